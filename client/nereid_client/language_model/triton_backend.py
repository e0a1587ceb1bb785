"""The implementation of the protocol `Backend` that calls the ensemble on a Triton server."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, cast

import grpc
import numpy as np
from pydantic_core import from_json

from nereid_client.errors import BackendError
from nereid_client.grpc_calls import (
    InputTensor,
    Stream,
    TritonCalls,
    decode_strings,
    infer_request,
)
from nereid_client.language_model.backend import Generation
from nereid_client.language_model.server_errors import (
    means_dead_model,
    read_error,
    unreachable_message,
)
from nereid_client.streaming.deltas import Delta
from nereid_client.supervise.hang_detection import TEST_SAMPLING_PARAMETERS

# The ensemble first calls the tokenizer model, which has the output tensors `prompt_token_ids` and
# `envelope`. The envelope contains all data about a request except its token ids.
TOKENIZER_MODEL = "tokenizer"
_PROMPT_TOKEN_IDS = "prompt_token_ids"
_ENVELOPE = "envelope"
# The ensemble calls the executor model after the tokenizer model. The output tensor `state` of the
# executor model contains JSON text.
EXECUTOR_MODEL = "executor"
_STATE = "state"
# If a request contains this tensor, the ensemble sends the answer in several responses. Otherwise,
# the ensemble sends one response.
_STREAM_THE_ANSWER = InputTensor("stream", "BOOL", [True])
# The executor model requires these tensors in every request. A request without a prompt contains
# these values, which the model ignores.
_NO_PROMPT = (
    InputTensor(_PROMPT_TOKEN_IDS, "INT32", [0]),
    InputTensor(_ENVELOPE, "UINT8", [0]),
)

_PROBE_TIMEOUT_S = 2.0


class TritonBackend:
    """Calls the ensemble on a Triton server.

    Each request has its own gRPC stream. All running streams of a client share one connection.

    The object must be created in a running event loop. The first call opens the connection.
    """

    def __init__(
        self,
        url: str,
        ensemble: str,
        tokenizer: str = TOKENIZER_MODEL,
        executor: str = EXECUTOR_MODEL,
    ) -> None:
        """Connect to the Triton server.

        Args:
            url: host:port of the server's gRPC endpoint.
            ensemble: the name of the ensemble in the model repository.
            tokenizer: the name of the first model that the ensemble calls.
            executor: the name of the second model that the ensemble calls.
        """
        self._url = url
        self._ensemble = ensemble
        self._tokenizer = tokenizer
        self._executor = executor
        self._calls = TritonCalls(url)
        # Whether the last response to `generate` was an error because a model's process has died.
        self._is_model_dead = False

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta]:
        """Yield the deltas of all choices, as described by `Backend.generate`.

        If the generator is closed before the last response, the gRPC stream is cancelled. After the
        last response or an error, the stream is not cancelled, because Triton server 2.51 can crash
        if a stream is cancelled while it ends (issues 7368 and 8034 of the Triton server). This
        would happen often, because many clients disconnect when they receive a finish reason.
        """
        stream = self._start_stream(generation)
        num_running = generation.num_choices  # the choices without a finish reason
        has_ended = False  # whether the last response or an error has arrived
        try:
            while (message := await stream.read()) is not None:
                self._is_model_dead = means_dead_model(message.error_message)
                if message.error_message:
                    has_ended = True
                    raise read_error(message.error_message)
                deltas = _decode_response(message.infer_response, with_text=generation.with_text)
                num_running -= sum("finish_reason" in delta for delta in deltas)
                has_ended = num_running <= 0
                for delta in deltas:
                    yield delta
                if has_ended:
                    return
        except grpc.RpcError as error:
            raise self._stream_error(error) from None
        finally:
            if has_ended:
                stream.let_end()
            else:
                stream.cancel()

    def _start_stream(self, generation: Generation) -> Stream:
        """Send a request to the ensemble, and return the stream of the responses."""
        outputs = ["delta", "text_output"] if generation.with_text else ["delta"]
        # With the header `triton_grpc_error`, the Triton server would send the code of an error as
        # the status of the stream. The frontend does not send this header, because Triton server
        # 2.51 would then treat each error as a cancellation, and crash after some errors.
        return self._calls.stream(self._request(self._ensemble, generation, outputs))

    async def tokenize(self, generation: Generation) -> list[int]:
        """Return the token ids from the tokenizer model, as described by `Backend.tokenize`."""
        raw = await self._infer(self._request(self._tokenizer, generation, [_PROMPT_TOKEN_IDS]))
        return [int(token_id) for token_id in np.frombuffer(raw, np.int32)]

    async def detokenize(
        self, request_id: str, token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> str:
        """Return the text from the tokenizer model, as described by `Backend.detokenize`.

        The tokenizer model's output `envelope` usually describes a request. For a request with the
        parameter `return_text`, the envelope is the JSON object {"text": TEXT} instead.
        """
        inputs = [InputTensor("input_ids", "INT32", token_ids)]
        request = infer_request(self._tokenizer, request_id, inputs, [_ENVELOPE])
        request.parameters["return_text"].bool_param = True
        request.parameters["skip_special_tokens"].bool_param = skip_special_tokens
        envelope = await self._infer(request)
        return str(json.loads(envelope)["text"])

    async def request_limits(self) -> Mapping[str, int]:
        """Return the limits of the tokenizer model, as described by `Backend.request_limits`.

        For a request with the parameter `return_limits`, the tokenizer model's output `envelope` is
        a JSON object with its limits.
        """
        request = infer_request(self._tokenizer, "limits", inputs=[], outputs=[_ENVELOPE])
        request.parameters["return_limits"].bool_param = True
        limits: dict[str, int] = json.loads(await self._infer(request))
        return limits

    async def change_adapters(self, parameters: Mapping[str, str]) -> list[str]:
        """Change the adapters of the executor model, as described by `Backend.change_adapters`."""
        answer = await self._call_executor("adapters", parameters)
        return list(map(str, answer["adapters"]))

    async def call_cache(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        """Call the prefix cache of the executor model, as described by `Backend.call_cache`."""
        return await self._call_executor("cache", parameters)

    async def _call_executor(
        self, request_id: str, parameters: Mapping[str, str]
    ) -> dict[str, Any]:
        """Send parameters to the executor model, and return the JSON object in the response.

        The request generates no text. Its parameters select what the model does, and the output
        tensor `state` contains the answer.
        """
        request = infer_request(self._executor, request_id, _NO_PROMPT, [_STATE])
        for name, value in parameters.items():
            request.parameters[name].string_param = value
        response = await self._only_response_of_executor(request)
        # This UINT8 tensor contains the bytes of a JSON text. Unlike a string tensor, it has no
        # length prefixes.
        (state,) = response.raw_output_contents
        answer: dict[str, Any] = json.loads(state)
        return answer

    async def _only_response_of_executor(self, request: Any) -> Any:
        """Send a request to the executor model, and return the model's only response.

        The executor model is decoupled: it may send any number of responses. A request to such a
        model needs a stream, even if there is only one response.
        """
        stream = self._calls.stream(request)
        try:
            message = await stream.read()
        except grpc.RpcError as error:  # the stream has ended
            raise self._stream_error(error) from None
        finally:
            # The stream ends in the background, even if this task is cancelled. Cancelling the
            # stream could crash the Triton server.
            stream.let_end()
        if message is None:
            raise BackendError("UNAVAILABLE", "The executor model does not answer. Try again.")
        if message.error_message:
            raise read_error(message.error_message)
        return message.infer_response

    async def _infer(self, request: Any) -> bytes:
        """Send a request for one output tensor to a model, and return the bytes of this tensor."""
        try:
            response = await self._calls.infer(request)
        except grpc.RpcError as error:
            raise self._call_error(error) from None
        (raw,) = response.raw_output_contents
        return cast("bytes", raw)

    async def is_live(self) -> bool:
        """Return True if the server answers and no process of a model has died."""
        return await self._calls.is_live() and not await self._check_dead_model()

    async def is_ready(self) -> bool:
        """Return whether the ensemble accepts requests."""
        is_ready = await self._calls.is_model_ready(self._ensemble)
        return is_ready and not await self._check_dead_model()

    async def _check_dead_model(self) -> bool:
        """Return whether the process of a model has died.

        The server reports a model as ready even if its process has died. The last response tells
        whether the process has died. If the process has died, the server may have restarted since
        then, so a new response is requested.
        """
        if self._is_model_dead:
            await self._update_is_model_dead()
        return self._is_model_dead

    async def _update_is_model_dead(self) -> None:
        """Update `_is_model_dead` by requesting a short answer from the model.

        For each response, `generate` sets `_is_model_dead`. If no response arrives within the
        timeout, `_is_model_dead` stays unchanged.
        """
        probe = Generation("health", text_input="a", sampling_parameters=TEST_SAMPLING_PARAMETERS)
        with suppress(BackendError, TimeoutError):
            async with (
                asyncio.timeout(_PROBE_TIMEOUT_S),
                aclosing(self.generate(probe)) as deltas,
            ):
                async for _ in deltas:  # only the assignment in `generate` matters
                    pass

    async def close(self) -> None:
        """Close the connection."""
        await self._calls.close()

    def _request(self, model: str, generation: Generation, outputs: list[str]) -> Any:
        """Return a ModelInferRequest that requests the tensors in `outputs` from `model`."""
        request = infer_request(model, generation.request_id, _inputs(generation), outputs)
        # The tokenizer model serves the clients in turn, and needs the client id before it parses
        # the JSON text of the request. The client id is therefore also sent as a parameter.
        if generation.client_id:
            request.parameters["client_id"].string_param = generation.client_id
        return request

    def _call_error(self, error: grpc.RpcError) -> BackendError:
        """Return a BackendError for a unary call that failed.

        If a model returned the error, gRPC's code is INTERNAL, and the message contains the code
        that the model chose.
        """
        code: str = error.code().name
        model_error = read_error(error.details() or code)
        if code == "UNAVAILABLE":
            return BackendError(code, self._outage_message(model_error.message))
        return BackendError(model_error.code if code == "INTERNAL" else code, model_error.message)

    def _stream_error(self, error: grpc.RpcError) -> BackendError:
        """Return a BackendError for a stream that ended because the connection failed."""
        code: str = error.code().name
        details: str = error.details() or code
        message = self._outage_message(details) if code == "UNAVAILABLE" else details
        return BackendError(code, message)

    def _outage_message(self, details: str) -> str:
        """Return the error message for an unreachable Triton server or a lost connection."""
        if "failed to connect" in details:
            return unreachable_message(self._url)
        return f"The frontend lost the connection to the Triton server ({details}). Try again."


def _inputs(generation: Generation) -> list[InputTensor]:
    """Convert a `Generation` object to input tensors of the ensemble or of the tokenizer model.

    A tensor is left out if the generation does not have its value. The tensor `stream` is always
    sent, because the frontend reads every answer as a stream. The tokenizer model ignores `stream`.
    """
    inputs = [_STREAM_THE_ANSWER]
    if generation.text_input is not None:
        inputs.append(_text_tensor("text_input", generation.text_input))
    if generation.chat_request is not None:
        chat_request = _append_frontend_fields(generation.chat_request, generation)
        inputs.append(_text_tensor("chat_request", chat_request))
    if generation.sampling_parameters is not None:
        parameters = _append_frontend_fields(generation.sampling_parameters, generation)
        inputs.append(_text_tensor("sampling_parameters", parameters))
    if generation.input_ids is not None:
        inputs.append(InputTensor("input_ids", "INT32", generation.input_ids))
    return inputs


def _text_tensor(name: str, text: str) -> InputTensor:
    return InputTensor(name, "BYTES", [text.encode()])


def _append_frontend_fields(text: str, generation: Generation) -> str:
    """Append the fields that the frontend sets, such as the client id, to a JSON object.

    `text` is the JSON object. The text is not parsed, because it can be several megabytes long. If
    a client has sent one of the fields, the result contains the key twice. The backend's JSON
    parser uses the last value, so a client cannot replace the appended value.

    Example: '{"n": 1}' returns '{"n": 1, "client_id": "a", "client_weight": 1.0}'.
    """
    fields = _frontend_fields(generation)
    if not fields:
        return text
    opened_object = text.rstrip().removesuffix("}").rstrip()  # such as '{"n": 1'
    separator = "" if opened_object == "{" else ", "
    return opened_object + separator + json.dumps(fields, ensure_ascii=False).removeprefix("{")


def _frontend_fields(generation: Generation) -> dict[str, object]:
    """Return the fields of a request that only the frontend can set. A client cannot set them."""
    fields: dict[str, object] = {}
    if generation.client_id:
        fields["client_id"] = generation.client_id
        fields["client_weight"] = generation.client_weight
    if generation.priority is not None:
        fields["priority"] = generation.priority
    if generation.lora_name:
        fields["lora_name"] = generation.lora_name
    return fields


def _decode_response(response: Any, *, with_text: bool) -> list[Delta]:
    """Convert one response of the Triton server to deltas, which are pieces of generated text.

    The result contains one delta for each choice with news, such as text or a finish reason. For a
    choice without news, the server sends the delta {}, which is left out. The last response of a
    stream may have no delta.

    Args:
        response: the response, a protobuf message. The tensor `delta` has a JSON object for each
            choice. If `text_output` was requested, it has the unparsed text of each choice.
        with_text: whether to add the unparsed text to each delta, with the key `text`.
    """
    # `outputs` and `raw_output_contents` have one item for each output tensor, so they are empty in
    # a response without tensors. `strict` is False, because a difference in length must not end the
    # stream.
    contents = zip(response.outputs, response.raw_output_contents, strict=False)
    tensors = {output.name: decode_strings(raw) for output, raw in contents}
    deltas = [cast("Delta", from_json(string)) for string in tensors.get("delta", ())]
    if with_text:
        texts = tensors.get("text_output", ())
        for delta, text in zip(deltas, texts, strict=False):
            if text:
                delta["text"] = text.decode()
    return [delta for delta in deltas if delta]
