"""Attention over the paged KV cache.

The package contains three parts: the attention function that is registered in transformers, the
reference implementation of attention, and the attention kernels for CPUs and GPUs.
"""
