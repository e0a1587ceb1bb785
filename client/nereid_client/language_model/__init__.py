"""Calls the language model on the Triton server.

- triton_backend.py: the protocol `Backend`, and its implementation over gRPC
- client_backend.py: adds the client of a request to each call, and counts the client's tokens
- adapters.py: lists, loads and unloads LoRA adapters
- fill_in_middle.py: builds the prompts of completions with the field `suffix`
"""
