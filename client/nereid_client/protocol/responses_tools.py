"""Translates the fields `tools` and `tool_choice` from the Responses API to chat completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from nereid_client.errors import FieldError, shown
from nereid_client.protocol.custom_tools import CustomTool, check_input_format
from nereid_client.protocol.refused import Refusal, refuse_nested
from nereid_client.protocol.request_body import RequestBody, validated

Json = dict[str, Any]

REFUSED_IN_TOOLS = {
    "async": Refusal("the client runs the tools, and decides when", (False,)),
    "defer_loading": Refusal("Nereid has no tool search; send only tools to offer now", (False,)),
    "allowed_callers": Refusal("only the model calls tools", (["direct"], [])),
    "output_schema": Refusal("Nereid does not validate the output of a function"),
}
"""The fields that Nereid refuses in a tool of the Responses API."""


class FunctionTool(RequestBody):
    """A function that the client runs."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Namespace(RequestBody):
    """A group of functions and custom tools."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    tools: Annotated[list[dict[str, Any]], Field(min_length=1)]


TOOL_CHOICES = (
    '"none", "auto", "required", {"type": "function", "name"}, {"type": "custom", "name"} or '
    '{"type": "allowed_tools", "mode", "tools"}'
)
"""The forms of a tool choice in the Responses API, for error messages."""


def to_chat_tool_choice(choice: str | Json) -> str | Json:
    """Return the field `tool_choice` in the format of chat completions.

    Examples: {"type": "custom", "name": "f"} returns {"type": "custom", "custom": {"name": "f"}}. A
    function or `allowed_tools` is converted in the same way. "none", "auto", "required" and a
    choice in the format of chat completions are returned unchanged. "" and {} return "auto".

    Raises: FieldError if the choice has no known form.
    """
    if not choice:
        return "auto"
    if choice in ("none", "auto", "required"):
        return choice
    if isinstance(choice, dict):
        match choice:
            case {"function": _} | {"custom": _} | {"allowed_tools": _}:
                return choice  # the client has used the format of chat completions
            case {"type": "function" | "custom" as kind}:
                return {"type": kind, kind: {"name": choice.get("name")}}
            case {"type": "allowed_tools" as kind}:
                return {"type": kind, kind: _allowed_tools(choice)}
    raise FieldError(
        "tool_choice", f"tool_choice must be {TOOL_CHOICES}, but the request has {shown(choice)}"
    )


def _allowed_tools(choice: Json) -> Json:
    """Return the object `allowed_tools` in the format of chat completions.

    Example: {"mode": "auto", "tools": [{"type": "function", "name": "f"}]} returns {"mode": "auto",
    "tools": [{"type": "function", "function": {"name": "f"}}]}.
    """
    tools = choice.get("tools")
    if isinstance(tools, list):
        tools = [_allowed_tool(tool) for tool in tools]
    return {"mode": choice.get("mode"), "tools": tools}


def name_in_chat(chat_tool: Json) -> str:
    """Return the name of a tool in the format of chat completions.

    Example: {"type": "custom", "custom": {"name": "f"}} returns "f".
    """
    kind = chat_tool["type"]
    name: str = chat_tool[kind]["name"]
    return name


def chat_name(namespace: str | None, name: str) -> str:
    """Return the name of a tool in a chat completion: the namespace, if any, and the name.

    Example: namespace "files" and name "read" return "files__read".
    """
    return name if namespace is None else f"{namespace}__{name}"


@dataclass(frozen=True)
class OfferedTool:
    """A custom tool, or a tool in a namespace. The model calls a function that replaces the tool.

    Attributes:
        name: the name of the tool without the namespace.
        namespace: the namespace of the tool, or None.
        is_custom: whether the tool is a custom tool.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False


def converted_tools(tools: Sequence[Json]) -> dict[str, OfferedTool]:
    """Return the tools that are not plain functions: custom tools, and all tools in namespaces.

    A key is the name of the function that replaces the tool in a chat completion.

    Example: a custom tool "read" in the namespace "files" is {"files__read": OfferedTool("read",
    "files", is_custom=True)}.

    Args:
        tools: the field `tools` of a valid request.
    """
    converted = {}
    for tool in tools:
        namespace = tool["name"] if tool["type"] == "namespace" else None
        members = tool["tools"] if tool["type"] == "namespace" else [tool]
        for member in members:
            is_custom = member["type"] == "custom"
            if is_custom or namespace is not None:
                offered = OfferedTool(member["name"], namespace, is_custom)
                converted[chat_name(namespace, member["name"])] = offered
    return converted


def to_chat_tools(tool: Json, place: str) -> list[Json]:
    """Convert a member of the field `tools` to a list of tools in the format of chat completions.

    The name of a namespace is put before the name of each of its tools, and the description of the
    namespace is put before the description of each tool.

    Example: the function "read" in the namespace "files" with the description "Local files."
    returns [{"type": "function", "function": {"name": "files__read", "description":
    "Local files."}}].

    Args:
        tool: a member of the field `tools`: a function, a custom tool or a namespace.
        place: the path of the tool in the body, such as "tools[0]".

    Raises: FieldError if the tool has another type, or if a field of the tool is wrong.
    """
    if tool.get("type") != "namespace":
        return [_to_chat_tool(_read_tool(tool, place))]
    namespace = validated(Namespace, tool, place)
    chat_tools = []
    for index, member in enumerate(namespace.tools):
        named_tool = _read_tool(member, f"{place}.tools[{index}]")
        chat_tools.append(_to_chat_tool(_with_namespace(named_tool, namespace)))
    return chat_tools


def _with_namespace(
    tool: FunctionTool | CustomTool, namespace: Namespace
) -> FunctionTool | CustomTool:
    """Prepend the name and description of the namespace to the tool's name and description."""
    descriptions = [text for text in (namespace.description, tool.description) if text]
    return tool.model_copy(
        update={
            "name": chat_name(namespace.name, tool.name),
            "description": "\n\n".join(descriptions) or None,
        }
    )


def _to_chat_tool(tool: FunctionTool | CustomTool) -> Json:
    """Convert a tool to the format of chat completions. Leave out fields that are null.

    Example: a custom tool "f" returns {"type": "custom", "custom": {"name": "f"}}.
    """
    kind = "custom" if isinstance(tool, CustomTool) else "function"
    declared_fields = set(type(tool).model_fields)
    return {"type": kind, kind: tool.model_dump(include=declared_fields, exclude_none=True)}


def _read_tool(tool: Json, place: str) -> FunctionTool | CustomTool:
    """Validate a function or a custom tool."""
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        raise FieldError(
            f"{place}.type",
            f"{place}.type must be function, custom or namespace, but the request has "
            f"{shown(kind)}. Nereid has no tools of its own.",
        )
    refuse_nested(place, tool, REFUSED_IN_TOOLS)
    if kind == "function":
        return validated(FunctionTool, tool, place)
    custom_tool = validated(CustomTool, tool, place)
    check_input_format(custom_tool, place)
    return custom_tool


def _allowed_tool(tool: object) -> object:
    """Convert one allowed tool to the format of chat completions. Return other values unchanged."""
    if isinstance(tool, dict) and tool.get("type") in ("function", "custom") and "name" in tool:
        return {"type": tool["type"], tool["type"]: {"name": tool["name"]}}
    return tool
