# SPDX-License-Identifier: Apache-2.0
"""Captures CUDA graphs. The other modules of this package decide which steps are captured.

This code has not run on a GPU yet.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
# The type of the function `cut`. A call of `cut` ends the capture of one CUDA graph and begins the
# capture of the next graph; see `GraphCapture.capture_pieces`.
Cut = Callable[[Callable[[], None]], None]
CapturePieces = Callable[[Callable[[Cut], None]], Replay]

# The number of bytes of GPU memory that must stay free even during the largest step.
_SPARE_BYTES = 256 * 2**20
# The id of the memory pool that torch uses when it does not capture a graph.
_DEFAULT_POOL = (0, 0)
# Graphs whose capture failed. This list keeps the graphs alive, because torch's allocator of pinned
# memory still uses them, and Python code cannot remove them from the allocator.
_failed_captures: list[torch.cuda.CUDAGraph] = []


class GraphMemoryError(Exception):
    """Raised if too little GPU memory is free to capture another CUDA graph.

    Graphs that were captured before can still be replayed.
    """


def capture_on(device: torch.device, reserve_bytes: int = 0) -> "GraphCapture | None":
    """Return an object that captures CUDA graphs on a GPU; None if `device` is not a GPU.

    Args:
        device: the device on which the work runs.
        reserve_bytes: memory that later steps may need, in bytes. Memory that torch's allocator has
            cached for steps is part of this number.
    """
    return GraphCapture(device, reserve_bytes) if device.type == "cuda" else None


class GraphCapture:
    """Captures graphs that share their memory.

    Each replay overwrites the intermediate results of the previous replay. A replay runs on the
    stream that is current when the replay is called.
    """

    def __init__(self, device: torch.device, reserve_bytes: int) -> None:
        """Create the memory pool and the CUDA stream for captures; see `capture_on`."""
        self._device = device
        self._reserve_bytes = reserve_bytes
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], None]) -> Replay:
        """Capture one call of `work` as a graph, and return a function that replays the graph.

        `capture_pieces` describes the requirements for `work`, and the possible exceptions.
        """
        return self.capture_pieces(lambda _: work())

    def capture_pieces(self, work: Callable[[Cut], None]) -> Replay:
        """Capture `work` as several CUDA graphs. Return a function that replays them in order.

        The work gets a function `cut`. A call `cut(between)` ends the current graph and begins the
        next graph. `between` is not captured: each replay calls it between these two graphs.

        The work is called twice on a stream of its own: once to warm up, and once to capture. The
        work must store its results in tensors that already exist. It must not wait for the device,
        and must not read from the device.

        Raises:
            GraphMemoryError: if too little memory is free.
            Exception: of any class, if the work fails or cannot be captured.
        """
        parts: list[Replay] = []
        with torch.cuda.device(self._device):
            # Wait until running graphs have finished, because the new capture may reuse their
            # memory.
            torch.cuda.synchronize()
            self._check_memory()
            with torch.cuda.stream(self._stream), _without_collection():
                # Libraries allocate workspaces in their first call on a stream. Such an allocation
                # cannot be captured, so the work runs once before the capture.
                work(lambda between: between())
                torch.cuda.synchronize()
                graph = self._begin_capture()

                def cut(between: Callable[[], None]) -> None:
                    nonlocal graph
                    _end_capture(graph, self._pool)
                    parts.extend((graph.replay, between))
                    graph = self._begin_capture()

                try:
                    work(cut)
                except BaseException:
                    # After an error during a capture, ending the capture usually raises a second
                    # error. The second error is suppressed, so that the caller gets the first
                    # error.
                    with suppress(RuntimeError):
                        _end_capture(graph, self._pool)
                    raise
                _end_capture(graph, self._pool)
                parts.append(graph.replay)
            torch.cuda.synchronize()

        def replay() -> None:
            for part in parts:
                part()

        return replay

    def _begin_capture(self) -> torch.cuda.CUDAGraph:
        """Begin to capture a CUDA graph on the current stream, and return the graph."""
        graph = torch.cuda.CUDAGraph()
        # In the mode "thread_local", other threads may use the device during the capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph

    def _check_memory(self) -> None:
        """Raise GraphMemoryError if less memory is free than later steps may need."""
        free_bytes, _ = torch.cuda.mem_get_info()
        # A later step can also use the memory that is unused in the cache of torch's allocator.
        # This memory is therefore subtracted from the memory that must be free.
        step_bytes = max(0, self._reserve_bytes - _cached_bytes(self._device))
        needed_bytes = step_bytes + _SPARE_BYTES
        if free_bytes < needed_bytes:
            raise GraphMemoryError(
                f"only {free_bytes / 2**20:.0f} MiB of GPU memory are free, but the forward pass "
                f"needs {needed_bytes / 2**20:.0f} MiB"
            )


def _cached_bytes(device: torch.device) -> int:
    """Return the size of the unused memory in the cache of torch's allocator, in bytes.

    After the first large step, the allocator caches the memory of the step, so later steps need no
    further free memory. The memory of captured graphs does not count, because steps cannot use it.
    """
    num_bytes = 0
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        is_for_steps = tuple(segment["segment_pool_id"]) == _DEFAULT_POOL
        if segment["device"] == device.index and is_for_steps:
            num_bytes += segment["total_size"] - segment["allocated_size"]
    return num_bytes


def _end_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:  # noqa: ANN401 - torch's handle
    """End the capture of a CUDA graph on the current device.

    The captured work allocates its memory from `pool`. CUDA cancels a capture after a forbidden
    operation, such as a read from the device. The capture is then also ended in torch's allocator.

    Raises:
        RuntimeError: if the capture was cancelled, so there is no graph.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        device = torch.cuda.current_device()
        # A second error means that the allocator has already ended the capture.
        with suppress(RuntimeError):
            _end_in_allocator(graph, pool, device)
        raise


def _end_in_allocator(graph: torch.cuda.CUDAGraph, pool: Any, device: int) -> None:  # noqa: ANN401
    """Report the end of a failed capture to torch's allocator of GPU memory.

    Otherwise, the allocator would query the capture at every allocation, and it could not free
    cached memory. The captured work has allocated its memory from `pool` on the GPU `device`.

    Raises:
        RuntimeError: if the allocator has already ended the capture.
    """
    torch._C._cuda_endAllocateToPool(device, pool)
    # A graph releases its share of the pool when it is freed. This graph is never freed, so release
    # its share here.
    torch._C._cuda_releasePool(device, pool)
    # Keep the graph forever, because torch's allocator of pinned memory still uses it.
    _failed_captures.append(graph)


def is_lost(device: torch.device) -> bool:
    """Return whether a device no longer works, for example after an invalid memory access."""
    if device.type != "cuda":
        return False
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:  # the base class of torch's device errors
        return True
    return False


@contextmanager
def _without_collection() -> Iterator[None]:
    """Return a context manager that turns off Python's garbage collector during a graph capture.

    The capture can fail if the collector frees an object, such as another graph.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
