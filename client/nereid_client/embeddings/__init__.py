"""Calls pooling models. A pooling model is an embedding model or a reranker.

1. model_choice.py      selects the model for a request and calls it
2. pooling_backend.py   calls the Triton server over gRPC
3. embedding_output.py  encodes vectors and scores as JSON
"""
