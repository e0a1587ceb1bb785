"""Convert the field `tool_calls` of a response template into the tool section of a Format.

The field declares how the model writes tool calls. Example:

    {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": true,
     "transform": {"function": "{content}"}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nereid_parsers.errors import FormatError
from nereid_parsers.format import (
    BareKeyArguments,
    Call,
    JsonArguments,
    JsonArray,
    JsonObject,
    TaggedArguments,
    ToolSection,
)
from nereid_parsers.template.calls.call_texts import escape_braces, unescape_braces
from nereid_parsers.template.response.regex_parts import (
    Field,
    OptionalWhitespace,
    Piece,
    Pieces,
    alternatives,
    literal_text,
    marker_spellings,
    text_of_literals,
)
from nereid_parsers.template.response.response_transform import keys_of_transform
from nereid_parsers.tool_declarations import Body

# Maps named groups of a regular expression to fields of a pattern. Other groups become {word}.
_PATTERN_FIELDS = {"name": "{name}", "id": "{id}", "key": "{key}"}


class _CallStart(NamedTuple):
    """The start of a tool call: a marker, and a pattern with the name and the id.

    The marker or the pattern can be empty.
    """

    marker: str
    head: str


def tool_section(field: Mapping[str, Any]) -> ToolSection:
    """Convert the declaration of the field `tool_calls` into the tool section of a format."""
    closes = marker_spellings(field, "close")
    close = closes[0] if closes else ""
    is_array = _describes_all_calls(field)
    calls = [_call(field, start, close, is_array=is_array) for start in _call_starts(field)]
    return ToolSection(tuple(calls))


def _describes_all_calls(field: Mapping[str, Any]) -> bool:
    """Return whether the text of the field is one JSON array with all tool calls.

    The member `transform_each` declares such an array. Otherwise the members `repeats` and
    `transform` declare that the text is one tool call. Without these members, the text is an array.

    >>> _describes_all_calls({"repeats": True}), _describes_all_calls({"content": "json"})
    (False, True)
    """
    describes_one_call = bool(field.get("repeats") or field.get("transform"))
    return bool(field.get("transform_each")) or not describes_one_call


def _call_starts(field: Mapping[str, Any]) -> list[_CallStart]:
    r"""Read the possible starts of a tool call from the declaration of the field `tool_calls`.

    A start consists of a marker and a header with the function's name. The member `open` declares
    only markers. The member `open_pattern` is a regular expression for the marker and the header.

    >>> _call_starts({"open": ["<call>", "<tool>"]})
    [_CallStart(marker='<call>', head=''), _CallStart(marker='<tool>', head='')]
    >>> _call_starts({"open_pattern": r"<call>\s*<f=(?P<name>\w+)>"})
    [_CallStart(marker='<call>', head='\n<f={name}>')]

    Raises:
        FormatError: The field has no opening marker.
    """
    if "open_pattern" in field:
        return [_call_start(pieces) for pieces in alternatives(field["open_pattern"])]
    opens = marker_spellings(field, "open")
    if not opens:
        raise FormatError(
            "the field `tool_calls` of the response_template requires an opening marker. "
            "Declare `open` or `open_pattern`."
        )
    return [_CallStart(marker, "") for marker in opens]


def _call_start(pieces: Pieces) -> _CallStart:
    r"""Convert a split regular expression into the start of a tool call: a marker and a header.

    The expression is one alternative of the member `open_pattern`. The header is a pattern with the
    function's name. The marker is the first literal, unless this literal directly precedes a field.

    >>> _call_start(("<call>", OptionalWhitespace(), "<f=", Field("name"), ">"))
    _CallStart(marker='<call>', head='\n<f={name}>')
    >>> _call_start(("<f=", Field("name"), ">"))
    _CallStart(marker='', head='<f={name}>')
    >>> _call_start(("<call>", OptionalWhitespace()))
    _CallStart(marker='<call>', head='')

    Raises:
        FormatError: The tool call does not start with a literal.
    """
    visible_pieces = _without_leading_whitespace(pieces)
    first_literal = visible_pieces[0] if visible_pieces else None
    if not isinstance(first_literal, str):
        raise FormatError(
            "`open_pattern` of the field `tool_calls` must begin with a literal, but it begins "
            "with a group or is empty"
        )
    has_field = any(isinstance(piece, Field) for piece in visible_pieces)
    if not has_field:
        return _CallStart(text_of_literals(visible_pieces), head="")
    after_literal = visible_pieces[1:]
    precedes_field = isinstance(after_literal[0], Field)
    if precedes_field:
        return _CallStart(marker="", head=_pattern(visible_pieces))
    return _CallStart(first_literal, _pattern(after_literal))


def _without_leading_whitespace(pieces: Pieces) -> Pieces:
    """Remove the white-space pieces at the start of `pieces`."""
    while pieces and isinstance(pieces[0], OptionalWhitespace):
        pieces = pieces[1:]
    return pieces


def _pattern(pieces: Pieces) -> str:
    r"""Convert the pieces of a regular expression into a pattern such as `<f {name}>`.

    An expression for white space becomes a line break, which matches any white space in a pattern.

    >>> _pattern(("<f{x} ", Field("name"), OptionalWhitespace()))
    '<f{{x}} {name}\n'
    """
    return "".join(_pattern_text(piece) for piece in pieces)


def _pattern_text(piece: Piece) -> str:
    """Convert one piece of a regular expression into a pattern."""
    if isinstance(piece, Field):
        return _PATTERN_FIELDS.get(piece.name, "{word}")
    return escape_braces(piece) if isinstance(piece, str) else "\n"


def _call(field: Mapping[str, Any], start: _CallStart, close: str, *, is_array: bool) -> Call:
    """Declare how the model writes a tool call: the marker, the header, the body and the end.

    Args:
        field: The declaration of the field `tool_calls`.
        start: The start of the tool call.
        close: The marker after the tool call.
        is_array: Whether JSON that contains the names is an array of tool calls. Otherwise the JSON
            is one object.
    """
    has_name_in_head = "{name}" in start.head
    body = _body(field, has_name_in_head=has_name_in_head, is_array=is_array)
    contains_name = isinstance(body, JsonObject | JsonArray)
    if contains_name:
        # A header must contain the name. So the text of the header is a part of the marker.
        return Call(body, open=start.marker + unescape_braces(start.head), close=close)
    return Call(body, open=start.marker, head=start.head, close=close)


def _body(field: Mapping[str, Any], *, has_name_in_head: bool, is_array: bool) -> Body:
    """Declare the body of a tool call, which contains the arguments and sometimes the name.

    The member `content` of the field is the form of the body, and the member `content_args`
    describes this form. Example: {"content": "json"} is the body `JsonArguments` if the header
    contains the name.

    Args:
        field: The declaration of the field `tool_calls`.
        has_name_in_head: Whether the function's name precedes the body.
        is_array: Whether JSON that contains the names is an array of tool calls.

    Raises:
        FormatError: The field declares a form of arguments that a `Body` cannot express.
    """
    content = field.get("content", "text")
    options = field.get("content_args") or {}
    if content == "xml-inline":
        return _tagged_arguments(options)
    if content != "json":
        raise FormatError(
            f"the `content` of `tool_calls` must be 'json' or 'xml-inline', but it is {content!r}"
        )
    if options.get("unquoted_keys") and options.get("string_delims"):
        return _unquoted_key_arguments(options["string_delims"])
    if has_name_in_head:
        return JsonArguments()
    keys = keys_of_transform(field.get("transform"))  # The JSON also contains the name.
    return JsonArray(keys) if is_array else JsonObject(keys)


def _unquoted_key_arguments(string_delims: Sequence[Sequence[str]]) -> BareKeyArguments:
    """Declare arguments such as `{a:<q>x<q>}`: keys have no quotes, and strings have delimiters.

    `string_delims` contains pairs of the texts before and after a string. Only the first pair is
    used, because a template renders all strings with one pair.

    >>> _unquoted_key_arguments([["<q>", "<q>"]])
    BareKeyArguments(quote='<q>')

    Raises:
        FormatError: The two texts of the pair differ.
    """
    opening, closing = string_delims[0][:2]
    if opening != closing:
        raise FormatError(
            "the opening and the closing text of `string_delims` must be equal, but they are "
            f"{opening!r} and {closing!r}"
        )
    return BareKeyArguments(opening)


def _tagged_arguments(options: Mapping[str, Any]) -> TaggedArguments:
    r"""Derive the tags around the arguments of a tool call from the expression `tag_pattern`.

    The regular expression matches one argument. It contains the groups `key` and `value`.

    >>> _tagged_arguments({"tag_pattern": r"<a=(?P<key>\w+)>(?P<value>.*?)</a>"})
    TaggedArguments(open='<a={key}>', close='</a>', also=())

    Raises:
        FormatError: The expression contains no key, or no value after the key.
    """
    tag_pattern = str(options.get("tag_pattern", ""))
    # Only the first alternative is used, because a template writes all values in the same tags.
    pieces = alternatives(tag_pattern)[0]
    if not _has_key_before_value(pieces):
        raise FormatError(
            "`tag_pattern` of the response_template must contain the group (?P<key>..), and after "
            "it the group (?P<value>..)"
        )
    value_index = pieces.index(Field("value"))
    before_value = _without_leading_whitespace(pieces[:value_index])
    after_value = pieces[value_index + 1 :]
    # An opening tag is a pattern, because it contains the key. A closing tag is a fixed text.
    return TaggedArguments(open=_pattern(before_value), close=_closing_tag(after_value))


def _has_key_before_value(pieces: Pieces) -> bool:
    """Return whether the pieces contain the field `key`, and after it the field `value`.

    >>> _has_key_before_value(("<", Field("key"), ">", Field("value")))
    True
    """
    names = [piece.name for piece in pieces if isinstance(piece, Field)]
    has_both = "key" in names and "value" in names
    return has_both and names.index("key") < names.index("value")


def _closing_tag(pieces: Pieces) -> str:
    r"""Convert the pieces of a regular expression into the closing tag of an argument.

    A closing tag is a marker, not a pattern, so its braces are not doubled. An expression for white
    space becomes a line break.

    >>> _closing_tag((OptionalWhitespace(), "</a>"))
    '\n</a>'

    Raises:
        FormatError: A piece is a group of the regular expression.
    """
    texts = [
        "\n" if isinstance(piece, OptionalWhitespace) else literal_text(piece) for piece in pieces
    ]
    return "".join(texts)
