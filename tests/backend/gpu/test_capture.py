"""Tests of the code that captures CUDA graphs, with a fake in place of torch's CUDA functions."""

from contextlib import nullcontext

import pytest
import torch
from nereid_backend.paths.cuda_graphs import cuda_capture

DEVICE = torch.device("cuda:0")
POOL = (0, 1)


class Cuda:
    """The state of the fake for one GPU.

    Attributes:
        under_way: the memory pools for which the allocator believes that a capture is in progress.
        users: the number of graphs that use the memory pool.
        is_given_up: whether CUDA has aborted the capture.
        free: the free memory of the GPU in bytes.
        segments: the memory segments that the allocator has cached.
    """

    def __init__(self):
        self.under_way = []
        self.users = 0
        self.is_given_up = False
        self.fails_at_instantiation = False
        self.free = 2**40
        self.segments = []
        self.log = []

    def synchronize(self):
        assert self.under_way == [], "the host waits for the device during a capture"

    def begin(self):
        assert POOL not in self.under_way
        self.under_way.append(POOL)
        self.users += 1

    def end(self, _device, pool):
        if pool not in self.under_way:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.under_way.remove(pool)

    def release(self, _device, pool):
        assert pool == POOL
        self.users -= 1
        assert self.users >= 0

    def read(self):
        """Read from the GPU during a capture, so that CUDA aborts the capture."""
        self.is_given_up = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


@pytest.fixture
def cuda(monkeypatch):
    found = Cuda()

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            assert (pool, capture_error_mode) == (POOL, "thread_local")
            found.begin()

        def capture_end(self):
            if found.is_given_up:
                raise RuntimeError("CUDA error: operation failed due to a previous error")
            found.end(0, POOL)
            if found.fails_at_instantiation:
                raise RuntimeError("CUDA error: out of memory")

        def replay(self):
            found.log.append("graph")

    for name, value in {
        "device": lambda _: nullcontext(),
        "stream": lambda _: nullcontext(),
        "Stream": object,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: POOL,
        "synchronize": found.synchronize,
        "current_device": lambda: 0,
        "mem_get_info": lambda: (found.free, 2**40),
        "memory_snapshot": lambda: found.segments,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", found.end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", found.release)
    monkeypatch.setattr(cuda_capture, "_failed_captures", [])
    return found


def test_the_allocator_ends_a_capture_that_cuda_aborts(cuda):
    work = [lambda: None, cuda.read]
    with pytest.raises(RuntimeError, match="when stream is capturing"):
        cuda_capture.capture_on(DEVICE)(lambda: work.pop(0)())
    assert cuda.under_way == []
    assert cuda.users == 0
    # torch's allocator of pinned memory still uses the failed graph, so the graph is kept.
    assert len(cuda_capture._failed_captures) == 1


def test_the_allocator_ends_a_capture_that_cuda_aborts_without_an_error(cuda):
    def work():
        cuda.is_given_up = True  # a library does not report CUDA's error

    with pytest.raises(RuntimeError, match="previous error"):
        cuda_capture.capture_on(DEVICE)(work)
    assert cuda.under_way == []
    assert cuda.users == 0


def test_an_error_in_the_captured_code_ends_the_capture(cuda):
    work = [lambda: None, lambda: 1 / 0]
    with pytest.raises(ZeroDivisionError):
        cuda_capture.capture_on(DEVICE)(lambda: work.pop(0)())
    assert cuda.under_way == []
    # The capture itself succeeded. The graph releases the pool when the graph is deleted.
    assert cuda.users == 1
    assert cuda_capture._failed_captures == []


def test_a_graph_without_enough_memory_releases_its_pool_itself(cuda):
    cuda.fails_at_instantiation = True
    with pytest.raises(RuntimeError, match="out of memory"):
        cuda_capture.capture_on(DEVICE)(lambda: None)
    assert cuda.under_way == []
    assert cuda.users == 1
    assert cuda_capture._failed_captures == []


def segment(pool, size, device=0):
    return {
        "device": device,
        "total_size": size,
        "allocated_size": 0,
        "segment_pool_id": pool,
    }


@pytest.mark.parametrize(
    ("segments", "is_enough"),
    [
        ([], False),
        ([segment((0, 0), 2**30)], True),
        ([segment(POOL, 2**30)], False),
        ([segment((0, 0), 2**30, device=1)], False),
    ],
)
def test_memory_that_the_allocator_cached_for_steps_is_part_of_the_reserve(
    cuda, segments, is_enough
):
    cuda.free = 2**29
    cuda.segments = segments
    capture = cuda_capture.capture_on(DEVICE, reserve_bytes=2**30)
    if is_enough:
        capture(lambda: None)
    else:
        with pytest.raises(cuda_capture.GraphMemoryError):
            capture(lambda: None)


def test_pieces_are_replayed_in_their_order_with_the_work_between_them(cuda):
    def work(cut):
        for number in range(2):
            cuda.log.append("code")
            cut(lambda number=number: cuda.log.append(number))

    replay = cuda_capture.capture_on(DEVICE).capture_pieces(work)
    # Before the capture, all functions run once, including the functions between the pieces.
    assert cuda.log == ["code", 0, "code", 1, "code", "code"]
    assert cuda.users == 3
    assert cuda.under_way == []
    cuda.log.clear()
    for _ in range(2):
        replay()
    assert cuda.log == ["graph", 0, "graph", 1, "graph"] * 2


def test_a_piece_that_cuda_aborts_ends_the_capture(cuda):
    num_calls = 0

    def work(cut):
        nonlocal num_calls
        num_calls += 1
        cut(lambda: None)
        if num_calls == 2:
            cuda.read()

    with pytest.raises(RuntimeError, match="when stream is capturing"):
        cuda_capture.capture_on(DEVICE).capture_pieces(work)
    assert cuda.under_way == []
    # The first piece was captured. Its graph releases the pool when the graph is deleted.
    assert cuda.users == 1
