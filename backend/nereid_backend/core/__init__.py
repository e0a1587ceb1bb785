"""The scheduler, the blocks of the KV cache, and the requests. This package never imports torch."""
