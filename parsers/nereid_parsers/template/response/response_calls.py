"""Convert the field `tool_calls` of a `response_template` into a `ToolSection` object."""

from __future__ import annotations

from collections.abc import Mapping
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
from nereid_parsers.pattern_syntax import escape_braces
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

# This dict maps the name of a regex group to a placeholder. Example: the regular expression
# `<f=(?P<name>\w+)>` becomes the pattern `<f={name}>`. Every other group becomes `{word}`.
_PLACEHOLDERS = {"name": "{name}", "id": "{id}", "key": "{key}"}


class _CallStart(NamedTuple):
    """The start of a tool call, such as `<call><f={name}>`, divided into a marker and a header.

    The body contains the arguments. Example: the text `<call><f=save>` is declared by the marker
    `<call>` and the header `<f={name}>`.

    Attributes:
        marker: The fixed text that opens the tool call, or "".
        head: The pattern of the header, or "". The header contains the name of the function or the
            id of the tool call, for which the pattern contains the placeholder `{name}` or `{id}`.
    """

    marker: str
    head: str


class _TagPieces(NamedTuple):
    """The two tags around the value of an argument, as the parts of a regular expression.

    Attributes:
        opening: The parts before the value, for example those of `<a=(?P<key>..)>`.
        closing: The parts after the value, for example those of `</a>`.
    """

    opening: Pieces
    closing: Pieces


def tool_section(field: Mapping[str, Any]) -> ToolSection:
    """Convert the field `tool_calls` of a `response_template` into a `ToolSection` object.

    A tool section declares how a model writes all tool calls of a message. Example:
    {"open": ["<call>", "<tool>"], "close": "</call>", "content": "json"} gives a tool section with
    two variants of a tool call. The first variant starts with `<call>`, the second with `<tool>`.

    Raises:
        FormatError: The declaration is incomplete, or a format cannot express the declaration.
    """
    # A `Call` can declare only one closing marker. If the field contains several spellings of this
    # marker, only the first is declared.
    close = next(iter(marker_spellings(field, "close")), "")
    calls = [_declare_call(field, start, close) for start in _call_starts(field)]
    return ToolSection(tuple(calls))


def _call_starts(field: Mapping[str, Any]) -> list[_CallStart]:
    r"""Return the possible starts of a tool call, such as `<call>` or `<call><f={name}>`.

    `field` is the declaration of the field `tool_calls`. The member `open` contains the marker that
    opens a tool call, or a list of such markers:

    >>> _call_starts({"open": ["<call>", "<tool>"]})
    [_CallStart(marker='<call>', head=''), _CallStart(marker='<tool>', head='')]

    Instead of `open`, a declaration may contain the member `open_pattern`: a regular expression
    that matches the marker and a header with the function's name. Each alternative of the
    expression gives one start. In a header, a line break means optional white space:

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
    r"""Split the start of a tool call, such as `<call><f={name}>`, into a marker and a header.

    The pieces have one of three forms. Without variable text, all pieces are the marker:

    >>> _split_call_start(("<call>", OptionalWhitespace()))
    _CallStart(marker='<call>', head='')

    If variable text, such as the function's name, directly follows the first literal, all pieces
    are the header:

    >>> _split_call_start(("<f=", VariableText("name"), ">"))
    _CallStart(marker='', head='<f={name}>')

    Otherwise, the first literal is the marker, and the other pieces are the header. In a header,
    optional white space becomes a line break, because a line break matches any white space:

    >>> _split_call_start(("<call>", OptionalWhitespace(), "<f=", VariableText("name"), ">"))
    _CallStart(marker='<call>', head='\n<f={name}>')

    Raises:
        FormatError: The first piece after white space is not a literal.
    """
    visible_pieces = _without_leading_whitespace(pieces)
    has_variable_text = any(isinstance(piece, VariableText) for piece in visible_pieces)
    match visible_pieces:
        case [str(), *_] if not has_variable_text:  # `<call>`
            return _CallStart(text_of_literals(visible_pieces), head="")
        case [str(), VariableText(), *_]:  # `<f={name}>`
            return _CallStart(marker="", head=_make_pattern(visible_pieces))
        case [str(marker), *_]:  # `<call>`, then `<f={name}>`
            return _CallStart(marker, head=_make_pattern(visible_pieces[1:]))
        case _:
            raise FormatError(
                "`open_pattern` of the field `tool_calls` must begin with a literal, but it begins "
                "with a group or is empty"
            )


def _without_leading_whitespace(pieces: Pieces) -> Pieces:
    """Remove optional white space at the start of a regular expression."""
    while pieces and isinstance(pieces[0], OptionalWhitespace):
        pieces = pieces[1:]
    return pieces


def _make_pattern(pieces: Pieces) -> str:
    r"""Convert the parts of a regular expression into a pattern such as `<f {name}>`.

    Each part is converted by `_pattern_of_piece`.

    >>> _make_pattern(("<f{x} ", VariableText("name"), OptionalWhitespace()))
    '<f{{x}} {name}\n'
    """
    return "".join(_pattern_of_piece(piece) for piece in pieces)


def _pattern_of_piece(piece: Piece) -> str:
    r"""Convert one part of a regular expression into a part of a pattern.

    Optional white space becomes a line break, because a line break in a pattern matches any white
    space.

    >>> _pattern_of_piece("f{x}"), _pattern_of_piece(OptionalWhitespace())
    ('f{{x}}', '\n')
    >>> _pattern_of_piece(VariableText("name")), _pattern_of_piece(VariableText("other"))
    ('{name}', '{word}')
    """
    match piece:
        case str():
            return escape_braces(piece)  # A single brace would start a placeholder.
        case OptionalWhitespace():
            return "\n"
        case VariableText(name):
            return _PLACEHOLDERS.get(name, "{word}")  # `{word}` matches any word.


def _declare_call(field: Mapping[str, Any], start: _CallStart, close: str) -> Call:
    """Return a `Call`, which describes how the model writes one tool call.

    There are two forms of tool calls:

        the name is in the header    `<call><f=save>{"path": "a"}</call>`, the header is `<f=save>`
        the name is in the body      `<call><json>{"name": "save", "arguments": ..}</call>`

    In the second form, the text `<json>` contains no name. It is declared as a part of the opening
    marker, and the `Call` has no header.

    `field` is the declaration of the field `tool_calls`, which describes the body. `start` contains
    the text before the body. `close` is the closing marker, or "" if there is none.
    """
    # If `start.head` contains no field for the name, the body must contain the name.
    body = _declare_body(field, start.head)
    is_name_in_body = isinstance(body, JsonObject | JsonArray)
    if not is_name_in_body:
        return Call(body, open=start.marker, head=start.head, close=close)
    # `start.head` is a pattern, in which braces are doubled, but a marker is a fixed text.
    fixed_text = _unescape_braces(start.head)
    return Call(body, open=start.marker + fixed_text, close=close)


def _unescape_braces(pattern: str) -> str:
    """Convert a pattern into a fixed text, in which a brace is not doubled.

    >>> _unescape_braces("<f{{x}}>")
    '<f{x}>'
    """
    return pattern.replace("{{", "{").replace("}}", "}")


def _declare_body(field: Mapping[str, Any], head: str) -> Body:
    """Return a description of how the model writes the arguments of a tool call.

    The member `content` of `field` names the form of the body, "json" or "xml-inline". The member
    `content_args` contains the options of this form. Example: {"content": "json"} declares a JSON
    body.

    `head` is the pattern of the header, which precedes the body. Example: `<f={name}>`.

    Raises:
        FormatError: The declared form is unknown, or its options are invalid.
    """
    options = field.get("content_args") or {}
    if not isinstance(options, Mapping):
        raise FormatError(f"`content_args` must be a JSON object, but it is {options!r}")
    # Without the member `content`, the form is "text", which cannot contain tool calls.
    content = field.get("content", "text")
    match content:
        case "json":
            return _json_body(field, options, is_name_in_header="{name}" in head)
        case "xml-inline":
            return _tagged_arguments(options)
        case _:
            raise FormatError(
                "the `content` of `tool_calls` must be 'json' or 'xml-inline', but it is "
                f"{content!r}"
            )


def _json_body(
    field: Mapping[str, Any], options: Mapping[str, Any], *, is_name_in_header: bool
) -> Body:
    """Return a description of a JSON body, which contains the arguments of a tool call.

    Unless the header contains the function's name, the body also contains the name. `field` is the
    declaration of the field `tool_calls`. `options` may declare that the keys have no quotes, as in
    `{a:<q>x<q>}`. The option `unquoted_keys` is then true, and the option `string_delims` contains
    the marker around strings, `<q>`. If only one of these two options is set, it is ignored.

    Raises:
        FormatError: An option, or the member `transform` of `field`, is invalid.
    """
    string_delims = options.get("string_delims")
    if options.get("unquoted_keys") and string_delims:
        return _unquoted_key_arguments(string_delims)
    return JsonArguments() if is_name_in_header else _json_with_name(field)


def _json_with_name(field: Mapping[str, Any]) -> JsonObject | JsonArray:
    """Describe JSON that contains both the function's name and the arguments of a tool call.

    The body is a JSON object with one tool call, or a JSON array of tool calls. The members of
    `field`, the declaration of the field `tool_calls`, show which of them the model writes. The
    first member in this list that is set decides:

        transform_each    an array. The rule in `transform` converts each item into a tool call.
        repeats           an object. The field occurs once for each tool call.
        transform         an object. The rule converts the whole object into one tool call.
        no member         an array with all tool calls of the message

    Raises:
        FormatError: The member `transform` is malformed.
    """
    keys = keys_of_transform(field.get("transform"))
    if field.get("transform_each"):
        return JsonArray(keys)
    if field.get("repeats") or field.get("transform"):
        return JsonObject(keys)
    return JsonArray(keys)


def _unquoted_key_arguments(string_delims: object) -> BareKeyArguments:
    """Describe arguments whose keys have no quotes, as in `{a:<q>x<q>}`.

    The option `string_delims` is a list of pairs: the text before a string value, and the text
    after the string value. Only the first pair is used, because a template renders all strings with
    one pair.

    >>> _unquoted_key_arguments([["<q>", "<q>"]])
    BareKeyArguments(quote='<q>')

    Raises:
        FormatError: The option contains no pair, or the two texts of the first pair differ.
    """
    match string_delims:
        case [[str(opening), str(closing), *_], *_]:
            if opening != closing:
                raise FormatError(
                    "the opening and the closing text of `string_delims` must be equal, but they "
                    f"are {opening!r} and {closing!r}"
                )
            return BareKeyArguments(opening)
        case _:
            raise FormatError(
                f"`string_delims` must be a list of pairs, but it is {string_delims!r}"
            )


def _tagged_arguments(options: Mapping[str, Any]) -> TaggedArguments:
    r"""Describe arguments that are each written between two tags, such as `<a=path>x</a>`.

    The option `tag_pattern` is a regular expression that matches one argument with its tags. The
    group `key` matches the name of the argument, and the group `value` matches the value. The text
    before the value becomes the opening tag, and the text after the value the closing tag:

    >>> arguments = _tagged_arguments({"tag_pattern": r"<a=(?P<key>\w+)>(?P<value>.*?)</a>"})
    >>> arguments.open, arguments.close
    ('<a={key}>', '</a>')

    Raises:
        FormatError: The expression has no group `key`, or no group `value` after it, or the closing
            tag contains variable text.
    """
    tag_pattern = str(options.get("tag_pattern", ""))
    # A template writes all arguments with the same tags, so the first alternative of the expression
    # is sufficient.
    first_alternative, *_ = alternatives(tag_pattern)
    tags = _split_at_value(first_alternative)
    # The parser searches for the opening tag, so the tag must start with visible text.
    opening_tag = _make_pattern(_without_leading_whitespace(tags.opening))
    return TaggedArguments(open=opening_tag, close=_closing_tag(tags.closing))


def _split_at_value(pieces: Pieces) -> _TagPieces:
    """Divide a regular expression for an argument into the parts before and after the value.

    Example: the parts of `<a=(?P<key>..)>(?P<value>..)</a>` are divided into the opening tag
    `<a=(?P<key>..)>` and the closing tag `</a>`. `pieces` are the parts of the expression.

    Raises:
        FormatError: The expression has no group `value`, or no group `key` before it.
    """
    groups = [piece.name for piece in pieces if isinstance(piece, VariableText)]
    has_both = "key" in groups and "value" in groups
    if not has_both or groups.index("value") < groups.index("key"):
        raise FormatError(
            "`tag_pattern` of the response_template must contain the group (?P<key>..), and after "
            "it the group (?P<value>..)"
        )
    value_index = pieces.index(VariableText("value"))
    return _TagPieces(opening=pieces[:value_index], closing=pieces[value_index + 1 :])


def _closing_tag(pieces: Pieces) -> str:
    r"""Convert the parts of a closing tag into a fixed text. Optional white space becomes "\n".

    >>> _closing_tag((OptionalWhitespace(), "</a>"))
    '\n</a>'

    Raises:
        FormatError: A part is variable text, so the tag is not a fixed text.
    """
    return "".join(
        "\n" if isinstance(piece, OptionalWhitespace) else literal_text(piece) for piece in pieces
    )
