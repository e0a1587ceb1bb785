"""Request bodies of chat completions and completions.

The checks in this module are fast. They find most errors without calling the backend. The
backend checks every field again, because gRPC clients send requests directly to the backend.

Unknown fields are ignored, unless the name is similar to the name of a known field. Such a name is
refused as a typing error (see `refuse_typing_errors`).

The limits are those of OpenAI's API. Fields such as `top_k`, `min_p` and `min_tokens` are
extensions of vLLM and SGLang.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from nereid_client.errors import FieldError
from nereid_client.protocol.common_fields import (
    FRONTEND_ONLY,
    INT64_LIMIT,
    MAX_CHOICES,
    MAX_LOGPROBS,
    SGLANG,
    VLLM,
    GenerationRequest,
    Origin,
)
from nereid_client.protocol.completion_prompts import Prompt, read_prompts
from nereid_client.protocol.custom_tools import (
    custom_tool_names,
    with_custom_tools_as_functions,
    with_function_calls,
)
from nereid_client.protocol.field_checks import check_tool_choice, check_tools
from nereid_client.protocol.refused import (
    REFUSED_BY_BACKEND,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
)
from nereid_client.protocol.request_body import RequestBody

# In OpenAI's API, the content of a message with one of these roles must not be missing or null. A
# message of the assistant may have no content, because it may consist of tool calls.
_ROLES_WITH_CONTENT = ("system", "developer", "user")


class ChatMessage(RequestBody):
    """One message of a chat. Further fields are passed on to the chat template."""

    role: Annotated[str, Field(min_length=1)]
    """The author of the message: system, developer, user, assistant or tool."""
    content: str | list[dict[str, Any]] | None = None
    """The text of the message, or a list of content parts. A message of the system, the developer
    or the user must have content."""

    @field_validator("content", mode="before")
    @classmethod
    def _accept_strings_as_parts(cls, value: object) -> object:
        """Replace strings in a list by text parts. vLLM accepts such strings."""
        if not isinstance(value, list):
            return value
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in value]


class ChatCompletionRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    refused = (REFUSED_IN_CHAT,)

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    """The conversation so far: at least one message, with text or a list of text parts."""
    max_completion_tokens: Annotated[int | None, Field(ge=1, lt=INT64_LIMIT)] = None
    """OpenAI's newer name of `max_tokens`. It takes precedence if a request has both fields."""
    tools: list[dict[str, Any]] | None = None
    """The functions and custom tools that the model may call. `strict` forces the arguments of a
    function to match the schema."""
    tool_choice: str | dict[str, Any] | None = None
    """Which tools the model may or must call: `none`, `auto`, `required`, a function, a custom
    tool or `allowed_tools`."""
    parallel_tool_calls: bool | None = None
    """Whether the model may call several tools. The default is `true`."""
    logprobs: bool | None = None
    """Whether the answer contains the log-probability of each token."""
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    """The number of likely tokens to report at each position. Requires `logprobs: true`."""
    chat_template_kwargs: Annotated[dict[str, Any] | None, VLLM] = None
    """Variables of the chat template, for example `{"enable_thinking": false}`."""
    add_generation_prompt: Annotated[bool | None, VLLM] = None
    """Whether the prompt ends with the beginning of an assistant message. The default is
    `true`."""
    continue_final_message: Annotated[bool | None, VLLM] = None
    """Whether the answer continues the last message instead of starting a new one."""
    reasoning_effort: str | None = None
    """A word such as `none`, `low` or `high`, for templates with such a variable."""
    thinking: Annotated[Any, Origin.ANTHROPIC] = None
    """The key `type` turns reasoning on or off, and the key `budget_tokens` limits reasoning."""
    stream_reasoning: Annotated[bool | None, FRONTEND_ONLY, SGLANG] = None
    """`false` sends the whole reasoning in one chunk of the stream."""
    documents: Annotated[Any, VLLM] = None
    """A list of documents for the chat template."""
    metadata: Annotated[Any, FRONTEND_ONLY] = None
    """Accepted without effect."""

    @model_validator(mode="after")
    def _check_contents(self) -> Self:
        for index, message in enumerate(self.messages):
            if message.content is None and message.role in _ROLES_WITH_CONTENT:
                raise FieldError(
                    f"messages[{index}].content",
                    f"messages[{index}].content must be a string or a list of content parts, "
                    f"because a message of the role {message.role} must have content",
                )
        return self

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs requires logprobs=true")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        check_tools(self.tools or ())
        if self.tool_choice is not None:
            check_tool_choice(self.tool_choice, self.tools or ())
        for index, message in enumerate(self.messages):
            with_function_calls(message.model_extra or {}, f"messages[{index}]")
        return self

    @property
    def custom_tools(self) -> frozenset[str]:
        """The names of the custom tools, which the backend receives as functions."""
        return custom_tool_names(self.tools or ())

    def fields_for_backend(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the body that the tokenizer model receives.

        Fields with the value null are left out, because null means that a field is not given.
        Fields that only the frontend reads are also left out. Custom tools become functions.
        """
        frontend_fields = self.fields_of_frontend()
        fields = {
            name: value
            for name, value in body.items()
            if value is not None and name not in frontend_fields
        }
        if self.response_format:
            # In `body`, this field may have the format of another server. During validation, the
            # field was converted to OpenAI's format and stored in `self.response_format`.
            fields["response_format"] = self.response_format
        return with_custom_tools_as_functions(fields)


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    refused = (REFUSED_IN_COMPLETIONS,)

    # OpenAI's default is small, because a completion often has no natural end.
    max_tokens: Annotated[int | None, Field(ge=0, lt=INT64_LIMIT)] = 16
    """The largest number of tokens to generate. The default is 16. 0 requires `echo: true`."""
    prompt: Annotated[Any, FRONTEND_ONLY]
    """A string, a list of strings, a list of token ids, or a list of lists of token ids."""
    suffix: Annotated[str | None, FRONTEND_ONLY] = None
    """The text after the completion, for tokenizers with markers for filling in the middle."""
    echo: Annotated[bool | None, FRONTEND_ONLY] = False
    """Whether each choice starts with the prompt."""
    best_of: Annotated[int | None, Field(ge=1, le=MAX_CHOICES), FRONTEND_ONLY] = None
    """Generate this number of choices, and return the `n` most likely. Requires `stream: false`."""
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    """The number of likely tokens to report at each position."""

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: object) -> tuple[Prompt, ...]:
        return read_prompts(value)

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        """Check that best_of is at least n. In a stream, best_of must equal n."""
        if self.best_of is None:
            return self
        if self.best_of < self.num_choices:
            raise FieldError(
                "best_of",
                f"best_of must be at least n, but the request has best_of={self.best_of} and "
                f"n={self.num_choices}",
            )
        if self.stream and self.best_of > self.num_choices:
            raise FieldError(
                "best_of",
                "best_of must not be greater than n if stream=true, because the best choices are "
                "known only at the end",
            )
        return self

    @model_validator(mode="after")
    def _check_suffix(self) -> Self:
        """If the request has a suffix, check that all prompts are texts, and that echo is false."""
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise FieldError(
                "suffix",
                "suffix requires a prompt of text, but the request has a prompt of token ids",
            )
        if self.suffix and self.echo:
            raise FieldError("suffix", "suffix requires echo=false, but the request has echo=true")
        return self

    @model_validator(mode="after")
    def _check_zero_tokens(self) -> Self:
        """Check that max_tokens is 0 only if the whole response is the echo of the prompt."""
        if self.max_tokens == 0 and (not self.echo or self.stream):
            raise FieldError(
                "max_tokens",
                "max_tokens must be at least 1, but the request has 0. The value 0 is allowed only "
                "with echo=true and stream=false.",
            )
        return self

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        """If the request asks for an echo of the prompt, check that the frontend can send the echo.

        The prompt must be complete. In a stream, the echo has no log-probabilities.
        """
        if not self.echo:
            return self
        if self.truncate_prompt_tokens is not None:
            raise FieldError(
                "echo",
                "echo=true requires a request without truncate_prompt_tokens. The frontend does "
                "not know the text of the tokens that are kept.",
            )
        if self.stream and self.logprobs is not None:
            raise FieldError(
                "echo",
                "echo=true with logprobs requires stream=false, because the log-probabilities of a "
                "prompt are not streamed",
            )
        return self

    @property
    def only_prompt(self) -> bool:
        """Whether the response contains only the prompt and no generated tokens."""
        return self.max_tokens == 0

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the log-probabilities of a choice include the tokens of the prompt."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def num_generated_choices(self) -> int:
        """The number of choices to generate for each prompt. Only the best choices are returned."""
        return max(self.best_of or 1, self.num_choices)

    def sampling_parameters(self) -> dict[str, Any]:
        """Return the JSON object for the ensemble's input `sampling_parameters`.

        The object contains the fields of the request that the engine knows. Some values differ from
        the request, because the engine does not support `best_of` and `echo`.

        Example: {"prompt": "a", "max_tokens": 5, "best_of": 3} returns {"max_tokens": 5, "n": 3}.
        """
        passed_on = PASSED_ON - {"n"}
        given = self.model_dump(exclude_none=True)
        fields = {name: value for name, value in given.items() if name in passed_on}
        if self.num_generated_choices > 1:
            fields["n"] = self.num_generated_choices
        if self.only_prompt:  # max_tokens=0
            # The engine reports log-probabilities of the prompt only if it generates tokens.
            fields["max_tokens"] = 1
        if self.echoes_logprobs:
            fields |= self._parameters_for_echoed_logprobs()
        return fields

    def _parameters_for_echoed_logprobs(self) -> dict[str, Any]:
        """Return the parameters that let the engine report log-probabilities of the prompt.

        The engine also returns the token ids of the prompt, so that the frontend can select the
        log-probability of each token of the prompt among those of the likely tokens.
        """
        # The fields `logprobs` and `prompt_logprobs` can ask for different numbers of tokens, but
        # the engine accepts only one number for the prompt.
        num_likely_tokens = max(self.logprobs or 0, self.prompt_logprobs or 0)
        return {"prompt_logprobs": num_likely_tokens, "return_token_ids": True}


PASSED_ON = (
    CompletionRequest.model_fields.keys() - CompletionRequest.fields_of_frontend()
) | REFUSED_BY_BACKEND
"""The fields of a completion that the frontend sends to the ensemble."""
