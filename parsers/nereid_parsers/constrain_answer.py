"""Builds the structural-tag node that the content of an answer must match."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from nereid_parsers.constrain_nodes import Node, const, json_schema, one_of
from nereid_parsers.errors import ConstraintError
from nereid_parsers.unenforced_keywords import unenforced

log = logging.getLogger(__name__)

# The node types of xgrammar 0.2.8, and the keys under which a node contains other nodes.
_NODE_TYPES: dict[str, tuple[str, ...]] = {
    "const_string": (), "json_schema": (), "any_text": (), "token": (), "exclude_token": (),
    "any_tokens": (), "grammar": (), "regex": (), "qwen_xml_parameter": (),
    "sequence": ("elements",), "or": ("elements",), "tag": ("content",),
    "triggered_tags": ("tags",), "token_triggered_tags": ("tags",),
    "tags_with_separator": ("tags",), "optional": ("content",), "plus": ("content",),
    "star": ("content",), "repeat": ("content",), "dispatch": ("rules",),
    "token_dispatch": ("rules",),
}  # fmt: skip
# The value of the first key is one node. The value of each other key is a list of nodes.
_NODE_KEYS = ("content",)
_NODE_LIST_KEYS = ("elements", "tags")


def answer_node(response_format: Mapping[str, Any] | None) -> Node | None:
    """Return the structural-tag node that the content must match, or None for free text.

    Examples: `{"type": "regex", "pattern": "[0-9]+"}` is returned unchanged, and
    `{"type": "choice", "choice": ["a"]}` gives `{"type": "const_string", "value": "a"}`.

    Args:
        response_format: The OpenAI field, or an object of one of these types: structural_tag (in
            xgrammar's form, or in the older form with structures and triggers), regex (with the key
            `pattern`), grammar (with the key `grammar`, in EBNF) or choice (with the key `choice`,
            a list of strings).

    Raises:
        ConstraintError: The object has none of these forms. The message names the field.
    """
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_schema({"type": "object"})
    if kind == "json_schema":
        return _json_schema_node(response_format)
    if kind == "structural_tag":
        return _structural_tag_node(response_format)
    if kind == "regex":
        return {"type": "regex", "pattern": _required_text(response_format, "pattern")}
    if kind == "grammar":
        return {"type": "grammar", "grammar": _required_text(response_format, "grammar")}
    if kind == "choice":
        return _choice_node(response_format.get("choice"))
    raise ConstraintError(
        f"response_format: type {kind!r} is not one of text, json_object, json_schema, "
        "structural_tag, regex, grammar and choice"
    )


def report_unenforced(schema: Any, is_strict: bool, field: str) -> None:  # noqa: ANN401  # JSON
    """Log the keywords of `schema` that constrained decoding does not enforce.

    Args:
        schema: The JSON schema.
        is_strict: Whether the request demands that the whole schema is enforced.
        field: The field of the request that contains the schema. Messages start with this text.

    Raises:
        ConstraintError: `is_strict` is true and the schema has such keywords.
    """
    keywords = unenforced(schema)
    if not keywords:
        return
    if is_strict:
        raise ConstraintError(
            f"{field}: strict is true, but these parts of the schema are not enforced: "
            f"{'; '.join(keywords)}. Remove them, or set strict to false."
        )
    log.warning("%s: these parts of the schema are not enforced: %s", field, "; ".join(keywords))


def _json_schema_node(response_format: Mapping[str, Any]) -> Node:
    """Return the structural-tag node for a response format of type json_schema."""
    spec = response_format.get("json_schema", response_format)
    if not isinstance(spec, Mapping):
        raise ConstraintError(
            f"response_format: json_schema must be an object, but is {_shorten(spec)}"
        )
    schema = spec.get("schema", {})
    if not isinstance(schema, Mapping | bool):
        raise ConstraintError(
            "response_format: json_schema.schema must be an object, true or false, but is "
            f"{_shorten(schema)}"
        )
    report_unenforced(schema, bool(spec.get("strict")), "response_format")
    return json_schema(schema)


def _shorten(value: object) -> str:
    """Return the representation of a value for an error message, cut to 80 characters."""
    return f"{value!r:.80}"


def _required_text(response_format: Mapping[str, Any], key: str) -> str:
    """Return the text under `key`. Raise ConstraintError if the text is missing or empty."""
    value = response_format.get(key)
    if not isinstance(value, str) or not value:
        raise ConstraintError(
            f"response_format: {key} must be a string of at least one character, but is {value!r}"
        )
    return value


def _choice_node(choices: object) -> Node:
    """Return the structural-tag node that matches exactly one of the strings in `choices`."""
    if not isinstance(choices, list) or not choices:
        raise ConstraintError("response_format: choice must be a list of at least one string")
    for number, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise ConstraintError(
                f"response_format: choice[{number}] must be a string of at least one character, "
                f"but is {choice!r}"
            )
    return one_of(*map(const, dict.fromkeys(choices)))


def _structural_tag_node(response_format: Mapping[str, Any]) -> Node:
    """Return the node of a response format of type structural_tag. Two forms are accepted."""
    if "structures" in response_format or "triggers" in response_format:
        return _legacy_tag_node(response_format)
    node = response_format.get("format")
    _check_node(node, "response_format.format")
    assert isinstance(node, Mapping)
    return dict(node)


def _check_node(node: object, path: str) -> None:
    """Raise ConstraintError if xgrammar does not support `node` or a node inside it."""
    kind = node.get("type") if isinstance(node, Mapping) else None
    if not isinstance(node, Mapping) or not isinstance(kind, str):
        raise ConstraintError(
            f"{path}: must be an object with the key 'type', but is {_shorten(node)}"
        )
    if kind not in _NODE_TYPES:
        names = ", ".join(sorted(_NODE_TYPES))
        raise ConstraintError(f"{path}.type: {kind!r} is not one of {names}")
    if kind == "json_schema":
        schema = node.get("json_schema")
        report_unenforced(schema, bool(node.get("strict")), f"{path}.json_schema")
    for key in _NODE_TYPES[kind]:
        inner = node.get(key)
        if key in _NODE_KEYS:
            _check_node(inner, f"{path}.{key}")
        elif key in _NODE_LIST_KEYS:
            if not isinstance(inner, list) or not inner:
                raise ConstraintError(f"{path}.{key}: must be a list of at least one node")
            for number, part in enumerate(inner):
                _check_node(part, f"{path}.{key}[{number}]")


def _legacy_tag_node(response_format: Mapping[str, Any]) -> Node:
    """Convert a structural tag from the older form to a node of the current form.

    Example: `{"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}`
    gives a node of type `triggered_tags` with one tag.
    """
    triggers = response_format.get("triggers")
    structures = response_format.get("structures")
    if not isinstance(triggers, list) or not triggers or not all(map(_is_text, triggers)):
        raise ConstraintError(
            "response_format.triggers: must be a list of at least one string, and no string may be "
            "empty"
        )
    if not isinstance(structures, list) or not structures:
        raise ConstraintError("response_format.structures: must be a list of at least one object")
    tags: list[Node] = []
    for number, structure in enumerate(structures):
        place = f"response_format.structures[{number}]"
        if not isinstance(structure, Mapping) or not _is_text(structure.get("begin")):
            raise ConstraintError(
                f"{place}: must be an object whose key 'begin' contains a string of at least one "
                "character"
            )
        end = structure.get("end")
        if not isinstance(end, str):
            raise ConstraintError(f"{place}.end: must be a string, but is {end!r}")
        begin = structure["begin"]
        if not any(begin.startswith(trigger) for trigger in triggers):
            raise ConstraintError(
                f"{place}.begin: must start with one of the strings in response_format.triggers, "
                f"but is {begin!r}"
            )
        schema = structure.get("schema", {})
        report_unenforced(schema, False, f"{place}.schema")
        tags.append({"type": "tag", "begin": begin, "content": json_schema(schema), "end": end})
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": tags}


def _is_text(value: object) -> bool:
    """Return whether `value` is a string of at least one character."""
    return isinstance(value, str) and bool(value)
