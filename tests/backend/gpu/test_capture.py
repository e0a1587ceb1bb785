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
        captured_pools: the memory pools for which the allocator believes that a capture is in
            progress.
        num_pool_users: the number of graphs that use the memory pool.
        is_aborted: whether CUDA has aborted the capture.
        fails_at_instantiation: whether CUDA has no memory for the captured graph.
        free: the free memory of the GPU in bytes.
        segments: the memory segments that the allocator has cached.
        log: the replayed graphs and the calls of the captured functions, in their order.
    """

    def __init__(self):
        self.captured_pools = []
        self.num_pool_users = 0
        self.is_aborted = False
        self.fails_at_instantiation = False
        self.free = 2**40
        self.segments = []
        self.log = []

    def synchronize(self):
        assert self.captured_pools == [], "the host waits for the device during a capture"

    def begin(self):
        assert POOL not in self.captured_pools
        self.captured_pools.append(POOL)
        self.num_pool_users += 1

    def end(self, _device, pool):
        if pool not in self.captured_pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.captured_pools.remove(pool)

    def release(self, _device, pool):
        assert pool == POOL
        self.num_pool_users -= 1
        assert self.num_pool_users >= 0

    def read(self):
        """Read from the GPU during a capture, so that CUDA aborts the capture."""
        self.is_aborted = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


@pytest.fixture
def cuda(monkeypatch):
    """Replace torch's CUDA functions by a fake GPU, and return the state of the fake."""
    fake = Cuda()

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            assert (pool, capture_error_mode) == (POOL, "thread_local")
            fake.begin()

        def capture_end(self):
            if fake.is_aborted:
                raise RuntimeError("CUDA error: operation failed due to a previous error")
            fake.end(0, POOL)
            if fake.fails_at_instantiation:
                raise RuntimeError("CUDA error: out of memory")

        def replay(self):
            fake.log.append("graph")

    functions = {
        "device": lambda _: nullcontext(),
        "stream": lambda _: nullcontext(),
        "Stream": object,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: POOL,
        "synchronize": fake.synchronize,
        "current_device": lambda: 0,
        "mem_get_info": lambda: (fake.free, 2**40),
        "memory_snapshot": lambda: fake.segments,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", fake.release)
    monkeypatch.setattr(cuda_capture, "_failed_captures", [])
    return fake


def test_the_allocator_ends_a_capture_that_cuda_aborts(cuda):
    # `capture_on` calls the function once before the capture, and again during the capture.
    calls = iter([lambda: None, cuda.read])
    with pytest.raises(RuntimeError, match="when stream is capturing"):
        cuda_capture.capture_on(DEVICE)(lambda: next(calls)())
    assert cuda.captured_pools == []
    assert cuda.num_pool_users == 0
    # torch's allocator of pinned memory still uses the failed graph, so the graph is kept.
    assert len(cuda_capture._failed_captures) == 1


def test_the_allocator_ends_a_capture_that_cuda_aborts_without_an_error(cuda):
    def work():
        cuda.is_aborted = True  # a library does not report CUDA's error

    with pytest.raises(RuntimeError, match="previous error"):
        cuda_capture.capture_on(DEVICE)(work)
    assert cuda.captured_pools == []
    assert cuda.num_pool_users == 0


def test_an_error_in_the_captured_code_ends_the_capture(cuda):
    # `capture_on` calls the function once before the capture, and again during the capture.
    calls = iter([lambda: None, lambda: 1 / 0])
    with pytest.raises(ZeroDivisionError):
        cuda_capture.capture_on(DEVICE)(lambda: next(calls)())
    assert cuda.captured_pools == []
    # The capture itself succeeded. The graph releases the pool when the graph is deleted.
    assert cuda.num_pool_users == 1
    assert cuda_capture._failed_captures == []


def test_a_graph_without_enough_memory_releases_its_pool_itself(cuda):
    cuda.fails_at_instantiation = True
    with pytest.raises(RuntimeError, match="out of memory"):
        cuda_capture.capture_on(DEVICE)(lambda: None)
    assert cuda.captured_pools == []
    assert cuda.num_pool_users == 1
    assert cuda_capture._failed_captures == []


def segment(pool, size, device=0):
    """Describe a memory segment that the allocator has cached and that no tensor uses.

    `pool` is the id of the segment's pool. The pool (0, 0) is for the tensors of steps.
    """
    return {
        "device": device,
        "total_size": size,
        "allocated_size": 0,
        "segment_pool_id": pool,
    }


@pytest.mark.parametrize(
    ("segments", "expectation"),
    [
        ([], pytest.raises(cuda_capture.GraphMemoryError)),
        ([segment((0, 0), 2**30)], nullcontext()),
        ([segment(POOL, 2**30)], pytest.raises(cuda_capture.GraphMemoryError)),
        ([segment((0, 0), 2**30, device=1)], pytest.raises(cuda_capture.GraphMemoryError)),
    ],
    ids=["no segment", "for steps", "for graphs", "of another GPU"],
)
def test_memory_that_the_allocator_cached_for_steps_is_part_of_the_reserve(
    cuda, segments, expectation
):
    cuda.free = 2**29
    cuda.segments = segments
    capture = cuda_capture.capture_on(DEVICE, reserve_bytes=2**30)
    with expectation:
        capture(lambda: None)


def test_pieces_are_replayed_in_their_order_with_the_work_between_them(cuda):
    def work(cut):
        for number in range(2):
            cuda.log.append("code")
            cut(lambda number=number: cuda.log.append(number))

    replay = cuda_capture.capture_on(DEVICE).capture_pieces(work)
    # Before the capture, all functions run once, including the functions between the pieces.
    assert cuda.log == ["code", 0, "code", 1, "code", "code"]
    assert cuda.num_pool_users == 3
    assert cuda.captured_pools == []

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
    assert cuda.captured_pools == []
    # The first piece was captured. Its graph releases the pool when the graph is deleted.
    assert cuda.num_pool_users == 1
