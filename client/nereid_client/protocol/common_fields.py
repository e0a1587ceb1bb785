"""The fields that chat completions, completions and responses have in common.

Each field is declared here once, with its type, range, origin and meaning. The page
docs/reference/request-fields.md and the OpenAPI schema are generated from these declarations.
"""

import difflib
import functools
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from nereid_client.errors import FieldError, shown
from nereid_client.protocol.field_checks import (
    check_logit_bias,
    check_response_format,
    to_openai_response_format,
)
from nereid_client.protocol.operations.cache_requests import Retention
from nereid_client.protocol.refused import REFUSED, REFUSED_BY_BACKEND, Refusal, refuse
from nereid_client.protocol.request_body import RequestBody


class Origin(Enum):
    """The origin of a request field: the API that defines it. OpenAI's fields have no origin."""

    VLLM = "vLLM"
    SGLANG = "SGLang"
    LLAMA_CPP = "llama.cpp"
    ANTHROPIC = "Anthropic"
    NEREID = "Nereid"


VLLM, SGLANG, LLAMA_CPP = Origin.VLLM, Origin.SGLANG, Origin.LLAMA_CPP
FRONTEND_ONLY = "frontend only"
"""Marks a field that the frontend reads but does not send to the backend."""

MAX_CHOICES = 64
MAX_LOGPROBS = 20
MAX_CACHE_KEY_LENGTH = 256
SERVICE_TIER = "default"
"""The service tier of every response."""
INT64_LIMIT = 2**63
"""Integers must be less than this number, because the backend stores them as int64."""
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/+=@-]{1,128}$")]

# An unknown field name is treated as a typing error if difflib's similarity ratio between this name
# and a known name is at least this value. Example: "max_token" is treated as a typing error,
# because the ratio between "max_token" and "max_tokens" is 0.94. llama.cpp's field "return_tokens"
# is ignored, because the ratio between "return_tokens" and "return_token_ids" is 0.92.
_MIN_SIMILARITY_OF_TYPING_ERROR = 0.93
# At most this many unknown field names are compared with the known names, because the comparison of
# thousands of names would take seconds.
_MAX_COMPARED_FIELDS = 32
_MAX_SHOWN_KEY_CHARS = 40


class StreamOptions(RequestBody):
    """Options of a stream."""

    include_usage: bool | None = False
    """Whether the stream ends with a chunk that contains the token counts."""
    continuous_usage_stats: bool | None = False
    """Whether each chunk contains the token counts so far. Requires include_usage."""


class GenerationRequest(RequestBody):
    """The fields that chat completions, completions and responses have in common.

    Attributes:
        refused: tables of further fields that a subclass refuses, in addition to `REFUSED`.
    """

    refused: ClassVar[tuple[Mapping[str, Refusal], ...]] = ()

    model: Annotated[str | None, FRONTEND_ONLY] = None
    """The name of the served model, as listed by `/v1/models`. It may be left out."""
    stream: Annotated[bool | None, FRONTEND_ONLY] = False
    """Whether the response is sent as server-sent events. The last event is `[DONE]`."""
    stream_options: Annotated[StreamOptions | None, FRONTEND_ONLY] = None
    """`include_usage` adds a last chunk with the token counts, and `continuous_usage_stats` adds
    them to each chunk."""
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = 1
    """The number of choices to generate for each prompt."""
    max_tokens: Annotated[int | None, Field(ge=1, lt=INT64_LIMIT)] = None
    """The largest number of tokens to generate, reasoning included. The default is the model
    length."""
    min_tokens: Annotated[int | None, Field(ge=0, lt=INT64_LIMIT), VLLM] = None
    """The number of tokens before which no stop token is sampled."""
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    """The sampling temperature. 0 always selects the most likely token. The default is in
    `generation_config.json`, or 1."""
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    """Sample only from the most likely tokens whose probabilities reach this sum."""
    top_k: Annotated[int | None, Field(ge=-1, lt=INT64_LIMIT), VLLM] = None
    """Sample only from this number of most likely tokens. -1 and 0 allow all tokens."""
    min_p: Annotated[float | None, Field(ge=0, le=1), VLLM] = None
    """Exclude tokens that are less likely than `min_p` times the most likely token."""
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    """Subtracted once from the logit of each token that the answer already contains."""
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    """Subtracted from the logit of a token for each time that the answer contains it."""
    repetition_penalty: Annotated[float | None, Field(gt=0), VLLM] = None
    """Values above 1 lower the logits of tokens that the prompt or the answer contains."""
    logit_bias: dict[str, float] | None = None
    """Maps token ids to numbers from -100 to 100, which are added to the logits."""
    allowed_token_ids: Annotated[list[int] | None, VLLM] = None
    """The only tokens that can be generated."""
    bad_words: Annotated[list[str] | None, VLLM] = None
    """Up to 128 texts that cannot be generated."""
    seed: Annotated[int | None, Field(ge=-INT64_LIMIT, lt=INT64_LIMIT)] = None
    """The seed of the sampling."""
    stop: str | list[str] | None = None
    """A string, or up to 16 strings, before which the answer ends."""
    stop_token_ids: Annotated[list[int] | None, VLLM] = None
    """Token ids that end the answer, in addition to those of the checkpoint."""
    include_stop_str_in_output: Annotated[bool | None, VLLM] = None
    """Whether the text keeps the stop string that ended it."""
    no_stop_trim: Annotated[bool | None, SGLANG] = None
    """SGLang's name of `include_stop_str_in_output`."""
    skip_special_tokens: Annotated[bool | None, VLLM] = None
    """Whether special tokens are left out of the text. The default is `true`."""
    spaces_between_special_tokens: Annotated[bool | None, VLLM] = None
    """Only `true` is accepted."""
    ignore_eos: Annotated[bool | None, VLLM] = None
    """Whether generation continues after an end-of-sequence token."""
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS), VLLM] = None
    """The number of likely tokens to report for each prompt token. Requires `stream: false`."""
    response_format: dict[str, Any] | None = None
    """The form of the answer. The key `type` is `text`, `json_object`, `json_schema` or
    `structural_tag`."""
    structured_outputs: Annotated[dict[str, Any] | None, VLLM] = None
    """An object with one of the keys `json`, `json_object`, `regex`, `choice`, `grammar` and
    `structural_tag`."""
    regex: Annotated[str | None, SGLANG] = None
    """A regular expression that the answer must match."""
    ebnf: Annotated[str | None, SGLANG] = None
    """A grammar in EBNF that the answer must match."""
    json_schema: Annotated[Any, SGLANG, LLAMA_CPP] = None
    """A JSON schema that the answer must match: an object, or the text of an object."""
    grammar: Annotated[str | None, LLAMA_CPP] = None
    """A grammar in EBNF that the answer must match."""
    thinking_token_budget: Annotated[int | None, Field(ge=0, lt=INT64_LIMIT), VLLM] = None
    """The largest number of reasoning tokens."""
    reasoning_budget_tokens: Annotated[int | None, Field(lt=INT64_LIMIT), LLAMA_CPP] = None
    """llama.cpp's name of `thinking_token_budget`. -1 means no limit."""
    custom_params: Annotated[Any, SGLANG] = None
    """An object with the key `thinking_budget`, which has the meaning of
    `thinking_token_budget`."""
    include_reasoning: Annotated[bool | None, VLLM] = None
    """Whether the answer contains the reasoning. The default is `true`."""
    separate_reasoning: Annotated[bool | None, SGLANG] = None
    """Whether the reasoning is a field of its own. If `false`, the reasoning stays in the
    content."""
    reasoning_format: Annotated[Any, LLAMA_CPP] = None
    """`none` has the meaning of `separate_reasoning: false`. `auto` and `deepseek` are the
    default."""
    priority: Annotated[int | None, Field(ge=-(2**31), lt=2**31), VLLM] = None
    """Requests with lower numbers are scheduled first."""
    timeout: Annotated[float | None, Field(ge=0), Origin.NEREID] = None
    """The longest total time of the request in seconds. 0 means no limit."""
    queue_timeout: Annotated[float | None, Field(ge=0), Origin.NEREID] = None
    """The longest waiting time of the request in seconds. 0 means no limit."""
    cache_salt: Annotated[str | None, VLLM] = None
    """Only requests with the same text in this field share cached prefixes."""
    extra_key: Annotated[str | None, SGLANG] = None
    """SGLang's name of `cache_salt`."""
    lora_name: Annotated[str | None, VLLM] = None
    """The name of a LoRA adapter. The field `model` can contain the name instead."""
    add_special_tokens: Annotated[bool | None, VLLM] = None
    """Whether the tokenizer adds its special tokens. The default is `false` for chats, and `true`
    for completions. By default, they are also added to a prompt with images that does not begin
    with the BOS token."""
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, lt=INT64_LIMIT), VLLM] = None
    """The number of tokens to keep at the end of the prompt. -1 keeps as many as fit."""
    return_token_ids: Annotated[bool | None, VLLM] = None
    """Whether the answer contains the token ids of the prompt and of each choice."""
    return_prompt_token_ids: Annotated[bool | None, SGLANG] = None
    """SGLang's name of `return_token_ids`."""
    return_tokens_as_token_ids: Annotated[bool | None, FRONTEND_ONLY, VLLM] = None
    """Whether log-probabilities name a token by its id, for example `token_id:17`."""
    request_id: Annotated[RequestId | None, FRONTEND_ONLY, VLLM] = None
    """A text that becomes the end of the answer's id, as the header `X-Request-Id` does."""
    rid: Annotated[RequestId | None, FRONTEND_ONLY, SGLANG] = None
    """SGLang's name of `request_id`."""
    service_tier: Annotated[str | None, FRONTEND_ONLY] = None
    """Accepted without effect. The answer contains `default`."""
    user: Annotated[str | None, FRONTEND_ONLY] = None
    """Accepted without effect."""
    safety_identifier: Annotated[Any, FRONTEND_ONLY] = None
    """Accepted without effect."""
    prompt_cache_key: Annotated[str | None, Field(max_length=MAX_CACHE_KEY_LENGTH)] = None
    """The name of a session. Its cached prefixes are evicted last until 5 minutes after its last
    request. Among sessions, the largest loses blocks first."""
    prompt_cache_retention: Retention | None = None
    """The time of a session: `in_memory` (5 minutes with a `prompt_cache_key`, otherwise none),
    `5m`, `1h` or `24h`."""

    @classmethod
    @functools.cache
    def fields_of_frontend(cls) -> frozenset[str]:
        """Return the names of the fields that only the frontend reads."""
        return frozenset(
            name for name, field in cls.model_fields.items() if FRONTEND_ONLY in field.metadata
        )

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_bias_types(cls, value: object) -> object:
        """Raise an error for the first bias that is not a number.

        Without this check, pydantic would create an error for each wrong bias. A request can
        contain millions of wrong biases.
        """
        for token_id, bias in value.items() if isinstance(value, dict) else ():
            if type(bias) not in (int, float):
                place = f"logit_bias.{token_id[:_MAX_SHOWN_KEY_CHARS]}"
                param = place if token_id.isdecimal() else "logit_bias"
                raise FieldError(
                    param, f"{place} must be a number, but the request has {shown(bias)}"
                )
        return value

    @field_validator("logit_bias")
    @classmethod
    def _check_logit_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        check_logit_bias(value or {})
        return value

    @field_validator("response_format")
    @classmethod
    def _check_response_format(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        value = to_openai_response_format(value, "response_format")
        check_response_format(value, "response_format", "response_format.json_schema.schema")
        return value

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, body: dict[str, Any]) -> dict[str, Any]:
        tables = (REFUSED, *cls.refused)
        refuse(body, *tables)
        known = {*cls.model_fields, *REFUSED_BY_BACKEND}.union(*tables)
        refuse_typing_errors(body, known)
        return body

    @model_validator(mode="after")
    def _check_prompt_logprobs(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise FieldError(
                "prompt_logprobs",
                "prompt_logprobs requires stream=false, because the log-probabilities of a prompt "
                "are not streamed",
            )
        return self

    @model_validator(mode="after")
    def _check_truncate_prompt_tokens(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            raise FieldError(
                "truncate_prompt_tokens",
                "truncate_prompt_tokens must be -1 or at least 1, but the request has 0",
            )
        return self

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options requires stream=true")
        return self

    @property
    def num_choices(self) -> int:
        """The number of choices to generate for each prompt."""
        return self.n or 1

    @property
    def given_id(self) -> str | None:
        """The request id in the body: the field request_id (vLLM) or rid (SGLang)."""
        return self.request_id or self.rid

    @property
    def tier(self) -> str | None:
        """The service tier in the response, or None if the request has no field `service_tier`."""
        return None if self.service_tier is None else SERVICE_TIER

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk that contains the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk contains the token counts so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


def refuse_typing_errors(body: Mapping[str, Any], known: set[str]) -> None:
    """Raise an error if the name of an unknown field is similar to the name of a known field.

    A field with the value null counts as omitted.

    Other unknown fields are ignored, because clients send fields of other APIs. Examples:
    `max_token` and `maxTokens` are refused with an error that suggests `max_tokens`. `num_ctx` is
    ignored.

    Args:
        body: the request body.
        known: the names of all fields that the API accepts or refuses.

    Raises: FieldError that names the unknown field and the similar known field.
    """
    # A name that is much longer than every known name cannot be similar to any of them, and the
    # comparison of a name with millions of characters would take seconds.
    max_length = 2 * max(map(len, known))
    unknown = [
        name
        for name, value in body.items()
        if value is not None and name not in known and len(name) <= max_length
    ]
    unknown = unknown[:_MAX_COMPARED_FIELDS]
    if not unknown:
        return
    known_by_letters = {_lower_case_letters(name): name for name in known}
    for name in unknown:
        similar = difflib.get_close_matches(
            _lower_case_letters(name),
            known_by_letters,
            n=1,
            cutoff=_MIN_SIMILARITY_OF_TYPING_ERROR,
        )
        if similar:
            similar_name = known_by_letters[similar[0]]
            raise FieldError(
                name,
                f"The request has the unknown field {shown(name)}. Did you mean "
                f"{shown(similar_name)}? Nereid ignores most unknown fields, but it rejects an "
                "unknown field whose name is similar to the name of a known field.",
            )


def _lower_case_letters(name: str) -> str:
    """Return a field name in lower case without "_" and "-". "maxTokens" becomes "maxtokens"."""
    return name.lower().replace("_", "").replace("-", "")
