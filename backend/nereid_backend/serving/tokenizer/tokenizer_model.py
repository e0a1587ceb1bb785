# SPDX-License-Identifier: Apache-2.0
"""The Triton model `tokenizer`. It converts a request to token ids and a RequestEnvelope."""

import dataclasses
import json
import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nereid_backend.config import EngineConfig
from nereid_backend.core.grammar import ThinkingSpec
from nereid_backend.errors import NereidError, RequestError
from nereid_backend.serving import tensor_names, triton_api
from nereid_backend.serving.chat_format import choose_format
from nereid_backend.serving.chat_template import read_chat_template, read_template_defaults
from nereid_backend.serving.serving_settings import ServingSettings, read_settings
from nereid_backend.serving.tokenizer.chat.chat_tools import read_tools
from nereid_backend.serving.tokenizer.chat.thinking_effort import (
    build_thinking_spec,
    read_thinking_budget,
)
from nereid_backend.serving.tokenizer.image_prompts import (
    MAX_IMAGE_BYTES,
    ImagePrompts,
    may_accept_media,
)
from nereid_backend.serving.tokenizer.prompt_builder import Prompt, PromptBuilder, load_tokenizer
from nereid_backend.serving.tokenizer.read_request import json_object, sampling_fields
from nereid_backend.serving.tokenizer.read_sampling import (
    ignored_defaults,
    read_generation_defaults,
    read_sampling,
)
from nereid_backend.serving.tokenizer.request_grammar import build_chat_grammar, build_text_grammar
from nereid_backend.serving.tokenizer.request_limits import length_limit
from nereid_backend.serving.tokenizer.request_prompts import RequestPrompts, read_input_ids
from nereid_backend.serving.tokenizer.request_workers import RequestWorkers
from nereid_backend.serving.tokenizer.stream_context import (
    CheckedRequest,
    prompt_tail,
    stream_context,
)
from nereid_backend.serving.tracing import Tracing, traceparent_of
from nereid_backend.serving.wire import RequestEnvelope, pack_params
from nereid_backend.vision.image_sources import ImageSources

# Matches the body of a request that may contain an image, a video or audio. Preparing an image
# takes time, and downloading an image takes even longer. Such a body contains a text such as
# `"image_url"`, the type of a content part. In JSON, an escape sequence can replace a letter of the
# type. Example: `\u0069` means "i". Therefore, the expression also matches the beginning of an
# escape sequence.
_MEDIA_MARK = re.compile(rb'"(?:input_)?(?:image|video|audio)|\\u00[67]')
# Tokenising `_LONG_PROMPT_BYTES` bytes takes about 15 ms.
_LONG_PROMPT_BYTES = 32 * 1024
# The inputs whose length decides whether a request is long. Reading a grammar of several megabytes
# in the sampling parameters takes as long as tokenising a long prompt.
_TEXT_INPUTS = (
    tensor_names.CHAT_REQUEST,
    tensor_names.TEXT_INPUT,
    tensor_names.SAMPLING_PARAMETERS,
)


class TokenizerModel:
    """The first step of the ensemble. It sends one response or one error for each request."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the checkpoint's tokenizer, chat format and sampling defaults, and start threads."""
        try:
            settings, config = read_settings(args)
            self._load(settings, config)
        except NereidError as error:
            raise triton_api.load_error(error) from error
        if self._image_prompts is not None:
            # Wait until the process that prepares images is ready. The wait does not delay the
            # server, because the engine loads the model at the same time, and loading the model
            # usually takes longer.
            self._image_prompts.warm_up()
        self._tracing = Tracing("tokenizer")
        # Requests with images or long texts are handled by other threads, so that short requests
        # need not wait for these requests.
        is_long = partial(_is_long, reads_media=self._image_prompts is not None)
        self._workers = RequestWorkers(self.respond, is_long)
        self._workers.start()

    def _load(self, settings: ServingSettings, config: EngineConfig) -> None:
        """Set the attributes that depend on the checkpoint, such as the tokenizer.

        `__init__` cannot set them, because Triton server creates the model without arguments and
        sends the settings later.
        """
        triton_api.progress(f"loading the tokenizer of {settings.model}")
        self._tokenizer = load_tokenizer(settings.model)
        replacement = read_chat_template(settings)  # from the setting chat_template, or None
        if replacement is not None:
            self._tokenizer.chat_template = replacement
        self._image_prompts = _make_image_prompts(settings)
        self._prompt_builder = PromptBuilder(
            self._tokenizer,
            length_limit(config),
            read_template_defaults(settings),
            max_image_bytes=MAX_IMAGE_BYTES if self._image_prompts is not None else 0,
        )
        # `_request_prompts` chooses one of the two builders for each request.
        self._request_prompts = RequestPrompts(self._prompt_builder, self._image_prompts)
        # Do not log the chosen format, because the postprocessor chooses and logs the same format.
        self._format = choose_format(settings, report=lambda _: None)
        self._defaults = read_generation_defaults(Path(settings.model))
        if ignored := ignored_defaults(Path(settings.model)):
            triton_api.progress(
                f"generation_config.json: these fields have no effect: {', '.join(ignored)}"
            )

    def execute(self, requests: list[Any]) -> None:
        """Queue the requests. The workers send one response for each request."""
        for request in requests:
            self._workers.add(request)

    def finalize(self) -> None:
        """Answer the queued requests and end the threads."""
        self._workers.stop()
        if self._image_prompts is not None:
            self._image_prompts.close()
        self._tracing.close()

    def respond(self, request: Any) -> Any:  # noqa: ANN401 - the server's own types
        """Return the response to a request. The response may be an error.

        This method is thread-safe.
        """
        try:
            return self._tokenize(request)
        except NereidError as error:
            return triton_api.error_response(error)
        except Exception as error:  # noqa: BLE001 - the request ends here and must be answered
            triton_api.log.exception("request %s failed in the tokenizer", request.request_id())
            return triton_api.error_response(error)

    def _tokenize(self, request: Any) -> Any:  # noqa: ANN401 - the server's own types
        """Return the response to a request.

        The response is a tokenised prompt, or JSON text with the limits on requests or with the
        text of token ids.
        """
        if _asks_for_limits(request):
            return _json_response(dataclasses.asdict(self._prompt_builder.limits))
        text = self._requested_text(request)
        if text is not None:
            return _json_response({"text": text})
        return self._tokenized_prompt(request)

    def _tokenized_prompt(self, request: Any) -> Any:  # noqa: ANN401 - the server's own types
        """Return the response for the executor: the prompt's token ids and the RequestEnvelope."""
        began = time.monotonic()
        checked = self._read_request(request)
        token_ids = checked.prompt.token_ids
        traceparent = self._record_span(request, began, len(token_ids))
        return triton_api.response(
            {
                tensor_names.PROMPT_TOKEN_IDS: np.array(token_ids, dtype=np.int32),
                tensor_names.ENVELOPE: _make_envelope(request, checked, traceparent).pack(),
            }
        )

    def _record_span(self, request: Any, began: float, num_tokens: int) -> str:  # noqa: ANN401
        """Record a span that ends now. Return the traceparent header for the later spans.

        A traceparent identifies the parent of a span. If the client has sent a traceparent, all
        spans of the request have this parent. Otherwise, the new span is the parent of the later
        spans.
        """
        given_traceparent = traceparent_of(request)
        own_traceparent = self._tracing.record(
            "nereid.tokenize",
            given_traceparent,
            began,
            time.monotonic(),
            {"gen_ai.usage.input_tokens": num_tokens},
        )
        return given_traceparent or own_traceparent

    def _read_request(self, request: Any) -> CheckedRequest:  # noqa: ANN401 - the server's own type
        """Validate a request, and build its prompt, its grammar and its sampling parameters."""
        limits = self._prompt_builder.limits
        body = json_object(request, tensor_names.CHAT_REQUEST, limits)  # None for a completion
        is_chat = body is not None
        # In a chat, this call also replaces each image in `body` by a placeholder. `build` and
        # `read_tools` then read the changed `body`.
        images = self._request_prompts.take_images(request, body)
        fields = sampling_fields(request, body, limits)
        prompt = self._request_prompts.build(request, body, fields, images)
        output_names = _requested_outputs(request)
        thinking_budget = read_thinking_budget(fields)
        if body is None:
            tools = None
            grammar = build_text_grammar(fields)
        else:
            tools = read_tools(body)
            grammar = build_chat_grammar(fields, self._format, prompt_tail(prompt), tools)
        # The grammar of a completion applies from the first token, so the output cannot contain
        # reasoning.
        may_reason = is_chat or grammar.spec is None
        thinking = self._thinking_spec(thinking_budget, prompt) if may_reason else None
        params, options = read_sampling(
            _with_requested_logprobs(fields, output_names, is_chat=is_chat),
            self._defaults,
            encode=self._prompt_builder.encode,
            is_chat=is_chat,
            grammar=grammar.spec,
            thinking=thinking,
        )
        return CheckedRequest(body, prompt, tools, output_names, grammar, params, options)

    def _thinking_spec(self, budget: int | None, prompt: Prompt) -> ThinkingSpec | None:
        """Convert a reasoning budget to a ThinkingSpec, the form that the engine needs.

        The budget is the largest number of reasoning tokens.
        """
        return build_thinking_spec(
            budget, self._format, prompt.text or "", self._prompt_builder.encode
        )

    def _requested_text(self, request: Any) -> str | None:  # noqa: ANN401 - the server's own type
        """Return the text of a request's token ids; None without the parameter `return_text`."""
        parameters = triton_api.parameters(request)
        if not parameters.get("return_text"):
            return None
        ids = read_input_ids(request, self._prompt_builder.limits)
        if ids is None:
            raise RequestError("input_ids: the tensor is required with the parameter return_text.")
        vocabulary_size = len(self._tokenizer)
        for token_id in ids:
            if not 0 <= token_id < vocabulary_size:
                raise RequestError(
                    f"input_ids: the vocabulary has {vocabulary_size} tokens, but the request has "
                    f"the token id {token_id}."
                )
        skip_special_tokens = bool(parameters.get("skip_special_tokens"))
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def _make_image_prompts(settings: ServingSettings) -> ImagePrompts | None:
    """Return the builder of prompts with images; None if the checkpoint reads no media."""
    if not may_accept_media(settings.model):
        return None
    sources = ImageSources(
        settings.image_url_hosts, settings.image_url_timeout_s, settings.image_folder
    )
    return ImagePrompts(settings.model, sources)


def _make_envelope(
    request: Any,  # noqa: ANN401 - the server's own type
    checked: CheckedRequest,
    traceparent: str,
) -> RequestEnvelope:
    """Return all data of a request that the executor needs, except the prompt's token ids."""
    return RequestEnvelope(
        # `params` contains all sampling parameters in packed form. The executor does not unpack
        # `params`. Therefore the values that the executor itself needs, such as `n`, are also sent
        # as separate fields.
        params=pack_params(checked.params),
        n=checked.params.n,
        context=stream_context(request, checked, traceparent).pack(),
        grammar_field=checked.grammar.field,
        timeout_s=checked.options.timeout_s,
        queue_timeout_s=checked.options.queue_timeout_s,
        client_id=checked.params.client_id,
        traceparent=traceparent,
        images=checked.prompt.images,
    )


def _asks_for_limits(request: Any) -> bool:  # noqa: ANN401 - the server's own type
    """Return whether a request has the parameter `return_limits` and no prompt.

    The response to such a request contains the limits on requests, as JSON text in the output
    `envelope`.
    """
    prompts = (tensor_names.CHAT_REQUEST, tensor_names.TEXT_INPUT, tensor_names.INPUT_IDS)
    if any(triton_api.has_tensor(request, name) for name in prompts):
        return False
    return bool(triton_api.parameters(request).get("return_limits"))


def _json_response(value: dict[str, Any]) -> Any:  # noqa: ANN401 - the server's own type
    """Return a response with a JSON text in the output `envelope`."""
    text = json.dumps(value).encode()
    return triton_api.response({tensor_names.ENVELOPE: np.frombuffer(text, dtype=np.uint8)})


def _is_long(request: Any, *, reads_media: bool) -> bool:  # noqa: ANN401 - the server's own type
    """Return whether rendering and tokenising the prompt of a request may take long.

    Such a request is processed in a separate thread, so that it does not delay other requests.

    Args:
        request: the server's request.
        reads_media: whether the served model reads images, videos or audio.
    """
    if triton_api.has_input(request, tensor_names.IMAGE):
        return True
    for name in _TEXT_INPUTS:
        texts = triton_api.optional_array(request, name)
        for text in texts if texts is not None else ():
            if len(text) > _LONG_PROMPT_BYTES or (reads_media and _MEDIA_MARK.search(text)):
                return True
    return False


def _with_requested_logprobs(
    fields: dict[str, Any], returns: tuple[str, ...], *, is_chat: bool
) -> dict[str, Any]:
    """Return the fields of a request. Set `logprobs` if the output tensor `logprobs` is requested.

    The engine computes log-probabilities only if the field `logprobs` is set, but a request can ask
    for the output tensor without this field. `returns` are the names of the requested outputs.
    """
    if tensor_names.LOGPROBS not in returns or fields.get("logprobs"):
        return fields
    # In a chat, the field `logprobs` is a boolean. In a completion, the field is the number of
    # alternative tokens.
    return {**fields, "logprobs": True if is_chat else 0}


def _requested_outputs(request: Any) -> tuple[str, ...]:  # noqa: ANN401 - the server's own type
    """Return the names of the optional outputs that the request asks for.

    The request asks for the output NAME with the input `return_NAME`.
    """
    return tuple(
        name
        for name in tensor_names.RETURNABLE
        if triton_api.optional_bool(request, tensor_names.RETURN_PREFIX + name)
    )
