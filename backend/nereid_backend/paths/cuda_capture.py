# SPDX-License-Identifier: Apache-2.0
"""The lines that talk to CUDA about captured graphs; what is captured, and when, is `graphs`'s.

Nothing here has run on a GPU yet.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]

# Left free besides what the largest step needs: graphs are the last to take memory.
_SPARE_BYTES = 256 * 2**20
# Captures that did not end well: the allocator of pinned memory, whose part cannot be ended from
# Python, goes on asking them.
_given_up: list[torch.cuda.CUDAGraph] = []


class NoRoomError(Exception):
    """There is too little memory for another graph; those that there are stay of use."""


def capture_on(device: torch.device, reserve_bytes: int = 0) -> Capture | None:
    """What captures work on a device; None where there is nothing to capture.

    Args:
        device: where the work runs.
        reserve_bytes: memory that steps may still come to need.

    Returns:
        A function from work to its replay. The work is called twice, once to warm up and once to be
        captured, on a stream of its own; it must leave what it computes in tensors that were there
        before. It may not wait for the device, nor read from it. Replays run on the stream that is
        current then; all of one such function share their memory, so that what one leaves in
        tensors of its own is lost with the next. NoRoomError: too little memory is free.
    """
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(work: Callable[[], None]) -> Replay:
        with torch.cuda.device(device):
            # Replays must have ended before a graph is dropped, or memory taken over from one.
            torch.cuda.synchronize()
            free = torch.cuda.mem_get_info()[0]
            if free < reserve_bytes + _SPARE_BYTES:
                raise NoRoomError(
                    f"{free / 2**20:.0f} MiB are free, and steps need {reserve_bytes / 2**20:.0f}"
                )
            with torch.cuda.stream(stream), _without_collection():
                # Libraries make what they keep for a stream; that cannot be captured.
                work()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                # Other threads may go on meanwhile.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    work()
                except BaseException:
                    # Ends the capture; that this fails as well must not hide why.
                    with suppress(Exception):
                        _end(graph, pool)
                    raise
                _end(graph, pool)
            torch.cuda.synchronize()
        return graph.replay

    return capture


def _end(graph: torch.cuda.CUDAGraph, pool: Any) -> None:  # noqa: ANN401 - torch's handle
    """End a capture on the current device.

    Where CUDA has given it up, as after a read from the device, torch's own end stops halfway: its
    allocator then takes the capture for one that goes on. It asks it at every allocation, never
    gives back what it has cached, so that memory runs out early, and fails when asked to.

    Raises:
        RuntimeError: there is no graph.
    """
    try:
        graph.capture_end()
    except Exception:
        device = torch.cuda.current_device()
        # It says so itself where the allocator's part had ended before.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
            _given_up.append(graph)
        raise


def is_lost(device: torch.device) -> bool:
    """Whether a device takes no more work, as after an access to memory that is not there."""
    if device.type != "cuda":
        return False
    try:
        torch.zeros(1, device=device).item()
    except Exception:  # noqa: BLE001 - drivers fail in any way
        return True
    return False


@contextmanager
def _without_collection() -> Iterator[None]:
    """Objects that Python finds dead may free what a capture does not let go of."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
