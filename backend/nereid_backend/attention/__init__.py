"""Attention over the paged KV cache: the function for transformers, the reference, the kernels."""
