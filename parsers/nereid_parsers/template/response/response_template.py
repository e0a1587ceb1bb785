r"""Convert a `response_template`, transformers' declaration of a chat format, into a Format.

The declaration is in tokenizer_config.json (transformers 5.23, utils/chat_parsing). For each field
of a message, the declaration states the literal or the regular expression that opens and closes the
field, and how the text of the field is parsed:

    {"start_anchor": "<|im_start|>assistant\n", "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json",
                       "repeats": true, "transform": {"function": "{content}"}},
        "content": {"close": "<|im_end|>"}}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nereid_parsers.errors import FormatError
from nereid_parsers.format import (
    BareKeyArguments,
    Call,
    Format,
    JsonArguments,
    JsonArray,
    JsonObject,
    Reasoning,
    Sections,
    Source,
    TaggedArguments,
    ToolSection,
    Wrapper,
)
from nereid_parsers.template.calls.call_texts import escape_braces
from nereid_parsers.template.conversation import REASONING_FIELDS
from nereid_parsers.template.response.regex_parts import (
    Field,
    OptionalWhitespace,
    Piece,
    Pieces,
    alternatives,
    literal_text,
    text_of_literals,
)
from nereid_parsers.template.response.response_transform import keys_of_transform
from nereid_parsers.tool_declarations import Body

_VERSION = 1
_KNOWN_FIELDS = {*REASONING_FIELDS, "content", "tool_calls"}
# Maps named groups of a regular expression to fields of a pattern. Other groups become {word}.
_PATTERN_FIELDS = {"name": "{name}", "id": "{id}", "key": "{key}"}


class _CallStart(NamedTuple):
    """The start of a tool call: a marker, and a pattern with the name and the id.

    The marker or the pattern can be empty.
    """

    marker: str
    head: str


def format_of_response_template(spec: Mapping[str, Any]) -> Format:
    """Convert a `response_template`, transformers' declaration of a chat format, into a Format.

    Example: {"fields": {"content": {"close": "<end>"}}} declares that `<end>` ends a turn.

    Raises:
        FormatError: The declaration is malformed, or declares something that a Format cannot
            express.
    """
    fields = _checked_fields(spec)
    # The field for reasoning has one of the names of REASONING_FIELDS, such as "reasoning_content".
    reasoning_fields = [fields[name] for name in REASONING_FIELDS if name in fields]
    reasoning = _reasoning(reasoning_fields[0]) if reasoning_fields else None
    content = _content_markers(fields.get("content") or {})
    tools = _tool_section(fields["tool_calls"]) if "tool_calls" in fields else None
    return Format(
        "response_template",
        Sections(reasoning=reasoning, content=content.wrapper, tools=tools),
        ends=content.turn_ends,
        turn=_literals(spec, "start_anchor"),
        sources=(Source("response_template in the checkpoint's tokenizer_config.json"),),
    )


def _checked_fields(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check a `response_template`, and return its member `fields`.

    Each field declares how the model writes one part of a message, such as "tool_calls".

    Raises:
        FormatError: The declaration is malformed, has another version, or has an unknown field.
    """
    if not isinstance(spec, Mapping):
        raise FormatError(f"the response_template must be a JSON object, but it is {spec!r}")
    version = spec.get("version", _VERSION)
    if version != _VERSION:
        raise FormatError(
            f"the response_template has the version {version!r}, but only version {_VERSION} is "
            "supported"
        )
    fields = spec.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise FormatError(
            "`fields` of the response_template must be a dict of fields with at least one field, "
            f"but it is {fields!r}"
        )
    unknown = sorted(set(fields) - _KNOWN_FIELDS)
    if unknown:
        raise FormatError(
            f"the response_template has the unknown fields {unknown}. The known fields are "
            f"{sorted(_KNOWN_FIELDS)}."
        )
    return fields


def _literals(field: Mapping[str, Any], key: str) -> tuple[str, ...]:
    r"""Return all spellings of one marker. `key` selects the marker, for example "open".

    If `key` is "open", the member `open` of the field contains one or more literals, or the member
    `open_pattern` contains a regular expression. The result is () if the field has no such member.

    >>> _literals({"open": "<a>"}, "open"), _literals({"open_pattern": r"<a>|<b>\s*"}, "open")
    (('<a>',), ('<a>', '<b>'))

    Raises:
        FormatError: A regular expression contains a group.
    """
    literal = field.get(key)
    if isinstance(literal, str):
        return (literal,)
    if isinstance(literal, list):
        return tuple(str(spelling) for spelling in literal)
    regex = field.get(f"{key}_pattern")
    if regex is None:
        return ()
    texts = [text_of_literals(pieces).strip() for pieces in alternatives(regex)]
    distinct_texts = dict.fromkeys(texts)
    return tuple(text for text in distinct_texts if text)


def _reasoning(field: Mapping[str, Any]) -> Reasoning:
    """Convert the declaration of the field for reasoning into the reasoning part of a format.

    Example: {"open": "<think>", "close": "</think>"} gives `Reasoning("<think>", "</think>")`.

    Raises:
        FormatError: The declaration has no opening marker or no closing marker.
    """
    opens = _literals(field, "open")
    closes = _literals(field, "close")
    if not opens or not closes:
        raise FormatError(
            "the field for reasoning in the response_template requires both markers, `open` and "
            "`close`"
        )
    return Reasoning(opens[0], closes[0], also_open=opens[1:], also_close=closes[1:])


class _ContentMarkers(NamedTuple):
    """The markers around the content, if any, and the markers that end the turn."""

    wrapper: Wrapper | None
    turn_ends: tuple[str, ...]


def _content_markers(field: Mapping[str, Any]) -> _ContentMarkers:
    """Read the markers from the declaration of the field `content`.

    If the field has no opening marker, there is no wrapper, and the closing markers end the turn.
    Otherwise the first closing marker belongs to the wrapper.

    >>> _content_markers({"close": "<end>"})
    _ContentMarkers(wrapper=None, turn_ends=('<end>',))
    >>> _content_markers({"open": "<a>", "close": ["</a>", "<end>"]})
    _ContentMarkers(wrapper=Wrapper(open='<a>', close='</a>'), turn_ends=('<end>',))
    """
    opens = _literals(field, "open")
    closes = _literals(field, "close")
    if not opens:
        return _ContentMarkers(None, closes)
    wrapper_close = closes[0] if closes else ""
    return _ContentMarkers(Wrapper(opens[0], wrapper_close), turn_ends=closes[1:])


# ---- calls --------------------------------------------------------------------------------------


def _tool_section(field: Mapping[str, Any]) -> ToolSection:
    """Convert the declaration of the field `tool_calls` into the tool section of a format.

    Usually the text of the field is one tool call. But if the declaration has the member
    `transform_each`, or has neither `repeats` nor `transform`, the text is one JSON array with all
    tool calls.
    """
    closes = _literals(field, "close")
    close = closes[0] if closes else ""
    describes_one_call = bool(field.get("repeats") or field.get("transform"))
    describes_all_calls = bool(field.get("transform_each")) or not describes_one_call
    calls = [
        _call(field, start, close, is_array=describes_all_calls) for start in _call_starts(field)
    ]
    return ToolSection(tuple(calls))


def _call_starts(field: Mapping[str, Any]) -> list[_CallStart]:
    """Read the possible starts of a tool call from the declaration of the field `tool_calls`.

    A start consists of a marker and a header with the function's name. The member `open` declares
    only markers. The member `open_pattern` is a regular expression for the marker and the header.

    >>> _call_starts({"open": ["<call>", "<tool>"]})
    [_CallStart(marker='<call>', head=''), _CallStart(marker='<tool>', head='')]

    Raises:
        FormatError: The field has no opening marker.
    """
    if "open_pattern" in field:
        return [_call_start(pieces) for pieces in alternatives(field["open_pattern"])]
    opens = _literals(field, "open")
    if not opens:
        raise FormatError(
            "the field `tool_calls` of the response_template requires an opening marker. "
            "Declare `open` or `open_pattern`."
        )
    return [_CallStart(marker, "") for marker in opens]


def _call_start(pieces: Pieces) -> _CallStart:
    r"""Convert a split regular expression into the start of a tool call: a marker and a header.

    The expression is one alternative of the member `open_pattern`. The header is a pattern with the
    function's name.

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
    if isinstance(after_literal[0], Field):
        # The first literal directly precedes a field, so this literal belongs to the header. The
        # tool call has no marker.
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
    if isinstance(body, JsonObject | JsonArray):
        # The header contains no name, so the whole header becomes a part of the opening marker.
        # A header contains `{{` for each `{` of the text, but a marker contains `{` itself.
        text_of_head = start.head.replace("{{", "{").replace("}}", "}")
        return Call(body, open=start.marker + text_of_head, close=close)
    return Call(body, open=start.marker, head=start.head, close=close)


def _body(field: Mapping[str, Any], *, has_name_in_head: bool, is_array: bool) -> Body:
    """Declare the body of a tool call, which contains the arguments and sometimes the name.

    Example: {"content": "json"} is the body `JsonArguments` if the header contains the name.
    Otherwise the JSON also contains the name, and the body is a `JsonObject` or a `JsonArray`.

    Args:
        field: The declaration of the field `tool_calls`.
        has_name_in_head: Whether the function's name precedes the body.
        is_array: Whether JSON that contains the names is an array of tool calls.

    Raises:
        FormatError: The field declares a form of arguments that a `Body` cannot express.
    """
    content = field.get("content", "text")
    arguments = field.get("content_args") or {}
    if content == "xml-inline":
        return _tagged_arguments(arguments)
    if content != "json":
        raise FormatError(
            f"the `content` of `tool_calls` must be 'json' or 'xml-inline', but it is {content!r}"
        )
    has_unquoted_keys = arguments.get("unquoted_keys") and arguments.get("string_delims")
    if has_unquoted_keys:
        return _unquoted_key_arguments(arguments["string_delims"])
    if has_name_in_head:
        return JsonArguments()
    keys = keys_of_transform(field.get("transform"))
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


def _tagged_arguments(arguments: Mapping[str, Any]) -> TaggedArguments:
    r"""Derive the tags around the arguments of a tool call from the expression `tag_pattern`.

    The regular expression matches one argument. It contains the groups `key` and `value`.

    >>> _tagged_arguments({"tag_pattern": r"<a=(?P<key>\w+)>(?P<value>.*?)</a>"})
    TaggedArguments(open='<a={key}>', close='</a>', also=())

    Raises:
        FormatError: The expression contains no key, or no value after the key.
    """
    tag_pattern = str(arguments.get("tag_pattern", ""))
    # Only the first alternative is used, because a template writes all values in the same tags.
    pieces = alternatives(tag_pattern)[0]
    groups = [piece.name for piece in pieces if isinstance(piece, Field)]
    has_key_and_value = "key" in groups and "value" in groups
    if not has_key_and_value or groups.index("key") > groups.index("value"):
        raise FormatError(
            "`tag_pattern` of the response_template must contain the group (?P<key>..), and after "
            "it the group (?P<value>..)"
        )
    value_index = pieces.index(Field("value"))
    before_value = _without_leading_whitespace(pieces[:value_index])
    after_value = pieces[value_index + 1 :]
    return TaggedArguments(_pattern(before_value), _closing_tag(after_value))


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
