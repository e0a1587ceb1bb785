"""Calls of the embedding model and the reranker, which share the name "pooling models".

1. model_choice.py      selects the model for a request and calls it
2. pooling_backend.py   calls the Triton server over gRPC
3. embedding_output.py  encodes vectors and scores as JSON
"""
