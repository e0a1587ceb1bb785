"""Deltas: the messages in which the postprocessor sends the new output of a request.

One delta contains the new text, tool calls, log-probabilities and token counts of one choice. The
function `fold` merges all deltas of a choice into a whole completion. The function `merged` merges
only the deltas that arrive while the client is slow.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import NotRequired, TypedDict

from nereid_client.errors import BackendError

# When the number of waiting deltas reaches this value, they are merged to save memory. A request
# has at most 64 choices, so at most 64 deltas remain after the merge. A value close to 64 would
# cause a merge after almost every delta.
_MAX_UNMERGED = 256


class PromptTokensDetails(TypedDict, total=False):
    """Details about the tokens of the prompt."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict, total=False):
    """Details about the generated tokens."""

    reasoning_tokens: int


class Usage(TypedDict):
    """The token counts of one choice so far.

    All choices of a prompt have the same `prompt_tokens`.
    """

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class ToolCallPiece(TypedDict, total=False):
    """A part of a tool call.

    Only the first part has `id` and `name`. The arguments of the call are the joined `arguments` of
    all parts.
    """

    index: int
    id: str
    name: str
    arguments: str


class TopLogprob(TypedDict):
    """One of the most probable tokens at a position."""

    token: str
    token_id: int
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The log-probability and the rank of a generated token, and the most probable alternatives."""

    rank: int
    top_logprobs: list[TopLogprob]


class PromptLogprob(TypedDict):
    """The log-probability of a prompt token, or of a probable alternative at the same position."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""The log-probabilities of a prompt. The list has one item for each token of the prompt.

An item maps token ids, written as strings, to log-probabilities. The item contains the token of the
prompt and the most probable tokens at the same position. The item of the first token is None.
"""


class Delta(TypedDict, total=False):
    """The new output of one choice. A key is missing if its value would be empty.

    `text` comes from the tensor `text_output`, if the call requested this tensor. The other keys
    come from the tensor `delta`. `index` is the number of the choice; a missing index means 0.
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


def merge(deltas: Iterable[Delta]) -> Delta:
    """Merge several deltas of one choice, in time that is linear in their total length.

    Example: {"content": "a"} and {"content": "b", "finish_reason": "stop"} return
    {"content": "ab", "finish_reason": "stop"}.
    """
    deltas = list(deltas)
    total: Delta = {}
    # These values are replaced by later values.
    for delta in deltas:
        for key in _REPLACED_KEYS:
            if key in delta:
                total[key] = delta[key]  # type: ignore[literal-required]
    # Texts and lists are joined.
    for name in ("text", "reasoning", "content"):
        texts = [delta[name] for delta in deltas if name in delta]
        if texts:
            total[name] = "".join(texts)
    if any("logprobs" in delta for delta in deltas):
        total["logprobs"] = [entry for delta in deltas for entry in delta.get("logprobs", ())]
    if any("token_ids" in delta for delta in deltas):
        total["token_ids"] = [token for delta in deltas for token in delta.get("token_ids", ())]
    call_pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    if call_pieces:
        total["tool_calls"] = _merge_calls(call_pieces)
    return total


_REPLACED_KEYS = (
    *("index", "cumulative_logprob", "prompt_token_ids", "prompt_logprobs"),
    *("finish_reason", "stop_reason", "usage"),
)
"""For these keys, values are not appended: the merged delta has the last value."""


def merge_by_choice(deltas: Iterable[Delta]) -> list[Delta]:
    """Return one merged delta for each choice, in the order in which the choices first appear."""
    choices: dict[int, list[Delta]] = {}
    for delta in deltas:
        choices.setdefault(delta.get("index", 0), []).append(delta)
    return [choice[0] if len(choice) == 1 else merge(choice) for choice in choices.values()]


_KINDS = ("reasoning", "content", "tool_calls")
"""The keys of a delta that belong to different kinds of output."""


def merge_by_kind(deltas: Iterable[Delta]) -> list[Delta]:
    """Merge consecutive deltas that have the same kind of output: reasoning, content or tool calls.

    The order of the deltas does not change. Example: content "a", content "b", a tool call and
    content "c" become content "ab", the tool call and content "c".
    """
    groups: list[list[Delta]] = []
    group_kinds: set[str] = set()  # the kinds of output in the last group
    for delta in deltas:
        kinds = {kind for kind in _KINDS if kind in delta}
        # A delta without output, for example a delta with only the usage, can be merged into any
        # group.
        has_one_kind = len(group_kinds | kinds) <= 1
        if groups and has_one_kind:
            groups[-1].append(delta)
            group_kinds = group_kinds | kinds
        else:
            groups.append([delta])
            group_kinds = kinds
    return [group[0] if len(group) == 1 else merge(group) for group in groups]


Group = Callable[[Iterable[Delta]], list[Delta]]
"""The type of a function that merges deltas, such as `merge_by_choice` or `merge_by_kind`."""


def _merge_calls(pieces: list[ToolCallPiece]) -> list[ToolCallPiece]:
    """Return one merged piece for each tool call.

    Example: the arguments "{" and "}" of call 0 become "{}".
    """
    pieces_of_calls: dict[int, list[ToolCallPiece]] = {}
    for piece in pieces:
        pieces_of_calls.setdefault(piece["index"], []).append(piece)
    return [_merge_call(pieces_of_call) for pieces_of_call in pieces_of_calls.values()]


def _merge_call(pieces: Sequence[ToolCallPiece]) -> ToolCallPiece:
    """Merge the pieces of one tool call. Usually, only the first piece has the id and the name."""
    call: ToolCallPiece = {"index": pieces[0]["index"]}
    for piece in pieces:
        call.update(piece)
    call["arguments"] = "".join(piece.get("arguments", "") for piece in pieces)
    return call


async def fold(deltas: AsyncGenerator[Delta], num_choices: int = 1) -> list[Delta]:
    """Merge all deltas of a stream. Return one delta for each choice, sorted by the index.

    The deltas are merged whenever many of them have arrived, so that a long answer does not need
    the memory of a delta for each token.

    Raises: BackendError, also if a choice has no finish reason at the end of the stream.
    """
    unmerged: list[Delta] = []
    async with aclosing(deltas):
        async for delta in deltas:
            _append_and_merge(unmerged, delta)
    choices = {choice.get("index", 0): choice for choice in merge_by_choice(unmerged)}
    sorted_choices = [choices.get(index, {}) for index in range(num_choices)]
    if any("finish_reason" not in choice for choice in sorted_choices):
        raise unfinished_error()
    return sorted_choices


def unfinished_error() -> BackendError:
    """Return the error for a stream that ended before all choices had a finish reason."""
    return BackendError(
        "INTERNAL",
        "The stream of the Triton server ended without a finish reason. The log of the Triton "
        "server may give the cause.",
    )


async def merged(
    deltas: AsyncGenerator[Delta], group: Group = merge_by_choice
) -> AsyncGenerator[Delta]:
    """Yield the deltas of a stream. While the reader is busy, merge the deltas that arrive.

    A slow reader therefore never delays the backend, and the memory contains only the text that the
    reader has not read. Closing this generator closes `deltas`.

    Args:
        deltas: the deltas of the backend.
        group: merges waiting deltas.

    Raises: BackendError, after all deltas that arrived before the error.
    """
    inbox = _Inbox(group)
    reader = asyncio.create_task(inbox.fill(deltas))
    try:
        while waiting := await inbox.pop_all():
            for delta in group(waiting):
                yield delta
        await reader  # raises the error of the backend, if there was one
    finally:
        reader.cancel()  # `fill` then closes `deltas`
        await asyncio.gather(reader, return_exceptions=True)


async def interleaved(
    sources: Sequence[AsyncGenerator[Delta]],
) -> AsyncGenerator[tuple[int, Delta]]:
    """Yield the deltas of several generators as they arrive, each with the index of its generator.

    Example: (1, {"text": "a"}) is a delta of the second generator.

    Closing this generator closes all sources.

    A task for each source puts its deltas into a common queue, followed by None or by the error of
    the source. A single source needs no queue.

    Raises: the first BackendError that a source raises.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for delta in source:
                yield 0, delta
        return
    queue: _Queue = asyncio.Queue(maxsize=1)
    feeders = [
        asyncio.create_task(_feed(queue, index, source)) for index, source in enumerate(sources)
    ]
    num_running = len(feeders)
    try:
        while num_running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is not None:
                yield item
            else:  # one of the sources has ended
                num_running -= 1
    finally:
        for feeder in feeders:
            feeder.cancel()
        await asyncio.gather(*feeders, return_exceptions=True)


_Queue = asyncio.Queue[tuple[int, Delta] | Exception | None]
"""A queue of deltas with the index of their source, of errors, and of None for an ended source."""


async def _feed(queue: _Queue, index: int, source: AsyncGenerator[Delta]) -> None:
    """Put all deltas of a source into the queue, followed by None or by the source's error."""
    try:
        async with aclosing(source):
            async for delta in source:
                await queue.put((index, delta))
    except Exception as error:  # the task ends here, and the reader of the queue raises this error
        await queue.put(error)
        raise
    await queue.put(None)


class _Inbox:
    """Stores the deltas that have arrived from a stream but have not been read yet."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._waiting: list[Delta] = []
        self._has_ended = False
        self._changed = asyncio.Event()

    async def fill(self, deltas: AsyncGenerator[Delta]) -> None:
        """Read all deltas of a stream, and add them to the waiting deltas."""
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    _append_and_merge(self._waiting, delta, self._group)
                    self._changed.set()
        finally:
            self._has_ended = True
            self._changed.set()

    async def pop_all(self) -> list[Delta]:
        """Wait for new deltas, and return all of them. After the end of the stream, return []."""
        while not self._waiting and not self._has_ended:
            self._changed.clear()
            await self._changed.wait()
        waiting, self._waiting = self._waiting, []
        return waiting


def _append_and_merge(waiting: list[Delta], delta: Delta, group: Group = merge_by_choice) -> None:
    """Append a delta to `waiting`. If the list is then too long, merge its deltas with `group`."""
    waiting.append(delta)
    if len(waiting) >= _MAX_UNMERGED:
        waiting[:] = group(waiting)
