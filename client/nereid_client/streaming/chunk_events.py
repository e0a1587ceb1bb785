"""Send chat completions and text completions as server-sent events."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

from nereid_client.errors import FrontendError, to_api_error
from nereid_client.streaming import sse
from nereid_client.streaming.completion_frame import CompletionFrame, Json, total_usage
from nereid_client.streaming.deltas import Delta, Usage, unfinished_error

ItemT = TypeVar("ItemT")


class ChunkBuilder(ABC, Generic[ItemT]):
    """Builds the chunks of one stream.

    Args:
        frame: the fields that all chunks have in common.
        kind: the value of the field `object`, such as "chat.completion.chunk".
        num_prompts: the number of prompts. Each prompt has `frame.num_choices` choices.

    Attributes:
        unfinished_choices: the numbers of the choices without a finish reason. The choices are
            numbered across all prompts.
    """

    def __init__(self, frame: CompletionFrame, kind: str, num_prompts: int) -> None:
        self.frame = frame
        self.unfinished_choices = set(range(num_prompts * frame.num_choices))
        self._kind = kind
        self._usages: list[list[Usage | None]] = [
            [None] * frame.num_choices for _ in range(num_prompts)
        ]

    @abstractmethod
    def opening(self) -> list[Json]:
        """Return the chunks at the start of the stream, before the chunks for the first delta."""

    @abstractmethod
    def add(self, item: ItemT) -> list[Json]:
        """Return the chunks for the next delta of the stream."""

    def choice_number_of(self, prompt: int, delta: Delta) -> int:
        """Return the number of the choice to which a delta belongs.

        The choices are numbered across all prompts. Example: with two choices for each prompt, the
        first choice of the prompt with the index 1 has the number 2.
        """
        return prompt * self.frame.num_choices + delta.get("index", 0)

    def record_usage_and_end(self, prompt: int, delta: Delta) -> None:
        """Store the usage that `delta` contains, and record whether `delta` ends its choice.

        `prompt` is the index of the prompt to which `delta` belongs.

        Mutates: `_usages`, and `unfinished_choices`, the numbers of the choices without a finish
            reason.
        """
        if "usage" in delta:
            self._usages[prompt][delta.get("index", 0)] = delta["usage"]
        if "finish_reason" in delta:
            self.unfinished_choices.discard(self.choice_number_of(prompt, delta))

    def chunk(self, choice: Json) -> Json:
        """Return a chunk with one choice. If requested, add the token counts so far."""
        chunk = self.frame.with_choices(self._kind, [choice])
        if self.frame.include_usage:
            is_known = any(usage for usages in self._usages for usage in usages)
            has_usage = self.frame.continuous_usage and is_known
            chunk["usage"] = total_usage(self._usages) if has_usage else None
        return chunk

    def usage_chunk(self) -> Json:
        """Return the last chunk of a stream. It contains the token counts, and no choices."""
        return {**self.frame.with_choices(self._kind, []), "usage": total_usage(self._usages)}


async def chunk_events(
    builder: ChunkBuilder[ItemT], first: ItemT | None, rest: AsyncGenerator[ItemT]
) -> AsyncGenerator[bytes]:
    """Yield a stream of chunks as server-sent events.

    Each yield causes a write to the socket. Therefore, the opening chunks and the chunks for the
    first item are yielded together. The same applies to the chunks that end the last choice, the
    usage and [DONE]. If the backend fails, its error is the last event, and [DONE] does not follow.

    Args:
        builder: builds the chunks, and records which choices have not finished yet.
        first: the first item of the stream; None if the stream has no items.
        rest: the items after the first item.
    """
    unsent = [sse.event(chunk) for chunk in builder.opening()]
    item = first
    try:
        while item is not None:
            unsent += [sse.event(chunk) for chunk in builder.add(item)]
            # The chunks that end the last choice are not sent here. They are sent together with the
            # usage and [DONE].
            if unsent and builder.unfinished_choices:
                yield b"".join(unsent)
                unsent = []
            item = await anext(rest, None)
        if builder.unfinished_choices:
            raise unfinished_error()
    except FrontendError as error:
        yield b"".join([*unsent, sse.event(to_api_error(error).body())])
        return
    if builder.frame.include_usage:
        unsent.append(sse.event(builder.usage_chunk()))
    yield b"".join([*unsent, sse.DONE])
