# SPDX-License-Identifier: Apache-2.0
"""Reads the fields `tools` and `tool_choice` of a chat: the tools that the model may call."""

from collections.abc import Mapping
from typing import Any

from nereid_backend.errors import RequestError
from nereid_backend.request_field_checks import shown


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools that the chat template shows to the model, so that the model can call them.

    Return None if there are no tools or if tool_choice is "none". If tool_choice has the type
    allowed_tools, return only the tools in the list of tool_choice.

    Raises:
        RequestError: tools or tool_choice is malformed.
    """
    tools = body.get("tools")
    if not tools or body.get("tool_choice") == "none":
        return None
    if not isinstance(tools, list):
        raise RequestError(
            f"tools: the value must be a list of tools, but the request has {shown(tools)}."
        )
    for index, tool in enumerate(tools):
        _check_tool(tool, index)
    return _allowed_tools(tools, body.get("tool_choice"))


def with_optional_fields(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Add an empty description and empty parameters to each tool that has none.

    Each parameter without a description gets an empty description, too.

    Example: the function `{"name": "f"}` becomes `{"name": "f", "description": "", "parameters":
    {"type": "object", "properties": {}}}`.
    """
    return tools and [
        {**tool, "function": _with_optional_fields(tool["function"])} for tool in tools
    ]


def _with_optional_fields(function: dict[str, Any]) -> dict[str, Any]:
    """Return the declaration of a function, with the missing optional fields added.

    A missing description becomes an empty text, and missing parameters become an empty JSON Schema.
    """
    parameters = function.get("parameters") or {}
    if isinstance(parameters, dict):
        parameters = _complete_parameters(parameters)
    return {**_with_description(function), "parameters": parameters}


def _complete_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """Add the missing fields to the JSON Schema of a function's parameters.

    A field with the value None counts as missing. Example: `{"properties": {"city": {}}}` becomes
    `{"type": "object", "properties": {"city": {"description": ""}}}`.
    """
    given = {name: value for name, value in parameters.items() if value is not None}
    completed = {"type": "object", "properties": {}, **given}
    properties = completed["properties"]
    if isinstance(properties, dict):
        completed["properties"] = {
            name: _with_description(schema) if isinstance(schema, dict) else schema
            for name, schema in properties.items()
        }
    return completed


def _with_description(described: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an object. If the object has no description, add the description "".

    The object is the declaration of a function, or the schema of a parameter. A description of None
    counts as missing. Example: `{"type": "string"}` becomes `{"type": "string", "description":
    ""}`.
    """
    return {**described, "description": described.get("description") or ""}


def _check_tool(tool: Any, index: int) -> None:  # noqa: ANN401 - any JSON value
    """Raise a RequestError if a tool has no name. `index` is the tool's position in the list."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            f"tools: item {index} must contain function.name, but the item is {shown(tool)}."
        )


def _allowed_tools(tools: list[dict[str, Any]], choice: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON
    """Return the tools that `tool_choice` allows.

    A tool_choice of the type allowed_tools contains a list of allowed tools. Any other tool_choice
    allows all tools. Tools that are not allowed are left out of the prompt, so the model cannot
    call these tools. Clients send the list in two forms, and the functions in the list in three
    forms:

        {"type": "allowed_tools", "allowed_tools": {"tools": [...]}}    chat completions API
        {"type": "allowed_tools", "tools": [...]}                       Responses API

        {"type": "function", "function": {"name": "add"}}
        {"type": "function", "function": "add"}
        {"type": "function", "name": "add"}

    Args:
        tools: the tools of the request. They have been validated.
        choice: the field tool_choice.

    Raises:
        RequestError: the list is malformed, or contains a function that `tools` does not contain.
    """
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools
    # Store the names in a dict and a set. Comparing each pair of names would be slow, because both
    # lists can be long.
    known_names = dict.fromkeys(tool["function"]["name"] for tool in tools)
    allowed_names = set()
    for tool in _allowed_list(choice):
        name = _function_name(tool)
        if not isinstance(name, str) or name not in known_names:
            raise RequestError(
                f"tool_choice: allowed_tools has the function {shown(name)}, but tools has only "
                f"{', '.join(known_names)}."
            )
        allowed_names.add(name)
    return [tool for tool in tools if tool["function"]["name"] in allowed_names]


def _allowed_list(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the list of tools in a tool_choice of the type allowed_tools.

    The list is the key `tools` of the object `allowed_tools` (chat completions API), or of
    tool_choice itself (Responses API).

    Raises:
        RequestError: the value is not a list of objects.
    """
    object_with_list = choice.get("allowed_tools", choice)
    allowed = object_with_list.get("tools") if isinstance(object_with_list, dict) else None
    if not isinstance(allowed, list) or not all(isinstance(tool, dict) for tool in allowed):
        raise RequestError(
            "tool_choice: allowed_tools.tools must be a list of functions, but the request has "
            f"{shown(allowed)}."
        )
    return allowed


def _function_name(tool: dict[str, Any]) -> Any:  # noqa: ANN401 - any JSON value
    """Return the name of a tool in an allowed_tools list.

    Examples: {"function": {"name": "f"}}, {"name": "f"} and {"function": "f"} return "f".
    """
    function = tool.get("function") or tool
    return function.get("name") if isinstance(function, dict) else function
