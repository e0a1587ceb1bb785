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
    OptionalWhitespace,
    Piece,
    Pieces,
    VariableText,
    alternatives,
    literal_text,
    marker_spellings,
    text_of_literals,
)
from nereid_parsers.template.response.response_transform import keys_of_transform
from nereid_parsers.tool_declarations import Body

# Maps the name of a group in a regular expression to the placeholder in a pattern of a format. Any
# other group becomes the placeholder {word}.
_PLACEHOLDERS = {"name": "{name}", "id": "{id}", "key": "{key}"}


class _CallStart(NamedTuple):
    """The text before the body of a tool call, for example `<call><f=save>`.

    Attributes:
        marker: The fixed text that opens the tool call: `<call>`. May be empty.
        head: The pattern that matches the name or the id of the function: `<f={name}>`. May be
            empty.
    """

    marker: str
    head: str


def tool_section(field: Mapping[str, Any]) -> ToolSection:
    """Convert the declaration of the field `tool_calls` into the tool section of a format.

    A tool section declares how a model writes all tool calls of a message. Example:
    {"open": ["<call>", "<tool>"], "close": "</call>", "content": "json"} gives a tool section with
    two variants of a tool call. The first variant starts with `<call>`, the second with `<tool>`.

    Raises:
        FormatError: The declaration is incomplete, or a format cannot express it.
    """
    closes = marker_spellings(field, "close")
    close = closes[0] if closes else ""
    is_array = _is_array_of_calls(field)
    calls = [_declare_call(field, start, close, is_array=is_array) for start in _call_starts(field)]
    return ToolSection(tuple(calls))


def _is_array_of_calls(field: Mapping[str, Any]) -> bool:
    """Return whether the model writes all tool calls of a message as one JSON array.

    `field` is the declaration of the field `tool_calls`. Its member `transform_each` is true for an
    array. A member `repeats` or `transform` shows that the model writes one tool call after the
    other. If all three members are missing, the model writes an array.

    >>> _is_array_of_calls({"repeats": True}), _is_array_of_calls({"content": "json"})
    (False, True)
    """
    if field.get("transform_each"):
        return True
    is_one_call = bool(field.get("repeats") or field.get("transform"))
    return not is_one_call


def _call_starts(field: Mapping[str, Any]) -> list[_CallStart]:
    r"""Return the possible starts of a tool call: the texts before the arguments.

    `field` is the declaration of the field `tool_calls`. Its member `open` contains the marker that
    opens a tool call, or a list of such markers. Its member `open_pattern` contains a regular
    expression, which matches the marker and also a header with the function's name.

    >>> _call_starts({"open": ["<call>", "<tool>"]})
    [_CallStart(marker='<call>', head=''), _CallStart(marker='<tool>', head='')]
    >>> _call_starts({"open_pattern": r"<call>\s*<f=(?P<name>\w+)>"})
    [_CallStart(marker='<call>', head='\n<f={name}>')]

    Raises:
        FormatError: The declaration contains no opening marker.
    """
    if "open_pattern" in field:
        return [_split_call_start(pieces) for pieces in alternatives(field["open_pattern"])]
    opens = marker_spellings(field, "open")
    if not opens:
        raise FormatError(
            "the field `tool_calls` of the response_template requires an opening marker. "
            "Declare `open` or `open_pattern`."
        )
    return [_CallStart(marker, "") for marker in opens]


def _split_call_start(pieces: Pieces) -> _CallStart:
    r"""Split the start of a tool call into a marker and a header with the function's name.

    There are three cases. Without variable text, there is only a marker:

    >>> _split_call_start(("<call>", OptionalWhitespace()))
    _CallStart(marker='<call>', head='')

    If the first literal touches variable text, the literal belongs to the header:

    >>> _split_call_start(("<f=", VariableText("name"), ">"))
    _CallStart(marker='', head='<f={name}>')

    Otherwise the first literal is the marker:

    >>> _split_call_start(("<call>", OptionalWhitespace(), "<f=", VariableText("name"), ">"))
    _CallStart(marker='<call>', head='\n<f={name}>')

    Args:
        pieces: The pieces of a regular expression that matches the start of a tool call. A piece is
            a literal, optional white space or variable text such as the function's name.

    Raises:
        FormatError: The first piece after white space is not a literal.
    """
    visible_pieces = _without_leading_whitespace(pieces)
    first_literal = visible_pieces[0] if visible_pieces else None
    if not isinstance(first_literal, str):
        raise FormatError(
            "`open_pattern` of the field `tool_calls` must begin with a literal, but it begins "
            "with a group or is empty"
        )
    has_variable_text = any(isinstance(piece, VariableText) for piece in visible_pieces)
    if not has_variable_text:
        return _CallStart(text_of_literals(visible_pieces), head="")
    after_literal = visible_pieces[1:]
    touches_variable_text = isinstance(after_literal[0], VariableText)
    if touches_variable_text:
        return _CallStart(marker="", head=_pattern(visible_pieces))
    return _CallStart(first_literal, _pattern(after_literal))


def _without_leading_whitespace(pieces: Pieces) -> Pieces:
    """Return the pieces of a regular expression without optional white space at the start."""
    while pieces and isinstance(pieces[0], OptionalWhitespace):
        pieces = pieces[1:]
    return pieces


def _pattern(pieces: Pieces) -> str:
    r"""Convert the pieces of a regular expression into a pattern of a format, such as `<f {name}>`.

    A pattern contains placeholders in braces, so the braces of a literal are doubled. Optional
    white space becomes a line break, because a line break in a pattern matches any white space.

    >>> _pattern(("<f{x} ", VariableText("name"), OptionalWhitespace()))
    '<f{{x}} {name}\n'
    """
    return "".join(_pattern_text(piece) for piece in pieces)


def _pattern_text(piece: Piece) -> str:
    r"""Return the text in a pattern that corresponds to one piece of a regular expression.

    >>> _pattern_text(VariableText("name")), _pattern_text("{"), _pattern_text(OptionalWhitespace())
    ('{name}', '{{', '\n')
    """
    if isinstance(piece, VariableText):
        return _PLACEHOLDERS.get(piece.name, "{word}")
    return escape_braces(piece) if isinstance(piece, str) else "\n"


def _declare_call(
    field: Mapping[str, Any], start: _CallStart, close: str, *, is_array: bool
) -> Call:
    """Return a `Call`, which declares how the model writes one tool call.

    Example: if the tool call is `<call><f=save>{"path": "a"}</call>`, `start` consists of the
    marker `<call>` and the header `<f={name}>`. The body of the tool call is JSON.

    Args:
        field: The declaration of the field `tool_calls`, which describes the body.
        start: The text before the body.
        close: The marker after the body, or "" if there is none.
        is_array: Whether a body that contains the functions' names is a JSON array of tool calls.
            Otherwise such a body is a JSON object with one tool call.
    """
    has_name_in_head = "{name}" in start.head
    body = _declare_body(field, has_name_in_head=has_name_in_head, is_array=is_array)
    is_name_in_body = isinstance(body, JsonObject | JsonArray)
    if is_name_in_body:
        # In a `Call`, a header must contain the name. So the text of this header, which contains no
        # name, is appended to the marker.
        return Call(body, open=start.marker + unescape_braces(start.head), close=close)
    return Call(body, open=start.marker, head=start.head, close=close)


def _declare_body(field: Mapping[str, Any], *, has_name_in_head: bool, is_array: bool) -> Body:
    """Return the declaration of the body: the part of a tool call that contains the arguments.

    The member `content` of `field` names the form of the body, and the member `content_args`
    contains the options of this form. Example: {"content": "json"} gives `JsonArguments` if the
    function's name precedes the body. If the body itself contains the name, this declaration gives
    `JsonObject` or `JsonArray`.

    Args:
        field: The declaration of the field `tool_calls`.
        has_name_in_head: Whether the function's name precedes the body.
        is_array: Whether a body that contains the functions' names is a JSON array of tool calls.

    Raises:
        FormatError: The declared form is unknown, or its options are invalid.
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
    keys = keys_of_transform(field.get("transform"))  # The body contains the name.
    return JsonArray(keys) if is_array else JsonObject(keys)


def _unquoted_key_arguments(string_delims: Sequence[Sequence[str]]) -> BareKeyArguments:
    """Return the declaration of arguments such as `{a:<q>x<q>}`, whose keys have no quotes.

    `string_delims` contains pairs of texts: the text before a string and the text after the string.
    Only the first pair is used, because a template renders all strings with one pair.

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
    r"""Return the declaration of arguments in tags, such as `<a=path>x</a>`.

    The option `tag_pattern` is a regular expression that matches one argument with its tags. The
    group `key` matches the name of the argument, and the group `value` matches the value.

    >>> _tagged_arguments({"tag_pattern": r"<a=(?P<key>\w+)>(?P<value>.*?)</a>"})
    TaggedArguments(open='<a={key}>', close='</a>', also=())

    Raises:
        FormatError: The expression has no group `key`, or no group `value` after it.
    """
    tag_pattern = str(options.get("tag_pattern", ""))
    # A template writes all arguments in equal tags, so the first alternative is sufficient.
    pieces = alternatives(tag_pattern)[0]
    if not _has_key_before_value(pieces):
        raise FormatError(
            "`tag_pattern` of the response_template must contain the group (?P<key>..), and after "
            "it the group (?P<value>..)"
        )
    value_index = pieces.index(VariableText("value"))
    before_value = _without_leading_whitespace(pieces[:value_index])
    after_value = pieces[value_index + 1 :]
    # The opening tag is a pattern, because it contains the key. The closing tag is a fixed text.
    return TaggedArguments(open=_pattern(before_value), close=_closing_tag(after_value))


def _has_key_before_value(pieces: Pieces) -> bool:
    """Return whether the group `value` follows the group `key` in a regular expression.

    >>> key, value = VariableText("key"), VariableText("value")
    >>> _has_key_before_value(("<", key, ">", value)), _has_key_before_value(("<", value, ">", key))
    (True, False)
    """
    names = [piece.name for piece in pieces if isinstance(piece, VariableText)]
    has_both = "key" in names and "value" in names
    return has_both and names.index("key") < names.index("value")


def _closing_tag(pieces: Pieces) -> str:
    r"""Convert the pieces of a regular expression into the closing tag of an argument.

    A closing tag is a fixed text. Optional white space becomes a line break.

    >>> _closing_tag((OptionalWhitespace(), "</a>"))
    '\n</a>'

    Raises:
        FormatError: A piece is variable text.
    """
    texts = [
        "\n" if isinstance(piece, OptionalWhitespace) else literal_text(piece) for piece in pieces
    ]
    return "".join(texts)
