"""Calls the language model on the Triton server.

- backend.py: the protocol `Backend`, and the inputs of a call
- triton_backend.py: the implementation of the protocol over gRPC
- server_errors.py: converts error messages of the Triton server to exceptions
- client_backend.py: adds the client of a request to each call, and counts the client's tokens
- adapters.py: lists, loads and unloads LoRA adapters
- fill_in_middle.py: builds the prompts of completions with the field `suffix`
"""
