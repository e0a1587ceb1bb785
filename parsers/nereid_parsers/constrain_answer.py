"""Builds the grammar node that the content of an answer must match."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from nereid_parsers.constrain_nodes import Node, const, json_schema, one_of
from nereid_parsers.enforceable_schema import enforceable
from nereid_parsers.errors import ConstraintError, shorten
from nereid_parsers.unenforced_keywords import unenforced

log = logging.getLogger(__name__)

# The types of grammar nodes in xgrammar 0.2.8. A node whose type is in `_LEAF_TYPES`
# contains no other nodes. `_KEY_OF_SINGLE_NODE` contains the types of nodes with exactly one inner
# node, and the key of this inner node. `_KEY_OF_NODE_LIST` contains the types of nodes with several
# inner nodes, and the key of the list of inner nodes.
_LEAF_TYPES = frozenset({
    "const_string", "json_schema", "any_text", "token", "exclude_token", "any_tokens", "grammar",
    "regex", "qwen_xml_parameter", "dispatch", "token_dispatch",
})  # fmt: skip
_KEY_OF_SINGLE_NODE = dict.fromkeys(("tag", "optional", "plus", "star", "repeat"), "content")
_KEY_OF_NODE_LIST = {
    "sequence": "elements",
    "or": "elements",
    "triggered_tags": "tags",
    "token_triggered_tags": "tags",
    "tags_with_separator": "tags",
}
_NODE_TYPES = sorted({*_LEAF_TYPES, *_KEY_OF_SINGLE_NODE, *_KEY_OF_NODE_LIST})


def answer_node(response_format: Mapping[str, Any] | None) -> Node | None:
    """Return the grammar node that the content must match, or None for free text.

    A grammar node is a dict from which xgrammar builds a grammar.

    Examples: `{"type": "regex", "pattern": "[0-9]+"}` is returned unchanged, and
    `{"type": "choice", "choice": ["a"]}` gives `{"type": "const_string", "value": "a"}`.

    Args:
        response_format: The OpenAI field `response_format`, or an object with one of these types:
            "structural_tag"  a structural tag of xgrammar, in the current or in the older form
            "regex"           the key `pattern` contains a regular expression
            "grammar"         the key `grammar` contains a grammar in EBNF
            "choice"          the key `choice` contains a list of strings

    Raises:
        ConstraintError: `response_format` is not valid. The message names the invalid field.
    """
    if response_format is None:
        return None
    kind = response_format.get("type")
    match kind:
        case "text":
            return None
        case "json_object":
            return json_schema({"type": "object"})
        case "json_schema":
            return _json_schema_node(response_format)
        case "structural_tag":
            return _structural_tag_node(response_format)
        case "regex":
            return {"type": "regex", "pattern": _required_text(response_format, "pattern")}
        case "grammar":
            return {"type": "grammar", "grammar": _required_text(response_format, "grammar")}
        case "choice":
            return _choice_node(response_format.get("choice"))
    raise ConstraintError(
        "response_format: type must be text, json_object, json_schema, structural_tag, regex, "
        f"grammar or choice, but is {shorten(kind)}"
    )


def report_unenforced(schema: Any, is_strict: bool, field: str) -> None:  # noqa: ANN401  # JSON
    """Log a warning with the keywords of `schema` that constrained decoding does not enforce.

    If the request demands that the whole schema is enforced ("strict"), raise an error instead.

    Args:
        schema: The JSON schema.
        is_strict: Whether the request demands that the whole schema is enforced.
        field: The name of the request's field that contains the schema. Error messages start with
            this name.

    Raises:
        ConstraintError: `is_strict` is true, and decoding does not enforce a keyword of `schema`.
    """
    keywords = unenforced(schema)
    if not keywords:
        return
    if is_strict:
        raise ConstraintError(
            f"{field}: strict is true, but constrained decoding cannot enforce these parts of the "
            f"schema: {'; '.join(keywords)}. Remove these parts, or set strict to false."
        )
    log.warning(
        "%s: constrained decoding does not enforce these parts of the schema: %s",
        field,
        "; ".join(keywords),
    )


def _json_schema_node(response_format: Mapping[str, Any]) -> Node:
    """Return the grammar node for a `response_format` of type `json_schema`.

    Example of a value: `{"json_schema": {"schema": {"type": "integer"}, "strict": true}}`. Some
    clients omit the outer object, so the keys `schema` and `strict` are also accepted without it.
    If `strict` is true, the client demands that the whole schema is enforced.

    Raises:
        ConstraintError: A value has a wrong type, or a strict schema cannot be enforced.
    """
    schema_and_options = response_format.get("json_schema", response_format)
    if not isinstance(schema_and_options, Mapping):
        raise ConstraintError(
            f"response_format: json_schema must be an object, but is {shorten(schema_and_options)}"
        )
    schema = schema_and_options.get("schema", {})
    if not isinstance(schema, Mapping | bool):
        raise ConstraintError(
            "response_format: json_schema.schema must be an object, true or false, but is "
            f"{shorten(schema)}"
        )
    enforceable_schema = enforceable(schema)
    is_strict = bool(schema_and_options.get("strict"))
    report_unenforced(enforceable_schema, is_strict, "response_format")
    return json_schema(enforceable_schema)


def _required_text(response_format: Mapping[str, Any], key: str) -> str:
    """Return the string under `key`. Raise ConstraintError if this string is missing or empty."""
    value = response_format.get(key)
    if not isinstance(value, str) or not value:
        raise ConstraintError(
            f"response_format: {key} must be a string of at least one character, but is "
            f"{shorten(value)}"
        )
    return value


def _choice_node(choices: object) -> Node:
    """Return the grammar node that matches exactly one of the strings in `choices`.

    Example: the node for `["yes", "no"]` matches `yes` and `no`.

    Raises:
        ConstraintError: `choices` is not a list of non-empty strings, or the list is empty.
    """
    if not isinstance(choices, list) or not choices:
        raise ConstraintError(
            "response_format: choice must be a list of at least one string, but is "
            f"{shorten(choices)}"
        )
    for number, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise ConstraintError(
                f"response_format: choice[{number}] must be a string of at least one character, "
                f"but is {shorten(choice)}"
            )
    distinct_choices = dict.fromkeys(choices)
    return one_of(*(const(choice) for choice in distinct_choices))


def _structural_tag_node(response_format: Mapping[str, Any]) -> Node:
    """Return the grammar node for a `response_format` of type `structural_tag`.

    A structural tag is xgrammar's description of a grammar. A structural tag in the older form has
    the keys `structures` and `triggers`. A structural tag in the current form has the key `format`.

    Raises:
        ConstraintError: The structural tag is not valid.
    """
    is_older_form = "structures" in response_format or "triggers" in response_format
    if is_older_form:
        return _legacy_tag_node(response_format)
    node = response_format.get("format")
    _check_node(node, "response_format.format")
    assert isinstance(node, Mapping)  # `_check_node` raises an error for any other value.
    return dict(node)


def _check_node(node: object, path: str) -> None:
    """Raise ConstraintError if xgrammar does not support `node` or a node inside `node`.

    If a schema inside `node` has keywords that xgrammar does not enforce, log a warning.

    Args:
        node: The value that the client has sent as a grammar node.
        path: The path of the node in the request, for use in error messages. Example:
            `response_format.format.elements[0]`.
    """
    node_type = node.get("type") if isinstance(node, Mapping) else None
    if not isinstance(node, Mapping) or not isinstance(node_type, str):
        raise ConstraintError(
            f"{path}: the value must be an object with a string under the key 'type', but is "
            f"{shorten(node)}"
        )
    if node_type not in _NODE_TYPES:
        raise ConstraintError(
            f"{path}.type: the value must be one of {', '.join(_NODE_TYPES)}, but is "
            f"{shorten(node_type)}"
        )
    if node_type == "json_schema":
        schema = node.get("json_schema")
        report_unenforced(schema, bool(node.get("strict")), f"{path}.json_schema")
    for inner, inner_path in _inner_nodes(node, node_type, path):
        _check_node(inner, inner_path)


def _inner_nodes(
    node: Mapping[str, Any], node_type: str, path: str
) -> Iterator[tuple[object, str]]:
    """Yield each direct inner node of `node`, and the path of the inner node in the request.

    Examples for a node at the path `$`: if the type is `sequence`, the path of the first inner node
    is `$.elements[0]`. If the type is `optional`, the path of the only inner node is `$.content`.
    If the type is `const_string`, there are no inner nodes.

    Args:
        node: The grammar node.
        node_type: The type of `node`.
        path: The path of `node` in the request.

    Raises:
        ConstraintError: `node` must contain a list of nodes, but the value is not a list, or is an
            empty list.
    """
    if node_type in _KEY_OF_SINGLE_NODE:
        key = _KEY_OF_SINGLE_NODE[node_type]
        yield node.get(key), f"{path}.{key}"
    elif node_type in _KEY_OF_NODE_LIST:
        key = _KEY_OF_NODE_LIST[node_type]
        inner_nodes = _required_list(node.get(key), f"{path}.{key}")
        for number, inner in enumerate(inner_nodes):
            yield inner, f"{path}.{key}[{number}]"


def _required_list(value: object, path: str) -> list[Any]:
    """Return `value`. Raise ConstraintError if `value` is not a list with at least one member."""
    if not isinstance(value, list) or not value:
        raise ConstraintError(
            f"{path}: the value must be a list of at least one object, but is {shorten(value)}"
        )
    return value


def _legacy_tag_node(response_format: Mapping[str, Any]) -> Node:
    """Convert a structural tag in the older form into a grammar node in the current form.

    Example: `{"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}`
    gives a node of type `triggered_tags` with one tag. This node matches free text. After a
    trigger, the text must match one of the tags.

    Raises:
        ConstraintError: The structural tag is not valid.
    """
    triggers = _required_triggers(response_format.get("triggers"))
    path = "response_format.structures"
    structures = _required_list(response_format.get("structures"), path)
    tags = [
        _legacy_tag(structure, triggers, f"{path}[{number}]")
        for number, structure in enumerate(structures)
    ]
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": tags}


def _required_triggers(value: object) -> list[str]:
    """Validate and return the field `triggers` of a structural tag in the older form.

    Raises:
        ConstraintError: `value` is not a list of non-empty strings, or the list is empty.
    """
    if isinstance(value, list) and value and all(_is_text(item) for item in value):
        return value
    raise ConstraintError(
        "response_format.triggers: the value must be a list of non-empty strings, but it is "
        f"{shorten(value)}"
    )


def _legacy_tag(structure: object, triggers: list[str], path: str) -> Node:
    """Convert one member of `structures`, a list in the older form, into a node of type `tag`.

    Example: `{"begin": "<f>", "schema": {}, "end": "</f>"}` gives a tag with the same `begin` and
    `end`, whose content is any JSON value.

    Args:
        structure: The member, as the client has sent the member.
        triggers: The texts that announce a tag. `begin` must start with one of these texts.
        path: The path of the member in the request, for use in error messages.

    Raises:
        ConstraintError: The member is not valid.
    """
    if not isinstance(structure, Mapping) or not _is_text(structure.get("begin")):
        raise ConstraintError(
            f"{path}: the value must be an object whose key 'begin' has a string of at least one "
            f"character, but is {shorten(structure)}"
        )
    begin = structure["begin"]
    end = structure.get("end")
    if not isinstance(end, str):
        raise ConstraintError(f"{path}.end: the value must be a string, but is {shorten(end)}")
    if not begin.startswith(tuple(triggers)):
        raise ConstraintError(
            f"{path}.begin: the value must start with one of the strings in "
            f"response_format.triggers, but is {shorten(begin)}"
        )
    schema = structure.get("schema", {})
    report_unenforced(schema, False, f"{path}.schema")
    return {"type": "tag", "begin": begin, "content": json_schema(schema), "end": end}


def _is_text(value: object) -> bool:
    """Return whether `value` is a string of at least one character."""
    return isinstance(value, str) and bool(value)
