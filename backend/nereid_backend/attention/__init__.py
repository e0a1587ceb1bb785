"""Attention over the paged KV cache: the entry in transformers, the reference and the kernels."""
