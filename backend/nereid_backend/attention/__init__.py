"""Attention over the paged KV cache.

The package contains the attention function that is registered in transformers, the reference
implementation, and the kernels for CPUs and GPUs.
"""
