# SPDX-License-Identifier: Apache-2.0
"""The values that cross between the three steps of the ensemble, and how they are packed.

    tokenizer --- RequestEnvelope ---> executor --- StepState ---> postprocessor

A step behind a decoupled step may take inputs from that step only, so what the postprocessor must
know of a request (StreamContext) rides through the executor, unread, in the first step.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import msgpack
import numpy as np
import numpy.typing as npt

from nereid_backend.core.params import SamplingParams

UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StreamContext:
    """What the postprocessor must know of one request.

    Attributes:
        stream: one response per step; otherwise exactly one response.
        num_prompt_tokens: for usage.
        seed_token_ids: last tokens of the prompt, so that a completion's first word keeps the
            space before it; empty for chat.
        prepend: text put before the output (the prompt, when the request asks for it).
        stop: strings that end the answer.
        include_stop_str_in_output: leave the stop string that was found in the text.
        skip_special_tokens: drop special tokens from the text.
        returns: names of the optional outputs that the request asked for.
        tools: OpenAI tools list of the request.
        prompt: end of the rendered prompt, from which the parser sees in which stage output begins;
            None for plain completions, which are not parsed.
    """

    stream: bool
    num_prompt_tokens: int
    seed_token_ids: tuple[int, ...] = ()
    prepend: str = ""
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    returns: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str | None = None

    def pack(self) -> bytes:
        """As msgpack."""
        return _pack(asdict(self))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """From what `pack` gave."""
        return cls(**msgpack.unpackb(data, use_list=False))


@dataclass(frozen=True, slots=True)
class RequestEnvelope:
    """Tokenizer to executor: how to sample, and the context that is passed on unread."""

    params: SamplingParams
    context: bytes

    def pack(self) -> UInt8Array:
        """As a UINT8 tensor [num_bytes]."""
        params = {field.name: getattr(self.params, field.name) for field in fields(SamplingParams)}
        return np.frombuffer(_pack([params, self.context]), dtype=np.uint8)

    @classmethod
    def unpack(cls, data: UInt8Array) -> Self:
        """From what `pack` gave."""
        params, context = msgpack.unpackb(data.tobytes(), use_list=False)
        return cls(SamplingParams(**params), context)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended; its last step carries it."""

    finish_reason: str
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """What the first step of a stream brings: the request's context, and where to report."""

    context: bytes
    feedback_path: str


@dataclass(frozen=True, slots=True)
class StepState:
    """Executor to postprocessor, beside the new token ids of one step.

    A step without tokens and without an ending is a heartbeat.

    Attributes:
        slot: where the postprocessor reports about this stream.
        serial: number of the stream, never used twice by one executor.
        step: number of this step in its stream, from 1.
        cumulative_logprob: of all tokens up to this step.
        opening: in the first step only.
        ending: in the last step only.
    """

    slot: int
    serial: int
    step: int
    cumulative_logprob: float = 0.0
    opening: Opening | None = None
    ending: Ending | None = None

    def pack(self) -> UInt8Array:
        """As a UINT8 tensor [num_bytes]."""
        opening = self.opening and (self.opening.context, self.opening.feedback_path)
        ending = self.ending and (self.ending.finish_reason, self.ending.stop_reason)
        row = (self.slot, self.serial, self.step, self.cumulative_logprob, opening, ending)
        return np.frombuffer(_pack(row), dtype=np.uint8)

    @classmethod
    def unpack(cls, data: UInt8Array) -> Self:
        """From what `pack` gave."""
        row = msgpack.unpackb(data.tobytes(), use_list=False)
        slot, serial, step, logprob, opening, ending = row
        return cls(
            slot, serial, step, logprob, opening and Opening(*opening), ending and Ending(*ending)
        )


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed
