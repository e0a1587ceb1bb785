"""The postprocessor's deltas: what one response adds, and how several add up."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import TypedDict

from nereid_client.errors import BackendError

_PILE_LIMIT = 256  # deltas kept apart before they are added up: bounds memory, amortises copying


class Usage(TypedDict):
    """Token counts so far."""

    prompt_tokens: int
    completion_tokens: int


class ToolCallPiece(TypedDict, total=False):
    """What is new of one tool call: `id` and `name` come once, `arguments` is appended."""

    index: int
    id: str
    name: str
    arguments: str


class Delta(TypedDict, total=False):
    """What one response adds. Keys are present only where they say something.

    `text` is the ensemble's `text_output`, there when the call asked for it; the other keys are
    those of the `delta` tensor.
    """

    text: str
    reasoning: str
    content: str
    tool_calls: list[ToolCallPiece]
    finish_reason: str
    stop_reason: str | int
    usage: Usage


def add_up(deltas: Iterable[Delta]) -> Delta:
    """One delta that says what all of them say, in time linear in their length."""
    deltas = list(deltas)
    total: Delta = {}
    for text in ("text", "reasoning", "content"):
        pieces = [delta[text] for delta in deltas if text in delta]
        if pieces:
            total[text] = "".join(pieces)
    for delta in deltas:
        for latest in ("finish_reason", "stop_reason", "usage"):
            if latest in delta:
                total[latest] = delta[latest]
    calls = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    if calls:
        total["tool_calls"] = _add_up_calls(calls)
    return total


def _add_up_calls(pieces: list[ToolCallPiece]) -> list[ToolCallPiece]:
    calls: dict[int, ToolCallPiece] = {}
    arguments: dict[int, list[str]] = {}
    for piece in pieces:
        index = piece["index"]
        call = calls.setdefault(index, {"index": index})
        if "id" in piece:
            call["id"] = piece["id"]
        if "name" in piece:
            call["name"] = piece["name"]
        arguments.setdefault(index, []).append(piece.get("arguments", ""))
    for index, call in calls.items():
        call["arguments"] = "".join(arguments[index])
    return list(calls.values())


async def fold(deltas: AsyncGenerator[Delta]) -> Delta:
    """All deltas added up: the answer of a request that doesn't stream.

    Raises: BackendError, also when the stream ends without a finish reason.
    """
    pile: list[Delta] = []
    async with aclosing(deltas):
        async for delta in deltas:
            _put(pile, delta)
    total = add_up(pile)
    if "finish_reason" not in total:
        raise unfinished()
    return total


def unfinished() -> BackendError:
    """The error for a stream that ended without saying why."""
    return BackendError("INTERNAL", "the answer ended without a finish reason")


async def merged(deltas: AsyncGenerator[Delta]) -> AsyncGenerator[Delta]:
    """The same answer in as few deltas as the reader needs: what has queued up comes as one.

    A client that reads slowly thus costs the text it has not read and no more, and the backend is
    never held up by it. Closing this generator closes `deltas`.

    Raises: BackendError, after everything that came before it.
    """
    inbox = _Inbox()
    pump = asyncio.create_task(inbox.fill(deltas))
    try:
        while pile := await inbox.take():
            yield pile[0] if len(pile) == 1 else add_up(pile)
        await pump  # raises what the backend raised
    finally:
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)


async def interleaved(
    sources: Sequence[AsyncGenerator[Delta]],
) -> AsyncGenerator[tuple[int, Delta]]:
    """The deltas of several answers as they come, each with its answer's index.

    Closing this generator closes the sources. Raises: BackendError, the first that any raises.
    """
    queue: _Queue = asyncio.Queue(maxsize=1)
    feeders = [
        asyncio.create_task(_feed(queue, index, source)) for index, source in enumerate(sources)
    ]
    try:
        running = len(feeders)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for feeder in feeders:
            feeder.cancel()
        await asyncio.gather(*feeders, return_exceptions=True)


_Queue = asyncio.Queue[tuple[int, Delta] | Exception | None]


async def _feed(queue: _Queue, index: int, source: AsyncGenerator[Delta]) -> None:
    try:
        async with aclosing(source):
            async for delta in source:
                await queue.put((index, delta))
    except Exception as error:
        await queue.put(error)
        raise
    await queue.put(None)


class _Inbox:
    """Deltas that wait for the reader."""

    def __init__(self) -> None:
        self._pile: list[Delta] = []
        self._ended = False
        self._news = asyncio.Event()

    async def fill(self, deltas: AsyncGenerator[Delta]) -> None:
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    _put(self._pile, delta)
                    self._news.set()
        finally:
            self._ended = True
            self._news.set()

    async def take(self) -> list[Delta]:
        """What waits; nothing at the end."""
        while not self._pile and not self._ended:
            self._news.clear()
            await self._news.wait()
        pile, self._pile = self._pile, []
        return pile


def _put(pile: list[Delta], delta: Delta) -> None:
    pile.append(delta)
    if len(pile) >= _PILE_LIMIT:
        pile[:] = [add_up(pile)]
