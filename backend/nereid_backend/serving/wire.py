# SPDX-License-Identifier: Apache-2.0
"""The messages between the three steps of the ensemble, and their conversion to bytes.

    tokenizer --- RequestEnvelope ---> executor --- StepState ---> postprocessor
                                          ^
                                          +-- RequestUpdate --- engine process

In Triton server, the postprocessor can receive inputs only from the executor, because the executor
is a decoupled step. Therefore the tokenizer packs the data for the postprocessor (StreamContext)
into the message to the executor (RequestEnvelope). The executor sends the packed StreamContext to
the postprocessor with the first step, and sends the packed SamplingParams to the engine process.
The executor itself unpacks neither the StreamContext nor the SamplingParams.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Self, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.core.sampling_params import MAX_SEQUENCES, SamplingParams
from nereid_backend.errors import RequestError, first_line
from nereid_backend.request_field_checks import CheckedSamplingParams
from nereid_backend.serving import tensor_names

UInt8Array = npt.NDArray[np.uint8]
MessageT = TypeVar("MessageT")


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return `tool` unchanged. Raise a ValueError if the function of the tool has no name."""
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool must have a function with a name")
    return tool


def _check_output_name(name: str) -> str:
    """Return `name` unchanged. Raise a ValueError if no optional output has this name."""
    if name not in tensor_names.RETURNABLE:
        raise ValueError("no optional output has this name")
    return name


# A client can call the executor directly with any message. Therefore the following types are
# checked when a message is unpacked.
_NumSequences = Annotated[int, Field(ge=1, le=MAX_SEQUENCES)]
_Count = Annotated[int, Field(ge=0, lt=2**32)]
_TokenIds = tuple[_Count, ...]
_OutputName = Annotated[str, AfterValidator(_check_output_name)]
_Tool = Annotated[dict[str, Any], AfterValidator(_check_tool)]


@dataclass(frozen=True, slots=True)
class StreamContext:
    """The data that the postprocessor needs about a request.

    Attributes:
        stream: whether the request is streaming. If True, each step can have a response. If False,
            the request has exactly one response.
        num_prompt_tokens: the number of prompt tokens, for the usage.
        n: the number of choices.
        seed_token_ids: the last tokens of a completion's prompt. The detokenizer starts with these
            tokens, so that a space before the first generated word is not lost. Empty for a chat.
        prepend: a text that precedes the output. If the output must begin with the prompt, the text
            is the prompt. Otherwise the text is empty.
        stop: strings at which the output ends.
        min_tokens: the number of tokens that must be generated before stop strings have an effect.
        include_stop_str_in_output: whether the output contains the stop string at which generation
            ended.
        skip_special_tokens: whether special tokens are removed from the output.
        returns: the names of the optional outputs that the request asks for.
        prompt_token_ids: the tokens of the prompt if the request has return_token_ids=true,
            otherwise None.
        tools: the tools of the request, in the format of the OpenAI API.
        reads_calls: whether tool calls are parsed. If False (tool_choice "none"), tool calls stay
            in the content.
        prompt: the end of the rendered prompt. It determines whether the output begins inside
            reasoning, content or a tool call. None for completions, because their output is not
            parsed.
        separate_reasoning: whether reasoning is separated from the content. If False, reasoning
            stays in the content with its markers.
        include_reasoning: whether responses contain reasoning.
        strict_schema: the JSON text of the schema that the complete content must match. Empty if
            the content is not validated.
        traceparent: the parent of the request's spans (see tracing.py); "" for none.
    """

    stream: bool
    num_prompt_tokens: _Count
    n: _NumSequences = 1
    seed_token_ids: _TokenIds = ()
    prepend: str = ""
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    returns: tuple[_OutputName, ...] = ()
    prompt_token_ids: _TokenIds | None = None
    tools: tuple[_Tool, ...] = ()
    reads_calls: bool = True
    prompt: str | None = None
    separate_reasoning: bool = True
    include_reasoning: bool = True
    strict_schema: str = ""
    traceparent: str = ""

    def pack(self) -> bytes:
        """Convert the context to msgpack bytes."""
        return _pack(asdict(self), default=_nearest_64_bit_integer)

    @staticmethod
    def unpack(data: bytes) -> "StreamContext":
        """Unpack a StreamContext from `data`, the return value of `pack`.

        Raises:
            RequestError: the bytes are not a valid context.
        """
        return _unpack("context", data, _CONTEXT.validate_python)


@dataclass(frozen=True, slots=True)
class RequestEnvelope:
    """The message from the tokenizer to the executor about one request (the tensor `envelope`).

    Attributes:
        params: the packed SamplingParams. Only the engine process unpacks them.
        n: the number of sequences. `params` contains the same number.
        context: a packed StreamContext. Only the postprocessor unpacks it.
        grammar_field: the request's field from which the grammar was built, for error messages.
        timeout_s: the time limit of the whole request in seconds. 0 means no limit, None means the
            server's default.
        queue_timeout_s: the time limit for waiting in the queue in seconds. 0 means no limit, None
            means the server's default.
        client_id: the client that sent the request; "" if the client is unknown. `params` contains
            the same text.
        traceparent: the parent of the request's spans (see tracing.py); "" for none.
        images: the packed ImageInputs; b"" if there are no images. Only the engine process unpacks
            them.
    """

    params: bytes
    n: _NumSequences
    context: bytes
    grammar_field: str = ""
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    client_id: str = ""
    traceparent: str = ""
    images: bytes = b""

    def pack(self) -> UInt8Array:
        """Convert the envelope to a UINT8 array of shape [num_bytes]."""
        row = [getattr(self, field.name) for field in fields(self)]
        return np.frombuffer(_pack(row), dtype=np.uint8)

    @staticmethod
    def unpack(data: UInt8Array) -> "RequestEnvelope":
        """Return the envelope that `pack` packed into `data`.

        Raises:
            RequestError: the bytes are not a valid envelope.
        """
        return _unpack(
            "message",
            data.tobytes(),
            lambda row: _ENVELOPE.validate_python(ArgsKwargs(tuple(row))),
        )


_CONTEXT = TypeAdapter(StreamContext)
_ENVELOPE = TypeAdapter(RequestEnvelope)


def pack_params(params: SamplingParams) -> bytes:
    """Convert sampling parameters to msgpack bytes."""
    return _pack({field.name: getattr(params, field.name) for field in fields(SamplingParams)})


def unpack_params(data: bytes) -> SamplingParams:
    """Return the sampling parameters that `pack_params` packed into `data`.

    Raises:
        RequestError: the bytes are not valid sampling parameters.
    """
    return _unpack("sampling parameters", data, lambda values: CheckedSamplingParams(**values))


@dataclass(frozen=True, slots=True)
class Ending:
    """The reason why a sequence ended. The last delta of the sequence contains this reason."""

    finish_reason: str
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """Data that only the first message of a stream contains.

    Attributes:
        context: the packed StreamContext of the request.
        slots: one slot number for each sequence, in the order of the sequences. The slots are in
            the shared memory (see feedback.py).
    """

    context: bytes
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """The new tokens of one sequence in one message to the postprocessor.

    Attributes:
        index: the index of the sequence in its request.
        token_ids: the new tokens.
        cumulative_logprobs: one sum for each new token: the log-probabilities of this token and of
            all earlier tokens of the sequence.
        logprobs: one entry for each new token: the fields of a TokenLogprobs. None if the request
            does not ask for log-probabilities.
        prompt_logprobs: one entry for each prompt token: the fields of a TokenLogprobs, or None for
            the first prompt token. Only the first delta of sequence 0 contains these entries, and
            only if the request asks for them.
        num_cached_tokens: the number of prompt tokens that were found in the prefix cache.
        ending: the reason why the sequence ended. It is None in all deltas except the last delta of
            the sequence.
    """

    index: int
    token_ids: tuple[int, ...]
    cumulative_logprobs: tuple[float, ...] = ()
    logprobs: tuple[Any, ...] | None = None
    prompt_logprobs: tuple[Any, ...] | None = None
    num_cached_tokens: int = 0
    ending: Ending | None = None

    def row(self) -> tuple[Any, ...]:
        """Return the fields as a tuple of values that msgpack can pack.

        The class method `of` converts such a tuple back to a SequenceDelta.
        """
        ending = None
        if self.ending is not None:
            ending = (self.ending.finish_reason, self.ending.stop_reason)
        return (
            self.index,
            self.token_ids,
            self.cumulative_logprobs,
            self.logprobs,
            self.prompt_logprobs,
            self.num_cached_tokens,
            ending,
        )

    @classmethod
    def of(cls, row: tuple[Any, ...]) -> Self:
        """Build a SequenceDelta from a tuple that the method `row` has returned."""
        *values, ending = row
        return cls(*(*values, ending and Ending(*ending)))


@dataclass(frozen=True, slots=True)
class StepState:
    """A message with new tokens of a stream, sent from the executor to the postprocessor.

    A step without deltas is a heartbeat.

    Attributes:
        slot: the number of a slot in the shared memory (see feedback.py). In this slot, the
            postprocessor stores the number of consumed steps.
        serial: the number of the stream. It is unique in the executor process.
        step: the number of this step in its stream, starting with 1.
        deltas: the new tokens of the sequences. A sequence without new tokens has a delta only if
            the sequence has ended.
        is_last: whether every sequence of the request has ended.
        opening: the data of the stream's first step; None in later steps.
    """

    slot: int
    serial: int
    step: int
    deltas: tuple[SequenceDelta, ...] = ()
    is_last: bool = False
    opening: Opening | None = None

    def pack(self) -> bytes:
        """Convert the state to msgpack bytes."""
        opening = self.opening
        first = opening and (opening.context, opening.slots)
        deltas = [delta.row() for delta in self.deltas]
        return _pack((self.slot, self.serial, self.step, deltas, self.is_last, first))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Unpack a StepState from `data`, the return value of `pack`.

        The fields are not validated, because the executor has signed the data.
        """
        row = msgpack.unpackb(data, use_list=False)
        slot, serial, step, deltas, is_last, first = row
        opening = first and Opening(*first)
        return cls(slot, serial, step, tuple(map(SequenceDelta.of, deltas)), is_last, opening)


def pack_update(update: RequestUpdate) -> list[Any]:
    """Convert a RequestUpdate to a list of values that msgpack can convert to bytes.

    The list contains the fields in the order in which RequestUpdate declares them.
    """
    return [getattr(update, name) for name in _UPDATE_FIELDS]


def unpack_update(row: list[Any]) -> RequestUpdate:
    """Build a RequestUpdate from a list that `pack_update` has returned.

    Log-probabilities stay lists of plain values, because the executor only passes them on.
    """
    return RequestUpdate(*row)


_UPDATE_FIELDS = tuple(field.name for field in fields(RequestUpdate))


def _unpack(title: str, data: bytes, read: Callable[[Any], MessageT]) -> MessageT:
    """Unpack `data`, and return the message that `read` builds from the unpacked values.

    Raises:
        RequestError: the bytes are not msgpack, or `read` raises an error. The text of the error
            contains `title`, the name of the message.
    """
    try:
        return read(msgpack.unpackb(data, use_list=False))
    except ValidationError as error:
        first_error = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first_error["loc"]))
        raise RequestError(
            f"envelope: the {title} is damaged: {field}: {first_error['msg']}."
        ) from None
    except (ValueError, TypeError) as error:
        # All errors of msgpack are ValueErrors. If an error has no message, `first_line` returns
        # the name of the error's class.
        raise RequestError(f"envelope: the {title} is damaged: {first_line(error)}") from None


def _nearest_64_bit_integer(value: object) -> int:
    """Return the integer of at most 64 bits that is nearest to a larger integer.

    The parsing of tool calls depends on the types of the numbers in a schema, but not on the
    numbers.

    Raises:
        TypeError: the value is no integer, so msgpack cannot pack it.
    """
    if not isinstance(value, int):
        raise TypeError(f"msgpack cannot pack a value of the type {type(value).__name__}")
    return 2**64 - 1 if value > 0 else -(2**63)


def _pack(value: object, default: Callable[[object], object] | None = None) -> bytes:
    """Convert a value to msgpack bytes. `default` replaces an object that msgpack cannot pack."""
    packed: bytes = msgpack.packb(value, use_bin_type=True, default=default)
    return packed
