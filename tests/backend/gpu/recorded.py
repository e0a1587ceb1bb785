"""Replaces CUDA graphs on a machine without a GPU: records operators of torch and repeats them."""

from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that read the numbers of a tensor on the CPU. On a GPU, the CPU would have to wait, and
# CUDA would abort the capture.
READERS = {
    *("aten.item", "aten._local_scalar_dense", "aten.is_nonzero", "aten.equal"),
    *("aten.nonzero", "aten.nonzero_numpy", "aten.masked_select", "aten._unique2"),
}


class CaptureError(Exception):
    """Raised if recorded code calls an operator that CUDA cannot capture."""


class Recorder(TorchDispatchMode):
    """A context manager that records each call of an operator with its input and output tensors."""

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
        """Call the recorded operators again, and write the results into the recorded outputs."""
        for func, args, kwargs, recorded_out in self.calls:
            out = func(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded_out), tree_leaves(out), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record(work):
    """Call the function `work` twice, and return a function that replays the second call.

    As with a CUDA graph, a replay repeats the operators of torch, but runs no Python code of
    `work`. Numbers of Python in `work` keep the values that they had during the recording.
    """
    return record_pieces(lambda _: work())


def record_pieces(work):
    """Record `work` in pieces, and return a function that replays it.

    As in `GraphCapture.capture_pieces`, the argument of `work` is a function `cut`. A call of
    `cut(between)` ends a piece. The function `between` runs in each replay after the piece.
    """
    work(lambda between: between())
    replayed_functions = []
    recorder = Recorder()

    def cut(between):
        nonlocal recorder
        recorder.__exit__(None, None, None)
        replayed_functions.extend((recorder.replay, between))
        recorder = Recorder()
        recorder.__enter__()

    # Some code of transformers reads tensors to write warnings, unless a capture is in progress.
    with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
        recorder.__enter__()
        try:
            work(cut)
        finally:
            recorder.__exit__(None, None, None)
    replayed_functions.append(recorder.replay)

    def replay():
        for function in replayed_functions:
            function()

    return replay


class Rerun:
    """A capture whose replay calls the whole function again.

    Tests with kernels need this class, because the `Recorder` cannot record calls of kernels.
    """

    def __call__(self, work):
        return work

    def capture_pieces(self, work):
        return lambda: work(lambda between: between())


rerun = Rerun()
