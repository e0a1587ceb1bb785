"""A stand-in for captured graphs on a machine without a GPU."""

from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What reads a tensor's numbers on the host: on a GPU that waits, and ends a capture.
READERS = {
    *("aten.item", "aten._local_scalar_dense", "aten.is_nonzero", "aten.equal"),
    *("aten.nonzero", "aten.nonzero_numpy", "aten.masked_select", "aten._unique2"),
}


class CaptureError(Exception):
    pass


class Recorder(TorchDispatchMode):
    """Keeps every operator call with the very tensors that it got and gave."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_masked = func is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if is_masked or str(func.overloadpacket) in READERS:
            raise CaptureError(f"{func} while a stream is captured")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.inference_mode()
    def replay(self):
        """Repeat the operators on the very same tensors."""
        for func, args, kwargs, out in self.calls:
            found = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(found), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record(work):
    """Capture work as CUDA does: a replay repeats its operators and runs none of its Python.

    Numbers that the host knew are frozen; what was computed from tensors before is not computed
    again.
    """
    return record_pieces(lambda _: work())


def record_pieces(work):
    """Capture work in pieces: `work` gets a function that ends a piece, as in GraphCapture."""
    work(lambda between: between())
    parts = []
    tape = Recorder()

    def cut(between):
        nonlocal tape
        tape.__exit__(None, None, None)
        parts.extend((tape.replay, between))
        tape = Recorder()
        tape.__enter__()

    # Code of transformers asks for this before it reads tensors to warn about them.
    asked = mock.patch("torch.cuda.is_current_stream_capturing", return_value=True)
    with asked:
        tape.__enter__()
        try:
            work(cut)
        finally:
            tape.__exit__(None, None, None)
    parts.append(tape.replay)

    def replay():
        for part in parts:
            part()

    return replay


class Rerun:
    """A replay that runs all of the work again: for kernels, which the interpreter runs."""

    def __call__(self, work):
        return work

    def capture_pieces(self, work):
        return lambda: work(lambda between: between())


rerun = Rerun()
