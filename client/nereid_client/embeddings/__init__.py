"""The embedding model and the reranker: how they are called, and what the HTTP routes share."""
