"""Compiles and matches the tags of arguments such as `<parameter=city>Paris</parameter>`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from nereid_parsers.pattern_syntax import first_literal
from nereid_parsers.stream.lexer import spaced_marker_prefixes, spaced_marker_regex
from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    Mismatch,
    Pattern,
    PatternMatch,
    compile_pattern,
    looks_like_markup,
    match_marker,
    skip_whitespace,
)
from nereid_parsers.stream.values.argument_types import Tools
from nereid_parsers.tool_declarations import TaggedArguments

# A value may contain a marker that normally ends a tool call, such as `</function>`. To decide
# whether the marker belongs to the value, the parser searches for the closing tag of the value,
# such as `</parameter>`, in the next `_MAX_UNDECIDED_CHARS` characters. During the search, the
# client receives no text, so the search is limited.
_MAX_UNDECIDED_CHARS = 2048
_NEVER = "(?!)"  # A regex that never matches.
# Matches a closing marker of one or two characters, without letters, digits, quotes and brackets:
# for example a line break, `;` or `,`.
_SEPARATOR = re.compile(r"""(?:(?![\w"'`<>()\[\]{}]).){1,2}""", re.DOTALL)
_NO_TOOLS = Tools(None)


class MarkerRole(Enum):
    """Whether a marker, such as `</call>`, is a part of a value or follows the value.

    PART_OF_VALUE  The value contains the marker.
    AFTER_VALUE    The value ends before the marker. The closing marker of the value is missing.
    UNDECIDED      More text is required to decide.
    """

    PART_OF_VALUE = "part_of_value"
    AFTER_VALUE = "after_value"
    UNDECIDED = "undecided"


class CompiledTag:
    r"""The regular expressions for one way to write an argument, such as `<p=a>1</p>`.

    Example: the text before a value is declared as `<p={key}>\n`, and the text after a value as
    `\n</p>`. Then `opening` is the pattern `<p={key}>`, `padding` is `\n`, and `closing_marker` is
    `</p>`. The value of the argument `<p=a>\n1\n</p>` is `1`.

    Attributes:
        opening: The pattern of the opening tag.
        padding: The declared white space after the opening tag. The padding is not a part of the
            value.
        closing_marker: The closing marker, without white space.
        escapes: The kind of escape sequences in the value, see `TaggedArguments`.
        is_closed_by_separator: Whether the closing marker is a line break or punctuation, such as
            `;` in `a=1; b=2`. A value may contain such a separator, and the separator may be
            missing after the last value.
        may_be_escaped: Whether a backslash before the closing marker makes the marker a part of the
            value.
        find_end: A function that finds the closing marker (group "close") or an early end (group
            "early"). An early end is another marker, such as `</call>`, before which the closing
            marker may be missing. The match includes the declared white space before the marker.
        find_possible_end: A function that does the same as `find_end`, and also finds an incomplete
            marker at the end of the text, such as `</`. If the marker is incomplete, both groups
            are empty.
    """

    def __init__(self, declaration: TaggedArguments, early_ends: tuple[str, ...]) -> None:
        """Compile the regular expressions for one way to write a value, such as `<p={key}>..</p>`.

        `early_ends` are the markers that follow the value if its closing marker is missing. Example
        for the early end `</call>`: both `a</p>` and `a</call>` have the value `a`.
        """
        opening_tag = declaration.open.rstrip()
        self.opening: Pattern = compile_pattern(opening_tag)
        self.padding = declaration.open.removeprefix(opening_tag)
        self.closing_marker = declaration.closing_marker
        self.escapes = declaration.escapes
        self.is_closed_by_separator = _SEPARATOR.fullmatch(self.closing_marker) is not None
        self.may_be_escaped = _may_escape_closing_marker(declaration)
        regexes = _compile_value_end_regexes(declaration, early_ends)
        self.find_end = regexes.complete.search
        self.find_possible_end = regexes.possible.search


def _may_escape_closing_marker(declaration: TaggedArguments) -> bool:
    r"""Return whether a backslash before the closing marker makes the marker a part of the value.

    Example: in a JSON string, a quote after a backslash does not close the value. But a marker such
    as `"</p>` always closes the value. A string rarely contains this text, and models sometimes
    forget to escape a backslash at the end of a string, as in `"C:\"</p>`.
    """
    return declaration.escapes == "json" and not looks_like_markup(declaration.closing_marker)


def _whitespace_before_marker(closing_text: str) -> str:
    r"""Return the white space before the marker in `closing_text`: the first `\n` of `\n</p>\n`.

    The format declares this white space, but the model may omit it. The white space is not a part
    of the value. If `closing_text` is only a line break, the line break is the marker, so the
    result is "".
    """
    marker = closing_text.strip()
    return closing_text.partition(marker)[0] if marker else ""


class _ValueEndRegexes(NamedTuple):
    """Two regexes that find the end of a value.

    Attributes:
        complete: Matches a complete marker, such as `</p>`, that can end the value.
        possible: Also matches an incomplete marker, such as `</`, at the end of the text.
    """

    complete: re.Pattern[str]
    possible: re.Pattern[str]


def _compile_value_end_regexes(
    declaration: TaggedArguments, early_ends: tuple[str, ...]
) -> _ValueEndRegexes:
    """Compile the regexes that find the closing marker of a value, or one of `early_ends`.

    Example: the regex `complete` finds the closing marker `</p>`. The regex `possible` also finds
    `</` at the end of the text, which more text may complete. `early_ends` are the markers that
    follow the value if its closing marker is missing.
    """
    closing_marker = declaration.closing_marker
    markers = (closing_marker, *early_ends)
    # This text, such as a line break, may precede each marker.
    whitespace = _whitespace_before_marker(declaration.close)
    complete_regex = _value_end_regex(closing_marker, early_ends, whitespace)
    possible_regex = "|".join([complete_regex, *_value_end_prefixes(markers, whitespace)])
    # Each match starts with the white space or with a marker. The look-ahead makes the search
    # faster, because it rejects most positions with one test.
    lookahead_regex = _first_char_lookahead((whitespace, *markers))
    return _ValueEndRegexes(
        complete=re.compile(f"{lookahead_regex}(?:{complete_regex})"),
        possible=re.compile(f"{lookahead_regex}(?:{possible_regex})"),
    )


def _value_end_regex(closing_marker: str, early_ends: tuple[str, ...], whitespace: str) -> str:
    r"""Return a regex that matches any of the markers that can end a value.

    The group "close" matches the closing marker of the value. The group "early" matches a marker
    that follows the value if the closing marker is missing. `whitespace` is the optional white
    space before these markers. Example: for the closing marker `</p>`, the early end `</call>` and
    the white space `\n`, the regex matches `\n</p>` and `</call>`.
    """
    close_group = f"(?P<close>{_any_marker_regex((closing_marker,))})"
    early_group = f"(?P<early>{_any_marker_regex(early_ends)})"
    return f"(?:{re.escape(whitespace)})?(?:{close_group}|{early_group})"


def _value_end_prefixes(markers: tuple[str, ...], whitespace: str) -> list[str]:
    r"""Return regexes that match an incomplete marker, such as `</`, at the end of a text.

    More text could complete such a marker. Example: for the marker `</p>` and the optional white
    space `\n` before the marker, the regexes match `\n</` and `</` at the end of the text.
    """
    prefixes: list[str] = []
    for optional_whitespace in dict.fromkeys(("", whitespace)):
        for marker in markers:
            prefixes += spaced_marker_prefixes(marker, optional_whitespace)
    return prefixes


def _first_char_lookahead(texts: Iterable[str]) -> str:
    """Return a regex look-ahead that accepts the first character of any of `texts`.

    Example: `("</p>", "[x]")` gives the look-ahead for `<` and `[`.
    """
    first_chars = "".join(re.escape(text[0]) for text in texts if text)
    return f"(?=[{first_chars}])"


def _any_marker_regex(markers: Iterable[str]) -> str:
    """Return a regex that matches any of `markers`. If `markers` is empty, the regex never matches.

    White space between the tags of a marker is optional. Example: the marker `<a><b>` gives a regex
    that also matches `<a> <b>`.
    """
    return "|".join(map(spaced_marker_regex, markers)) or _NEVER


@dataclass(frozen=True, slots=True)
class TagOpening:
    """The matched opening tag of a tagged value, for example `<parameter=city>`.

    Attributes:
        variant_index: The index of the matched variant in `CompiledTags.variants`.
        end: The position after the opening tag.
        fields: The texts of the pattern's fields. Example: `{"key": "city"}` for the pattern
            `<parameter={key}>`.
    """

    variant_index: int
    end: int
    fields: dict[str, str]


class CompiledTags:
    """Matches the tags of arguments such as `<parameter=city>Paris</parameter>`.

    Attributes:
        variants: The declared ways to write a value, in the order in which they are tried.
        stop_markers: The markers that follow the last argument, such as `</function>`.
    """

    def __init__(
        self,
        declaration: TaggedArguments,
        head: Pattern,
        stop_markers: tuple[str, ...],
        markers_between_calls: tuple[str, ...],
        next_call_start: str,
    ) -> None:
        """Compile the regexes for arguments such as `<parameter=city>Paris</parameter>`.

        Args:
            declaration: Declares the text before and after each value. `declaration.also` declares
                other ways to write a value.
            head: The pattern of the text before the arguments, such as `<function={name}>`.
            stop_markers: The markers that end the arguments, for example `</function>`.
            markers_between_calls: The markers that may separate the last value of a tool call from
                the next header, for example `</function>` and `<tool_call>`.
            next_call_start: The start of a tool call's header, such as `<function=`, if the
                arguments of the previous tool call end at this text. Otherwise "".
        """
        self.stop_markers = stop_markers
        self._declaration = declaration
        self._head = head
        self._markers_between_calls = markers_between_calls
        declarations = (declaration, *declaration.also)
        tag_starts = _tag_starts(declarations)  # Such as `<parameter=`.
        starts_like_argument = next_call_start in tag_starts
        self._next_call_start = "" if starts_like_argument else next_call_start
        self._tag_starts = tag_starts
        early_ends = _ends_without_closing_marker(stop_markers, tag_starts)
        self.variants = tuple(CompiledTag(each, early_ends) for each in declarations)
        self._close_or_tag_start_regex = _compile_close_or_tag_start(self.variants, tag_starts)
        self._between_calls_regex = _compile_between_calls(markers_between_calls)

    @lru_cache(maxsize=1024)  # noqa: B019  # A program has few formats, and keeps all of them.
    def for_key(self, key: str) -> CompiledTags:
        """Return the tags of the argument `key`. The closing tag may contain the argument's name.

        Example: for the declaration `<{key}>`, `</{key}>`, the value of `city` ends at `</city>`.
        The variants of the result have the same order as `variants`.
        """
        declaration = self._declaration.for_key(key)
        if declaration == self._declaration:
            return self
        return CompiledTags(
            declaration,
            self._head,
            self.stop_markers,
            self._markers_between_calls,
            self._next_call_start,
        )

    def match(self, text: str, pos: int, is_final: bool) -> TagOpening | Mismatch:
        """Match the opening tag of a value at `text[pos]`.

        Examples for the tag `<parameter={key}>`: the text `<parameter=city>` gives a `TagOpening`
        with the fields `{"key": "city"}`, `<param` gives NEED_MORE, and `Paris` gives NO_MATCH.
        """
        if text.startswith("</", pos):
            return NO_MATCH  # With the declaration `<{key}>`, a closing tag would match, too.
        for index, variant in enumerate(self.variants):
            result = variant.opening.match(text, pos, is_final)
            if isinstance(result, PatternMatch):
                return TagOpening(index, result.end, result.fields)
            if result is NEED_MORE:  # An earlier variant has priority, even if it is incomplete.
                return NEED_MORE
        return NO_MATCH

    def start_mismatch(self, text: str, pos: int, is_final: bool) -> Mismatch | None:
        """Return None if the body of a tool call starts at `pos`. Otherwise return the mismatch.

        The body is the text after the header of the tool call. Examples for arguments that start
        with `<parameter={key}>`:

            text at `pos`        result
            `<parameter=city>`   None
            `</function>`        None, because the body may have no arguments
            no text              None, because the message has ended (`is_final` is true)
            `<param`, `</func`   NEED_MORE
            `Paris`              NO_MATCH

        If the message has not ended, the caller must wait until there is text at `pos`.
        """
        has_message_ended = is_final and pos == len(text)
        if has_message_ended:
            return None
        end = self.match_end(text, pos, is_final)
        start = self.match(text, pos, is_final) if end is NO_MATCH else end
        return start if isinstance(start, Mismatch) else None

    def match_end(
        self, text: str, pos: int, is_final: bool, tools: Tools = _NO_TOOLS
    ) -> int | Mismatch:
        """Match the text that ends the arguments: a stop marker, or the header of the next call.

        Examples for the stop marker `</function>`:

            text at `pos`   result
            `</function>`   `pos`, because the arguments end there
            `</func`        NEED_MORE
            `Paris`         NO_MATCH

        For the header of the next tool call, see `match_next_call`.
        """
        if self.is_at_stop_marker(text, pos):
            return pos
        if not is_final and self.may_become_stop_marker(text, pos):
            return NEED_MORE  # An opening tag `[{key}]` matches the start of the marker `[[end]]`.
        return self.match_next_call(text, pos, is_final, tools)

    def match_next_call(
        self, text: str, pos: int, is_final: bool, tools: Tools = _NO_TOOLS
    ) -> int | Mismatch:
        r"""Match the header of the next tool call at `pos`, if the arguments end at this header.

        If the offered `tools` are known, the header must name one of these tools. Examples for the
        header `- {name}:` and the offered tool `f`:

            text at `pos`   result
            `- f:`          the position after the header
            `- `            NEED_MORE
            `- g:`          NO_MATCH, because the tool `g` is not offered
            `a: 1`          NO_MATCH
        """
        if not self._next_call_start:
            return NO_MATCH
        head = self._head.match(text, pos, is_final)
        if not isinstance(head, PatternMatch):
            return head
        return head.end if _is_offered(head, tools) else NO_MATCH

    def role_of_stop_marker(self, text: str, pos: int, is_final: bool, tools: Tools) -> MarkerRole:
        """Decide whether the stop marker at `pos` is a part of a value, or follows the value.

        The stop marker, such as `</function>`, has been found before the closing marker of the
        value, such as `</parameter>`. Either the value contains the stop marker, or the model has
        omitted the closing marker. The text after the stop marker decides:

            text after `</function>`        result
            `text</parameter>`              PART_OF_VALUE: the closing marker follows.
            `<function=f><parameter=city>`  AFTER_VALUE: another tool call follows.
            `text`                          UNDECIDED, because more text may follow. At the end of
                                            the message, or if the text is long, AFTER_VALUE.

        Another tool call must call one of the offered `tools`, if they are known.
        """
        search_end = pos + _MAX_UNDECIDED_CHARS
        is_search_complete = is_final or len(text) >= search_end
        if not self._tag_starts:  # No fixed text shows where an argument starts.
            next_call = self._match_later_call(text[pos:search_end], is_search_complete, tools)
            if next_call is NEED_MORE:
                return MarkerRole.UNDECIDED
            if next_call is not NO_MATCH:
                return MarkerRole.AFTER_VALUE
        for tag in self._close_or_tag_start_regex.finditer(text, pos, search_end):
            is_closing_marker = tag["close"] is not None
            if is_closing_marker:
                return MarkerRole.PART_OF_VALUE
            if self._starts_next_call(text, pos, opening_pos=tag.start(), tools=tools):
                return MarkerRole.AFTER_VALUE
            # The value may contain an opening tag that starts no tool call. The search continues.
        return MarkerRole.AFTER_VALUE if is_search_complete else MarkerRole.UNDECIDED

    def _starts_next_call(self, text: str, pos: int, opening_pos: int, tools: Tools) -> bool:
        """Return whether the next tool call starts between a stop marker and an opening tag.

        The stop marker, such as `</function>`, is at `pos`. The opening tag, such as `<p=`, is at
        `opening_pos`. The text between these positions must consist of markers, then the header of
        the next tool call, and nothing else. If the request offers tools, the header must name one
        of them. Example: the result is True for the text `</function></call><call><function=f><p=`
        if the request offers `f`.
        """
        head_start = self._skip_markers_between_calls(text, pos, opening_pos)
        # The opening tag must follow the header, so the header is not at the end of the message.
        head = self._head.match(text, head_start, is_final=False)
        if not isinstance(head, PatternMatch):
            return False
        is_directly_before_opening = skip_whitespace(text, head.end) == opening_pos
        return is_directly_before_opening and _is_offered(head, tools)

    def _match_later_call(self, text: str, is_final: bool, tools: Tools) -> TagOpening | Mismatch:
        """Match the start of another tool call: markers such as `</call>`, a header, an argument.

        Examples for arguments such as `a=1`:

            `</call><call>f a=1`   the `TagOpening` of the argument `a`
            `</call><ca`           NEED_MORE
            `</call> text`         NO_MATCH
        """
        head_start = self._skip_markers_between_calls(text, 0, len(text))
        markers = self._markers_between_calls
        is_cut_off = any(match_marker(each, text, head_start) is NEED_MORE for each in markers)
        if is_cut_off and not is_final:
            return NEED_MORE
        head = self._head.match(text, head_start, is_final)
        if not isinstance(head, PatternMatch):
            return head
        if not _is_offered(head, tools):
            return NO_MATCH
        return self.match(text, skip_whitespace(text, head.end), is_final)

    def _skip_markers_between_calls(self, text: str, pos: int, end: int) -> int:
        """Return the position after the markers that are between `pos` and `end`.

        The markers, such as `</function>` and `<call>`, separate two tool calls. White space
        around the markers is skipped, too. If there is no marker at `pos`, only white space is
        skipped.
        """
        markers = self._between_calls_regex.match(text, pos, end)
        assert markers is not None  # The regex also matches the empty text.
        return markers.end()

    def is_at_stop_marker(self, text: str, pos: int) -> bool:
        """Return whether `text[pos:]` starts with a marker that ends the arguments."""
        return any(isinstance(match_marker(marker, text, pos), int) for marker in self.stop_markers)

    def may_become_stop_marker(self, text: str, pos: int) -> bool:
        """Return whether `text[pos:]` is a prefix of a marker that ends the arguments.

        Example: `</fun` is a prefix of `</function>`.
        """
        return any(match_marker(marker, text, pos) is NEED_MORE for marker in self.stop_markers)


def _is_offered(head: PatternMatch, tools: Tools) -> bool:
    """Return whether a header names an offered function. If `tools` is not known, return True."""
    return not tools.is_known or head.fields.get("name") in tools.parameters


def _tag_starts(declarations: Iterable[TaggedArguments]) -> tuple[str, ...]:
    """Return the text before the key in each opening tag: `<parameter=` for `<parameter={key}>`.

    Duplicates are removed. A tag that starts with the key, such as `{key}=`, has no such text.
    """
    literals = [first_literal(declaration.open) for declaration in declarations]
    return tuple(dict.fromkeys(literal for literal in literals if literal))


def _ends_without_closing_marker(
    stop_markers: tuple[str, ...], tag_starts: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the texts before which a value ends if its closing marker is missing.

    Examples: the stop marker `</function>`, and the start `<parameter=` of the next tag. The tag
    start `<` of `<{key}>` is omitted, because a value may contain any tag, such as `<b>`.
    """
    return (*stop_markers, *(start for start in tag_starts if len(start) > 1))


def _compile_close_or_tag_start(
    variants: Iterable[CompiledTag], tag_starts: Iterable[str]
) -> re.Pattern[str]:
    """Return a regex that matches the closing marker of any variant, or the start of a tag.

    The group "close" matches a closing marker, such as `</parameter>`. If the regex matches the
    start of an opening tag, such as `<parameter=`, the group is empty.
    """
    closing_markers = _any_marker_regex(variant.closing_marker for variant in variants)
    return re.compile(f"(?P<close>{closing_markers})|{_any_marker_regex(tag_starts)}")


def _compile_between_calls(markers: Iterable[str]) -> re.Pattern[str]:
    """Return a regex that matches any number of `markers` and the white space around them.

    Example: for the markers `</function>` and `</call>`, the regex matches `</function> </call>`.
    """
    return re.compile(rf"(?:\s*(?:{_any_marker_regex(markers)}))*\s*")
