"""Request bodies: the cheap checks. The backend checks everything again.

Fields that are not listed here are kept and passed on. Limits are those of the OpenAI API
reference; `top_k`, `min_p`, `min_tokens` and the like are vLLM's and SGLang's additions to it.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nereid_client.errors import shown
from nereid_client.protocol.field_checks import (
    check_logit_bias,
    check_response_format,
    check_tool_choice,
    plain_response_format,
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

MAX_CHOICES = 64
ONLY_TIER = "default"
MAX_LOGPROBS = 20
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/+=@-]{1,128}$")]

_INT64 = 2**63
_OWN = frozenset(
    {
        *("stream_reasoning", "return_tokens_as_token_ids", "request_id", "rid"),
        "service_tier",
    }
)
"""Fields of a chat's body that the frontend acts on itself."""
_MAX_TOKEN_ID = 2**31 - 1  # `input_ids` is INT32


class StreamOptions(BaseModel):
    """`stream_options`: whether and when a stream reports its usage."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationRequest(BaseModel):
    """What chat and plain completions have in common."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)
    refused: ClassVar[tuple[Mapping[str, Refusal], ...]] = ()

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    max_tokens: Annotated[int, Field(ge=1, lt=_INT64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=_INT64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=_INT64)] | None = None
    reasoning_budget_tokens: Annotated[int, Field(lt=_INT64)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    timeout: Annotated[float, Field(ge=0)] | None = None
    queue_timeout: Annotated[float, Field(ge=0)] | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: RequestId | None = None
    rid: RequestId | None = None
    service_tier: str | None = None
    user: str | None = None

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        check_logit_bias(value or {})
        return value

    @field_validator("response_format")
    @classmethod
    def _known_format(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        value = plain_response_format(value)
        check_response_format(value)
        return value

    @model_validator(mode="before")
    @classmethod
    def _nothing_refused(cls, body: dict[str, Any]) -> dict[str, Any]:
        refuse(body, REFUSED, *cls.refused)
        return body

    @model_validator(mode="after")
    def _no_stream_of_prompt_logprobs(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: only without stream; they are there at once")
        return self

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed when stream is true")
        return self

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        return self.n or 1

    @property
    def given_id(self) -> str | None:
        """The request id in the body: vLLM's name of the field, or SGLang's."""
        return self.request_id or self.rid

    @property
    def tier(self) -> str | None:
        """The tier that the answer tells of, where one was asked for: there is but one."""
        return None if self.service_tier is None else ONLY_TIER

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries the usage so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class ChatMessage(BaseModel):
    """One message. The chat template decides what else it may hold."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: Annotated[str, Field(min_length=1)]
    content: str | list[dict[str, Any]] | None = None


class ChatCompletionRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    refused = (REFUSED_IN_CHAT,)

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=_INT64)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs true")
        return self

    @model_validator(mode="after")
    def _known_tool_choice(self) -> Self:
        if self.tool_choice is not None:
            check_tool_choice(self.tool_choice, self.tools or ())
        return self

    def passed_on(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The body as the tokenizer step gets it.

        Without nulls, which mean "not given", and without what the frontend does itself.
        """
        given = {
            name: value for name, value in body.items() if value is not None and name not in _OWN
        }
        return given | ({"response_format": self.response_format} if self.response_format else {})


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    refused = (REFUSED_IN_COMPLETIONS,)

    # OpenAI's default. A prompt without a chat template often has no natural end.
    max_tokens: Annotated[int, Field(ge=0, lt=_INT64)] | None = 16
    prompt: Any = Field(...)
    echo: bool | None = False
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @field_validator("prompt")
    @classmethod
    def _known_kind_of_prompt(cls, value: object) -> tuple[Prompt, ...]:
        return _prompts(value)

    @model_validator(mode="after")
    def _best_of_more(self) -> Self:
        if self.best_of is None:
            return self
        if self.best_of < self.num_choices:
            raise ValueError(f"best_of: must be at least n ({self.n}), got {self.best_of}")
        if self.stream and self.best_of > self.num_choices:
            raise ValueError("best_of: only without stream; which is best shows at the end")
        return self

    @model_validator(mode="after")
    def _echo_of_what_is_known(self) -> Self:
        if self.max_tokens == 0 and (not self.echo or self.stream):
            raise ValueError(
                "max_tokens: must be at least 1, got 0; 0 is for scoring a prompt, with echo and "
                "without stream"
            )
        if not self.echo:
            return self
        if not all(isinstance(prompt, str) for prompt in self.prompt):
            raise ValueError(
                "echo: needs the prompt as text, got token ids, whose text is not known here"
            )
        if self.stream and self.logprobs is not None:
            raise ValueError("echo: with logprobs only without stream")
        return self

    @property
    def only_prompt(self) -> bool:
        """Whether nothing is to be generated."""
        return self.max_tokens == 0

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the prompt's tokens come with log-probabilities as the answer's do."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def num_answers(self) -> int:
        """Answers to generate for each prompt."""
        return max(self.best_of or 1, self.num_choices)

    def sampling_parameters(self) -> dict[str, Any]:
        """What the ensemble's `sampling_parameters` gets: the fields that say how to sample."""
        given = self.model_dump(exclude_none=True)
        fields = {name: value for name, value in given.items() if name in PASSED_ON}
        fields.pop("n", None)
        if self.num_answers > 1:
            fields["n"] = self.num_answers
        if self.only_prompt:  # the engine scores prompts on the way to a first token
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
        # A completion's text is the raw one, so these change nothing in it; proxies send them.
        *("include_reasoning", "separate_reasoning", "reasoning_format"),
    }
)
"""Fields of a completion body that the ensemble acts on."""

PASSED_ON = SAMPLING_FIELDS | REFUSED_BY_BACKEND
"""Fields of a completion body that go on to the ensemble."""


def _prompts(value: object) -> tuple[Prompt, ...]:
    """The prompts of a body, one per choice.

    Raises: ValueError when it is none of the four kinds the API knows.
    """
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise ValueError(
            "must be a string, a list of strings, a list of token ids or a list of lists of "
            f"token ids, got {shown(value)}"
        )
    if not value:
        raise ValueError("must not be an empty list")
    if _is_token_id(value[0]):
        return (_token_ids(value),)
    if isinstance(value[0], str):
        return tuple(_string(item, index) for index, item in enumerate(value))
    return tuple(_token_ids(item) for item in value)


def _string(item: object, index: int) -> str:
    if not isinstance(item, str):
        raise ValueError(f"prompt {index} of a list of strings is {shown(item)}")
    return item


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"must hold lists of at least one token id, got {shown(value)}")
    for token in value:
        if not _is_token_id(token):
            raise ValueError(f"a token id is an integer from 0 to 2147483647, got {shown(token)}")
    return tuple(value)


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_TOKEN_ID
