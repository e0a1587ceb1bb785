"""Request bodies: the cheap checks. The backend checks everything again.

Fields that are not listed here are kept and passed on. Limits are those of the OpenAI API
reference; `top_k`, `min_p`, `min_tokens` and the like are vLLM's and SGLang's additions to it.
"""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nereid_client.errors import shown

Prompt = str | tuple[int, ...]

_INT64 = 2**63
_MAX_TOKEN_ID = 2**31 - 1  # `input_ids` is INT32


class StreamOptions(BaseModel):
    """`stream_options`: whether and when a stream reports its usage."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationRequest(BaseModel):
    """What chat and plain completions have in common."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    max_tokens: Annotated[int, Field(ge=1, lt=_INT64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=_INT64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    user: str | None = None

    @field_validator("n")
    @classmethod
    def _one_choice(cls, value: int | None) -> int | None:
        if value not in (None, 1):
            raise ValueError(f"must be 1, got {value}: one choice per request is the limit here")
        return value

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed when stream is true")
        return self

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

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=_INT64)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("logprobs")
    @classmethod
    def _no_logprobs(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("log-probabilities are not available here; leave it out")
        return value


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    # OpenAI's default. A prompt without a chat template often has no natural end.
    max_tokens: Annotated[int, Field(ge=1, lt=_INT64)] | None = 16
    prompt: Any = Field(...)
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None
    response_format: dict[str, Any] | None = None

    @field_validator("prompt")
    @classmethod
    def _known_kind_of_prompt(cls, value: object) -> tuple[Prompt, ...]:
        return _prompts(value)

    @field_validator("response_format")
    @classmethod
    def _only_text(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type") != "text":
            raise ValueError(f"must be {{'type': 'text'}} for completions, got {shown(value)}")
        return value

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise ValueError("filling in the middle is not available here; leave suffix out")
        return value

    @field_validator("best_of")
    @classmethod
    def _no_best_of(cls, value: int | None) -> int | None:
        if value not in (None, 1):
            raise ValueError(f"must be 1, got {value}: one choice per prompt is the limit here")
        return value

    @field_validator("logprobs")
    @classmethod
    def _no_logprobs(cls, value: int | None) -> int | None:
        if value is not None:
            raise ValueError("log-probabilities are not available here; leave it out")
        return value

    @model_validator(mode="after")
    def _echo_needs_text(self) -> Self:
        if self.echo and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise ValueError("echo: needs the prompt as text, got token ids")
        return self

    def sampling_parameters(self) -> dict[str, Any]:
        """What the ensemble's `sampling_parameters` gets: the fields that say how to sample."""
        given = self.model_dump(exclude_none=True)
        return {name: value for name, value in given.items() if name in _SAMPLING_FIELDS}


# Names of vLLM's SamplingParams that a completion body may hold.
_SAMPLING_FIELDS = frozenset(
    {
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
        *("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "bad_words"),
        *("allowed_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
        "structured_outputs",
    }
)


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
