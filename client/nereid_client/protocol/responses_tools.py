"""Translates the fields `tools` and `tool_choice` from the Responses API to chat completions."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from nereid_client.errors import FieldError, shown
from nereid_client.protocol.refused import Refusal, refuse_nested
from nereid_client.protocol.request_body import RequestBody, validated

Json = dict[str, Any]

REFUSED_IN_TOOLS = {
    "async": Refusal("the client runs the functions, and decides when", (False,)),
    "defer_loading": Refusal("Nereid has no tool search; send only tools to offer now", (False,)),
    "allowed_callers": Refusal("only the model calls functions", (["direct"], [])),
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
    """A group of functions."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    tools: Annotated[list[dict[str, Any]], Field(min_length=1)]


def to_chat_tool_choice(choice: str | Json) -> str | Json:
    """Return the field `tool_choice` in the format of chat completions.

    Example: {"type": "function", "name": "f"} returns {"type": "function", "function":
    {"name": "f"}}.

    Raises: FieldError if the choice has no known form.
    """
    if not choice:
        return "auto"
    if choice in ("none", "auto", "required"):
        return choice
    if isinstance(choice, dict):
        if "function" in choice or "allowed_tools" in choice:
            return choice  # the client has used the format of chat completions
        if choice.get("type") == "function":
            return {"type": "function", "function": {"name": choice.get("name")}}
        if choice.get("type") == "allowed_tools":
            return {"type": "allowed_tools", "allowed_tools": _allowed_tools(choice)}
    raise FieldError(
        "tool_choice",
        'tool_choice must be "none", "auto", "required", {"type": "function", "name"} or '
        '{"type": "allowed_tools", "mode", "tools"}, but the request has '
        f"{shown(choice)}",
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


def chat_name(namespace: str | None, name: str) -> str:
    """Return the name of a function in a chat completion: the namespace, if any, and the name.

    Example: namespace "files" and name "read" return "files__read".
    """
    return name if namespace is None else f"{namespace}__{name}"


def functions_in_namespaces(tools: Sequence[Json]) -> dict[str, tuple[str, str]]:
    """Return a dict with one entry for each function in a namespace.

    A key is the name of a function in a chat completion. A value is a pair of the namespace and the
    name of the function.

    Example: a function "read" in the namespace "files" is {"files__read": ("files", "read")}.
    """
    functions = {}
    for namespace in tools:
        if namespace["type"] != "namespace":
            continue
        for function in namespace["tools"]:
            name = chat_name(namespace["name"], function["name"])
            functions[name] = (namespace["name"], function["name"])
    return functions


def to_chat_tools(tool: Json, place: str) -> list[Json]:
    """Convert a function or a namespace to a list of functions in the format of chat completions.

    The name of a namespace is put before the name of each of its functions, and the description of
    the namespace is put before the description of each function.

    Example: the function "read" in the namespace "files" with the description "Local files."
    returns [{"type": "function", "function": {"name": "files__read", "description":
    "Local files."}}].

    Args:
        tool: a member of the field `tools`: a function or a namespace.
        place: the path of the tool in the body, such as "tools[0]".

    Raises: FieldError if the tool has another type, or if a field of the tool is wrong.
    """
    if tool.get("type") != "namespace":
        return [_to_chat_tool(_function(tool, place))]
    namespace = validated(Namespace, tool, place)
    chat_tools = []
    for index, member in enumerate(namespace.tools):
        function = _function(member, f"{place}.tools[{index}]")
        chat_tools.append(_to_chat_tool(_with_namespace(function, namespace)))
    return chat_tools


def _with_namespace(function: FunctionTool, namespace: Namespace) -> FunctionTool:
    """Put the namespace's name and description before the name and description of a function."""
    descriptions = [text for text in (namespace.description, function.description) if text]
    return function.model_copy(
        update={
            "name": chat_name(namespace.name, function.name),
            "description": "\n\n".join(descriptions) or None,
        }
    )


def _to_chat_tool(function: FunctionTool) -> Json:
    """Convert a function to the format of chat completions. Leave out fields that are null."""
    fields = {"name", "description", "parameters", "strict"}
    return {
        "type": "function",
        "function": function.model_dump(include=fields, exclude_none=True),
    }


def _function(tool: Json, place: str) -> FunctionTool:
    """Validate a member of the field `tools`, and return it as a function.

    Raises: FieldError if the tool is not a function, or if a field of the tool is wrong.
    """
    if tool.get("type") != "function":
        raise FieldError(
            f"{place}.type",
            f"{place}.type must be function or namespace, but the request has "
            f"{shown(tool.get('type'))}. Nereid has no tools of its own.",
        )
    refuse_nested(place, tool, REFUSED_IN_TOOLS)
    return validated(FunctionTool, tool, place)


def _allowed_tool(tool: object) -> object:
    """Convert one allowed tool to the format of chat completions. Return other values unchanged."""
    if isinstance(tool, dict) and tool.get("type") == "function" and "name" in tool:
        return {"type": "function", "function": {"name": tool["name"]}}
    return tool
