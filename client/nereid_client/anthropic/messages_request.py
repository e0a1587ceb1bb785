"""The bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`.

Both routes also accept sampling fields of chat completions, such as `min_p`, although Anthropic's
API does not have these fields.
"""

from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from nereid_client.anthropic.content_blocks import Json, chat_messages
from nereid_client.errors import FieldError, shown
from nereid_client.protocol.common_fields import FRONTEND_ONLY, INT64_LIMIT, GenerationRequest
from nereid_client.protocol.field_checks import check_response_format, check_tool_choice
from nereid_client.protocol.refused import Refusal, refuse_nested
from nereid_client.protocol.request_body import RequestBody, validated

_FALSE = (False,)
_EMPTY: tuple[Any, ...] = ([],)
_ONLY_CHAT = "only /v1/chat/completions returns this"
_NOT_IN_ANTHROPIC = "Anthropic's API has the field {} instead"
_USE_REQUEST_ID_HEADER = "a message has a random id; the header X-Request-Id names a request"

REFUSED_IN_MESSAGES = {
    # These fields belong to Anthropic's API. Some of them exist only in its beta version.
    "container": Refusal("Nereid runs no code"),
    "mcp_servers": Refusal("the client calls the tools, also those of MCP servers", _EMPTY),
    "compaction": Refusal("Nereid does not compact conversations"),
    # After an error with the code thread_unsupported_request, Anthropic's client sends the whole
    # conversation again.
    "thread": Refusal(
        "Nereid stores no conversations; send all messages", code="thread_unsupported_request"
    ),
    "fallbacks": Refusal("Nereid does not send a request to another model", _EMPTY),
    "speed": Refusal("the server has one speed", ("standard",)),
    "output_format": Refusal(_NOT_IN_ANTHROPIC.format("output_config.format")),
    # Fields of chat completions.
    "max_completion_tokens": Refusal(_NOT_IN_ANTHROPIC.format("max_tokens")),
    "stop": Refusal(_NOT_IN_ANTHROPIC.format("stop_sequences"), _EMPTY),
    "response_format": Refusal(_NOT_IN_ANTHROPIC.format("output_config.format")),
    "reasoning_effort": Refusal(_NOT_IN_ANTHROPIC.format("output_config.effort")),
    "parallel_tool_calls": Refusal(
        _NOT_IN_ANTHROPIC.format("tool_choice.disable_parallel_tool_use"), (True,)
    ),
    "stream_options": Refusal("a stream always ends with the token counts"),
    "n": Refusal("a message has one choice; send several requests", (1,)),
    "logprobs": Refusal(_ONLY_CHAT, _FALSE),
    "top_logprobs": Refusal(_ONLY_CHAT),
    "prompt_logprobs": Refusal(_ONLY_CHAT),
    "return_token_ids": Refusal(_ONLY_CHAT, _FALSE),
    "return_prompt_token_ids": Refusal(_ONLY_CHAT, _FALSE),
    "return_tokens_as_token_ids": Refusal(_ONLY_CHAT, _FALSE),
    "request_id": Refusal(_USE_REQUEST_ID_HEADER),
    "rid": Refusal(_USE_REQUEST_ID_HEADER),
}
"""Maps each refused field to the reason for the refusal. The fields belong to several APIs."""

_REFUSED_IN_TOOLS = {
    "defer_loading": Refusal("Nereid has no tool search; send only tools to offer now", _FALSE),
    "allowed_callers": Refusal("only the model calls tools", (["direct"], [])),
}
_KEPT_REASONING = "clear_thinking_20251015"
"""The only accepted edit of context_management. The chat template decides which earlier reasoning
the model reads, so the edit has no effect.
"""


class Tool(RequestBody):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(RequestBody):
    """The field `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.type == "tool" and not self.name:
            raise FieldError(
                "tool_choice.name",
                "tool_choice.name must be the name of a tool if tool_choice.type is tool, but the "
                f"request has {shown(self.name)}",
            )
        return self


class Thinking(RequestBody):
    """The field `thinking`."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int | None, Field(ge=1, lt=INT64_LIMIT)] = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(RequestBody):
    """The field `output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class CountTokensRequest(GenerationRequest):
    """The body of `POST /v1/messages/count_tokens`."""

    refused = (REFUSED_IN_MESSAGES,)

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    """The conversation so far. A message has a text, or blocks of the types `text`, `thinking`,
    `redacted_thinking`, `tool_use` and `tool_result`. If the last message has the role
    `assistant`, the answer continues it."""
    system: str | list[dict[str, Any]] | None = None
    """The system prompt: a text, or a list of text blocks."""
    tools: list[dict[str, Any]] | None = None
    """The tools that the model may call, each with a name and an `input_schema`. Tools that
    Anthropic's servers run are refused."""
    tool_choice: ToolChoice | None = None
    """Which tools the model may or must call. The type is `auto`, `any`, `tool` or `none`."""
    thinking: Thinking | None = None
    """Turns reasoning on (`enabled`, `adaptive`) or off (`disabled`), if the chat template can.
    `budget_tokens` limits the reasoning. With the `display` `omitted`, the answer has no reasoning
    text."""
    output_config: OutputConfig | None = None
    """`effort` sets the variable `reasoning_effort` of the chat template. `format` is a JSON schema
    that the answer must match."""
    context_management: dict[str, Any] | None = None
    """Only the edit `clear_thinking_20251015` is accepted. It has no effect."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template."""
    cache_control: Annotated[Any, FRONTEND_ONLY] = None
    """Here or in a block, `ttl` sets the field `prompt_cache_retention`. All prompts are cached."""
    metadata: Annotated[Any, FRONTEND_ONLY] = None
    """With a `cache_control`, `user_id` sets the field `prompt_cache_key`."""
    diagnostics: Annotated[Any, FRONTEND_ONLY] = None
    """Accepted without effect."""
    inference_geo: Annotated[Any, FRONTEND_ONLY] = None
    """Accepted without effect."""
    user_profile_id: Annotated[Any, FRONTEND_ONLY] = None
    """Accepted without effect."""
    workspace_id: Annotated[Any, FRONTEND_ONLY] = None
    """Accepted without effect."""
    billing_policy: Annotated[Any, FRONTEND_ONLY] = None
    """Accepted without effect."""
    fallback_credit_token: Annotated[Any, FRONTEND_ONLY] = None
    """Accepted without effect."""

    @model_validator(mode="after")
    def _check_conversation(self) -> Self:
        """Check that all messages are valid, and that the model can continue the last message."""
        if self.chat_messages[-1].get("tool_calls"):
            raise FieldError(
                "messages",
                "messages must not end with a tool_use block. Add a user message that contains "
                "the tool_result block of this call.",
            )
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        tools = self.chat_tools
        if self.tool_choice is not None:
            given = self.tool_choice.model_dump(exclude_none=True)
            check_tool_choice(self.chat_tool_choice, tools, given=given)
        return self

    @model_validator(mode="after")
    def _check_output_format(self) -> Self:
        if self.response_format_of_config is not None:
            place = "output_config.format"
            check_response_format(self.response_format_of_config, place, f"{place}.schema")
        return self

    @model_validator(mode="after")
    def _check_context_management(self) -> Self:
        edits = (self.context_management or {}).get("edits") or []
        for edit in edits if isinstance(edits, list) else [edits]:
            if not isinstance(edit, dict) or edit.get("type") != _KEPT_REASONING:
                raise FieldError(
                    "context_management.edits",
                    f"context_management.edits must have the type {_KEPT_REASONING}, but the "
                    f"request has {shown(edit)}. Nereid cannot edit conversations in other ways.",
                )
        return self

    @cached_property
    def chat_messages(self) -> list[Json]:
        """The messages of the chat completion: the system prompt, followed by the conversation.

        Raises: FieldError.
        """
        return chat_messages(self.system, self.messages)

    @cached_property
    def chat_tools(self) -> list[Json]:
        """The tools in the format of chat completions.

        Raises: FieldError.
        """
        return [_chat_tool(tool, f"tools[{at}]") for at, tool in enumerate(self.tools or ())]

    @property
    def chat_tool_choice(self) -> str | Json:
        """The tool choice in the format of chat completions. The default is "auto"."""
        choice = self.tool_choice
        if choice is None or choice.type == "auto":
            return "auto"
        if choice.type == "tool":
            return {"type": "function", "function": {"name": choice.name}}
        return "none" if choice.type == "none" else "required"

    @property
    def response_format_of_config(self) -> Json | None:
        """The field output_config.format, converted to a response_format. None means plain text."""
        given = self.output_config.format if self.output_config else None
        if given is None:
            return None
        schema = {"name": "answer", "strict": True, "schema": given.get("schema")}
        return {"type": given.get("type"), "json_schema": schema}

    @property
    def shows_thinking(self) -> bool:
        """Whether the answer contains the text of the reasoning."""
        return self.thinking is None or self.thinking.display != "omitted"


class MessagesRequest(CountTokensRequest):
    """The body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, lt=INT64_LIMIT)]
    """The largest number of tokens to generate, reasoning included."""
    stop_sequences: list[str] | None = None
    """Up to 16 strings before which the answer ends."""


def _chat_tool(tool: Json, place: str) -> Json:
    """Return a tool in the format of chat completions."""
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise FieldError(
            f"{place}.type",
            f"{place} has the type {shown(kind)}, which is not supported: Nereid runs no tools and "
            "has no schemas for the tools of Anthropic's models. Send a tool with an input_schema.",
        )
    # `defer_loading` is refused because Nereid has no tool search. `allowed_callers` is refused
    # because only the model calls tools.
    refuse_nested(place, tool, _REFUSED_IN_TOOLS)
    valid_tool = validated(Tool, tool, place)
    function = {
        "name": valid_tool.name,
        "description": valid_tool.description,
        "parameters": valid_tool.input_schema,
        "strict": valid_tool.strict,
    }
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}
