"""Cheap checks of what constrains an answer: tool choice, response format, token biases."""

from collections.abc import Mapping, Sequence
from typing import Any

from nereid_client.errors import shown

RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_MAX_BIAS = 100


def check_response_format(value: Mapping[str, Any]) -> None:
    """Accept the four types; a json_schema must hold a schema.

    Raises: ValueError saying what is missing.
    """
    kind = value.get("type")
    if kind not in RESPONSE_FORMATS:
        raise ValueError(f"type must be one of {', '.join(RESPONSE_FORMATS)}, got {shown(kind)}")
    if kind != "json_schema":
        return
    wrapped = value.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
    if not isinstance(schema, dict | bool):
        raise ValueError(f"json_schema.schema must be a JSON schema, got {shown(schema)}")


def plain_response_format(value: Mapping[str, Any]) -> dict[str, Any]:
    """The same format in OpenAI's form.

    A schema may also stand in the format itself, as `schema` (llama.cpp) or, of a json_object,
    `value` (TGI); without this it would go unheeded.

    Raises: ValueError when what stands there is no schema.
    """
    names = {"json_object": ("schema", "value"), "json_schema": ("schema",)}
    given = [name for name in names.get(str(value.get("type")), ()) if value.get(name) is not None]
    if not given or value.get("json_schema") is not None:
        return dict(value)
    schema = value[given[0]]
    if not isinstance(schema, dict | bool):
        raise ValueError(f"{given[0]} must be a JSON schema, got {shown(schema)}")
    wrapped: dict[str, Any] = {"name": str(value.get("name") or "answer"), "schema": schema}
    if value.get("strict") is not None:
        wrapped["strict"] = value["strict"]
    return {"type": "json_schema", "json_schema": wrapped}


def check_tool_choice(choice: str | Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> None:
    """Accept none, auto, required, one named function, and OpenAI's allowed_tools.

    Raises: ValueError when the choice has another form or names what is not among the tools.
    """
    if choice in ("none", "auto"):
        return
    offered = [_name(tool) for tool in tools]
    if not offered:
        raise ValueError(f"tool_choice: {shown(choice)} needs tools, and there are none")
    for name in _chosen(choice):
        if name not in offered:
            raise ValueError(f"tool_choice: {shown(name)} is not among the tools {shown(offered)}")


def _chosen(choice: str | Mapping[str, Any]) -> list[object]:
    """The names that a choice mentions."""
    if choice == "required":
        return []
    if isinstance(choice, Mapping) and choice.get("type") == "function" and _name(choice):
        return [_name(choice)]
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        if isinstance(allowed, dict) and allowed.get("mode") in ("auto", "required"):
            tools = allowed.get("tools")
            if isinstance(tools, list) and tools and all(map(_name, tools)):
                return [_name(tool) for tool in tools]
    raise ValueError(
        "tool_choice: must be none, auto, required, a function as {type, function: {name}} or "
        f"{{type: allowed_tools, allowed_tools: {{mode, tools}}}}, got {shown(choice)}"
    )


def _name(tool: object) -> object:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def check_logit_bias(value: Mapping[str, float]) -> None:
    """Accept token ids with biases from -100 to 100.

    Raises: ValueError naming the entry.
    """
    for token_id, bias in value.items():
        if not (token_id.isascii() and token_id.isdecimal()):
            raise ValueError(f"keys are token ids, got {shown(token_id)}")
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise ValueError(f"must be between -100 and 100, got {bias} for token {token_id}")
