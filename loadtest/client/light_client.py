# SPDX-License-Identifier: Apache-2.0
"""A client of the OpenAI API that costs little, for measurements on the machine that serves.

A full client library takes as much of a core for its connections and streams as server and frontend
together do, and would be measured with them.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any


class Answer:
    """An answer whose head has come.

    Attributes:
        status: of HTTP.
        headers: names in small letters.
    """

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    async def text(self) -> str:
        """All that follows."""
        return (await self._reader.read()).decode()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream, but for its end."""
        # Between the events stand the sizes of chunks, which say nothing here.
        async for line in self._reader:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


@asynccontextmanager
async def posted(port: int, path: str, body: Mapping[str, object]) -> AsyncIterator[Answer]:
    """Post a body to 127.0.0.1, over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + content)
    try:
        status = int((await reader.readline()).split()[1])
        headers = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        yield Answer(status, headers, reader)
    finally:
        writer.close()
