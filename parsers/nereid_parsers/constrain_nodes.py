"""Builds the nodes of an xgrammar structural tag from smaller nodes."""

from __future__ import annotations

from typing import Any

# A part of a structural tag: a dict that describes the texts which match. Example:
# `{"type": "const_string", "value": "<a>"}` matches only `<a>`.
Node = dict[str, Any]

# Matches at most two white-space characters. Without this limit, the model could generate white
# space forever.
WHITESPACE: Node = {"type": "regex", "pattern": r"[ \n]{0,2}"}


# The keywords of a JSON schema that describe a value, but do not restrict it.
_DESCRIPTIONS = ("title", "description", "$comment")
# The keywords whose values are JSON data, not schemas.
_DATA_KEYWORDS = ("enum", "const", "default", "examples")

# The simple node for a list contains each possible item twice. If there are more than
# `_MAX_DUPLICATED_ITEMS` possible items, `repeated` returns a smaller node.
_MAX_DUPLICATED_ITEMS = 8


def const(text: str) -> Node:
    """Return the grammar node that matches exactly `text`."""
    return {"type": "const_string", "value": text}


def any_text(excludes: tuple[str, ...] = ()) -> Node:
    """Return the grammar node that matches any text without the strings in `excludes`.

    In a sequence, the text ends where the next node starts. White space at both ends of a string in
    `excludes` is removed, and strings that contain only white space are ignored. Example:
    `any_text((" <a> ",))` gives `{"type": "any_text", "excludes": ["<a>"]}`.
    """
    strings = list(dict.fromkeys(text.strip() for text in excludes if text.strip()))
    return {"type": "any_text", "excludes": strings} if strings else {"type": "any_text"}


def json_schema(schema: object, excludes: str = "") -> Node:
    """Return the grammar node that matches the JSON text of any value that a schema allows.

    The JSON text may contain at most one white-space character between two tokens. Without this
    limit, the model could generate white space forever.

    Example: `json_schema({"type": "boolean"})` matches `true` and `false`.

    Args:
        schema: The JSON schema.
        excludes: A string that the text may not contain, or "".
    """
    node: Node = {
        "type": "json_schema",
        "json_schema": _without_descriptions(schema),
        "max_whitespace_cnt": 1,
    }
    if excludes:
        node["excludes"] = [excludes]
    return node


def _without_descriptions(schema: object) -> object:
    """Return a schema without its descriptive texts, because a grammar does not need these texts.

    Example: `{"type": "string", "description": "A city"}` gives `{"type": "string"}`. A property
    that is called `description` is kept, because its value is a schema and not a text.
    """
    if isinstance(schema, list):
        return [_without_descriptions(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, object] = {}
    for key, value in schema.items():
        is_description = key in _DESCRIPTIONS and isinstance(value, str)
        if is_description:
            continue
        is_data = key in _DATA_KEYWORDS  # The value of `enum`, for example, is not a schema.
        kept[key] = value if is_data else _without_descriptions(value)
    return kept


def sequence(*parts: Node) -> Node:
    """Return the grammar node that matches all `parts`, one after another.

    Nested sequences are flattened, adjacent constants are joined, and empty constants are removed.
    Example: `sequence(const("<a>"), const(""), const("x"))` gives `const("<a>x")`.
    """
    elements = [element for part in parts for element in _elements(part)]
    joined: list[Node] = []
    for element in elements:
        if joined and _is_const(joined[-1]) and _is_const(element):
            joined[-1] = const(joined[-1]["value"] + element["value"])
        elif element != const(""):
            joined.append(element)
    return joined[0] if len(joined) == 1 else {"type": "sequence", "elements": joined}


def _elements(node: Node) -> list[Node]:
    """Return the elements of a node of type `sequence`. A node of another type is put in a list.

    Example: `const("a")` gives `[const("a")]`.
    """
    return list(node["elements"]) if node["type"] == "sequence" else [node]


def _is_const(node: Node) -> bool:
    """Return whether a node matches exactly one text."""
    return bool(node["type"] == "const_string")


def one_of(*options: Node) -> Node:
    """Return the grammar node that matches any one of the options."""
    return options[0] if len(options) == 1 else {"type": "or", "elements": list(options)}


def optional(part: Node) -> Node:
    """Return the grammar node that matches either `part` or the empty text."""
    return {"type": "optional", "content": part}


def repeated(items: list[Node], separator: Node, *, is_single: bool) -> Node:
    """Return the grammar node that matches one or more items, separated by `separator`.

    Each item in the text must match one of the nodes `items`. If `is_single` is true, the node
    matches exactly one item. Example: the items a and b with the separator `,` match `a`, `b,a` and
    `a,a,b`.

    The usual node for a list contains each item twice. If there are many items, and the separator
    is a constant or `WHITESPACE`, the result is a smaller node that contains each item once.
    """
    item = one_of(*items)
    if is_single:
        return item
    has_many_items = len(items) > _MAX_DUPLICATED_ITEMS
    if has_many_items and separator == WHITESPACE:
        # The node for `(item separator)+` contains each item only once. `WHITESPACE` also matches
        # the empty text, so no white space is required after the last item.
        return {"type": "plus", "content": sequence(item, separator)}
    if has_many_items and _is_const(separator):
        return separated_tags(items, separator["value"])  # A node type of xgrammar for lists.
    # The usual node is `item (separator item)*`.
    further_items = {"type": "star", "content": sequence(separator, item)}
    return sequence(item, further_items)


def separated_tags(items: list[Node], separator: str) -> Node:
    """Return the grammar node that matches one or more items, with `separator` between two items.

    The node contains each item once, so the node is smaller than the usual node for a list,
    `item (separator item)*`. The order of the items in the text is free.
    """
    return {
        "type": "tags_with_separator",
        "tags": [tag(item) for item in items],
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": False,
    }


def tag(node: Node) -> Node:
    """Convert a grammar node to a node of type `tag` that matches the same texts as `node`.

    A constant at the start of `node` becomes the tag's `begin`, and a constant at the end becomes
    the tag's `end`. Example: `sequence(const("<a>"), any_text(), const("</a>"))` gives `{"type":
    "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}`.
    """
    begin = ""
    end = ""
    content_elements = _elements(node)
    if _is_const(content_elements[0]):
        begin = content_elements[0]["value"]
        content_elements = content_elements[1:]
    if content_elements and _is_const(content_elements[-1]):
        end = content_elements[-1]["value"]
        content_elements = content_elements[:-1]
    content = sequence(*content_elements) if content_elements else const("")
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def without_outer_whitespace(node: Node) -> Node:
    r"""Remove white space from both ends of the text that `node` matches.

    Only white space in constant texts is removed. Example: `const("\n<a>\n")` gives
    `const("<a>")`.
    """
    elements = _elements(node)
    if _is_const(elements[0]):
        elements[0] = const(elements[0]["value"].lstrip())
    if _is_const(elements[-1]):
        elements[-1] = const(elements[-1]["value"].rstrip())
    return sequence(*elements)
