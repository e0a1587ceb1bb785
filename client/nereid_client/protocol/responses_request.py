"""The body of `POST /v1/responses`, with the checks that need no backend.

The fields follow OpenAI's API reference of November 2026. Sampling fields that OpenAI's API does
not have are those of chat completions.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nereid_client.errors import FieldError, shown
from nereid_client.protocol.field_checks import (
    check_response_format,
    check_tool_choice,
    to_openai_response_format,
)
from nereid_client.protocol.generation_requests import (
    MAX_LOGPROBS,
    GenerationRequest,
    StreamOptions,
)
from nereid_client.protocol.refused import REFUSED_IN_CHAT, Refusal, refuse

Json = dict[str, Any]

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED = "reasoning.encrypted_content"
_INT64 = 2**63
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
    "context_management": Refusal("Nereid does not compact conversations; use truncation"),
    "access_programs": Refusal("Nereid has no access programs"),
    "image": Refusal("the served model reads and writes text only"),
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
"""Fields of OpenAI's Responses API and of other APIs that a response refuses."""

REFUSED_IN_TOOLS = {
    "async": Refusal("the client runs the functions, and decides when", _FALSE),
    "defer_loading": Refusal("Nereid has no tool search; send only tools to offer now", _FALSE),
    "allowed_callers": Refusal("only the model calls functions", (["direct"], [])),
    "output_schema": Refusal("Nereid does not validate the output of a function"),
}
"""Fields that a tool of a response refuses."""

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
    """Options of a stream of events. The last event of a stream always has the token counts."""

    include_obfuscation: bool | None = False
    """Only false is supported: events have no padding."""


class FunctionTool(BaseModel):
    """A function that the client runs."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat(self) -> Json:
        """Return the tool in the format of chat completions, without fields that are null."""
        given = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }
        function = {name: value for name, value in given.items() if value is not None}
        return {"type": "function", "function": function}


class ResponsesRequest(GenerationRequest):
    """The body of `POST /v1/responses`."""

    refused = (REFUSED_IN_RESPONSES,)

    input: str | list[dict[str, Any]]
    """A text of the user, or a list of items."""
    instructions: str | None = None
    """The system message at the start of the conversation."""
    previous_response_id: str | None = None
    """The stored response that this one continues."""
    max_output_tokens: Annotated[int, Field(ge=1, lt=_INT64)] | None = None
    """The maximum number of tokens to generate, reasoning included."""
    max_tool_calls: Annotated[int, Field(ge=1, lt=_INT64)] | None = None
    """Accepted for compatibility. It limits tools that run on the server; Nereid has none."""
    tools: list[dict[str, Any]] | None = None
    """The functions that the model may call, alone or in namespaces."""
    tool_choice: str | dict[str, Any] | None = None
    """Which tools the model may or must call: none, auto, required, or named functions."""
    parallel_tool_calls: bool | None = None
    """Whether the model may call several functions. The default is true."""
    text: dict[str, Any] | None = None
    """The format of the text: text, json_object, json_schema or structural_tag, as text.format."""
    reasoning: dict[str, Any] | None = None
    """The options effort and summary."""
    include: list[str] | None = None
    """Further data to return, such as message.output_text.logprobs."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """The number of most probable tokens to return at each position."""
    truncation: str | None = None
    """auto removes the oldest turns of a conversation that is too long. disabled is the default."""
    store: bool | None = None
    """Whether the response is stored, so that it can be retrieved and continued. Default: true."""
    background: bool | None = None
    """Whether the response is generated in the background, without an open connection."""
    metadata: dict[str, str] | None = None
    """Up to 16 labels for the client's own use. The response repeats them."""
    stream_options: ResponseStreamOptions | None = None
    """Options of the stream. Requires stream."""

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
                    f"include supports {INCLUDE_LOGPROBS} and {INCLUDE_ENCRYPTED}, but the request "
                    f"has {shown(name)}",
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

    @field_validator("metadata")
    @classmethod
    def _check_metadata(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        """Check the number of entries, and the lengths of keys and values."""
        if value is not None and len(value) > _MAX_METADATA:
            raise FieldError(
                "metadata",
                f"metadata must have at most {_MAX_METADATA} entries, but the request has "
                f"{len(value)}",
            )
        for key, text in (value or {}).items():
            if len(key) > _MAX_METADATA_KEY_CHARS:
                raise FieldError(
                    "metadata",
                    f"metadata must have keys of at most {_MAX_METADATA_KEY_CHARS} characters, but "
                    f"the request has a key of {len(key)}: {shown(key)}",
                )
            if len(text) > _MAX_METADATA_VALUE_CHARS:
                raise FieldError(
                    "metadata",
                    f"metadata must have values of at most {_MAX_METADATA_VALUE_CHARS} characters, "
                    f"but the request has a value of {len(text)} for {shown(key)}",
                )
        return value

    @model_validator(mode="after")
    def _check_nested_fields(self) -> Self:
        """Check the fields inside of `reasoning`, `text` and `stream_options`."""
        _refuse_nested("reasoning", self.reasoning, _REFUSED_IN_REASONING)
        _refuse_nested("text", self.text, _REFUSED_IN_TEXT)
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            field = "stream_options.include_obfuscation"
            raise FieldError(
                field, f"{field} must not be true, because events have no padding. Leave it out."
            )
        if self.effort is not None and not isinstance(self.effort, str):
            raise FieldError(
                "reasoning.effort",
                f"reasoning.effort must be a string, but the request has {shown(self.effort)}",
            )
        return self

    @model_validator(mode="after")
    def _check_format_and_tools(self) -> Self:
        """Check text.format, the names of the tools, and that the tool choice names one of them."""
        if self.response_format_of_text is not None:
            check_response_format(self.response_format_of_text, "text.format", "text.format.schema")
        tools = self.chat_tools
        names = [tool["function"]["name"] for tool in tools or ()]
        for name in functions_in_namespaces(self.tools or ()):
            if names.count(name) > 1:
                raise FieldError(
                    "tools",
                    f"tools must have different names, but several are called {shown(name)}. A "
                    "function in a namespace is called NAMESPACE__FUNCTION.",
                )
        if self.tool_choice is not None:
            check_tool_choice(self._chat_tool_choice(), tools or ())
        return self

    @model_validator(mode="after")
    def _check_background(self) -> Self:
        if self.background and self.store is False:
            raise FieldError(
                "background",
                "background=true requires store=true, because the response is retrieved later",
            )
        return self

    @property
    def effort(self) -> Any:  # noqa: ANN401 - any JSON value, until it is validated
        """The field reasoning.effort, or None if it is not given."""
        return (self.reasoning or {}).get("effort")

    @property
    def summary(self) -> str | None:
        """The requested kind of summary of the reasoning, or None for the text of the reasoning."""
        reasoning = self.reasoning or {}
        kind = reasoning.get("summary") or reasoning.get("generate_summary")
        return None if kind is None else str(kind)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the response has log-probabilities: for `include`, or for `top_logprobs` > 0."""
        return INCLUDE_LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def format(self) -> Json:
        """The field text.format. The default is plain text.

        Raises: FieldError if it is not an object.
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
        """The field text.format as a chat completion's response_format, or None for plain text."""
        given = self.format
        if given.get("type") == "text":
            return None
        if given.get("type") != "json_schema":
            return to_openai_response_format(given, "text.format")
        schema = {name: value for name, value in given.items() if name != "type"}
        return {"type": "json_schema", "json_schema": schema}

    @property
    def chat_tools(self) -> list[Json] | None:
        """The tools in the format of chat completions."""
        if self.tools is None:
            return None
        functions = [_functions_of(tool, f"tools[{at}]") for at, tool in enumerate(self.tools)]
        return [function.as_chat() for several in functions for function in several]

    @property
    def chat_tool_choice(self) -> str | Json | None:
        """The tool choice in the format of chat completions."""
        return None if self.tool_choice is None else self._chat_tool_choice()

    def _chat_tool_choice(self) -> str | Json:
        """Return the field `tool_choice` in the format of chat completions.

        Raises: FieldError if it has no known form.
        """
        choice = self.tool_choice or "auto"
        if choice in ("none", "auto", "required"):
            return choice
        if isinstance(choice, dict):
            if "function" in choice or "allowed_tools" in choice:  # the form of chat completions
                return choice
            if choice.get("type") == "function":
                return {"type": "function", "function": {"name": choice.get("name")}}
            if choice.get("type") == "allowed_tools":
                tools = choice.get("tools")
                if isinstance(tools, list):
                    tools = [_as_chat_choice(tool) for tool in tools]
                allowed = {"mode": choice.get("mode"), "tools": tools}
                return {"type": "allowed_tools", "allowed_tools": allowed}
        raise FieldError(
            "tool_choice",
            'tool_choice must be "none", "auto", "required", {"type": "function", "name"} or '
            '{"type": "allowed_tools", "mode", "tools"}, but the request has '
            f"{shown(choice)}",
        )

    def passed_on(self, body: Mapping[str, Any]) -> Json:
        """Return the body's fields that the chat completion has under the same names."""
        return {
            name: value
            for name, value in body.items()
            if value is not None and name not in _TRANSLATED
        }


_TRANSLATED = frozenset(ResponsesRequest.__annotations__) - {"parallel_tool_calls"}
_TRANSLATED |= {"stream", "service_tier"}
"""Fields that the frontend reads itself, or that have another name in a chat completion."""


def chat_name(namespace: str | None, name: str) -> str:
    """Return the name of a function in the chat completion, which has no namespaces.

    Example: namespace "files" and name "read" return "files__read".
    """
    return name if namespace is None else f"{namespace}__{name}"


def functions_in_namespaces(tools: Sequence[Json]) -> dict[str, tuple[str, str]]:
    """Return the functions in namespaces: the name in the chat -> (namespace, name).

    Example: a function "read" in the namespace "files" is {"files__read": ("files", "read")}.
    """
    return {
        chat_name(tool["name"], function["name"]): (tool["name"], function["name"])
        for tool in tools
        if tool["type"] == "namespace"
        for function in tool["tools"]
    }


def _functions_of(tool: Json, place: str) -> list[FunctionTool]:
    """Return the functions of a tool: the function itself, or all functions of a namespace.

    A function of a namespace has the namespace's name as a prefix, and the namespace's description
    before its own.

    Args:
        tool: a member of the field `tools`.
        place: its path in the body, such as "tools[0]".

    Raises: FieldError.
    """
    if tool.get("type") != "namespace":
        return [_function(tool, place)]
    namespace, description, members = (tool.get(k) for k in ("name", "description", "tools"))
    for field, value, kind, requirement in (
        ("name", namespace, str, "a string that is not empty"),
        ("tools", members, list, "a list of at least one function"),
    ):
        if not value or not isinstance(value, kind):
            raise _wrong(f"{place}.{field}", requirement, value)
    if not isinstance(description, str | None):
        raise _wrong(f"{place}.description", "a string", description)
    functions = []
    for at, member in enumerate(members or ()):
        if not isinstance(member, dict):
            raise _wrong(f"{place}.tools[{at}]", "an object", member)
        function = _function(member, f"{place}.tools[{at}]")
        text = "\n\n".join(filter(None, (description, function.description)))
        update = {"name": chat_name(namespace, function.name), "description": text or None}
        functions.append(function.model_copy(update=update))
    return functions


def _function(tool: Json, place: str) -> FunctionTool:
    """Return a function of the field `tools`.

    Raises: FieldError if a field of the function is wrong.
    """
    if tool.get("type") != "function":
        raise FieldError(
            f"{place}.type",
            f"{place}.type must be function or namespace, because the client runs all tools, but "
            f"the request has {shown(tool.get('type'))}",
        )
    _refuse_nested(place, tool, REFUSED_IN_TOOLS)
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise _wrong(f"{place}.name", "a string that is not empty", name)
    for field, kind, requirement in (
        ("description", str, "a string"),
        ("parameters", dict, "an object"),
        ("strict", bool, "true or false"),
    ):
        if not isinstance(tool.get(field), kind | None):
            raise _wrong(f"{place}.{field}", requirement, tool[field])
    return FunctionTool.model_validate(tool)


def _wrong(field: str, requirement: str, value: object) -> FieldError:
    return FieldError(field, f"{field} must be {requirement}, but the request has {shown(value)}")


def _as_chat_choice(tool: object) -> object:
    """Return a function of `allowed_tools` in the format of chat completions."""
    if isinstance(tool, dict) and tool.get("type") == "function" and "name" in tool:
        return {"type": "function", "function": {"name": tool["name"]}}
    return tool


def _refuse_nested(place: str, value: Json | None, table: Mapping[str, Refusal]) -> None:
    """Raise an error if an object contains a field of the table.

    Args:
        place: the path of the object in the body, such as "reasoning".
        value: the object, or None if the body does not contain it.
        table: the names of fields that are not supported.

    Raises: FieldError.
    """
    if value is not None:
        refuse(
            {f"{place}.{name}": inner for name, inner in value.items()},
            {f"{place}.{name}": refusal for name, refusal in table.items()},
        )
