"""The way to the language model: the `Backend` protocol and its Triton gRPC implementation."""

import json
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import grpc
import numpy as np

from nereid_client.errors import BackendError
from nereid_client.grpc_calls import TritonCalls, decode_strings, infer_request
from nereid_client.streaming.deltas import Delta

# The ensemble's first step, by its name in the repository, and what it makes of a request.
_TOKENIZER = "tokenizer"
_PROMPT_TOKEN_IDS = "prompt_token_ids"
_UNREACHABLE = "the Triton server at {} can't be reached; is it running?"
_LOST = "the connection to the Triton server was lost ({}); try again"
_SICK = "is not healthy"  # of a stub that died; only a new server helps
_STOPPING = "Server is stopping"
# Put in front by the Triton server, and by the ensemble's steps.
_PLACE = re.compile(r"^(\[request id: [^\]]*\] )?(in ensemble '[^']*', )?")
_TAG = re.compile(r"^\[([A-Z_]+)\] ")


@dataclass(frozen=True)
class Generation:
    """One call of the ensemble: a request id, exactly one kind of prompt, and how to sample.

    Attributes:
        request_id: shows up in the server's logs; unique among requests that run.
        text_input: a prompt as text.
        input_ids: a prompt as token ids.
        chat_request: the JSON body of a chat completion.
        sampling_parameters: a JSON object, for the first two kinds.
        with_text: whether deltas carry `text`, the raw text.
        num_choices: how many answers were asked for; the last one's end is the stream's.
    """

    request_id: str
    text_input: str | None = None
    input_ids: tuple[int, ...] | None = None
    chat_request: str | None = None
    sampling_parameters: str | None = None
    with_text: bool = False
    num_choices: int = 1


class Backend(Protocol):
    """Something that generates."""

    def generate(self, generation: Generation) -> AsyncGenerator[Delta]:
        """The deltas of all choices as they come; closing the generator aborts the request.

        Raises: BackendError.
        """
        ...

    async def tokenize(self, generation: Generation) -> list[int]:
        """The token ids of its prompt; nothing is generated.

        Raises: BackendError.
        """
        ...

    async def is_live(self) -> bool:
        """Whether the server answers at all."""
        ...

    async def is_ready(self) -> bool:
        """Whether the model can take requests."""
        ...

    async def close(self) -> None:
        """Give up the connection."""
        ...


class TritonBackend:
    """The ensemble on a Triton server: one gRPC stream per request, one channel for all."""

    def __init__(self, url: str, ensemble: str) -> None:
        """Nothing is connected yet; must be called in a running event loop.

        Args:
            url: host:port of the server's gRPC door.
            ensemble: the model's name in the repository.
        """
        self._url = url
        self._ensemble = ensemble
        self._calls = TritonCalls(url)

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta]:
        """See `Backend.generate`.

        Closing it before the last response cancels the gRPC stream; after that, or after an error,
        the stream is left to end by itself. Server 2.51 can crash when a cancel meets the end of a
        stream (its issues 7368 and 8034), and many clients hang up at the sight of a finish reason.
        """
        outputs = ["delta", "text_output"] if generation.with_text else ["delta"]
        # Not with the header `triton_grpc_error`, which turns an error's code into the stream's
        # status: server 2.51 then takes each error for a cancel, and sooner or later crashes.
        stream = self._calls.stream(self._request(self._ensemble, generation, outputs))
        is_over = False
        running = generation.num_choices
        try:
            while (message := await stream.read()) is not None:
                if message.error_message:
                    is_over = True
                    raise read_error(message.error_message)
                deltas = _decode_response(message.infer_response, generation.with_text)
                running -= sum("finish_reason" in delta for delta in deltas)
                is_over = running <= 0
                for delta in deltas:
                    yield delta
                if is_over:
                    return
        except grpc.RpcError as error:
            raise self._stream_error(error) from None
        finally:
            if is_over:
                stream.leave()
            else:
                stream.give_up()

    async def tokenize(self, generation: Generation) -> list[int]:
        """See `Backend.tokenize`: a call of the ensemble's first step alone."""
        request = self._request(_TOKENIZER, generation, [_PROMPT_TOKEN_IDS])
        try:
            response = await self._calls.infer(request)
        except grpc.RpcError as error:
            raise self._call_error(error) from None
        (raw,) = response.raw_output_contents  # of the one output that was asked for
        return [int(token_id) for token_id in np.frombuffer(raw, np.int32)]

    async def is_live(self) -> bool:
        """See `Backend.is_live`."""
        return await self._calls.is_live()

    async def is_ready(self) -> bool:
        """See `Backend.is_ready`."""
        return await self._calls.is_model_ready(self._ensemble)

    async def close(self) -> None:
        """See `Backend.close`."""
        await self._calls.close()

    def _request(self, model: str, generation: Generation, outputs: list[str]) -> Any:
        return infer_request(model, generation.request_id, _inputs(generation), outputs)

    def _call_error(self, error: grpc.RpcError) -> BackendError:
        code: str = error.code().name
        told = read_error(error.details() or code)
        if code == "UNAVAILABLE":
            return BackendError(code, self._outage(told.message))
        return BackendError(told.code if code == "INTERNAL" else code, told.message)

    def _stream_error(self, error: grpc.RpcError) -> BackendError:
        code: str = error.code().name
        details: str = error.details() or code
        return BackendError(code, self._outage(details) if code == "UNAVAILABLE" else details)

    def _outage(self, details: str) -> str:
        if "failed to connect" in details:
            return _UNREACHABLE.format(self._url)
        return _LOST.format(details)


def read_error(text: str) -> BackendError:
    """The error that a message in the stream stands for; see docs/contract.md for its form."""
    text = _PLACE.sub("", text)
    tagged = _TAG.match(text)
    if tagged is not None:
        return BackendError(tagged[1], text[tagged.end() :])
    if text.startswith("Request for unknown model") or is_outage(text):
        return BackendError("UNAVAILABLE", text)
    return BackendError("INTERNAL", text)


def is_outage(text: str) -> bool:
    """Whether a message of the server's own says that it must be started again, or is stopping."""
    return _SICK in text or _STOPPING in text


def _inputs(generation: Generation) -> list[tuple[str, str, Sequence[Any]]]:
    inputs: list[tuple[str, str, Sequence[Any]]] = [("stream", "BOOL", [True])]
    for name in ("text_input", "chat_request", "sampling_parameters"):
        text = getattr(generation, name)
        if text is not None:
            inputs.append((name, "BYTES", [text.encode()]))
    if generation.input_ids is not None:
        inputs.append(("input_ids", "INT32", generation.input_ids))
    return inputs


def _decode_response(response: Any, with_text: bool) -> list[Delta]:
    """The deltas of one ModelInferResponse, one a choice; the last response may have none."""
    deltas: list[Delta] = []
    texts: list[bytes] = []
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=False):
        if output.name == "delta":
            deltas = [cast("Delta", json.loads(string)) for string in decode_strings(raw)]
        elif output.name == "text_output" and with_text:
            texts = decode_strings(raw)
    for delta, text in zip(deltas, texts, strict=False):
        if text:
            delta["text"] = text.decode()
    return [delta for delta in deltas if delta]
