"""Compiles the declarations of tool calls and message headers, and matches them in a text."""

from __future__ import annotations

import re
from typing import NamedTuple

from nereid_parsers.declarations import Messages, Route, Stage
from nereid_parsers.pattern_syntax import first_literal, split_pattern
from nereid_parsers.stream.bodies.body_reader import BodyReader, Head
from nereid_parsers.stream.bodies.compiled_tags import CompiledTags
from nereid_parsers.stream.bodies.json_bodies import ArrayReader, JsonArgumentsReader
from nereid_parsers.stream.bodies.json_object import ObjectReader
from nereid_parsers.stream.bodies.nested_tags import NestedReader
from nereid_parsers.stream.bodies.python_calls import PythonCallsReader, UnquotedKeyReader
from nereid_parsers.stream.bodies.tagged_arguments import TaggedReader
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.lexer import Lexer, marker_prefix_regex
from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    Mismatch,
    Pattern,
    PatternMatch,
    as_mismatch,
    compile_pattern,
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
    ToolSection,
)


class CompiledCall:
    """The compiled declaration of one variant of a tool call.

    Attributes:
        call: The declaration.
        is_unmarked: Whether the tool call starts without a marker.
        omits_marker: Whether this variant lacks the marker that the format declares before the
            header. A tool call of such a variant is accepted only if the request offers the
            function.
        closing_markers: The parts of the closing marker, such as `</function>` and `</tool_call>`.
        end_of_broken: A lexer that finds the end of arguments that are not valid JSON.
    """

    def __init__(self, call: Call, section: ToolSection, *, omits_marker: bool = False) -> None:
        """Compile the declaration `call`, which is a part of the tool section `section`."""
        self.call = call
        self.is_unmarked = not call.trigger
        self.omits_marker = omits_marker
        self.closing_markers = marker_parts(call.close)
        self.end_of_broken = Lexer(_markers_after_call(call, section))
        self._head_pattern: Pattern = compile_pattern(call.open + call.head)
        self._id_template = call.id
        self._body_start, self._possible_body_start = _body_start_regexes(call)
        self._tags = _compile_tags(call, section, self._head_pattern)

    def match(self, text: str, pos: int, is_final: bool) -> Head | Mismatch:
        """Match the marker, the header and the start of the body of a tool call at `pos`.

        The header is the text between the marker and the body, and may contain the function's name.
        The start of the body is examined because ordinary text may contain the marker. Example:
        `<tool_call>{"` matches a JSON object after the marker `<tool_call>`, and the header ends at
        the position 11. The text `<tool_call>` alone gives NEED_MORE, and `<tool_call>x` gives
        NO_MATCH.

        Returns:
            The matched header, NEED_MORE or NO_MATCH.
        """
        match = self._head_pattern.match(text, pos, is_final)
        if not isinstance(match, PatternMatch):
            return match
        body_start = self.match_body_start(text, match.end, is_final)
        if body_start < 0:
            return as_mismatch(body_start)
        call_id = _fill_in_id(self._id_template, match.fields)
        return Head(match.end, name=match.fields.get("name", ""), call_id=call_id)

    def match_body_start(self, text: str, head_end: int, is_final: bool) -> int:
        """Return the position at which the body starts, or NEED_MORE or NO_MATCH.

        The body contains the arguments, or a list of tool calls. Its first visible characters show
        whether the text is a body. Example: for a JSON array of tool calls, `[{` starts the body,
        `[` gives NEED_MORE and `[1` gives NO_MATCH.

        Args:
            text: The text.
            head_end: The end of the header. White space may follow.
            is_final: Whether no more text follows.
        """
        pos = skip_whitespace(text, head_end)
        if pos == len(text) and not is_final:
            return NEED_MORE
        if self._tags is not None:
            return self._tags.match_start(text, pos, is_final)
        if self._body_start.match(text, pos) is not None:
            return pos
        may_become_start = self._possible_body_start.match(text, pos) is not None
        return NEED_MORE if may_become_start and not is_final else NO_MATCH

    def create_reader(self, writer: CallWriter, head: Head, *, is_confirmed: bool) -> BodyReader:
        """Create the reader that parses the arguments of a tool call.

        The class of the reader depends on how the format writes arguments: as JSON, in Python
        syntax or between tags.

        Args:
            writer: The writer that converts the tool call into events.
            head: The matched text before the arguments. It usually contains the function's name.
            is_confirmed: Whether a marker or an earlier tool call shows that the text is a tool
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
                return NestedReader(writer, head, prefix, stop_marker=self.closing_markers[0])
        assert self._tags is not None  # TaggedArguments is the only other type of a body.
        return TaggedReader(writer, head, self._tags)

    def may_follow_content(self) -> bool:
        """Return whether a tool call that has no marker may follow content.

        JSON can be distinguished from content. Python calls can be distinguished from content only
        if they are between brackets.
        """
        body = self.call.body
        if isinstance(body, PythonCalls):
            return bool(body.open)
        return isinstance(body, JsonObject | JsonArray)

    def body_openings(self) -> tuple[str, ...]:
        """Return the texts that can start the body of a tool call that has no marker.

        Examples: `("{",)` for a JSON object, `("[",)` for a JSON array, and `()` for Python calls
        without brackets.
        """
        body = self.call.body
        if isinstance(body, PythonCalls):
            return (body.open,) if body.open else ()
        return ("[",) if isinstance(body, JsonArray) else ("{",)


def _markers_after_call(call: Call, section: ToolSection) -> tuple[str, ...]:
    """Return the markers that can follow the body of a tool call.

    These are the closing markers of the tool call and of its section, and the opening marker of the
    next tool call. Arguments that are not valid JSON end at one of these markers. If a closing
    marker consists of several parts, only the last part is returned, because arguments may contain
    the other parts. Example: for the opening marker `<tool_call>` and the closing marker
    `</function></tool_call>`, the result is `("</tool_call>", "<tool_call>")`.
    """
    close_parts = marker_parts(call.close)
    last_close_part = close_parts[-1] if close_parts else ""
    markers = (last_close_part, *section.closes, call.open.strip())
    return tuple(marker for marker in markers if marker)


def _compile_tags(call: Call, section: ToolSection, head: Pattern) -> CompiledTags | None:
    """Compile tagged arguments, such as `<parameter=city>Paris</parameter>`, of a tool call.

    Return None if the declared arguments have no tags.

    Args:
        call: The declaration of the tool call.
        section: The declaration of the tool section, which contains all tool calls of a message.
        head: The pattern of the tool call's opening marker and header.
    """
    if not isinstance(call.body, TaggedArguments):
        return None
    close_parts = marker_parts(call.close)
    # The arguments end at any of these markers. The first marker is the first part of `call.close`,
    # because that part directly follows the last argument.
    stop_markers = (*close_parts[:1], *_markers_after_call(call, section))
    section_opens = (marker.strip() for marker in section.opens)
    markers_between_calls = (*close_parts, *section.closes, *section_opens)
    return CompiledTags(
        call.body,
        head,
        stop_markers=tuple(dict.fromkeys(stop_markers)),
        markers_between_calls=tuple(dict.fromkeys(markers_between_calls)),
    )


def _body_start_regexes(call: Call) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return two regexes, one for the start of a body and one for an incomplete start.

    Example: a JSON array of tool calls starts with `[{` or `[]`. White space may separate the two
    characters. If only `[` has arrived, the start is incomplete.
    """
    if isinstance(call.body, NestedTags):
        prefix = call.body.tag_prefix
        return re.compile(re.escape(prefix)), re.compile(marker_prefix_regex(prefix))
    start = _body_start(call)
    complete = rf"{start.first_char}\s*{start.second_char}"
    incomplete = rf"{start.first_char}\s*\Z"
    return re.compile(complete), re.compile(incomplete)


class _BodyStart(NamedTuple):
    """The regexes for the first two characters of a body. White space is not counted.

    Attributes:
        first_char: The regex for the first character.
        second_char: The regex for the second character, or "" if any character is accepted.
    """

    first_char: str
    second_char: str


def _body_start(call: Call) -> _BodyStart:
    """Return the regexes for the first two characters of the body of a tool call.

    Example: a JSON array of tool calls gives a regex for `[`, and a regex for `{` or `]`.
    """
    body = call.body
    if isinstance(body, PythonCalls):
        name_start = r"[^\W\d]"  # A function's name starts with a letter or `_`.
        return _BodyStart(re.escape(body.open), name_start)
    if isinstance(body, JsonArray):
        return _BodyStart(r"\[", r"[{\]]")
    if isinstance(body, JsonObject):
        key_quote_or_end = """["'}]"""  # Some models write single quotes around keys.
        return _BodyStart(r"\{", key_quote_or_end)
    if isinstance(body, JsonArguments) and _ends_with_marker(call):
        return _BodyStart("", "")  # The markers prove that any text is the body of a tool call.
    return _BodyStart(r"\{", "")


def _ends_with_marker(call: Call) -> bool:
    """Return whether the text after the header of a tool call can only be arguments.

    The result is True if the tool call has an opening marker and the last part of the header is a
    literal. Example: the result is True for the marker `[TOOL_CALLS]` and the header
    `{name}[ARGS]`. The result is False for the header `{name}`.
    """
    last_part = split_pattern(call.head)[-1]
    is_literal = isinstance(last_part, str) and bool(last_part.strip())
    return bool(call.open.strip()) and is_literal


def _fill_in_id(template: str, fields: dict[str, str]) -> str:
    """Return the id of a tool call, composed from the fields in the header of the tool call.

    The result is "" if a field of `template` is missing in `fields`. Example:
    `_fill_in_id("functions.{name}:{number}", {"name": "f", "number": "0"})` returns
    `"functions.f:0"`.
    """
    try:
        return template.format(**fields)
    except KeyError:
        return ""


class CompiledHeader:
    """The compiled declaration of a message header.

    Attributes:
        stage: The stage of the message's body.
        has_calls: Whether the body may contain tool calls.
    """

    def __init__(self, route: Route, layout: Messages, message_call: CompiledCall) -> None:
        r"""Compile `route`, which declares one message header of `layout`.

        The text after the header, `layout.header_end`, is matched in one of two ways:

        - A marker such as `<|message|>` is a part of the pattern that matches the header.
        - White space, such as the line break in `>>>all\nHello`, is not a part of this pattern. The
          method `match` compares this white space itself, because a pattern would accept any other
          white space, too.

        If the message is a tool call, `message_call` matches the start of the arguments.
        """
        self.stage = route.stage
        self.has_calls = route.has_calls
        self._message_call = message_call
        self._first_literal = first_literal(route.header)
        ends_with_marker = bool(layout.header_end.strip())
        if ends_with_marker:
            self._header_pattern = compile_pattern(route.header + layout.header_end)
            self._whitespace_header_end = ""
        else:
            self._header_pattern = compile_pattern(route.header)
            self._whitespace_header_end = layout.header_end

    def has_started(self, text: str, pos: int) -> bool:
        """Return whether the fixed text at the start of the header is at `pos`.

        If the message ends inside a header, the caller uses the result to distinguish the header
        from content.
        """
        pos = skip_whitespace(text, pos)
        return bool(self._first_literal) and text.startswith(self._first_literal, pos)

    def match(self, text: str, pos: int, is_final: bool) -> Head | Mismatch:
        """Match the header at `pos`, for example `<|channel|>final<|message|>`.

        The header of a tool call matches only if the arguments start after the header.

        Returns:
            The matched header, NEED_MORE or NO_MATCH.
        """
        # Some headers must end with certain white space, for example a line break. If the header
        # has no such requirement, the white space at `pos` is skipped.
        if not self._whitespace_header_end:
            pos = skip_whitespace(text, pos)
        match = self._header_pattern.match(text, pos, is_final)
        if not isinstance(match, PatternMatch):
            return match
        end = self._match_whitespace_end(text, match.end, is_final)
        if end < 0:
            return as_mismatch(end)
        if self.stage is Stage.CALLS:
            arguments_start = self._message_call.match_body_start(text, end, is_final)
            if arguments_start < 0:
                return as_mismatch(arguments_start)
        return Head(end, name=match.fields.get("name", ""), call_id=match.fields.get("id", ""))

    def _match_whitespace_end(self, text: str, pos: int, is_final: bool) -> int:
        """Match the white space at the end of the header. Return the position after this space.

        The result is NEED_MORE or NO_MATCH if this white space does not follow. It is `pos` if the
        header does not end with certain white space.
        """
        whitespace = self._whitespace_header_end
        if text.startswith(whitespace, pos):
            return pos + len(whitespace)
        may_follow = not is_final and whitespace.startswith(text[pos:])
        return NEED_MORE if may_follow else NO_MATCH
