# SPDX-License-Identifier: Apache-2.0
"""Collects the data of a validated request, and builds the StreamContext for the postprocessor."""

from dataclasses import dataclass
from typing import Any

from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.errors import RequestError
from nereid_backend.serving import tensor_names, triton_api
from nereid_backend.serving.tokenizer.prompt_builder import Prompt
from nereid_backend.serving.tokenizer.read_sampling import RequestOptions
from nereid_backend.serving.tokenizer.request_grammar import RequestGrammar
from nereid_backend.serving.wire import StreamContext

# Only the end of a prompt determines whether the output begins inside reasoning, content or a tool
# call.
_PROMPT_TAIL_CHARS = 4096
# The text of a token can depend on the tokens before this token. The output of a completion follows
# the prompt. Therefore the detokenizer of a completion starts with the last `_NUM_SEED_TOKENS`
# tokens of the prompt.
_NUM_SEED_TOKENS = 6


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request whose fields have been checked.

    Attributes:
        body: the body of a chat request; None for a completion.
        prompt: the prompt.
        tools: the tools that the model may call; None if there are no tools.
        returns: the names of the optional outputs that the request asks for.
        grammar: the grammar of the output.
        params: the sampling parameters for the engine.
        options: the other options of the request.
    """

    body: dict[str, Any] | None
    prompt: Prompt
    tools: list[dict[str, Any]] | None
    returns: tuple[str, ...]
    grammar: RequestGrammar
    params: SamplingParams
    options: RequestOptions


def stream_context(
    request: Any,  # noqa: ANN401 - the server's own type
    checked: CheckedRequest,
    traceparent: str,
) -> StreamContext:
    """Return the data that the postprocessor needs about a request.

    Raises:
        RequestError: the request sets exclude_input_in_output to false, but it is streaming or its
            prompt consists of token ids.
    """
    prompt, params, options = checked.prompt, checked.params, checked.options
    is_chat = checked.body is not None
    stream = triton_api.optional_bool(request, tensor_names.STREAM) or False
    excluded = triton_api.optional_bool(request, tensor_names.EXCLUDE_INPUT)
    forbids_calls = checked.body is not None and checked.body.get("tool_choice") == "none"
    end_of_chat: str | None = None
    seed_token_ids: tuple[int, ...] = ()
    if is_chat:
        # The end of the prompt determines whether the output begins inside reasoning, content or a
        # tool call. Therefore, the parser reads the end of the prompt.
        end_of_chat = prompt_tail(prompt)
    else:
        # The detokenizer starts with the last tokens of the prompt, because the text of the first
        # output token can depend on them.
        seed_token_ids = tuple(prompt.token_ids[-_NUM_SEED_TOKENS:])
    return StreamContext(
        # The responses.
        stream=stream,
        n=params.n,
        returns=checked.returns,
        traceparent=traceparent,
        # The prompt.
        num_prompt_tokens=len(prompt.token_ids),
        prompt_token_ids=tuple(prompt.token_ids) if options.return_token_ids else None,
        prompt=end_of_chat,
        seed_token_ids=seed_token_ids,
        prepend=_text_to_prepend(prompt, stream=stream, is_chat=is_chat, excluded=excluded),
        # These options control how tokens are converted to text.
        stop=options.stop,
        min_tokens=params.min_tokens,
        include_stop_str_in_output=options.include_stop_str_in_output,
        skip_special_tokens=options.skip_special_tokens,
        # These options control how the text is split into reasoning, content and tool calls.
        tools=tuple(checked.tools or ()),
        reads_calls=not forbids_calls,
        separate_reasoning=options.separate_reasoning,
        include_reasoning=options.include_reasoning,
        strict_schema=checked.grammar.strict_schema,
    )


def prompt_tail(prompt: Prompt) -> str:
    """Return the end of a prompt's text; "" if the request contained token ids."""
    return (prompt.text or "")[-_PROMPT_TAIL_CHARS:]


def _text_to_prepend(prompt: Prompt, *, stream: bool, is_chat: bool, excluded: bool | None) -> str:
    """Return the prompt's text if the output must begin with the prompt, otherwise "".

    By default, the output begins with the prompt if the request is a completion and is not
    streaming. The vLLM backend of Triton server has the same default.

    Args:
        prompt: the prompt.
        stream: whether the request is streaming.
        is_chat: whether the request is a chat.
        excluded: the input exclude_input_in_output; None if the request does not have this input.

    Raises:
        RequestError: the request sets exclude_input_in_output to false, but it is streaming or its
            prompt consists of token ids.
    """
    if excluded is False and stream:
        raise RequestError(
            "exclude_input_in_output: the value false requires stream=false, but the request has "
            "stream=true. Leave the field out or send true."
        )
    if excluded is False and prompt.text is None:
        raise RequestError(
            "exclude_input_in_output: the value false requires text_input or chat_request, but the "
            "request has input_ids. Leave the field out or send true."
        )
    is_excluded_by_default = stream or is_chat
    is_excluded = is_excluded_by_default if excluded is None else excluded
    return "" if is_excluded else prompt.text or ""
