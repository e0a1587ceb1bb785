"""The fields `tools` and `tool_choice` of the Responses API, translated for a chat completion."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from nereid_client.errors import FieldError, shown
from nereid_client.protocol.refused import Refusal, refuse

Json = dict[str, Any]

REFUSED_IN_TOOLS = {
    "async": Refusal("the client runs the functions, and decides when", (False,)),
    "defer_loading": Refusal("Nereid has no tool search; send only tools to offer now", (False,)),
    "allowed_callers": Refusal("only the model calls functions", (["direct"], [])),
    "output_schema": Refusal("Nereid does not validate the output of a function"),
}
"""Fields that a tool of a response refuses."""


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


def to_chat_tool_choice(choice: str | Json) -> str | Json:
    """Return the field `tool_choice` in the format of chat completions.

    Raises: FieldError if it has no known form.
    """
    if not choice:
        return "auto"
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


def functions_of(tool: Json, place: str) -> list[FunctionTool]:
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
    refuse_nested(place, tool, REFUSED_IN_TOOLS)
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


def refuse_nested(place: str, value: Json | None, table: Mapping[str, Refusal]) -> None:
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
