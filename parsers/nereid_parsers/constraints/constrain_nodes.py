"""Builds xgrammar's grammar nodes, which describe the texts that a model may write.

A structural tag is the JSON object from which xgrammar builds the grammar of a model's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from nereid_parsers.constraints.enforceable_pattern import check_pattern
from nereid_parsers.constraints.unenforced_keywords import SCHEMA_MAP_KEYWORDS, VALUE_KEYWORDS
from nereid_parsers.errors import ConstraintError

# A grammar node is a dict that describes a set of texts for xgrammar. Example: `{"type":
# "const_string", "value": "<a>"}` matches only the text `<a>`.
Node = dict[str, Any]

# A grammar node that matches only the empty text. The function `sequence` removes such nodes.
NOTHING: Node = {"type": "const_string", "value": ""}
# Matches at most two white-space characters. Without this limit, the model could generate white
# space forever.
WHITESPACE: Node = {"type": "regex", "pattern": r"[ \n]{0,2}"}

# Matches at most two line breaks before an answer. The parser removes line breaks before an answer,
# but not spaces. A space would belong to the answer, which would not match the request's pattern.
LINE_BREAKS: Node = {"type": "regex", "pattern": r"\n{0,2}"}

# Schema keywords for human readers. These keywords do not restrict the value.
_DESCRIPTIONS = ("title", "description", "$comment")

# Usually, `one_or_more` returns the grammar `item (separator item)*`, which contains all
# alternatives for `item` twice. If there are more than `_MAX_DUPLICATED_ITEMS` alternatives,
# `one_or_more` tries to build a smaller grammar.
_MAX_DUPLICATED_ITEMS = 8
# The maximum number of characters in the constants and schemas of one grammar. In some formats, the
# arguments of a tool call are separate texts instead of one JSON object. The grammar then contains
# a separate schema for each argument, with a copy of all definitions (`$defs`) of the tool's
# schema. Without this limit, the grammar for a request of 1 MB could need gigabytes.
_MAX_CHARS = 2**22
_CHARS_OF_CONST = 40  # The JSON text of a constant without its value.


class _Size:
    """The number of characters in the constants and schemas of the grammar that is being built."""

    num_chars = 0


_size: ContextVar[_Size | None] = ContextVar("_size", default=None)


@contextmanager
def limited_size() -> Iterator[None]:
    """Limit the size of the grammar whose nodes are built in the `with` block.

    Raises:
        ConstraintError: The constants and schemas have more than `_MAX_CHARS` characters.
    """
    token = _size.set(_Size())
    try:
        yield
    finally:
        _size.reset(token)


def count_chars(num_chars: int) -> None:
    """Add `num_chars` to the size of the grammar that is being built.

    Raise ConstraintError if the grammar exceeds its limit. Outside of a `with limited_size()`
    block, do nothing.
    """
    size = _size.get()
    if size is None:
        return
    size.num_chars += num_chars
    if size.num_chars > _MAX_CHARS:
        raise ConstraintError(
            f"tools: the grammar of the tool calls would exceed the limit of {_MAX_CHARS} "
            "characters. If a schema has definitions, each argument may need a copy of all "
            "definitions. Use fewer tools, fewer arguments or smaller schemas."
        )


def const(text: str) -> Node:
    """Return the grammar node that matches exactly `text`."""
    count_chars(len(text) + _CHARS_OF_CONST)
    return {"type": "const_string", "value": text}


def any_text(excludes: tuple[str, ...] = ()) -> Node:
    """Return the grammar node for any text that contains none of the strings in `excludes`.

    In a sequence, the text ends where the next node starts. White space at both ends of a string in
    `excludes` is removed, and strings that contain only white space are ignored. Example:
    `any_text((" <a> ",))` gives `{"type": "any_text", "excludes": ["<a>"]}`.
    """
    strings = list(dict.fromkeys(text.strip() for text in excludes if text.strip()))
    return {"type": "any_text", "excludes": strings} if strings else {"type": "any_text"}


def text_without(texts: tuple[str, ...]) -> Node:
    """Return the grammar node for any text that contains none of `texts`, such as `; days=`.

    In contrast to `any_text`, white space at both ends of each text is kept. `texts` must not be
    empty.
    """
    count_chars(sum(len(text) + _CHARS_OF_CONST for text in texts))
    return {"type": "any_text", "excludes": list(texts)}


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
        "json_schema": _grammar_schema(schema),
        "max_whitespace_cnt": 1,
    }
    if excludes:
        node["excludes"] = [excludes]
    return node


def _grammar_schema(schema: object) -> object:
    """Return a copy of a schema without descriptions and harmful patterns.

    Example: `{"type": "string", "description": "A city"}` gives `{"type": "string"}`.

    - Descriptions, such as `title`, do not restrict the value, so the grammar does not need them.
    - With the pattern `^"$`, the model could write a text that is not valid JSON.
    - Because of the pattern `(?<!a)b`, xgrammar would refuse the whole grammar.

    If `schema` is a list of schemas, return a list of such copies. Return any other value, such as
    a number, unchanged.

    Mutates: the size of the grammar, to which the characters of the schema are added. See
        `limited_size`.
    """
    _count_own_chars(schema)
    if isinstance(schema, list):
        return [_grammar_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        keyword: _grammar_value(keyword, value)
        for keyword, value in schema.items()
        if not _is_omitted(keyword, value)
    }


def _is_omitted(keyword: str, value: object) -> bool:
    """Return whether the grammar's copy of a schema omits a keyword.

    Descriptions and harmful patterns are omitted, for the reasons that `_grammar_schema` gives.
    Example: the result is True for `title` and the value `"City"`.
    """
    is_description = keyword in _DESCRIPTIONS and isinstance(value, str)
    return is_description or (keyword == "pattern" and _is_harmful_pattern(value))


def _grammar_value(keyword: str, value: object) -> object:
    """Copy the value of a keyword of a schema, without the descriptions of the schemas inside it.

    Two uses of the word `description` are no descriptions of a schema and are kept:

        {"enum": [{"description": "A city"}]}   The word is a part of an allowed value.
        {"properties": {"description": {..}}}   The word is the name of a property.

    Mutates: the size of the grammar, to which the characters of the value are added. See
        `limited_size`.
    """
    if keyword in VALUE_KEYWORDS:  # Such as `enum`, whose value contains no schemas.
        _count_all_chars(value)
        return value
    if keyword in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):  # Such as `properties`.
        _count_own_chars(value)
        return {name: _grammar_schema(inner) for name, inner in value.items()}
    return _grammar_schema(value)  # This function also counts the characters.


def _count_own_chars(value: object) -> None:
    """Add the length of a JSON value, but not of the values inside it, to the size of the grammar.

    The length depends on the type of the value:

        "bc"             the length of the string: 2
        {"a": [..]}      the length of each key, and 2 for its colon and comma: 3
        [1, 2, 3]        2 for each item: 6
        12               the length of its text: 2
    """
    if isinstance(value, str):
        count_chars(len(value))
    elif isinstance(value, dict):
        count_chars(sum(map(len, value)) + 2 * len(value))
    elif isinstance(value, list):
        count_chars(2 * len(value))
    else:
        count_chars(len(str(value)))


def _count_all_chars(value: object) -> None:
    """Add the length of a JSON value, and of all values inside it, to the size of the grammar."""
    _count_own_chars(value)
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _count_all_chars(inner)


def _is_harmful_pattern(pattern: object) -> bool:
    """Return whether a pattern would allow invalid JSON, or make xgrammar refuse the grammar.

    `pattern` is the value of the keyword `pattern`. Examples: the result is True for `^"$`, because
    JSON needs a backslash before the quotation mark, and for `(?<!a)b`, because xgrammar refuses
    lookbehinds. The result is False for `^[a-z]+$`.
    """
    error = check_pattern(pattern) if isinstance(pattern, str) else None
    return error is not None and (error.needs_json_escape or error.is_refused)


def sequence(*parts: Node) -> Node:
    """Return the grammar node that matches all `parts`, one after another.

    The elements of nested sequences become elements of the result, adjacent constants are joined,
    and `NOTHING` is removed. Example: `sequence(const("<a>"), NOTHING, const("x"))` gives
    `const("<a>x")`.
    """
    elements = [element for part in parts for element in elements_of(part)]
    merged: list[Node] = []
    for element in elements:
        if merged and _is_const(merged[-1]) and _is_const(element):
            merged[-1] = const(merged[-1]["value"] + element["value"])
        elif element != NOTHING:
            merged.append(element)
    return merged[0] if len(merged) == 1 else {"type": "sequence", "elements": merged}


def joined(parts: list[Node], separator: str) -> Node:
    """Return the grammar node that matches all `parts` in order, with `separator` between them.

    Example: the parts `const("a")` and `const("b")` with the separator `, ` match `a, b`.
    """
    separated_parts = [sequence(const(separator), part) for part in parts[1:]]
    return sequence(*parts[:1], *separated_parts)


def elements_of(node: Node) -> list[Node]:
    """Return the elements of a `sequence` node as a new list. For any other node, return `[node]`.

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


def one_or_more(items: list[Node], separator: Node) -> Node:
    """Return the grammar node that matches one or more items, separated by `separator`.

    Each item in the text must match one of the nodes in `items`. Example: if the items match `a`
    and `b`, and the separator matches `,`, the node matches `a`, `b,a` and `a,a,b`.

    Usually, the node is `item (separator item)*`, which contains each of `items` twice. If there
    are many items, a smaller node is returned if the separator allows this.
    """
    item = one_of(*items)
    has_many_items = len(items) > _MAX_DUPLICATED_ITEMS
    if has_many_items and separator == WHITESPACE:
        # The node `(item separator)+` requires a separator after the last item as well. This
        # requirement is harmless, because `WHITESPACE` also matches the empty text.
        return {"type": "plus", "content": sequence(item, separator)}
    if has_many_items and _is_const(separator):
        return separated_tags(items, separator["value"])
    further_items = {"type": "star", "content": sequence(separator, item)}
    return sequence(item, further_items)


def separated_tags(items: list[Node], separator: str) -> Node:
    """Return a grammar node that matches one or more of `items`, separated by `separator`.

    The node has the type `tags_with_separator`, and contains each node in `items` once. The node
    matches one or more items in any order, with the text `separator` between two items. Example: if
    the items match `a` and `b`, and the separator is `,`, the node matches `b,a,a`.
    """
    return {
        "type": "tags_with_separator",
        "tags": [tag(item) for item in items],
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": False,
    }


def tag(node: Node) -> Node:
    """Convert `node` to a grammar node of the type `tag` that matches the same texts.

    A constant at the start of `node` becomes the tag's `begin`, and a constant at the end becomes
    the tag's `end`. Example: `sequence(const("<a>"), any_text(), const("</a>"))` gives `{"type":
    "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}`.
    """
    begin = ""
    end = ""
    content = elements_of(node)  # A new list: the elements of a sequence, or the node alone.
    if _is_const(content[0]):
        begin = content.pop(0)["value"]
    if content and _is_const(content[-1]):
        end = content.pop()["value"]
    content_node = sequence(*content) if content else NOTHING
    return {"type": "tag", "begin": begin, "content": content_node, "end": end}


def without_outer_whitespace(node: Node) -> Node:
    r"""Copy a node, and strip white space from the constants at its start and at its end.

    White space is removed only from constants at the start and at the end of `node`. Example:
    `const("\n<a>\n")` gives `const("<a>")`.
    """
    elements = elements_of(node)
    if _is_const(elements[0]):
        elements[0] = const(elements[0]["value"].lstrip())
    if _is_const(elements[-1]):
        elements[-1] = const(elements[-1]["value"].rstrip())
    return sequence(*elements)
