"""Compiles the declaration of a tool call, and matches the start of a tool call."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from nereid_parsers.pattern_syntax import escape_braces, first_literal, split_pattern
from nereid_parsers.stream.bodies.body_reader import BodyReader, Head
from nereid_parsers.stream.bodies.compiled_tags import CompiledTags
from nereid_parsers.stream.bodies.convert_nested_tags import NestedReader
from nereid_parsers.stream.bodies.json_bodies import ArrayReader, JsonArgumentsReader
from nereid_parsers.stream.bodies.json_object import ObjectReader
from nereid_parsers.stream.bodies.python_calls import PythonCallsReader, UnquotedKeyReader
from nereid_parsers.stream.bodies.tagged_arguments import TaggedReader
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.lexer import Lexer, marker_prefix_regex
from nereid_parsers.stream.pattern_matching import (
    MAX_HEAD_CHARS,
    NEED_MORE,
    NO_MATCH,
    Mismatch,
    Pattern,
    PatternMatch,
    compile_pattern,
    looks_like_markup,
    marker_parts,
    skip_whitespace,
)
from nereid_parsers.tool_declarations import (
    BareKeyArguments,
    Call,
    JsonArguments,
    JsonArray,
    JsonObject,
    NestedTags,
    PythonCalls,
    TaggedArguments,
)

_NEVER = "(?!)"  # A regex that never matches.
_ANY_TEXT = ""  # A regex that matches at the start of any text.
_NAME_START = r"\w"  # A regex for the first character of a function's name.


class SectionMarkers(NamedTuple):
    """The markers around all tool calls of a message.

    The white space at both ends of each marker has been removed.

    Attributes:
        opens: The markers that can precede all tool calls, such as `<tool_calls>`. Empty if the
            format has no such marker.
        closes: The markers that can follow all tool calls, such as `</tool_calls>`. Empty if the
            format has no such marker.
        message_ends: The markers that end the message, such as `<|im_end|>`.
        separator: The text between two tool calls, such as `---`, or "".
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    message_ends: tuple[str, ...] = ()
    separator: str = ""


class CompiledCall:
    """The compiled description of one way to write a tool call, such as `<call>{..}</call>`.

    Attributes:
        call: The declaration.
        lacks_opening_marker: Whether the model has omitted the opening marker that the format
            declares. Such a tool call is accepted only if the request offers the function.
        closing_markers: The parts of the closing marker, such as `</function>` and `</tool_call>`.
        end_of_invalid_arguments: A lexer that finds the marker after arguments that are not valid.
    """

    def __init__(
        self, call: Call, section: SectionMarkers, *, lacks_opening_marker: bool = False
    ) -> None:
        """Compile the declaration of a tool call, such as `<call><f={name}>..</f></call>`.

        `section` contains the markers around all tool calls of a message. `call.open` is empty in
        two cases: the format declares no opening marker, or the model may omit the declared marker.
        Only in the second case, `lacks_opening_marker` is true.
        """
        self.call = call
        self.lacks_opening_marker = lacks_opening_marker
        self._section = section
        self.closing_markers = marker_parts(call.close)
        # Finds a marker such as `</call>`, at which invalid arguments end.
        self.end_of_invalid_arguments = Lexer(_recovery_markers(call, section))
        # Matches the opening marker and the header, such as `<call><f={name}>`.
        self._head_pattern: Pattern = compile_pattern(escape_braces(call.open) + call.head)
        # Matches arguments between tags, such as `<p=a>1</p>`. None if the format has no such tags.
        # The arguments of a tool call may end at the header of the next tool call.
        self._tags = _compile_tags(call, section, self._head_pattern)
        # Matches the first visible characters of the arguments, such as `<p=` or `{"`.
        self._body_start = _compile_body_start(call, self._tags)

    @lru_cache(maxsize=256)  # noqa: B019  # A program has few formats, and keeps all of them.
    def for_name(self, name: str) -> CompiledCall:
        """Return the compiled calls of one function, whose name a closing marker may contain.

        Example: for the closing marker `</{name}>`, a call of the function `f` ends at `</f>`.
        """
        call = self.call.for_name(name)
        if call == self.call:
            return self
        lacks_marker = self.lacks_opening_marker
        return CompiledCall(call, self._section, lacks_opening_marker=lacks_marker)

    @property
    def needs_offered_name(self) -> bool:
        """Whether only the name of an offered function shows that the text is a tool call.

        The text before the name does not show this in two cases: the model has omitted the opening
        marker, or the format declares only punctuation, such as the `<` of `<get_weather>`.
        """
        return self.lacks_opening_marker or self.call.starts_with_punctuation

    @property
    def is_unmarked(self) -> bool:
        """Whether the tool call starts without a fixed text, such as `<call>` or `<function=`."""
        return not self.call.trigger

    @property
    def may_repeat_object(self) -> bool:
        """Whether a model may write several objects between the markers: `<call>{..}{..}</call>`.

        The format declares one JSON object between an opening and a closing marker.
        """
        has_both_markers = bool(self.call.open.strip() and self.closing_markers)
        return has_both_markers and isinstance(self.call.body, JsonObject)

    def match(self, text: str, pos: int, is_final: bool) -> Head | Mismatch:
        """Match the start of a tool call at `pos`.

        A tool call consists of an opening marker, a header that may contain the function's name,
        and a body that contains the arguments. Ordinary text may contain the marker, so a tool call
        matches only if a body starts after the header. The marker and the header together have at
        most `MAX_HEAD_CHARS` characters. Examples for the marker `<call>`, the header `{name}`, and
        a JSON object as the body:

            text            result
            `<call>sum{`    `Head(end=9, name="sum")`
            `<call>sum`     NEED_MORE, because the body may follow
            `<call>sum is`  NO_MATCH, because a body starts with `{`

        Return the matched header, NEED_MORE or NO_MATCH.
        """
        return match_limited_head(self._match_head, text, pos, is_final)

    def _match_head(self, text: str, pos: int, is_final: bool) -> Head | Mismatch:
        """Do the same as `match`, but do not limit the length of the header."""
        match = self._head_pattern.match(text, pos, is_final)
        if not isinstance(match, PatternMatch):
            return match
        name = match.fields.get("name", "")
        # If the body is empty, the closing marker follows the header. This marker may contain the
        # name of the function, as in `</f>`, so `for_name` inserts the name into the marker.
        mismatch = self.for_name(name).body_start_mismatch(text, match.end, is_final)
        if mismatch is not None:
            return mismatch
        # An example of a template is `functions.{name}:{number}`. If the header does not contain
        # all fields of the template, the id is "".
        call_id = _fill_in_id(self.call.id, match.fields)
        return Head(match.end, name=name, call_id=call_id)

    def body_start_mismatch(self, text: str, head_end: int, is_final: bool) -> Mismatch | None:
        """Return None if arguments start at `head_end`. Otherwise return NEED_MORE or NO_MATCH.

        The first characters of the text decide. Examples for tool calls in a JSON array: `[{` gives
        None, `[` gives NEED_MORE, because `{` may follow, and `[1` gives NO_MATCH.

        `head_end` is the end of the header. White space may follow.
        """
        pos = skip_whitespace(text, head_end)
        if pos == len(text) and not is_final:
            return NEED_MORE
        return self._body_start.start_mismatch(text, pos, is_final)

    def create_reader(self, writer: CallWriter, head: Head, *, is_confirmed: bool) -> BodyReader:
        """Create the reader that parses the arguments of a tool call.

        The class of the reader depends on how the format writes arguments: as JSON, in Python
        syntax or between tags.

        `is_confirmed` is true if a marker or an earlier tool call shows that the text is a tool
        call. If not, the reader must find out whether the text is a tool call.
        """
        match self.call.body:
            case JsonArguments():
                return JsonArgumentsReader(writer, head)
            case JsonObject(keys=keys):
                return ObjectReader(writer, keys, is_confirmed=is_confirmed)
            case JsonArray(keys=keys):
                return ArrayReader(writer, keys, is_confirmed=is_confirmed)
            case PythonCalls() as python_calls:
                return PythonCallsReader(writer, python_calls, is_confirmed=is_confirmed)
            case BareKeyArguments(quote=quote):
                return UnquotedKeyReader(writer, head, quote)
            case NestedTags(tag_prefix=prefix):
                # The arguments end before the first closing marker: before `</f>` in `</f></call>`.
                # A format with nested tags must declare a closing marker, so `closing_markers` is
                # not empty.
                return NestedReader(writer, head, prefix, stop_marker=self.closing_markers[0])
            case TaggedArguments():
                assert self._tags is not None  # `__init__` compiles the tags of such a body.
                return TaggedReader(writer, head, self._tags)

    def may_follow_content(self) -> bool:
        """Return whether a tool call without a marker is recognised after content.

        JSON can be distinguished from content. Python calls can be distinguished from content only
        if they are between brackets.
        """
        body = self.call.body
        if isinstance(body, PythonCalls):
            return bool(body.open)
        return isinstance(body, JsonObject | JsonArray)

    def body_openings(self) -> tuple[str, ...]:
        """Return the texts with which a tool call that has no marker may start, for example `{`.

        Examples: `("{",)` for a JSON object, `("[",)` for a JSON array, and `()` for Python calls
        without brackets.
        """
        body = self.call.body
        if isinstance(body, PythonCalls):
            return (body.open,) if body.open else ()
        return ("[",) if isinstance(body, JsonArray) else ("{",)


def match_limited_head(
    match_head: Callable[[str, int, bool], Head | Mismatch], text: str, pos: int, is_final: bool
) -> Head | Mismatch:
    """Match a header at `text[pos:]`. Only the next `MAX_HEAD_CHARS` characters may match.

    `match_head(text, pos, is_final)` matches a header of any length, together with the start of the
    body after the header. An incomplete header is matched again whenever more text arrives, so the
    parsing time would not be linear without the limit. Example: `<call>` and 3,000 line breaks do
    not start a tool call.

    Return the matched header, NEED_MORE or NO_MATCH, like `match_head`.
    """
    if len(text) - pos <= MAX_HEAD_CHARS:
        return match_head(text, pos, is_final)
    next_chars = text[pos : pos + MAX_HEAD_CHARS]
    head = match_head(next_chars, 0, False)  # They are not final, because more text follows them.
    if not isinstance(head, Head):
        return NO_MATCH  # Even NEED_MORE becomes NO_MATCH, because the header is too long.
    return replace(head, end=pos + head.end)  # `end` is the only position in a header.


def _recovery_markers(call: Call, section: SectionMarkers) -> tuple[str, ...]:
    """Return the markers that show the end of arguments that are not valid, such as `</call>`.

    After such a marker, the parser reads the text correctly again. Example: for
    `<calls><call><function=f>ARGUMENTS</function></call></calls>`, the result is

        `</call>`   the last tag of the closing marker
        `</calls>`  the closing marker of all tool calls
        `<call>`    the opening marker of the next tool call
    """
    # Arguments that are not valid may contain a tag such as `</function>`. Only the last tag of the
    # closing marker reliably shows the end.
    last_close_part = marker_parts(call.close)[-1:]  # Empty if there is no closing marker.
    markers = (*last_close_part, *section.closes, call.open.strip())
    return tuple(marker for marker in markers if marker)


def _compile_tags(call: Call, section: SectionMarkers, head: Pattern) -> CompiledTags | None:
    """If the arguments are enclosed in tags, as in `<p=city>Paris</p>`, compile these tags.

    Return None if the format writes arguments in another way, for example as JSON. `section`
    contains the markers around all tool calls. `head` is the pattern of the tool call's opening
    marker and header, such as `<call><f={name}>`.
    """
    if not isinstance(call.body, TaggedArguments):
        return None
    return CompiledTags(
        call.body,
        head,
        stop_markers=_stop_markers(call, section),
        markers_between_calls=_markers_between_calls(call, section),
        next_header_start=_next_header_start(call, section),
    )


def _stop_markers(call: Call, section: SectionMarkers) -> tuple[str, ...]:
    """Return the markers that end the arguments of a tool call, such as `</f>`.

    Example: in `<calls><call><f={name}>ARGUMENTS</f></call></calls>`, the arguments end at `</f>`.
    A model may omit this marker, so `</call>`, `</calls>` and `<call>` are stop markers, too. If
    the tool call has no closing marker, the separator of two tool calls, such as `---`, and the
    markers that end the message are stop markers.
    """
    end_markers = marker_parts(call.close)[:1]
    if not end_markers:
        separators = (section.separator,) if section.separator else ()
        end_markers = (*separators, *section.message_ends)
    stop_markers = (*end_markers, *_recovery_markers(call, section))
    return tuple(dict.fromkeys(stop_markers))  # Without duplicates, in the same order.


def _next_header_start(call: Call, section: SectionMarkers) -> str:
    r"""Return the first fixed text of the header that ends the arguments of the previous tool call.

    A header ends these arguments only if tool calls have no opening and no closing marker. Example:
    in `<calls>- f:\n a: 1\n- g:\n b: 2\n</calls>`, the arguments of `f` end before `- g:`.
    The header is `- {name}:`, so the result is `-`. Return "" for all other tool calls.
    """
    if call.open.strip() or marker_parts(call.close):
        return ""
    start = first_literal(call.head)
    # If no marker precedes all tool calls, a text such as `-` may be content. Then only a header
    # that starts with a tag, such as `<f={name}>`, shows that a tool call starts.
    return start if section.opens or looks_like_markup(start) else ""


def _markers_between_calls(call: Call, section: SectionMarkers) -> tuple[str, ...]:
    """Return the markers that may separate the arguments of a tool call from the next tool call.

    Example: in `<calls><call><f={name}>ARGUMENTS</f></call></calls>`, the markers `</f>` and
    `</call>` follow the arguments. A model may close and open the outer element before the next
    tool call, so `</calls>` and `<calls>` are in the result, too.
    """
    markers = (*marker_parts(call.close), *section.closes, *section.opens)
    return tuple(dict.fromkeys(markers))  # Without duplicates, in the same order.


@dataclass(frozen=True, slots=True)
class _BodyStart:
    """Two regexes that match the start of a tool call's body, which is the text after the header.

    Attributes:
        complete: Matches the first characters of a body, for example `[{`.
        incomplete: Matches a part of these characters at the end of the text, for example `[`.
    """

    complete: re.Pattern[str]
    incomplete: re.Pattern[str]

    def start_mismatch(self, text: str, pos: int, is_final: bool) -> Mismatch | None:
        """Return None if `text[pos:]` matches `complete`. Otherwise return NEED_MORE or NO_MATCH.

        Examples for a JSON array of tool calls: `[{` gives None, `[1` gives NO_MATCH, and `[` gives
        NEED_MORE, or NO_MATCH if `is_final` shows that no more text follows.
        """
        if self.complete.match(text, pos) is not None:
            return None
        may_become_start = not is_final and self.incomplete.match(text, pos) is not None
        return NEED_MORE if may_become_start else NO_MATCH


def _compile_body_start(call: Call, tags: CompiledTags | None) -> _BodyStart | CompiledTags:
    """Return an object that matches the start of a tool call's body (the text after the header).

    The first one or two visible characters of the body distinguish a tool call from content. There
    is a regex for each of these characters. Example: a JSON array of tool calls starts with `[{` or
    `[]`, so the first regex matches `[`, and the second regex matches `{` or `]`.

    `tags` are the tags of arguments between tags. If the format writes arguments in another way,
    `tags` is None.
    """
    match call.body:
        case JsonArray():  # `[{"name": "f", ..}]` or `[]`
            return _starts_with_chars(r"\[", r"[{\]]")
        case JsonObject():  # `{"name": ..}`, `{'name': ..}` or `{}`
            return _starts_with_chars(r"\{", """["'}]""")
        case PythonCalls(open=""):  # `f(a=1)`
            return _starts_with_char(_NAME_START)
        case PythonCalls(open=opening_bracket):  # `[f(a=1)]`
            return _starts_with_chars(re.escape(opening_bracket), _NAME_START)
        case JsonArguments():  # `{"a": 1}`
            return _compile_json_arguments_start(call)
        case BareKeyArguments():  # `{a: 1}`
            return _starts_with_char(r"\{")
        case NestedTags(tag_prefix=prefix):  # `~<city>Paris~</city>`, where `~` is the prefix
            return _BodyStart(re.compile(re.escape(prefix)), _incomplete_marker_regex(prefix))
        case TaggedArguments():  # `<p=city>Paris</p>`
            assert tags is not None
            return tags


def _compile_json_arguments_start(call: Call) -> _BodyStart:
    """Return regexes that match the start of arguments that are written as a JSON object.

    Examples of tool calls, in the order of the code, and of the texts with which their arguments
    may start:

        `[TOOL_CALLS]f[ARGS]{"a": 1}`   any text, because only a tool call has such a header
        `f{"a": 1}`                     `{`, because no other text shows that this is a tool call
        `<call>f{"a": 1}</call>`        `{` or `</call>`, because a model may omit the arguments
    """
    if _header_proves_call(call):
        return _starts_with_char(_ANY_TEXT)
    has_opening_text = bool(call.trigger)  # The first fixed text of the tool call, here `<call>`.
    close_parts = marker_parts(call.close)
    if not has_opening_text or not close_parts:
        return _starts_with_char(r"\{")
    first_close_part = close_parts[0]
    complete = re.compile(rf"\{{|{re.escape(first_close_part)}")
    return _BodyStart(complete, _incomplete_marker_regex(first_close_part))


def _incomplete_marker_regex(marker: str) -> re.Pattern[str]:
    """Return a regex that matches an incomplete marker, such as `</ca`, at the end of a text."""
    return re.compile(marker_prefix_regex(marker))


def _starts_with_char(regex: str) -> _BodyStart:
    """Return a `_BodyStart` whose first character matches `regex`."""
    return _BodyStart(re.compile(regex), incomplete=re.compile(_NEVER))


def _starts_with_chars(first: str, second: str) -> _BodyStart:
    """Return a `_BodyStart` whose first two characters match the regexes `first` and `second`.

    White space may separate the two characters. At the end of the text, the first character alone
    is an incomplete start.
    """
    return _BodyStart(re.compile(rf"{first}\s*{second}"), re.compile(rf"{first}\s*\Z"))


def _header_proves_call(call: Call) -> bool:
    """Return whether a header such as `[TOOL_CALLS]f[ARGS]` is always followed by arguments.

    The result is True if the tool call has an opening marker and the last part of the header is a
    literal. Example: the result is True for the marker `[TOOL_CALLS]` and the header
    `{name}[ARGS]`. The result is False for the header `{name}`.
    """
    last_part = split_pattern(call.head)[-1]
    is_literal = isinstance(last_part, str) and bool(last_part.strip())
    return bool(call.open.strip()) and is_literal


def _fill_in_id(template: str, fields: dict[str, str]) -> str:
    """Create the id of a tool call: insert the values of `fields` into `template`.

    The result is "" if a field of `template` is missing in `fields`. Example:
    `_fill_in_id("functions.{name}:{number}", {"name": "f", "number": "0"})` returns
    `"functions.f:0"`.
    """
    try:
        return template.format(**fields)
    except KeyError:
        return ""
