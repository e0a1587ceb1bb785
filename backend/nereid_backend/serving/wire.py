# SPDX-License-Identifier: Apache-2.0
"""The values that cross between the three steps of the ensemble, and how they are packed.

    tokenizer --- RequestEnvelope ---> executor --- StepState ---> postprocessor
                                          ^
                                          +-- RequestUpdate --- engine process

A step behind a decoupled step may take inputs from that step only, so what the postprocessor must
know of a request (StreamContext) rides through the executor, unread, in the first step.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import msgpack
import numpy as np
import numpy.typing as npt

from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.core.sampling_params import SamplingParams

UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StreamContext:
    """What the postprocessor must know of one request.

    Attributes:
        stream: one response per step; otherwise exactly one response.
        num_prompt_tokens: for usage.
        n: how many answers it gets.
        seed_token_ids: last tokens of the prompt, so that a completion's first word keeps the
            space before it; empty for chat.
        prepend: text put before the output (the prompt, when the request asks for it).
        stop: strings that end the answer.
        min_tokens: stop strings are looked for behind so many tokens.
        include_stop_str_in_output: leave the stop string that was found in the text.
        skip_special_tokens: drop special tokens from the text.
        returns: names of the optional outputs that the request asked for.
        prompt_token_ids: the prompt, where the request says return_token_ids; else None.
        tools: OpenAI tools list of the request.
        reads_calls: False leaves tool calls in the content (tool_choice "none").
        prompt: end of the rendered prompt, from which the parser sees in which stage output begins;
            None for plain completions, which are not parsed.
        separate_reasoning: False leaves reasoning in the content, as the model wrote it.
        include_reasoning: False leaves reasoning out of the answer.
        strict_schema: JSON text of the schema that the content must match when it is whole; empty
            for none.
    """

    stream: bool
    num_prompt_tokens: int
    n: int = 1
    seed_token_ids: tuple[int, ...] = ()
    prepend: str = ""
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    returns: tuple[str, ...] = ()
    prompt_token_ids: tuple[int, ...] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    reads_calls: bool = True
    prompt: str | None = None
    separate_reasoning: bool = True
    include_reasoning: bool = True
    strict_schema: str = ""

    def pack(self) -> bytes:
        """As msgpack."""
        return _pack(asdict(self))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """From what `pack` gave."""
        return cls(**msgpack.unpackb(data, use_list=False))


@dataclass(frozen=True, slots=True)
class RequestEnvelope:
    """Tokenizer to executor.

    Attributes:
        params: how to sample.
        context: passed on unread.
        grammar_field: the request's field that made the grammar, for messages about it.
        timeout_s: how long it may take in all; 0 for no limit, None for the server's default.
        queue_timeout_s: how long it may wait for its turn.
    """

    params: SamplingParams
    context: bytes
    grammar_field: str = ""
    timeout_s: float | None = None
    queue_timeout_s: float | None = None

    def pack(self) -> UInt8Array:
        """As a UINT8 tensor [num_bytes]."""
        params = {field.name: getattr(self.params, field.name) for field in fields(SamplingParams)}
        rest = (self.context, self.grammar_field, self.timeout_s, self.queue_timeout_s)
        return np.frombuffer(_pack([params, *rest]), dtype=np.uint8)

    @classmethod
    def unpack(cls, data: UInt8Array) -> Self:
        """From what `pack` gave."""
        params, *rest = msgpack.unpackb(data.tobytes(), use_list=False)
        return cls(SamplingParams(**params), *rest)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sequence ended; its last part carries it."""

    finish_reason: str
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """What the first step of a stream brings.

    Attributes:
        context: the request's StreamContext, packed.
        feedback_path: the memory in which the postprocessor reports.
        slots: where it raises a signal about each sequence, in the order of their index.
    """

    context: bytes
    feedback_path: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What one step adds to one sequence of the request.

    Attributes:
        index: which sequence.
        num_tokens: how many of the step's token ids are its own; parts lie in order.
        cumulative_logprobs: behind each of those tokens, the sum for the answer so far.
        logprobs: one TokenLogprobs (as a plain row) a token, where the request asked for them.
        prompt_logprobs: one row a token of the prompt, None for the first; in the first part of
            sequence 0, where the request asked for them.
        num_cached_tokens: tokens of the prompt that were in the prefix cache.
        ending: in the sequence's last part only.
    """

    index: int
    num_tokens: int
    cumulative_logprobs: tuple[float, ...] = ()
    logprobs: tuple[Any, ...] | None = None
    prompt_logprobs: tuple[Any, ...] | None = None
    num_cached_tokens: int = 0
    ending: Ending | None = None

    def row(self) -> tuple[Any, ...]:
        """As plain values."""
        ending = self.ending and (self.ending.finish_reason, self.ending.stop_reason)
        return (
            self.index,
            self.num_tokens,
            self.cumulative_logprobs,
            self.logprobs,
            self.prompt_logprobs,
            self.num_cached_tokens,
            ending,
        )

    @classmethod
    def of(cls, row: tuple[Any, ...]) -> Self:
        """From what `row` gave."""
        *head, cached, ending = row
        index, num_tokens, cumulative, logprobs, prompt_logprobs = head
        return cls(
            index,
            num_tokens,
            cumulative,
            logprobs,
            prompt_logprobs,
            cached,
            ending and Ending(*ending),
        )


@dataclass(frozen=True, slots=True)
class StepState:
    """Executor to postprocessor, beside the new token ids of one step.

    A step without parts is a heartbeat.

    Attributes:
        slot: where the postprocessor reports how far this stream is consumed.
        serial: number of the stream, never used twice by one executor.
        step: number of this step in its stream, from 1.
        parts: what it adds to each of the request's sequences that has something new.
        is_last: every sequence has ended.
        opening: in the first step only.
    """

    slot: int
    serial: int
    step: int
    parts: tuple[Part, ...] = ()
    is_last: bool = False
    opening: Opening | None = None

    def pack(self) -> UInt8Array:
        """As a UINT8 tensor [num_bytes]."""
        opening = self.opening
        first = opening and (opening.context, opening.feedback_path, opening.slots)
        parts = [part.row() for part in self.parts]
        row = (self.slot, self.serial, self.step, parts, self.is_last, first)
        return np.frombuffer(_pack(row), dtype=np.uint8)

    @classmethod
    def unpack(cls, data: UInt8Array) -> Self:
        """From what `pack` gave."""
        row = msgpack.unpackb(data.tobytes(), use_list=False)
        slot, serial, step, parts, is_last, first = row
        opening = first and Opening(*first)
        return cls(slot, serial, step, tuple(map(Part.of, parts)), is_last, opening)


def pack_update(update: RequestUpdate) -> list[Any]:
    """An engine's update as plain values, its fields in their order."""
    return [getattr(update, name) for name in _UPDATE_FIELDS]


def unpack_update(row: list[Any]) -> RequestUpdate:
    """From what `pack_update` gave. Log-probabilities stay plain rows: nothing here reads them."""
    return RequestUpdate(*row)


_UPDATE_FIELDS = tuple(field.name for field in fields(RequestUpdate))


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed
