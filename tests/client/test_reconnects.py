"""Tests that repeated losses of the connection to the Triton server leak no files or channels.

The test runs this module as a program, which loses the connections and measures the leaks.
"""

import asyncio
import gc
import os
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from fakes import endless_server
from nereid_client.errors import BackendError
from nereid_client.language_model.backend import Generation
from nereid_client.language_model.triton_backend import TritonBackend

NUM_DEATHS = 6
NUM_STREAMS = 4


class Proxy:
    """A TCP proxy for a server. The method `abort` closes the proxy and aborts all connections."""

    def __init__(self, target):
        self._target = target
        self._writers = set()
        self._server = None
        self.port = 0

    async def open(self):
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def abort(self):
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _relay(self, reader, writer):
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, back}
        await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        self._writers -= {writer, back}

    async def _pump(self, reader, writer):
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()


async def use(backend, number):
    """Read a stream until the connection to the server is lost."""
    with pytest.raises(BackendError) as raised:
        async for _ in backend.generate(Generation(f"stream-{number}", text_input="Go")):
            pass
    assert raised.value.code == "UNAVAILABLE"


async def until(condition):
    """Call the asynchronous function `condition` until it returns true."""
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.02)


def num_held():
    """Return the number of open files plus the number of gRPC channels of this process."""
    channels = sum(isinstance(item, grpc.aio.Channel) for item in gc.get_objects())
    return len(os.listdir("/proc/self/fd")) + channels


async def live_through_deaths():
    """Abort the connections of a backend several times, and check that the backend reconnects.

    Check also that the backend closes the sockets and channels of the lost connections.
    """
    server, port = await endless_server.start()
    proxy = Proxy(port)
    await proxy.open()
    backend = TritonBackend(f"127.0.0.1:{proxy.port}", "llm")
    await until(backend.is_live)
    num_held_at_start = num_held()
    for _ in range(NUM_DEATHS):
        streams = [asyncio.create_task(use(backend, number)) for number in range(NUM_STREAMS)]
        await asyncio.sleep(0.05)  # the streams begin
        await proxy.abort()
        await asyncio.gather(*streams)
        assert not await backend.is_live()
        await proxy.open()
        await until(backend.is_live)

    async def is_as_at_start():
        return num_held() <= num_held_at_start

    await until(is_as_at_start)
    await backend.close()
    await proxy.abort()
    await server.stop(None)


def test_a_server_that_dies_again_and_again_leaves_no_files_and_channels_open():
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    try:
        asyncio.run(live_through_deaths())
    except BaseException:  # noqa: BLE001 - the process must end after any error
        traceback.print_exc()
        os._exit(1)
    # gRPC sometimes waits forever for one of its threads when the last channel is closed.
    os._exit(0)
