"""Tests that cancelled gRPC calls leak no memory, not even in the C code of gRPC.

The test runs this module as a program, which measures the memory. The argument of the program is
the port of a server.
"""

import asyncio
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import pytest
from fakes import endless_server
from nereid_client.embeddings.pooling_backend import PoolingCall, TritonPooling
from nereid_client.language_model.backend import Generation
from nereid_client.language_model.triton_backend import TritonBackend
from nereid_client.streaming.deltas import merged

NUM_ROUNDS = 6
NUM_CALLS = 100
AT_ONCE = 25
# The number of bytes that a cancelled call of each kind may leak. If gRPC does not free a batch of
# operations, at least 96 bytes leak. A stream without a response may leak one such batch. A running
# stream leaves responses of 4 KiB that gRPC has read in advance, but the next round frees them.
MAX_BYTES = {"running streams": 300, "silent streams": 150, "embeddings": 90, "token counts": 90}

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class MallocInfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS.split())


def allocated_bytes():
    """Return the number of bytes that malloc has allocated.

    Small Python objects do not count, because Python allocates them without malloc.
    """
    gc.collect()
    return libc.mallinfo2().uordblks


libc = ctypes.CDLL(None)
if not hasattr(libc, "mallinfo2"):
    pytest.skip("needs glibc 2.33 or later", allow_module_level=True)
libc.mallinfo2.restype = MallocInfo


async def stream(backend, prompt):
    async for _ in merged(backend.generate(Generation("stream", text_input=prompt))):
        pass


async def cancel_one(coroutine, number):
    """Start a call, and cancel it after a short time. The time increases with `number`."""
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(0.01 + 0.002 * number)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def bytes_a_cancel(port):
    """Return the leaked bytes per call in each round: kind of call -> list of numbers."""
    url = f"127.0.0.1:{port}"
    backend, pooling = TritonBackend(url, "llm"), TritonPooling(url)
    embed = PoolingCall("embedding", "call", {"text": ["a"]})
    kinds = {
        "running streams": lambda: stream(backend, "Go"),
        "silent streams": lambda: stream(backend, "silent"),
        "embeddings": lambda: pooling.infer(embed),
        "token counts": lambda: backend.tokenize(Generation("count", text_input="Go")),
    }
    rounds = {kind: [] for kind in kinds}
    for _ in range(NUM_ROUNDS):
        for kind, call in kinds.items():
            num_bytes_before = allocated_bytes()
            for _ in range(NUM_CALLS // AT_ONCE):
                await asyncio.gather(*(cancel_one(call(), number) for number in range(AT_ONCE)))
            await asyncio.sleep(0.2)  # gRPC frees the calls in its own threads
            rounds[kind].append((allocated_bytes() - num_bytes_before) / NUM_CALLS)
    await backend.close()
    await pooling.close()
    return rounds


@pytest.fixture(scope="module")
def measured():
    """The result of `bytes_a_cancel`, measured in a new process in which no other test runs."""
    with subprocess.Popen(
        [sys.executable, endless_server.__file__], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            done = subprocess.run(
                [sys.executable, __file__, server.stdout.readline()],
                capture_output=True,
                text=True,
                timeout=300,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            )
        finally:
            server.kill()
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", MAX_BYTES)
def test_a_call_that_is_given_up_leaves_no_memory_behind(measured, kind):
    rounds = measured[kind][1:]  # the first round fills caches, so it does not count
    # A leak raises both the median and the mean. Memory that the next round frees raises at most
    # one of them, so the smaller one is compared with the limit.
    left = min(statistics.median(rounds), statistics.fmean(rounds))
    assert left < MAX_BYTES[kind], rounds


if __name__ == "__main__":
    try:
        found = asyncio.run(bytes_a_cancel(int(sys.argv[1])))
        sys.stdout.write(json.dumps(found))
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - the process must end after any error
        traceback.print_exc()
        os._exit(1)
    # gRPC sometimes waits forever for one of its threads when the last channel is closed.
    os._exit(0)
