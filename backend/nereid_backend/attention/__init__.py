"""The attention hook into transformers and the paged kernels behind it."""
