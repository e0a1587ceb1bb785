"""Builds the grammar node that the content of an answer must match."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nereid_parsers.constraints.constrain_nodes import Node, const, json_schema, one_of
from nereid_parsers.constraints.enforceable_schema import rewrite_for_xgrammar
from nereid_parsers.constraints.report_unenforced import report_keywords, report_unenforced
from nereid_parsers.constraints.unenforced_keywords import (
    unenforced_keywords_of_answer,
)
from nereid_parsers.errors import ConstraintError, shorten

# The types of grammar nodes (dicts) in xgrammar 0.2.8. A node with a type in `_LEAF_TYPES` contains
# no other nodes. The two dicts below map each of the other types to a key. A node of such a type
# stores its inner nodes under this key. Example: a node of type `star` stores its inner node under
# the key `content`.
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
    """Return the grammar node that the content must match, or None if any text is allowed.

    A grammar node is a dict from which xgrammar builds a grammar. Examples:

        response_format                         result
        {"type": "text"}                        None
        {"type": "choice", "choice": ["a"]}     {"type": "const_string", "value": "a"}
        {"type": "regex", "pattern": "[0-9]"}   {"type": "regex", "pattern": "[0-9]"}

    Args:
        response_format: The OpenAI field `response_format`, or an object with one of these types,
            which OpenAI does not define:
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


def _json_schema_node(response_format: Mapping[str, Any]) -> Node:
    """Return the grammar node for a `response_format` of type `json_schema`.

    Example: `{"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}` gives a node
    that matches `5`. Some clients write the key `schema` next to `type`, without the inner object.
    The key `strict` next to `schema` demands that the whole schema is enforced.
    """
    schema_and_strict = response_format.get("json_schema", response_format)
    if not isinstance(schema_and_strict, Mapping):
        raise ConstraintError(
            f"response_format: json_schema must be an object, but is {shorten(schema_and_strict)}"
        )
    declared_schema = schema_and_strict.get("schema", {})  # `{}` accepts any value.
    if not isinstance(declared_schema, Mapping | bool):
        raise ConstraintError(
            "response_format: json_schema.schema must be an object, true or false, but is "
            f"{shorten(declared_schema)}"
        )
    schema = rewrite_for_xgrammar(declared_schema)
    is_strict = bool(schema_and_strict.get("strict"))
    unenforced = unenforced_keywords_of_answer(schema)
    report_keywords(unenforced, is_strict=is_strict, field="response_format")
    return json_schema(schema)


def _required_text(response_format: Mapping[str, Any], key: str) -> str:
    """Return the string under `key`. Raise ConstraintError if the string is missing or empty."""
    value = response_format.get(key)
    if not isinstance(value, str) or not value:
        raise ConstraintError(
            f"response_format: {key} must be a string of at least one character, but is "
            f"{shorten(value)}"
        )
    return value


def _choice_node(choices: object) -> Node:
    """Return the grammar node that matches any one of the strings in `choices`, and nothing else.

    Example: the node for `["yes", "no"]` matches `yes` and `no`.
    """
    if not isinstance(choices, list) or not choices:
        raise ConstraintError(
            "response_format: choice must be a list of at least one string, but is "
            f"{shorten(choices)}"
        )
    for index, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise ConstraintError(
                f"response_format: choice[{index}] must be a string of at least one character, "
                f"but is {shorten(choice)}"
            )
    distinct_choices = dict.fromkeys(choices)
    return one_of(*(const(choice) for choice in distinct_choices))


def _structural_tag_node(response_format: Mapping[str, Any]) -> Node:
    """Return the grammar node for a `response_format` of type `structural_tag`.

    A structural tag is xgrammar's description of a grammar. In the current form, the key `format`
    contains a grammar node, which is returned. In the older form, the keys `structures` and
    `triggers` describe the grammar. These keys are converted to a grammar node.
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

    The JSON schemas inside `node` are checked too. If xgrammar does not enforce a keyword of a
    schema, a warning is logged. If the node with this schema is strict, an error is raised instead.

    `path` is the path of the node in the request, such as `response_format.format.elements[0]`.
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
        is_strict = bool(node.get("strict"))
        report_unenforced(node.get("json_schema"), is_strict=is_strict, field=f"{path}.json_schema")
    for inner, inner_path in _inner_nodes(node, node_type, path):
        _check_node(inner, inner_path)


def _inner_nodes(
    node: Mapping[str, Any], node_type: str, path: str
) -> Iterator[tuple[object, str]]:
    """Yield a pair for each child of a grammar node: the child, and its path in the request.

    Examples for children `a` and `b`, and the path `$`:

        node                                        yielded values
        {"type": "sequence", "elements": [a, b]}    (a, "$.elements[0]"), (b, "$.elements[1]")
        {"type": "optional", "content": a}          (a, "$.content")
        {"type": "const_string", "value": "text"}   none
    """
    if node_type in _KEY_OF_SINGLE_NODE:
        key = _KEY_OF_SINGLE_NODE[node_type]
        yield node.get(key), f"{path}.{key}"
    elif node_type in _KEY_OF_NODE_LIST:
        key = _KEY_OF_NODE_LIST[node_type]
        inner_nodes = _required_list(node.get(key), f"{path}.{key}")
        for index, inner in enumerate(inner_nodes):
            yield inner, f"{path}.{key}[{index}]"


def _required_list(value: object, path: str) -> list[Any]:
    """Return `value`, which must be a non-empty list. Raise ConstraintError for any other value."""
    if not isinstance(value, list) or not value:
        raise ConstraintError(
            f"{path}: the value must be a list of at least one object, but is {shorten(value)}"
        )
    return value


def _legacy_tag_node(response_format: Mapping[str, Any]) -> Node:
    """Convert a structural tag in the older form (`structures`, `triggers`) to a grammar node.

    Example: `{"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}`
    gives a node of type `triggered_tags` with one tag. The node matches free text that may contain
    `<f>`, a JSON value and `</f>`. Text that starts with the trigger `<f` must match the tag.
    """
    triggers = response_format.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(map(_is_text, triggers)):
        raise ConstraintError(
            "response_format.triggers: the value must be a list of non-empty strings, but it is "
            f"{shorten(triggers)}"
        )
    path = "response_format.structures"
    structures = _required_list(response_format.get("structures"), path)
    tags = [
        _legacy_tag(structure, triggers, f"{path}[{index}]")
        for index, structure in enumerate(structures)
    ]
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": tags}


def _legacy_tag(structure: object, triggers: list[str], path: str) -> Node:
    """Convert one member of the request's `structures` list to a grammar node of type `tag`.

    Example: `{"begin": "<f>", "schema": {}, "end": "</f>"}` gives a tag that matches `<f>`, any
    JSON value and `</f>`.

    xgrammar starts to enforce a tag at one of the texts in `triggers`, so `begin` must start with
    one of these texts. `path` is the path of the member in the request, for error messages.
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
    # The older form has no key `strict`, so a keyword that xgrammar does not enforce causes only a
    # warning.
    report_unenforced(schema, is_strict=False, field=f"{path}.schema")
    return {"type": "tag", "begin": begin, "content": json_schema(schema), "end": end}


def _is_text(value: object) -> bool:
    """Return whether `value` is a string of at least one character."""
    return isinstance(value, str) and bool(value)
