"""The postprocessor's deltas: what one response adds, and how several add up."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import NotRequired, TypedDict

from nereid_client.errors import BackendError

# Deltas kept apart before they are added up, which bounds memory and amortises copying: a request
# has at most 64 choices, so most of a full pile is news.
_PILE_LIMIT = 256


class PromptTokensDetails(TypedDict, total=False):
    """What is known of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict, total=False):
    """What is known of the answer's tokens."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Token counts of one choice so far; its prompt's are those of all choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class ToolCallPiece(TypedDict, total=False):
    """What is new of one tool call: `id` and `name` come once, `arguments` is appended."""

    index: int
    id: str
    name: str
    arguments: str


class TopLogprob(TypedDict):
    """One of the likeliest tokens at a position."""

    token: str
    token_id: int
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer, its rank among the vocabulary, and the likeliest beside it."""

    rank: int
    top_logprobs: list[TopLogprob]


class PromptLogprob(TypedDict):
    """A token that stands in the prompt, or could have."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each of the prompt's tokens: token id as a string -> what is known of it; first, None."""


class Delta(TypedDict, total=False):
    """What one response adds to one choice. Keys are present only where they say something.

    `text` is the ensemble's `text_output`, there when the call asked for it; the other keys are
    those of the `delta` tensor. `index` is the choice's; left out, it is 0.
    """

    index: int
    text: str
    reasoning: str
    content: str
    tool_calls: list[ToolCallPiece]
    logprobs: list[TokenLogprob]
    token_ids: list[int]
    cumulative_logprob: float
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs
    finish_reason: str
    stop_reason: str | int
    usage: Usage


def add_up(deltas: Iterable[Delta]) -> Delta:
    """One delta that says what all of them say of one choice, in time linear in their length."""
    deltas = list(deltas)
    total: Delta = {}
    for delta in deltas:
        for latest in _LATEST:
            if latest in delta:
                total[latest] = delta[latest]  # type: ignore[literal-required]
    for text in ("text", "reasoning", "content"):
        pieces = [delta[text] for delta in deltas if text in delta]
        if pieces:
            total[text] = "".join(pieces)
    if any("logprobs" in delta for delta in deltas):
        total["logprobs"] = [entry for delta in deltas for entry in delta.get("logprobs", ())]
    if any("token_ids" in delta for delta in deltas):
        total["token_ids"] = [token for delta in deltas for token in delta.get("token_ids", ())]
    calls = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    if calls:
        total["tool_calls"] = _add_up_calls(calls)
    return total


_LATEST = (
    *("index", "cumulative_logprob", "prompt_token_ids", "prompt_logprobs"),
    *("finish_reason", "stop_reason", "usage"),
)


def by_choice(deltas: Iterable[Delta]) -> list[Delta]:
    """The deltas of each choice added up, in the order in which the choices first appear."""
    choices: dict[int, list[Delta]] = {}
    for delta in deltas:
        choices.setdefault(delta.get("index", 0), []).append(delta)
    return [choice[0] if len(choice) == 1 else add_up(choice) for choice in choices.values()]


Group = Callable[[Iterable[Delta]], list[Delta]]
"""How deltas that wait are added up, in an order that their reader can take."""


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


async def fold(deltas: AsyncGenerator[Delta], num_choices: int = 1) -> list[Delta]:
    """Each choice's deltas added up, in the order of their index: an answer in one piece.

    Raises: BackendError, also when a choice has no finish reason at the end.
    """
    pile: list[Delta] = []
    async with aclosing(deltas):
        async for delta in deltas:
            _put(pile, delta)
    totals = {total.get("index", 0): total for total in by_choice(pile)}
    answer = [totals.get(index, {}) for index in range(num_choices)]
    if not all("finish_reason" in total for total in answer):
        raise unfinished()
    return answer


def unfinished() -> BackendError:
    """The error for a stream that ended without saying why."""
    return BackendError("INTERNAL", "the answer ended without a finish reason")


async def merged(deltas: AsyncGenerator[Delta], group: Group = by_choice) -> AsyncGenerator[Delta]:
    """The same answer in as few deltas as the reader needs: what queued up of a choice is one.

    A client that reads slowly thus costs the text it has not read and no more, and the backend is
    never held up by it. Closing this generator closes `deltas`.

    Args:
        deltas: as they come.
        group: adds up what queued up.

    Raises: BackendError, after everything that came before it.
    """
    inbox = _Inbox(group)
    pump = asyncio.create_task(inbox.fill(deltas))
    try:
        while pile := await inbox.take():
            for delta in group(pile):
                yield delta
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
    if len(sources) == 1:  # which needs no tasks
        async with aclosing(sources[0]) as source:
            async for delta in source:
                yield 0, delta
        return
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

    def __init__(self, group: Group) -> None:
        self._group = group
        self._pile: list[Delta] = []
        self._ended = False
        self._news = asyncio.Event()

    async def fill(self, deltas: AsyncGenerator[Delta]) -> None:
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    _put(self._pile, delta, self._group)
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


def _put(pile: list[Delta], delta: Delta, group: Group = by_choice) -> None:
    pile.append(delta)
    if len(pile) >= _PILE_LIMIT:
        pile[:] = group(pile)
