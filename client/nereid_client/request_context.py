"""Functions for all routes: they read and validate a request body, and select the model."""

import asyncio
import gc
import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from nereid_client.errors import ApiError, Disconnected, from_validation, shown
from nereid_client.json_body import NESTED_TOO_DEEPLY, parse_json_object
from nereid_client.language_model.adapters import Adapters, current_adapter
from nereid_client.language_model.backend import Backend
from nereid_client.language_model.fill_in_middle import FillInMiddle
from nereid_client.middleware.client_keys import current_client
from nereid_client.protocol.common_fields import GenerationRequest
from nereid_client.protocol.request_limits import PublishedLimits, RequestLimits
from nereid_client.request_turns import RequestTurns
from nereid_client.settings import Settings
from nereid_client.several_models.model_control import ModelControl
from nereid_client.streaming.completion_frame import CompletionFrame

R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")

_LARGE_BODY_BYTES = 1 << 20
"""Bodies with more bytes are parsed one at a time. Python parses 1 MiB of JSON in about 2 ms."""


@dataclass(frozen=True)
class Context:
    """The settings and the backend of one language model.

    Attributes:
        aliases: more names of the language model in requests.
        created: the Unix time at which the application started, in seconds.
    """

    settings: Settings
    backend: Backend
    aliases: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def limits(self) -> PublishedLimits:
        """The size limits for requests to the language model."""
        return PublishedLimits(self.backend.request_limits)

    @cached_property
    def fill_in_middle(self) -> FillInMiddle:
        """Builds the prompts of completion requests that have the field `suffix`."""
        return FillInMiddle(self.backend)

    @cached_property
    def adapters(self) -> Adapters:
        """The LoRA adapters of the language model."""
        return Adapters(self.backend.change_adapters)


@dataclass(frozen=True)
class Contexts:
    """The contexts of all language models.

    Attributes:
        all: the context of each language model. The first model is the default.
        control: loads and unloads models. None if all models are always loaded.
        turns: lets the clients start requests in turn.
        large_bodies: the lock for parsing a large body, so that only one is parsed at a time.
    """

    all: tuple[Context, ...]
    control: ModelControl | None = None
    turns: RequestTurns = field(default_factory=RequestTurns)
    large_bodies: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def default(self) -> Context:
        """The context of the default language model, which answers requests that name no model."""
        return self.all[0]

    @cached_property
    def by_name(self) -> dict[str, Context]:
        """Maps each name and each alias of a language model to the context of the model."""
        return {
            name: context
            for context in self.all
            for name in (context.settings.model_name, *context.aliases)
        }


def name_of_model(request: Request) -> str:
    """Return the value for the field `model` of a response.

    If the request selects an adapter, return the name of the adapter. Otherwise, return the name of
    the language model.
    """
    return current_adapter.get() or context_of(request).settings.model_name


def context_of(request: Request) -> Context:
    """Return the context of the language model that the request selects.

    Until a function has set `request.state.context`, return the context of the default model.
    """
    context: Context = getattr(request.state, "context", None) or contexts_of(request).default
    return context


def contexts_of(request: Request) -> Contexts:
    """Return the `Contexts` object of the application that received the HTTP request."""
    contexts: Contexts = request.app.state.contexts
    return contexts


def find_context(request: Request, name: object) -> Context | None:
    """Return the context of the language model `name`, or None if there is no such model.

    Args:
        request: the HTTP request.
        name: the name of the model in the request. None means the default model.
    """
    contexts = contexts_of(request)
    if name is None:
        return contexts.default
    return contexts.by_name.get(name) if isinstance(name, str) else None


def request_id_of(request: Request) -> str:
    """Return the client's header X-Request-Id, or a random id if the request has no such header."""
    request_id: str = request.state.request_id
    return request_id


def unique_request_id(request: Request) -> str:
    """Return an id for the backend: the id of the HTTP request with a random suffix.

    Two requests may have the same X-Request-Id, but the backend requires unique ids.
    """
    return f"{request_id_of(request)}-{secrets.token_hex(4)}"


def let_clients_abort_by_given_id(request: Request, body: GenerationRequest) -> None:
    """If the body contains an id for the request, let clients abort the request by that id.

    Mutates: the ids of the running request, among which the route that aborts requests searches.
    """
    if body.given_id is not None:
        request.state.running_request.ids.add(body.given_id)


def frame_for(request: Request, body: GenerationRequest, prefix: str) -> CompletionFrame:
    """Return the fields that all chunks of a completion have in common.

    Args:
        request: the HTTP request.
        body: the validated body of the request.
        prefix: the beginning of the completion's id, such as "chatcmpl".
    """
    return CompletionFrame(
        id=f"{prefix}-{body.given_id or request_id_of(request)}",
        model=name_of_model(request),
        created=int(time.time()),
        num_choices=body.num_choices,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        service_tier=body.tier,
    )


async def read_prompt_body(request: Request, max_prompts: int = 1) -> dict[str, Any]:
    """Read and parse the JSON body of a request to the language model, and check the body's size.

    Args:
        request: the HTTP request.
        max_prompts: the largest number of prompts that the body may contain.

    Raises:
        ApiError: 400 if the body is not a JSON object, or if its prompt is certainly longer than
            max_model_len. 413 if the body is too large.
        Disconnected: the client closed the connection.
    """
    if len(contexts_of(request).all) > 1:  # the model in the body decides which limits hold
        return await _read_body_and_select_model(request, max_prompts)
    limits = await context_of(request).limits.get()
    if limits is None:  # the tokenizer model, which also checks the limits, has published none yet
        return await read_body(request)
    return await _read_body_within_limits(request, limits, max_prompts)


async def _read_body_within_limits(
    request: Request, limits: RequestLimits, max_prompts: int
) -> dict[str, Any]:
    """Read and parse a body. Check its size before, during and after each of these two steps.

    The first checks are only estimates, but they refuse a large body before it costs much time and
    delays other clients.
    """
    limits.check_size(_content_length(request), max_prompts)
    raw = await _read_with_limit(request, limits)
    # Content-Length may be missing, and the body may have fewer prompts than `max_prompts`.
    limits.check_size(len(raw), _max_possible_prompts(raw, max_prompts))
    body = await _parse_in_turn(request, raw)
    limits.check_parsed_body(body)
    return body


def _content_length(request: Request) -> int:
    """Return the value of the header Content-Length, or 0 if there is no valid header.

    The middleware BodyLimit has already refused too large values.
    """
    text = request.headers.get("content-length", "")
    # Leading zeros are removed, because Python converts no text with more than 4300 digits.
    return int(text.lstrip("0") or "0") if text.isdecimal() and text.isascii() else 0


async def _read_body_and_select_model(request: Request, max_prompts: int) -> dict[str, Any]:
    """Read a body, select the language model that the body names, and check the body's size.

    Each language model has its own size limits, and the name of the model is in the body. The size
    can therefore be checked only after the body is parsed. If no language model has this name, the
    limits of the default model are checked.

    Mutates: `request.state.context`, which becomes the context of the language model.
    """
    raw = await _read_bytes(request)
    body = await _parse_in_turn(request, raw)
    _select_context(request, body)
    limits = await context_of(request).limits.get()
    if limits is not None:
        # The size limit depends on the number of prompts in the body.
        limits.check_size(len(raw), _max_possible_prompts(raw, max_prompts))
        limits.check_parsed_body(body)
    return body


def _select_context(request: Request, body: dict[str, Any]) -> None:
    """If the field `model` names a language model, select the context of this model."""
    context = find_context(request, body.get("model"))
    if context is not None:
        request.state.context = context


def _max_possible_prompts(raw: bytes, max_prompts: int) -> int:
    """Return the largest number of prompts that an unparsed body can contain, up to `max_prompts`.

    Each prompt is a string, which needs two quotation marks, or a list, which needs a bracket. The
    frontend counts these characters, so that it can refuse a single prompt of many megabytes before
    it parses the body.

    Example: the body b'{"prompt": "word word"}' has four quotation marks and no bracket, so it
    has at most two prompts.
    """
    return max(1, min(max_prompts, raw.count(b'"') // 2 + raw.count(b"[")))


async def read_body(request: Request) -> dict[str, Any]:
    """Read the JSON object in the body of a request.

    Raises:
        ApiError: 400 if the body is not a JSON object, 413 if the body is too large.
        Disconnected: the client closed the connection.
    """
    return await _parse_in_turn(request, await _read_bytes(request))


async def _read_bytes(request: Request) -> bytes:
    """Read the whole body of a request."""
    try:
        return await request.body()
    except ClientDisconnect:
        raise Disconnected from None


async def _read_with_limit(request: Request, limits: RequestLimits) -> bytes:
    """Read a body. Stop as soon as a prompt in the body is certainly too long.

    A prompt is a string or a list of token ids. If more than `limits.max_request_bytes` bytes
    arrive without a quotation mark or an opening bracket, all of these bytes are in one string or
    list, which is longer than any valid prompt. The check misses a long prompt that contains these
    characters, but a later check finds it.

    Example: max_request_bytes is 5 MB, and the client sends the body {"prompt": "aaa..."} with
    40 MB. The request is refused after about 5 MB.

    Raises:
        ApiError: 400 with the code context_length_exceeded.
        Disconnected: the client closed the connection.
    """
    chunks: list[bytes] = []
    num_bytes_of_prompt = 0
    try:
        async for chunk in request.stream():
            chunks.append(chunk)
            # The index of the last byte in this chunk at which a prompt may start, or -1.
            last_start = max(chunk.rfind(b'"'), chunk.rfind(b"["))
            may_start_prompt = last_start >= 0
            if may_start_prompt:
                num_bytes_of_prompt = len(chunk) - (last_start + 1)
            else:
                num_bytes_of_prompt += len(chunk)
            limits.check_prompt_size(num_bytes_of_prompt)
    except ClientDisconnect:
        raise Disconnected from None
    return b"".join(chunks)


async def _parse_in_turn(request: Request, raw: bytes) -> dict[str, Any]:
    """Wait until it is the client's turn to start a request. Then return the parsed JSON body.

    The clients take turns: if requests of several clients wait, one request of each client starts
    before a second request of the same client starts.

    Mutates: `request.state.num_body_bytes`, which becomes the size of the body.
    """
    request.state.num_body_bytes = len(raw)
    refuse_compression(request)
    contexts = contexts_of(request)
    client = current_client.get().share  # the client's name in fair scheduling
    await contexts.turns.wait(client)
    if len(raw) <= _LARGE_BODY_BYTES:
        return parse_json_object(raw)
    return await _parse_large_body(raw, contexts.large_bodies)


def refuse_compression(request: Request) -> None:
    """Raise an ApiError 400 if a request has a Content-Encoding other than "identity"."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(
            400,
            "The request body must not be compressed, but the request has the Content-Encoding "
            f"{shown(encoding)}. Send the uncompressed body, without this header.",
        )


async def _parse_large_body(raw: bytes, lock: asyncio.Lock) -> dict[str, Any]:
    """Parse a large body. Large bodies are parsed one at a time, with a pause after each body.

    The parser blocks the event loop. The pause is as long as the parser needed for the body, and
    other requests run during the pause. The garbage collector is disabled: its collections would
    make the parser up to three times as slow for a body with millions of lists, and find nothing.
    """
    async with lock:
        started = time.perf_counter()
        try:
            with _garbage_collector_disabled():
                return parse_json_object(raw)
        finally:
            # An invalid body is also followed by a pause.
            await asyncio.sleep(time.perf_counter() - started)


@contextmanager
def _garbage_collector_disabled() -> Iterator[None]:
    """Disable the garbage collector in the `with` block.

    Two such blocks must not run at the same time, because the end of one block would enable the
    garbage collector in the other block.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def read_and_validate(request: Request, kind: type[R]) -> R:
    """Read the body of a request, and convert it to an object of the pydantic class `kind`.

    Raises: ApiError, Disconnected, as described by `read_body` and `validate`.
    """
    body = await read_body(request)
    return await convert(request, lambda: validate(kind, body))


async def convert(request: Request, function: Callable[[], T], more_bytes: int = 0) -> T:
    """Call `function`, which converts the body or the result of a request. Return the result.

    The conversion of a large body takes seconds. The function then runs in another thread, so that
    the event loop can continue with other requests. Only one large body is converted at a time,
    because the objects of several such bodies could fill the memory. During the conversion, the
    garbage collector is disabled, because each collection would stop all threads, and would find
    nothing.

    Args:
        request: the HTTP request. If it has a body, the body has been parsed.
        function: converts the data.
        more_bytes: the size of the data that `function` converts in addition to the body.
    """
    num_bytes = getattr(request.state, "num_body_bytes", 0) + more_bytes
    if num_bytes <= _LARGE_BODY_BYTES:
        return function()
    async with contexts_of(request).large_bodies:
        with _garbage_collector_disabled():
            return await asyncio.to_thread(function)


def validate(kind: type[R], body: dict[str, Any]) -> R:
    """Convert the JSON body of a request to an object of the pydantic class `kind`.

    Raises: ApiError 400 that names the first wrong field, its value and the limit.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None


def to_json(value: object) -> str:
    """Convert a value to JSON text for the backend. Characters outside ASCII are not escaped.

    Raises: ApiError 400 if a text is not valid Unicode, or if the value is nested too deeply.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ApiError(400, NESTED_TOO_DEEPLY) from None
    check_unicode(text)
    return text


def check_unicode(text: str) -> None:
    r"""Check that a text is valid Unicode.

    In JSON, a text can contain half of a surrogate pair, such as "\ud800". No tokenizer accepts
    such a text.

    Raises: ApiError 400 that names the invalid character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        character = ascii(text[error.start])
        raise ApiError(
            400,
            f"The request body contains {character}, which is half of a surrogate pair and not a "
            "Unicode character. Send the text in valid UTF-8.",
        ) from None
