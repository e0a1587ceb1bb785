"""The body of `POST /v1/responses`, and the checks of this body in the frontend.

The fields follow OpenAI's API reference of November 2026. The route also accepts sampling fields of
chat completions, such as `min_p`, although OpenAI's Responses API does not have these fields.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from nereid_client.errors import FieldError, shown
from nereid_client.protocol.common_fields import (
    FRONTEND_ONLY,
    INT64_LIMIT,
    MAX_LOGPROBS,
    GenerationRequest,
    StreamOptions,
)
from nereid_client.protocol.custom_tools import check_unique_names
from nereid_client.protocol.field_checks import (
    check_response_format,
    check_tool_choice,
    to_openai_response_format,
)
from nereid_client.protocol.refused import REFUSED_IN_CHAT, Refusal, refuse_nested
from nereid_client.protocol.responses_tools import (
    TOOL_CHOICES,
    Json,
    converted_tools,
    name_in_chat,
    to_chat_tool_choice,
    to_chat_tools,
)

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED = "reasoning.encrypted_content"

_MAX_METADATA = 16
_MAX_METADATA_KEY_CHARS = 64
_MAX_METADATA_VALUE_CHARS = 512

_FALSE = (False,)
_ONLY_CHAT = "only /v1/chat/completions returns this"
_USE_REQUEST_ID_HEADER = "a response has a random id; the header X-Request-Id names a request"

REFUSED_IN_RESPONSES = {
    **{name: refusal for name, refusal in REFUSED_IN_CHAT.items() if name != "store"},
    # Fields of OpenAI's Responses API.
    "conversation": Refusal(
        "Nereid stores responses but no conversations; use previous_response_id"
    ),
    "prompt": Refusal("Nereid stores no prompt templates; use instructions and input"),
    "context_management": Refusal("Nereid does not compact conversations; use truncation", ([],)),
    "access_programs": Refusal("Nereid has no access programs"),
    "image": Refusal("the served model writes text only"),
    # Fields of chat completions.
    "messages": Refusal("the Responses API has the field input instead"),
    "max_tokens": Refusal("the Responses API has the field max_output_tokens instead"),
    "max_completion_tokens": Refusal("the Responses API has the field max_output_tokens instead"),
    "response_format": Refusal("the Responses API has the field text.format instead"),
    "reasoning_effort": Refusal("the Responses API has the field reasoning.effort instead"),
    "logprobs": Refusal(
        f'the Responses API returns log-probabilities for include=["{INCLUDE_LOGPROBS}"]', _FALSE
    ),
    "n": Refusal("a response has one choice; send several requests", (1,)),
    "stream_reasoning": Refusal("reasoning is always streamed, in its own events", (True,)),
    "prompt_logprobs": Refusal(_ONLY_CHAT),
    "return_token_ids": Refusal(_ONLY_CHAT, _FALSE),
    "return_prompt_token_ids": Refusal(_ONLY_CHAT, _FALSE),
    "return_tokens_as_token_ids": Refusal(_ONLY_CHAT, _FALSE),
    "request_id": Refusal(_USE_REQUEST_ID_HEADER),
    "rid": Refusal(_USE_REQUEST_ID_HEADER),
}
"""Maps each refused field to the reason for the refusal. The fields belong to several APIs."""

_NO_SUMMARY = "Nereid does not summarize; auto and detailed return the whole reasoning"
_REFUSED_IN_REASONING = {
    "mode": Refusal("the only mode is standard", ("standard",)),
    "context": Refusal(
        "the chat template decides which earlier reasoning the model reads", ("auto",)
    ),
    "summary": Refusal(_NO_SUMMARY, ("auto", "detailed")),
    "generate_summary": Refusal(_NO_SUMMARY, ("auto", "detailed")),
}
_REFUSED_IN_TEXT = {"verbosity": REFUSED_IN_CHAT["verbosity"]}


class ResponseStreamOptions(StreamOptions):
    """Options of a streamed response. The last event always contains the token counts."""

    include_obfuscation: bool | None = False
    """Only false is supported: events have no padding."""


class ResponsesRequest(GenerationRequest):
    """The body of `POST /v1/responses`."""

    refused = (REFUSED_IN_RESPONSES,)

    input: str | list[dict[str, Any]]
    """A text of the user, or a list of items of the types `message`, `function_call`,
    `function_call_output`, `custom_tool_call`, `custom_tool_call_output`, `reasoning` and
    `item_reference`."""
    instructions: str | None = None
    """The text of the first system message."""
    previous_response_id: str | None = None
    """The id of a stored response whose conversation this request continues."""
    max_output_tokens: Annotated[int | None, Field(ge=1, lt=INT64_LIMIT)] = None
    """The largest number of tokens to generate, reasoning included."""
    max_tool_calls: Annotated[int | None, Field(ge=1, lt=INT64_LIMIT)] = None
    """Accepted without effect, because the server runs no tools."""
    tools: list[dict[str, Any]] | None = None
    """Functions and custom tools that the model may call, alone or in namespaces."""
    tool_choice: str | dict[str, Any] | None = None
    """Which tools the model may or must call: `none`, `auto`, `required`, a function, a custom
    tool or `allowed_tools`."""
    parallel_tool_calls: bool | None = None
    """Whether the model may call several tools. The default is `true`."""
    text: dict[str, Any] | None = None
    """The key `format` has the meaning of `response_format` in a chat request."""
    reasoning: dict[str, Any] | None = None
    """The key `effort` has the meaning of `reasoning_effort` in a chat. The key `summary` returns
    the whole reasoning."""
    include: list[str] | None = None
    """`message.output_text.logprobs` returns log-probabilities. `reasoning.encrypted_content` has
    no effect."""
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    """The number of likely tokens to report at each position."""
    truncation: str | None = None
    """`auto` removes the oldest turns of a conversation that is too long. The default is
    `disabled`."""
    store: bool | None = None
    """Whether the response is stored. The default is `true`."""
    background: bool | None = None
    """Whether the response is generated in the background."""
    metadata: dict[str, str] | None = None
    """Up to 16 pairs of strings, which the response repeats."""
    stream_options: Annotated[ResponseStreamOptions | None, FRONTEND_ONLY] = None
    """`include_obfuscation` must be `false`."""

    @field_validator("input")
    @classmethod
    def _check_input(cls, value: str | list[Json]) -> str | list[Json]:
        if not value:
            raise FieldError(
                "input", f"input must not be empty, but the request has {shown(value)}"
            )
        return value

    @field_validator("include")
    @classmethod
    def _check_include(cls, value: list[str] | None) -> list[str] | None:
        for name in value or ():
            if name not in (INCLUDE_LOGPROBS, INCLUDE_ENCRYPTED):
                raise FieldError(
                    "include",
                    f"include must contain only the values {INCLUDE_LOGPROBS} and "
                    f"{INCLUDE_ENCRYPTED}, but the request has {shown(name)}",
                )
        return value

    @field_validator("truncation")
    @classmethod
    def _check_truncation(cls, value: str | None) -> str | None:
        if value not in (None, "auto", "disabled"):
            raise FieldError(
                "truncation",
                f"truncation must be auto or disabled, but the request has {shown(value)}",
            )
        return value

    @field_validator("metadata", mode="before")
    @classmethod
    def _check_metadata_size(cls, value: object) -> object:
        """Check the number of entries in `metadata` before pydantic checks each entry."""
        if isinstance(value, dict) and len(value) > _MAX_METADATA:
            raise FieldError(
                "metadata",
                f"metadata must have at most {_MAX_METADATA} entries, but the request has "
                f"{len(value)}",
            )
        return value

    @field_validator("metadata")
    @classmethod
    def _check_metadata(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        """Check the length of each key and value in `metadata`."""
        for key, text in (value or {}).items():
            if len(key) > _MAX_METADATA_KEY_CHARS:
                raise FieldError(
                    "metadata",
                    f"metadata: the key {shown(key)} has {len(key)} characters, but the limit is "
                    f"{_MAX_METADATA_KEY_CHARS}",
                )
            if len(text) > _MAX_METADATA_VALUE_CHARS:
                raise FieldError(
                    "metadata",
                    f"metadata: the value of {shown(key)} has {len(text)} characters, but the "
                    f"limit is {_MAX_METADATA_VALUE_CHARS}",
                )
        return value

    @model_validator(mode="after")
    def _check_nested_fields(self) -> Self:
        """Check the members of the fields `reasoning`, `text` and `stream_options`."""
        refuse_nested("reasoning", self.reasoning, _REFUSED_IN_REASONING)
        refuse_nested("text", self.text, _REFUSED_IN_TEXT)
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            field = "stream_options.include_obfuscation"
            raise FieldError(
                field, f"{field} must be false or missing, because the events contain no padding."
            )
        if self.effort is not None and not isinstance(self.effort, str):
            raise FieldError(
                "reasoning.effort",
                f"reasoning.effort must be a string, but the request has {shown(self.effort)}",
            )
        return self

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        """Raise a FieldError if text.format is not valid."""
        if self.response_format_of_text is not None:
            check_response_format(self.response_format_of_text, "text.format", "text.format.schema")
        return self

    @model_validator(mode="after")
    def _check_tool_names(self) -> Self:
        """Raise a FieldError if a tool that is converted for the chat has no unique name.

        The frontend converts a custom tool to a function, and renames a tool in a namespace to
        NAMESPACE__TOOL. If the model calls a converted tool, the frontend finds the original tool
        by the name in the call.
        """
        check_unique_names(
            map(name_in_chat, self.chat_tools or ()),
            names_to_check=converted_tools(self.tools or ()).keys(),
            hint="A tool in a namespace is called NAMESPACE__TOOL.",
        )
        return self

    @model_validator(mode="after")
    def _check_tool_choice(self) -> Self:
        """Raise a FieldError if the tool choice is not valid, or names a tool that is missing."""
        if self.tool_choice is not None:
            check_tool_choice(
                to_chat_tool_choice(self.tool_choice),
                self.chat_tools or (),
                given=self.tool_choice,
                forms=TOOL_CHOICES,
            )
        return self

    @model_validator(mode="after")
    def _check_background(self) -> Self:
        """Raise a FieldError if the request has background=true and store=false."""
        if self.background and self.store is False:
            raise FieldError(
                "background",
                "background=true requires store=true, because the response is retrieved later",
            )
        return self

    @property
    def effort(self) -> Any:  # noqa: ANN401 - any JSON value, until it is validated
        """The value of reasoning.effort, or None if the request does not have this field."""
        return (self.reasoning or {}).get("effort")

    @property
    def summary(self) -> str | None:
        """The kind of reasoning summary that the request asks for, such as "auto".

        None means that the request does not ask for a summary.
        """
        reasoning = self.reasoning or {}
        kind = reasoning.get("summary") or reasoning.get("generate_summary")
        return None if kind is None else str(kind)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the field `include` or `top_logprobs` asks for log-probabilities."""
        return INCLUDE_LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def format(self) -> Json:
        """The field text.format. The default is plain text.

        Raises: FieldError if the field is not an object.
        """
        given = (self.text or {}).get("format")
        if given is None:
            return {"type": "text"}
        if not isinstance(given, dict):
            raise FieldError(
                "text.format", f"text.format must be an object, but the request has {shown(given)}"
            )
        return given

    @property
    def response_format_of_text(self) -> Json | None:
        """The field text.format, converted to a response_format. None means plain text."""
        given = self.format
        if given.get("type") == "text":
            return None
        if given.get("type") != "json_schema":
            return to_openai_response_format(given, "text.format")
        schema = {name: value for name, value in given.items() if name != "type"}
        return {"type": "json_schema", "json_schema": schema}

    @cached_property
    def chat_tools(self) -> list[Json] | None:
        """The tools in the format of chat completions."""
        if self.tools is None:
            return None
        return [
            chat_tool
            for index, tool in enumerate(self.tools)
            for chat_tool in to_chat_tools(tool, f"tools[{index}]")
        ]

    @property
    def chat_tool_choice(self) -> str | Json | None:
        """The tool choice in the format of chat completions."""
        return None if self.tool_choice is None else to_chat_tool_choice(self.tool_choice)

    def fields_copied_to_chat(self, body: Mapping[str, Any]) -> Json:
        """Return the fields of the body that are copied unchanged to the chat completion.

        These are the fields that both APIs have, such as `temperature`, and all unknown fields.
        Other fields have another name in a chat, or only the frontend evaluates them.
        """
        return {
            name: value
            for name, value in body.items()
            if value is not None and name not in _NOT_COPIED
        }


_NOT_COPIED = frozenset(ResponsesRequest.__annotations__) - {"parallel_tool_calls"}
_NOT_COPIED |= ResponsesRequest.fields_of_frontend()
"""Fields that are not copied to the chat completion.

The frontend itself evaluates these fields, or they have another name in a chat completion.
"""
