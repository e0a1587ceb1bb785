"""Request bodies of chat completions and completions.

The checks here are cheap ones, so that most errors are reported without a call of the backend. The
backend checks every field again, because gRPC clients do not pass through the frontend. Fields that
are not declared here are kept and passed on.

Limits are those of the OpenAI API. Fields such as `top_k`, `min_p` and `min_tokens` are extensions
of vLLM and SGLang.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nereid_client.errors import FieldError, shown
from nereid_client.protocol.field_checks import (
    check_logit_bias,
    check_response_format,
    check_tool_choice,
    to_openai_response_format,
)
from nereid_client.protocol.refused import (
    REFUSED,
    REFUSED_BY_BACKEND,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    Refusal,
    refuse,
)

Prompt = str | tuple[int, ...]
"""A prompt of a completion: a text, or token ids."""

MAX_CHOICES = 64
SERVICE_TIER = "default"
"""The service tier of every response: there is only one."""
MAX_LOGPROBS = 20
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/+=@-]{1,128}$")]

_INT64 = 2**63
_FRONTEND_FIELDS = frozenset(
    {
        *("stream_reasoning", "return_tokens_as_token_ids", "request_id", "rid"),
        "service_tier",
    }
)
"""Fields of a chat that only the frontend reads. They are not passed on."""
_MAX_TOKEN_ID = 2**31 - 1  # the tensor `input_ids` has the type INT32


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, use_attribute_docstrings=True
    )

    include_usage: bool | None = False
    """Whether the stream ends with a chunk that contains the token counts."""
    continuous_usage_stats: bool | None = False
    """Whether each chunk contains the token counts so far. Requires include_usage."""


class GenerationRequest(BaseModel):
    """The fields that chat completions, completions and responses have in common."""

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
    refused: ClassVar[tuple[Mapping[str, Refusal], ...]] = ()

    model: str | None = None
    """The name of the served model, as listed by /v1/models. It may be left out."""
    stream: bool | None = False
    """Whether the response is sent as server-sent events while it is generated."""
    stream_options: StreamOptions | None = None
    """Options of the stream. Requires stream."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    """The number of choices to generate for each prompt."""
    max_tokens: Annotated[int, Field(ge=1, lt=_INT64)] | None = None
    """The maximum number of tokens to generate, reasoning included."""
    min_tokens: Annotated[int, Field(ge=0, lt=_INT64)] | None = None
    """The number of tokens before which no stop token is sampled."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """The sampling temperature. 0 always takes the most probable token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the most probable tokens whose probabilities sum up to this value."""
    top_k: Annotated[int, Field(ge=-1, lt=_INT64)] | None = None
    """Sample from this number of most probable tokens. -1 and 0 mean all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample from tokens with at least this share of the highest probability."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from the logit of each token that has already been generated."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from a token's logit once for each time it has already been generated."""
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    """Makes tokens that have already occurred less probable if it is over 1. 1 has no effect."""
    logit_bias: dict[str, float] | None = None
    """Maps token ids to values from -100 to 100, which are added to the logits."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that may be generated."""
    bad_words: list[str] | None = None
    """Texts that must not be generated."""
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    """The seed of the sampling. The same request with the same seed returns the same tokens."""
    stop: str | list[str] | None = None
    """A text, or up to 16 texts, before which the response ends."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the response, in addition to those of the checkpoint."""
    include_stop_str_in_output: bool | None = None
    """Whether the response contains the stop text that ended it."""
    no_stop_trim: bool | None = None
    """SGLang's name of include_stop_str_in_output."""
    skip_special_tokens: bool | None = None
    """Whether special tokens are left out of the text. The default is true."""
    spaces_between_special_tokens: bool | None = None
    """Only true is supported."""
    ignore_eos: bool | None = None
    """Whether generation continues after an end token of the checkpoint."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """The number of most probable tokens to return for each token of the prompt."""
    response_format: dict[str, Any] | None = None
    """The format of the response: text, json_object, json_schema or structural_tag."""
    structured_outputs: dict[str, Any] | None = None
    """A grammar as in vLLM: json, json_object, regex, choice, grammar or structural_tag."""
    regex: str | None = None
    """A regular expression that the response must match."""
    ebnf: str | None = None
    """A grammar in EBNF that the response must match."""
    thinking_token_budget: Annotated[int, Field(ge=0, lt=_INT64)] | None = None
    """The number of reasoning tokens after which the end of the reasoning is forced."""
    reasoning_budget_tokens: Annotated[int, Field(lt=_INT64)] | None = None
    """llama.cpp's name of thinking_token_budget."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    """The priority in the queue. Requests with a lower number run first."""
    timeout: Annotated[float, Field(ge=0)] | None = None
    """The number of seconds that the request may take. 0 means no limit."""
    queue_timeout: Annotated[float, Field(ge=0)] | None = None
    """The number of seconds that the request may wait in the queue. 0 means no limit."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests that have the same salt."""
    extra_key: str | None = None
    """SGLang's name of cache_salt."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to the prompt."""
    return_token_ids: bool | None = None
    """Whether the response contains the token ids of the prompt and of each choice."""
    return_prompt_token_ids: bool | None = None
    """Whether the response contains the token ids of the prompt."""
    return_tokens_as_token_ids: bool | None = None
    """Whether log-probabilities name their tokens as "token_id:17" instead of by their text."""
    request_id: RequestId | None = None
    """The id of the request. The id of the response ends with it."""
    rid: RequestId | None = None
    """SGLang's name of request_id."""
    service_tier: str | None = None
    """Accepted for compatibility. There is only one service tier, "default"."""
    user: str | None = None
    """A label for the caller's own use. It has no effect."""

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
    def _check_refused_fields(cls, body: dict[str, Any]) -> dict[str, Any]:
        refuse(body, REFUSED, *cls.refused)
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
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options requires stream=true")
        return self

    @property
    def num_choices(self) -> int:
        """The number of choices of each prompt."""
        return self.n or 1

    @property
    def given_id(self) -> str | None:
        """The request id in the body: the field request_id (vLLM) or rid (SGLang)."""
        return self.request_id or self.rid

    @property
    def tier(self) -> str | None:
        """The service tier in the response, or None if the request has none."""
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


class ChatMessage(BaseModel):
    """One message of a chat. Further fields are passed on to the chat template."""

    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, use_attribute_docstrings=True
    )

    role: Annotated[str, Field(min_length=1)]
    """The author of the message: system, developer, user, assistant or tool."""
    content: str | list[dict[str, Any]] | None = None
    """The text of the message, or a list of content parts."""


class ChatCompletionRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    refused = (REFUSED_IN_CHAT,)

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    """The conversation so far."""
    max_completion_tokens: Annotated[int, Field(ge=1, lt=_INT64)] | None = None
    """OpenAI's newer name of max_tokens. It takes precedence over max_tokens."""
    tools: list[dict[str, Any]] | None = None
    """The functions that the model may call."""
    tool_choice: str | dict[str, Any] | None = None
    """Which tools the model may or must call: none, auto, required, or named functions."""
    parallel_tool_calls: bool | None = None
    """Whether the model may call several functions. The default is true."""
    logprobs: bool | None = None
    """Whether the response contains the log-probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """The number of most probable tokens to return at each position. Requires logprobs."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as {"enable_thinking": false}."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of an assistant message. The default is true."""
    continue_final_message: bool | None = None
    """Whether the response continues the last message instead of starting a new one."""
    reasoning_effort: str | None = None
    """How much the model reasons. Requires a chat template that reads it."""
    include_reasoning: bool | None = None
    """Whether the response contains the reasoning. The default is true."""
    separate_reasoning: bool | None = None
    """Whether the reasoning has a field of its own. If false, it is part of the content."""
    stream_reasoning: bool | None = None
    """Whether reasoning is streamed piece by piece. If false, it is sent in one piece."""

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs requires logprobs=true")
        return self

    @model_validator(mode="after")
    def _check_tool_choice(self) -> Self:
        if self.tool_choice is not None:
            check_tool_choice(self.tool_choice, self.tools or ())
        return self

    def passed_on(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body for the tokenizer model.

        Fields that are null are left out, because null means that a field is not given. Fields
        that only the frontend reads are left out too.
        """
        fields = {
            name: value
            for name, value in body.items()
            if value is not None and name not in _FRONTEND_FIELDS
        }
        if self.response_format:
            fields["response_format"] = self.response_format
        return fields


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    refused = (REFUSED_IN_COMPLETIONS,)

    # OpenAI's default. A prompt without a chat template often has no natural end.
    max_tokens: Annotated[int, Field(ge=0, lt=_INT64)] | None = 16
    """The maximum number of tokens to generate. 0 only evaluates the prompt; requires echo."""
    prompt: Any = Field(...)
    """A text, a list of texts, a list of token ids, or a list of lists of token ids."""
    echo: bool | None = False
    """Whether each choice starts with the prompt."""
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """The number of choices to generate. The n most probable ones are returned."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """The number of most probable tokens to return at each position."""

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: object) -> tuple[Prompt, ...]:
        return _prompts(value)

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        """Check that enough choices are generated to return n of them."""
        if self.best_of is None:
            return self
        if self.best_of < self.num_choices:
            raise FieldError(
                "best_of",
                f"best_of must be at least n, but the request has best_of={self.best_of} and "
                f"n={self.n}",
            )
        if self.stream and self.best_of > self.num_choices:
            raise FieldError(
                "best_of",
                "best_of must not be greater than n if stream=true, because the best choices are "
                "known only at the end",
            )
        return self

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        """Check the combinations of echo with max_tokens, the prompt, stream and logprobs."""
        if self.max_tokens == 0 and (not self.echo or self.stream):
            raise FieldError(
                "max_tokens",
                "max_tokens must be at least 1, but the request has 0. The value 0 is allowed only "
                "with echo=true and stream=false.",
            )
        if not self.echo:
            return self
        if not all(isinstance(prompt, str) for prompt in self.prompt):
            raise FieldError(
                "echo",
                "echo=true requires a prompt of text, but the request has a prompt of token ids, "
                "whose text is unknown to the frontend",
            )
        if self.stream and self.logprobs is not None:
            raise FieldError("echo", "echo=true with logprobs requires stream=false")
        return self

    @property
    def only_prompt(self) -> bool:
        """Whether the prompt is only evaluated and no token is generated."""
        return self.max_tokens == 0

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the log-probabilities of a choice start with those of the prompt."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def num_generated(self) -> int:
        """The number of choices to generate for each prompt, before the best are selected."""
        return max(self.best_of or 1, self.num_choices)

    def sampling_parameters(self) -> dict[str, Any]:
        """Return the JSON object for the ensemble's input `sampling_parameters`."""
        given = self.model_dump(exclude_none=True)
        fields = {name: value for name, value in given.items() if name in PASSED_ON}
        fields.pop("n", None)
        if self.num_generated > 1:
            fields["n"] = self.num_generated
        if self.only_prompt:
            # The engine computes the log-probabilities of a prompt only if it generates a token.
            fields["max_tokens"] = 1
        if self.echoes_logprobs:
            fields["prompt_logprobs"] = max(self.logprobs or 0, self.prompt_logprobs or 0)
            fields["return_token_ids"] = True
        return fields


SAMPLING_FIELDS = frozenset(
    {
        *("n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
        *("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "bad_words"),
        *("allowed_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
        *("logprobs", "prompt_logprobs", "return_token_ids", "priority", "cache_salt"),
        *("timeout", "queue_timeout"),
        *("response_format", "structured_outputs", "regex", "ebnf", "json_schema", "grammar"),
        *("no_stop_trim", "thinking_token_budget", "reasoning_budget_tokens", "custom_params"),
        *("add_special_tokens", "return_prompt_token_ids", "extra_key"),
        # These have no effect on a completion, whose text is not parsed. Some proxies send them.
        *("include_reasoning", "separate_reasoning", "reasoning_format"),
    }
)
"""Fields of a completion that the ensemble reads."""

PASSED_ON = SAMPLING_FIELDS | REFUSED_BY_BACKEND
"""Fields of a completion that are passed on to the ensemble."""


def _prompts(value: object) -> tuple[Prompt, ...]:
    """Return the prompts of a body.

    Example: "a" returns ("a",), ["a", "b"] returns ("a", "b"), and [1, 2] returns ((1, 2),).

    Raises: FieldError if the value has none of the four types that the API accepts.
    """
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise FieldError(
            "prompt",
            "prompt must be a string, a list of strings, a list of token ids or a list of lists "
            f"of token ids, but the request has {shown(value)}",
        )
    if not value:
        raise FieldError("prompt", "prompt must not be an empty list")
    if _is_token_id(value[0]):
        return (_token_ids(value, "prompt"),)
    if isinstance(value[0], str):
        return tuple(_string(item, index) for index, item in enumerate(value))
    return tuple(_token_ids(item, f"prompt[{index}]") for index, item in enumerate(value))


def _string(item: object, index: int) -> str:
    if not isinstance(item, str):
        raise FieldError(
            "prompt",
            f"prompt[{index}] must be a string like prompt[0], but the request has {shown(item)}",
        )
    return item


def _token_ids(value: object, place: str) -> tuple[int, ...]:
    """Return a list of token ids as a tuple.

    Raises: FieldError if the value at `place` is not such a list.
    """
    if not isinstance(value, list) or not value:
        raise FieldError(
            "prompt",
            f"{place} must be a list of at least one token id, but the request has {shown(value)}",
        )
    for token in value:
        if not _is_token_id(token):
            raise FieldError(
                "prompt",
                f"{place} must contain integers from 0 to {_MAX_TOKEN_ID} as token ids, but the "
                f"request has {shown(token)}",
            )
    return tuple(value)


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_TOKEN_ID
