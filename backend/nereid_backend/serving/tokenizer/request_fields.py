# SPDX-License-Identifier: Apache-2.0
"""The request fields that control the generation, and the validation of these fields.

The class SamplingParams declares the fields that the engine reads. The class RequestFields declares
all other fields. The names come from the OpenAI API, vLLM, SGLang and llama.cpp.
"""

import contextlib
import dataclasses
import difflib
import json
from collections.abc import Container, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from nereid_backend.core.sampling_params import MAX_LOGPROBS, SamplingParams
from nereid_backend.errors import RequestError
from nereid_backend.request_field_checks import to_request_error
from nereid_backend.serving.tokenizer import unsupported_fields

Seconds = Annotated[float, Field(ge=0)]
# The length of a stop string or a bad word is limited, so that the search for these texts stays
# fast.
_Word = Annotated[str, Field(max_length=4096)]

# Maps the values of prompt_cache_retention to a time in seconds. None means the engine's default.
# The values "in_memory" and "24h" come from OpenAI's API, and "5m" and "1h" from Anthropic's API.
CACHE_RETENTIONS: dict[str, float | None] = {
    "in_memory": None,
    "5m": 300.0,
    "1h": 3600.0,
    "24h": 86400.0,
}

_MAX_COMPARED_CHARS = 100
_BOOLEAN_TEXTS = {"true": True, "false": False}


class RequestFields(BaseModel):
    """The request fields that this server reads or converts before the engine gets the request.

    The fields in ENGINE_FIELDS are passed to the engine unchanged. A field with the type `Any` is
    checked by the module that reads the field: request_grammar.py, thinking_effort.py or
    prompt_builder.py.
    """

    model_config = ConfigDict(
        strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    stop: Annotated[
        list[_Word],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        Field(max_length=16),
    ] = []
    """The strings at which generation ends. A single string needs no list."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the stop string that ended it."""
    no_stop_trim: bool = False
    """SGLang's name of include_stop_str_in_output."""
    skip_special_tokens: bool = True
    """Whether special tokens are removed from the text."""
    separate_reasoning: bool | None = None
    """Whether reasoning is a field of its own. If False, reasoning stays in the content."""
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    """llama.cpp's name of separate_reasoning. The value "none" means False."""
    include_reasoning: bool = True
    """Whether responses contain reasoning at all."""
    return_token_ids: bool = False
    """Whether responses contain the token ids of the prompt and of the output."""
    return_prompt_token_ids: bool = False
    """SGLang's name of return_token_ids."""
    logprobs: Any = None
    """For a chat, whether log-probabilities are reported. Otherwise, their number per position."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    """The number of likely tokens that a chat reports at each position. Requires logprobs."""
    logit_bias: dict[str | int, Any] = {}
    """A mapping from token ids to numbers that are added to the logits. JSON keys are text."""
    bad_words: Annotated[list[_Word], Field(max_length=128)] = []
    """Texts that must not be generated."""
    best_of: int | None = None
    """The number of sequences to generate. It must equal n, because all of them are returned."""
    cache_salt: str = ""
    """Requests share cached prefixes only if their values of this field are equal."""
    extra_key: str = ""
    """SGLang's name of cache_salt. If a request has both fields, both values must be equal."""
    prompt_cache_retention: Literal["in_memory", "5m", "1h", "24h"] | None = None
    """The time for which the cached prefix of the request is evicted last."""
    timeout: Seconds | None = None
    """The time limit of the request in seconds. 0 means no limit."""
    queue_timeout: Seconds | None = None
    """The time limit for waiting in the queue in seconds. 0 means no limit."""
    add_special_tokens: Any = None
    """Whether the tokenizer adds its special tokens to the prompt."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """The number of tokens to keep at the end of a prompt. -1 keeps as many as fit."""
    response_format: Any = None
    """OpenAI's format of the output: text, json_object, json_schema or structural_tag."""
    structured_outputs: Any = None
    """vLLM's grammar of the output."""
    regex: Any = None
    """SGLang's regular expression that the output must match."""
    ebnf: Any = None
    """SGLang's EBNF grammar of the output."""
    json_schema: Any = None
    """The JSON schema of the output in the APIs of SGLang and llama.cpp."""
    grammar: Any = None
    """llama.cpp's EBNF grammar of the output."""
    thinking_token_budget: Any = None
    """The largest number of reasoning tokens."""
    reasoning_budget_tokens: Any = None
    """llama.cpp's name of thinking_token_budget."""
    custom_params: Any = None
    """SGLang's object whose key thinking_budget means thinking_token_budget."""

    @classmethod
    def check(cls, fields: Mapping[str, Any]) -> Self:
        """Validate the fields of a request, and return the validated fields.

        Some clients send numbers, booleans and lists as text. Such a text is first parsed. Example:
        "true" becomes True.

        Args:
            fields: the request's fields. Names that this class does not declare are skipped.

        Raises:
            RequestError: a value has the wrong type or is out of range.
        """
        try:
            return cls.model_validate(select_and_parse(fields, cls.model_fields))
        except ValidationError as error:
            raise to_request_error(error) from None


# These fields of SamplingParams have the same names in a client's request.
ENGINE_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams)) - {
    "bad_words_token_ids",
    "prompt_cache_ttl",
    "thinking",
    *RequestFields.model_fields,
}
# All fields that have an effect on the generation.
FIELD_NAMES = ENGINE_FIELDS | RequestFields.model_fields.keys()
# `select_and_parse` does not parse the values of these fields. The fields in the first group are
# texts. The fields in the second group are parsed later by other modules.
_TEXT_FIELDS = frozenset(
    {
        *(
            "cache_salt",
            "prompt_cache_key",
            "prompt_cache_retention",
            "lora_name",
            "client_id",
            "extra_key",
            "stop",
            "reasoning_format",
            "regex",
            "ebnf",
            "grammar",
        ),
        *("json_schema", "response_format", "structured_outputs", "custom_params"),
    }
)


def select_and_parse(fields: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    """Select the non-null fields whose names are in `names`, and parse their values.

    genai-perf and Triton's request parameters send numbers, booleans and lists as text. Example:
    `{"top_k": "5", "ignore_eos": "true", "seed": None}` returns `{"top_k": 5, "ignore_eos": True}`.
    A text that cannot be parsed is not changed. The later validation of types refuses such a text.
    """
    return {
        name: _parse_value(name, value)
        for name, value in fields.items()
        if name in names and value is not None
    }


def _parse_value(name: str, value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """If `value` is a text, but the field `name` has another type, parse the text.

    Otherwise, return `value` unchanged.
    """
    is_encoded = isinstance(value, str) and name not in _TEXT_FIELDS
    return _parse_text(value) if is_encoded else value


def _parse_text(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Parse a text that is a boolean, a number or JSON. Return any other text unchanged.

    Examples: "True" -> True, "0.5" -> 0.5, "[1, 2]" -> [1, 2], "abc" -> "abc".
    """
    if text.strip().lower() in _BOOLEAN_TEXTS:
        return _BOOLEAN_TEXTS[text.strip().lower()]
    for parse in (int, float, json.loads):
        with contextlib.suppress(ValueError, RecursionError):
            return parse(text)
    return text


def refuse_unknown(fields: Mapping[str, Any]) -> None:
    """Refuse unknown fields. The error message suggests the most similar known name.

    Unsupported fields of other APIs count as known, because `refuse_unsupported` refuses these
    fields with a reason.

    Raises:
        RequestError: a field is not a sampling parameter.
    """
    known_names = [*FIELD_NAMES, *unsupported_fields.NAMES]
    for name in fields:
        if name in known_names:
            continue
        # Compare only the first characters, because the comparison of a very long name would take
        # long.
        similar_names = difflib.get_close_matches(name[:_MAX_COMPARED_CHARS], known_names, n=1)
        hint = f' Did you mean "{similar_names[0]}"?' if similar_names else ""
        raise RequestError(f"{name}: this name is not a known sampling parameter.{hint}")
