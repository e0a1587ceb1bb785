"""Checks the fields `response_format`, `tools`, `tool_choice` and `logit_bias`."""

from collections.abc import Mapping, Sequence
from typing import Any

from nereid_client.errors import FieldError, shown
from nereid_client.protocol.custom_tools import (
    check_unique_names,
    custom_tool_names,
    is_custom,
    read_custom_tool,
)

RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_MAX_BIAS = 100
_TOOL_CHOICES = (
    '"none", "auto", "required", a function as {"type": "function", "function": {"name"}}, a '
    'custom tool as {"type": "custom", "custom": {"name"}}, or {"type": "allowed_tools", '
    '"allowed_tools": {"mode", "tools"}}'
)
"""The forms of a tool choice in OpenAI's format for chat completions, for error messages."""

_SCHEMA_FIELDS = {"json_object": ("schema", "value"), "json_schema": ("schema",)}
"""Maps the type of a response format to the names of the schema field in the APIs of other servers.
"""


def check_response_format(value: Mapping[str, Any], field: str, schema_field: str) -> None:
    """Check that a response format has a known type. The type `json_schema` also needs a schema.

    Args:
        value: the response format, in OpenAI's format for chat completions.
        field: the path of the response format in the body, for the error.
        schema_field: the path of the schema in the body, for the error message.

    Raises: FieldError if the type is unknown or the schema is missing.
    """
    kind = value.get("type")
    if kind not in RESPONSE_FORMATS:
        raise FieldError(
            field,
            f"{field}.type must be one of {', '.join(RESPONSE_FORMATS)}, but the request has "
            f"{shown(kind)}",
        )
    if kind != "json_schema":
        return
    wrapped = value.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
    _check_schema(schema, field, schema_field)


def to_openai_response_format(value: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Convert a response format to the format that OpenAI defines for chat completions.

    Clients of other servers send the schema in another field. Clients of llama.cpp send the schema
    in the field `schema`. Clients of TGI send a json_object with the schema in the field `value`.

    Example: `{"type": "json_object", "schema": S}` becomes
    `{"type": "json_schema", "json_schema": {"name": "answer", "schema": S}}`.

    Raises: FieldError if the value of the schema field is not a schema.
    """
    has_openai_schema = value.get("json_schema") is not None
    possible_fields = _SCHEMA_FIELDS.get(str(value.get("type")), ())
    present_fields = [name for name in possible_fields if value.get(name) is not None]
    if has_openai_schema or not present_fields:
        return dict(value)
    schema_field = present_fields[0]
    schema = value[schema_field]
    _check_schema(schema, field, f"{field}.{schema_field}")
    wrapped: dict[str, Any] = {"name": str(value.get("name") or "answer"), "schema": schema}
    if value.get("strict") is not None:
        wrapped["strict"] = value["strict"]
    return {"type": "json_schema", "json_schema": wrapped}


def _check_schema(schema: object, field: str, schema_field: str) -> None:
    """Raise a FieldError that names `field` if `schema` is not a JSON schema."""
    if not isinstance(schema, dict | bool):
        raise FieldError(
            field,
            f"{schema_field} must be a JSON schema (an object, true or false), but the request has "
            f"{shown(schema)}",
        )


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Check that all tools of a chat are functions or custom tools, and check the custom tools.

    A tool with the key `function` is a function, whatever its type is. The backend checks the
    functions.

    Raises: FieldError that names the first wrong tool, or a name that two tools have.
    """
    for index, tool in enumerate(tools):
        kind = tool.get("type", "function")
        is_function = kind == "function" or "function" in tool
        if is_custom(tool):
            read_custom_tool(tool, f"tools[{index}]")
        elif not is_function:
            raise FieldError(
                "tools",
                f"tools[{index}].type must be function or custom, but the request has "
                f"{shown(kind)}. Nereid has no tools of its own.",
            )
    names = [str(name) for _, name in map(_kind_and_name, tools)]
    # Only the names of custom tools are checked here. The backend checks the names of functions.
    check_unique_names(names, names_to_check=custom_tool_names(tools))


def check_tool_choice(
    choice: str | Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    *,
    given: object = None,
    forms: str = _TOOL_CHOICES,
) -> None:
    """Check that a tool choice has a known form, and names only tools of this request.

    The known forms are none, auto, required, one function, one custom tool, and OpenAI's
    allowed_tools.

    Args:
        choice: the field `tool_choice`, in OpenAI's format for chat completions.
        tools: the field `tools`, in OpenAI's format for chat completions.
        given: the field `tool_choice` as the client sent it, for error messages. None means
            `choice`.
        forms: the forms that the client's API allows, for error messages.

    Raises: FieldError if the form is unknown, or if the request does not contain a named tool.
    """
    given = choice if given is None else given
    if choice in ("none", "auto"):
        return
    offered = [_kind_and_name(tool) for tool in tools]
    if not offered:
        raise FieldError(
            "tool_choice",
            f"tool_choice={shown(given)} requires tools, but the request has none",
        )
    if choice == "required":
        return
    # The offered tools are stored in a set, because a request can contain thousands of tools and
    # choose thousands of them. A tool whose name is not a string is left out, because the backend
    # refuses this tool.
    offered_tools = {(kind, name) for kind, name in offered if isinstance(name, str)}
    chosen = _chosen_tools(choice)
    if not chosen:
        raise FieldError(
            "tool_choice", f"tool_choice must be {forms}, but the request has {shown(given)}"
        )
    for kind, name in chosen:
        if not isinstance(name, str) or (kind, name) not in offered_tools:
            names = [each for kind_of_tool, each in offered if kind_of_tool == kind]
            group = "custom tools" if kind == "custom" else "tools"
            raise FieldError(
                "tool_choice",
                f"tool_choice must name one of the {group} {shown(names)}, but the request has "
                f"{shown(name)}",
            )


def _chosen_tools(choice: str | Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return the kind and the name of each tool that a tool choice names.

    Return an empty list if the choice has no known form, or if one of its tools has no name.

    Example: {"type": "custom", "custom": {"name": "f"}} returns [("custom", "f")].
    """
    if not isinstance(choice, Mapping):
        return []
    match choice.get("type"):
        case "function" | "custom":
            tools = [_kind_and_name(choice)]
        case "allowed_tools":
            tools = _allowed_tools(choice.get("allowed_tools"))
        case _:
            return []
    all_have_names = all(name for _, name in tools)
    return tools if all_have_names else []


def _allowed_tools(allowed: object) -> list[tuple[str, object]]:
    """Return the kind and the name of each tool in an object `allowed_tools`.

    Return an empty list if the object has no known form. The name of a tool without a name is None.
    """
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        return []
    tools = allowed.get("tools")
    return [_kind_and_name(tool) for tool in tools] if isinstance(tools, list) else []


def _kind_and_name(tool: object) -> tuple[str, object]:
    """Return the kind of a tool, which is "function" or "custom", and the name of the tool.

    Example: {"type": "custom", "custom": {"name": "f"}} returns ("custom", "f"). If the value has
    another form, the name is None.
    """
    if not isinstance(tool, Mapping):
        return "function", None
    kind = "custom" if is_custom(tool) else "function"
    inner = tool.get(kind)
    return kind, inner.get("name") if isinstance(inner, Mapping) else None


def check_logit_bias(value: Mapping[str, float]) -> None:
    """Check that each key is a token id, and that each value is between -100 and 100.

    Raises: FieldError that names the wrong entry.
    """
    for token_id, bias in value.items():
        if not (token_id.isascii() and token_id.isdecimal()):
            raise FieldError(
                "logit_bias",
                f"logit_bias must have token ids as keys, but the request has {shown(token_id)}",
            )
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise FieldError(
                "logit_bias",
                f"logit_bias must have values from -{_MAX_BIAS} to {_MAX_BIAS}, but the request "
                f"has {bias:g} for token {token_id}",
            )
