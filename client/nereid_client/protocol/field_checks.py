"""Checks the fields `response_format`, `tools`, `tool_choice` and `logit_bias`."""

from collections.abc import Mapping, Sequence
from typing import Any

from nereid_client.errors import FieldError, shown

RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_MAX_BIAS = 100

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

    Args:
        value: the response format of the request.
        field: the path of the response format in the body, for the error.

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
    """Raise a FieldError for `field` if the value of `schema_field` is not a JSON schema."""
    if not isinstance(schema, dict | bool):
        raise FieldError(
            field,
            f"{schema_field} must be a JSON schema (an object, true or false), but the request has "
            f"{shown(schema)}",
        )


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Check that all tools of a chat are functions. Refuse other types, such as custom tools.

    Raises: FieldError that names the first tool of another type.
    """
    for index, tool in enumerate(tools):
        kind = tool.get("type", "function")
        if kind != "function" and "function" not in tool:
            raise FieldError(
                "tools",
                f"tools[{index}].type must be function, but the request has {shown(kind)}. A "
                "custom tool can be sent as a function with one parameter of the type string.",
            )


def check_tool_choice(choice: str | Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> None:
    """Check that a tool choice has a known form, and names only tools of this request.

    The known forms are none, auto, required, one function, and OpenAI's allowed_tools.

    Args:
        choice: the field `tool_choice`, in OpenAI's format for chat completions.
        tools: the field `tools`, in OpenAI's format for chat completions.

    Raises: FieldError if the form is unknown, or if the request does not contain a named tool.
    """
    if choice in ("none", "auto"):
        return
    tool_names = [_function_name(tool) for tool in tools]
    if not tool_names:
        raise FieldError(
            "tool_choice",
            f"tool_choice={shown(choice)} requires tools, but the request has none",
        )
    for name in _chosen_names(choice):
        if name not in tool_names:
            raise FieldError(
                "tool_choice",
                f"tool_choice must name one of the tools {shown(tool_names)}, but the request has "
                f"{shown(name)}",
            )


def _chosen_names(choice: str | Mapping[str, Any]) -> list[object]:
    """Return the names of the functions in a tool choice.

    For "required", return an empty list, because the model may then call any function.

    Raises: FieldError if the choice has no known form.
    """
    if choice == "required":
        return []
    names: list[object] = []
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if isinstance(choice, Mapping) and kind == "function":
        names = [_function_name(choice)]
    elif isinstance(choice, Mapping) and kind == "allowed_tools":
        names = _allowed_names(choice.get("allowed_tools"))
    has_unnamed_function = not all(names)
    if names and not has_unnamed_function:
        return names
    raise FieldError(
        "tool_choice",
        'tool_choice must be "none", "auto", "required", a function as {"type": "function", '
        '"function": {"name"}}, or {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}, '
        f"but the request has {shown(choice)}",
    )


def _allowed_names(allowed: object) -> list[object]:
    """Return the names of the functions in an object `allowed_tools`.

    Return an empty list if the object has no known form. For a function without a name, the list
    contains None.
    """
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        return []
    tools = allowed.get("tools")
    return [_function_name(tool) for tool in tools] if isinstance(tools, list) else []


def _function_name(tool: object) -> object:
    """Return the name of a function. Example: {"function": {"name": "f"}} returns "f".

    Return None if the value has another form.
    """
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


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
