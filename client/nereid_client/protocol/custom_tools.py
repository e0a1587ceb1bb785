"""Custom tools, which the model calls with a text instead of JSON.

The backend knows only functions. The frontend therefore sends each custom tool as a function with
one parameter, the string `input`. The module streaming/custom_tool_input.py converts the calls of
these functions back to calls of the custom tools.
"""

import json
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from nereid_client.errors import FieldError, shown
from nereid_client.protocol.input_patterns import whole_input_pattern
from nereid_client.protocol.request_body import RequestBody, validated

Json = dict[str, Any]


class CustomTool(RequestBody):
    """A tool whose input is a text."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    format: dict[str, Any] | None = None
    """The format of the input: `{"type": "text"}`, or an object of the type `grammar`."""


class _Format(RequestBody):
    """The format of a custom tool's input."""

    type: Literal["text", "grammar"]


class _Grammar(RequestBody):
    """The grammar of a custom tool's input."""

    syntax: Literal["regex", "lark"]
    definition: Annotated[str, Field(min_length=1)]


class _CustomCall(RequestBody):
    """A call of a custom tool in a message of the assistant."""

    name: Annotated[str, Field(min_length=1)]
    input: str


def is_custom(tool: Mapping[str, Any]) -> bool:
    """Return whether an object of a chat request is a custom tool, or refers to a custom tool.

    Tools, tool calls and tool choices have the form {"type": "custom", "custom": {"name": "f"}}.
    """
    return tool.get("type") == "custom" and "function" not in tool


def custom_tool_names(tools: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return the names of all custom tools of a chat. The tools must be valid."""
    return frozenset(tool["custom"]["name"] for tool in tools if is_custom(tool))


def to_function(tool: CustomTool, place: str) -> Json:
    r"""Convert a custom tool to a function with the parameter `input`.

    A regular expression is enforced, because the function is strict. A Lark grammar is added to the
    description, so that the model knows the grammar, but the grammar is not enforced.

    Example: the tool "date" with the regular expression `\d+` returns {"type": "function",
    "function": {"name": "date", "parameters": {"type": "object", "properties": {"input": {"type":
    "string", "pattern": "^(?:\\d+)$"}}, "required": ["input"], "additionalProperties": False},
    "strict": True}}.

    Args:
        tool: the custom tool.
        place: the path of the custom tool in the request body, such as "tools[0].custom".

    Raises: FieldError if the format of the input is wrong.
    """
    function: Json = {"name": tool.name}
    input_schema: Json = {"type": "string"}
    description = tool.description
    grammar, grammar_place = _grammar_of(tool, place)
    if grammar is not None and grammar.syntax == "lark":
        note = f"The input must match this Lark grammar:\n{grammar.definition}"
        description = f"{description}\n\n{note}" if description else note
    elif grammar is not None:
        definition_place = f"{grammar_place}.definition"
        input_schema["pattern"] = whole_input_pattern(grammar.definition, definition_place)
    if description is not None:
        function["description"] = description
    function["parameters"] = {
        "type": "object",
        "properties": {"input": input_schema},
        "required": ["input"],
        "additionalProperties": False,
    }
    if "pattern" in input_schema:
        function["strict"] = True
    return {"type": "function", "function": function}


def check_input_format(tool: CustomTool, place: str) -> None:
    """Raise a FieldError if the format of a custom tool's input is wrong."""
    to_function(tool, place)


def _grammar_of(tool: CustomTool, place: str) -> tuple[_Grammar | None, str]:
    """Return the grammar of a custom tool, and the path of the grammar in the request body.

    In chat completions, the field `format` contains an object `grammar` with the fields `syntax`
    and `definition`. In the Responses API, `format` itself contains these fields. Each API accepts
    both forms. If any text is allowed, the grammar is None.
    """
    format_place = f"{place}.format"
    if tool.format is None:
        return None, format_place
    kind = validated(_Format, tool.format, format_place).type
    if kind == "text":
        return None, format_place
    if "grammar" in tool.format:
        grammar_place = f"{format_place}.grammar"
        return validated(_Grammar, tool.format["grammar"], grammar_place), grammar_place
    return validated(_Grammar, tool.format, format_place), format_place


def read_custom_tool(tool: Mapping[str, Any], place: str) -> Json:
    """Convert a custom tool of a chat to a function, as described by `to_function`.

    Args:
        tool: the tool, in the form {"type": "custom", "custom": {"name", "description", "format"}}.
        place: the path of the tool in the request body, such as "tools[0]".

    Raises: FieldError if the tool is wrong.
    """
    custom_place = f"{place}.custom"
    return to_function(validated(CustomTool, tool.get("custom"), custom_place), custom_place)


def check_unique_names(
    names: Iterable[str], names_to_check: Container[str], hint: str = ""
) -> None:
    """Check that each name in `names_to_check` is the name of at most one tool.

    The backend receives some tools in another form, for example a custom tool as a function. The
    frontend converts a call of such a tool back, and finds the tool by the name in the call.

    Args:
        names: the names of all tools in a chat.
        names_to_check: the names of the tools that are converted.
        hint: a sentence that is appended to the error message.

    Raises: FieldError that contains the name.
    """
    for name, count in Counter(names).items():
        if count > 1 and name in names_to_check:
            message = f"tools must have different names, but several are called {shown(name)}."
            raise FieldError("tools", f"{message} {hint}".rstrip())


def with_custom_tools_as_functions(chat: Mapping[str, Any]) -> Json:
    """Convert the custom tools in a chat request to functions, and return the new request body.

    The custom tools in the field `tools`, the calls in earlier messages and the names in
    `tool_choice` are converted. The rest of the body is returned unchanged.

    Raises: FieldError if a custom tool or a call is wrong.
    """
    changed = dict(chat)
    tools = chat.get("tools")
    if isinstance(tools, list):
        changed["tools"] = [
            _function_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)
        ]
    if isinstance(chat.get("tool_choice"), Mapping):
        changed["tool_choice"] = _choice_of_functions(chat["tool_choice"])
    messages = chat.get("messages")
    if isinstance(messages, list):
        changed["messages"] = [
            with_function_calls(message, f"messages[{index}]")
            if isinstance(message, Mapping)
            else message
            for index, message in enumerate(messages)
        ]
    return changed


def _function_tool(tool: object, place: str) -> object:
    """Convert a custom tool to a function. Return other values unchanged."""
    if isinstance(tool, Mapping) and is_custom(tool):
        return read_custom_tool(tool, place)
    return tool


def with_function_calls(message: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """Return a chat message in which calls of custom tools are replaced by function calls.

    Example: the call {"id": "a", "type": "custom", "custom": {"name": "f", "input": "ls"}} becomes
    {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"input": "ls"}'}}.

    Args:
        message: the message. It is not changed.
        place: the path of the message in the request body, such as "messages[1]".

    Raises: FieldError if a call of a custom tool is wrong.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    converted = [
        _function_call(call, f"{place}.tool_calls[{index}].custom")
        for index, call in enumerate(calls)
    ]
    return {**message, "tool_calls": converted}


def _function_call(call: object, place: str) -> object:
    """Convert a call of a custom tool to a function call. Return other values unchanged."""
    if not isinstance(call, Mapping) or not is_custom(call):
        return call
    custom = validated(_CustomCall, call.get("custom"), place)
    others = {name: value for name, value in call.items() if name != "custom"}
    arguments = json.dumps({"input": custom.input}, ensure_ascii=False)
    function = {"name": custom.name, "arguments": arguments}
    return {**others, "type": "function", "function": function}


def _choice_of_functions(choice: Mapping[str, Any]) -> Json:
    """Return a tool choice in which custom tools are replaced by functions.

    The tool choice is one tool, or an object `allowed_tools` with a list of tools. Each tool of the
    list is converted by a call of this function. Another tool choice is returned unchanged.

    Example: {"type": "custom", "custom": {"name": "f"}} returns {"type": "function", "function":
    {"name": "f"}}.
    """
    if is_custom(choice):
        return {"type": "function", "function": choice.get("custom")}
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, Mapping) or not isinstance(allowed.get("tools"), list):
        return dict(choice)
    tools = [
        _choice_of_functions(tool) if isinstance(tool, Mapping) else tool
        for tool in allowed["tools"]
    ]
    return {**choice, "allowed_tools": {**allowed, "tools": tools}}
