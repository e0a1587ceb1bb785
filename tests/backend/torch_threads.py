"""Sets the number of threads with which torch and the CPU kernels compute."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def use_threads(num_threads: int) -> Iterator[None]:
    """Compute with `num_threads` threads inside the context. Restore the old number at the end."""
    previous = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
