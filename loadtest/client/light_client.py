"""A small client of the OpenAI API, for measurements on the machine that runs the server.

A full client library uses as much CPU time as the server and the frontend together, and the
measurement would include that time.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any


class Answer:
    """An answer whose HTTP headers have arrived.

    Attributes:
        status: the HTTP status.
        headers: the HTTP headers; the names are in lower case.
    """

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    async def text(self) -> str:
        """Return the rest of the body."""
        return (await self._reader.read()).decode()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a stream except [DONE]."""
        # The other lines are ignored. They contain the sizes of HTTP chunks.
        async for line in self._reader:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


@asynccontextmanager
async def posted(port: int, path: str, body: Mapping[str, object]) -> AsyncIterator[Answer]:
    """Post a JSON body to 127.0.0.1 over a new connection, and yield the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + content)
    try:
        status_line = await reader.readline()  # such as b"HTTP/1.1 200 OK"
        status = int(status_line.split()[1])
        headers = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        yield Answer(status, headers, reader)
    finally:
        writer.close()
