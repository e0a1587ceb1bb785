"""Compiles the declaration of tagged arguments, and matches the tags in the model's text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from nereid_parsers.pattern_syntax import first_literal
from nereid_parsers.stream.lexer import spaced_marker_prefixes, spaced_marker_regex
from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    Mismatch,
    Pattern,
    PatternMatch,
    compile_pattern,
    match_marker,
    skip_whitespace,
)
from nereid_parsers.stream.values.argument_types import Tools
from nereid_parsers.tool_declarations import TaggedArguments

# A value may contain a marker that normally ends a tool call. To find out whether the value's own
# closing marker follows, the reader waits for at most `_MAX_UNDECIDED_CHARS` characters.
_MAX_UNDECIDED_CHARS = 2048
_NEVER = "(?!)"  # A regex that never matches.


class MarkerRole(Enum):
    """Whether a marker is a part of the value that is being read, or follows this value.

    PART_OF_VALUE  The value contains the marker.
    AFTER_VALUE    The value ends before the marker. The closing marker of the value is missing.
    UNDECIDED      More text is required.
    """

    PART_OF_VALUE = "part_of_value"
    AFTER_VALUE = "after_value"
    UNDECIDED = "undecided"


class CompiledTag:
    """The compiled declaration of one variant of a tagged value.

    Attributes:
        opening: The pattern of the opening tag, for example `<parameter={key}>`.
        padding: The white space between the opening tag and the value, which is not a part of the
            value.
        close: The closing marker, without white space.
        find_end: A function that finds the closing marker (group "close") or an early end (group
            "early"). An early end is a marker that follows a value without a closing marker. The
            match includes the declared white space before the marker.
        find_possible_end: A function like `find_end` that also finds an incomplete marker at the
            end of the text. If the marker is incomplete, both groups are empty.
    """

    def __init__(self, declaration: TaggedArguments, early_ends: tuple[str, ...]) -> None:
        r"""Compile the regular expressions for one way to write a value, such as `<p={key}>..</p>`.

        Example: with the declaration `close="\n</p>\n"`, both `a\n</p>` and `a</p>` have the value
        `a`. If `</p>` is missing and `</call>` is an early end, `a</call>` has the value `a`, too.

        Args:
            declaration: The declaration of the opening tag and the closing marker.
            early_ends: The markers that follow the value if its closing marker is missing.
        """
        # The opening tag of the value.
        opening_tag = declaration.open.rstrip()
        self.opening: Pattern = compile_pattern(opening_tag)
        self.padding = declaration.open[len(opening_tag) :]
        # The end of the value, which is a closing marker or an early end.
        self.close = declaration.close.strip()
        whitespace_before_close = declaration.close.removesuffix(declaration.close.lstrip())
        end_regex = _value_end_regex(self.close, early_ends, whitespace_before_close)
        end_markers = (self.close, *early_ends)
        incomplete_end_regexes = _value_end_prefixes(end_markers, whitespace_before_close)
        possible_end_regex = "|".join([end_regex, *incomplete_end_regexes])
        # The look-ahead makes the search faster, because it rejects most characters with one test.
        lookahead = _first_char_lookahead((*end_markers, whitespace_before_close))
        self.find_end = re.compile(lookahead + end_regex).search
        self.find_possible_end = re.compile(f"{lookahead}(?:{possible_end_regex})").search


def _value_end_regex(close: str, early_ends: tuple[str, ...], whitespace: str) -> str:
    """Return a regex for the end of a value, with the groups "close" and "early".

    Args:
        close: The closing marker of the value.
        early_ends: The markers that follow the value if its closing marker is missing.
        whitespace: The optional white space before these markers.
    """
    close_group = f"(?P<close>{spaced_marker_regex(close)})"
    early_group = f"(?P<early>{_any_of(early_ends)})"
    return f"(?:{re.escape(whitespace)})?(?:{close_group}|{early_group})"


def _value_end_prefixes(markers: tuple[str, ...], whitespace: str) -> list[str]:
    r"""Return regexes that match incomplete markers at the end of a text.

    Example: for the marker `</p>` and the white space `\n`, the regexes match `\n</` and `</`.
    """
    prefixes: list[str] = []
    for optional_whitespace in dict.fromkeys(("", whitespace)):
        for marker in markers:
            prefixes += spaced_marker_prefixes(marker, optional_whitespace)
    return prefixes


def _any_of(markers: Iterable[str]) -> str:
    """Return a regex that matches any of the markers. Without markers, the regex never matches.

    White space around the tags of a marker is optional, see `spaced_marker_regex`.
    """
    return "|".join(map(spaced_marker_regex, markers)) or _NEVER


def _first_char_lookahead(texts: Iterable[str]) -> str:
    """Return a regex look-ahead that matches before the first character of any of the texts.

    Example: `("</p>", "[x]")` gives the look-ahead for `<` and `[`.
    """
    first_chars = "".join(re.escape(text[0]) for text in texts if text)
    return f"(?=[{first_chars}])"


@dataclass(frozen=True, slots=True)
class TagOpening:
    """The matched opening tag of a tagged value, for example `<parameter=city>`.

    Attributes:
        variant: The variant of the tagged value.
        end: The position after the opening tag.
        fields: The values of the pattern's fields, for example `{"key": "city"}`.
    """

    variant: CompiledTag
    end: int
    fields: dict[str, str]


class CompiledTags:
    """The compiled declaration of tagged arguments. The methods match the tags in a text.

    Attributes:
        variants: The variants of a tagged value, in the order in which they are tried.
        stop_markers: The markers that end the body. These markers do not belong to the body.
    """

    def __init__(
        self,
        declaration: TaggedArguments,
        head: Pattern,
        stop_markers: tuple[str, ...],
        markers_between_calls: tuple[str, ...],
    ) -> None:
        """Compile the declaration of arguments such as `<parameter=city>Paris</parameter>`.

        Args:
            declaration: The declaration. `declaration.also` contains other ways to write a value.
            head: The pattern of a tool call's opening marker and header.
            stop_markers: The markers that end the arguments, for example `</function>`.
            markers_between_calls: The markers that may occur between the last value of a tool call
                and the header of the next tool call.
        """
        variants = (declaration, *declaration.also)
        openings = tuple(dict.fromkeys(first_literal(variant.open) for variant in variants))
        # If the closing marker of a value is missing, one of these texts follows the value.
        early_ends = (*stop_markers, *openings)
        self.stop_markers = stop_markers
        self.variants = tuple(CompiledTag(variant, early_ends) for variant in variants)
        self._head = head
        # Finds the closing markers of values (group "close") and the opening tags of values.
        closes = _any_of(variant.close for variant in self.variants)
        self._find_close_or_opening = re.compile(
            f"(?P<close>{closes})|{_any_of(openings)}"
        ).finditer
        # Matches any number of markers between two tool calls, and white space around them.
        markers = _any_of(markers_between_calls)
        self._match_markers_between_calls = re.compile(rf"(?:\s*(?:{markers}))*\s*").match

    def match(self, text: str, pos: int, is_final: bool) -> TagOpening | Mismatch:
        """Match the opening tag of a value at `pos`, or return NEED_MORE or NO_MATCH.

        The result is the match of the first variant that matches. A variant is one of several ways
        to write a tag. Example: `<parameter=city>` matches the variant `<parameter={key}>` with the
        fields `{"key": "city"}`. The text `<param` gives NEED_MORE.
        """
        for variant in self.variants:
            match = variant.opening.match(text, pos, is_final)
            if isinstance(match, PatternMatch):
                return TagOpening(variant, match.end, match.fields)
            if match == NEED_MORE:
                return NEED_MORE
        return NO_MATCH

    def match_start(self, text: str, pos: int, is_final: bool) -> int:
        """Return `pos` if the arguments can start there. Otherwise, return NEED_MORE or NO_MATCH.

        Examples for values that start with `<parameter={key}>`: `<parameter=city>` and the stop
        marker `</function>`, which ends the arguments, give `pos`, because a tool call may have no
        arguments. The texts `<param` and `</func` give NEED_MORE, and `Paris` gives NO_MATCH.

        The caller calls this method at the end of the text only if the message has ended.
        """
        is_message_end = pos == len(text)
        if is_message_end or self.is_at_stop_marker(text, pos):
            return pos  # The tool call has no arguments.
        opening = self.match(text, pos, is_final)
        if isinstance(opening, TagOpening):
            return pos
        if opening == NEED_MORE:
            return NEED_MORE
        may_become_stop_marker = not is_final and self.may_become_stop_marker(text, pos)
        return NEED_MORE if may_become_stop_marker else NO_MATCH

    def role_of_stop_marker(self, text: str, pos: int, is_final: bool, tools: Tools) -> MarkerRole:
        """Decide whether a stop marker is a part of the current value, or follows this value.

        A stop marker, such as `</function>`, has been found before the closing marker of the value.
        Either the value contains the stop marker, or the model has omitted the closing marker, such
        as `</parameter>`. The text after the stop marker decides:

            `a</function>b</parameter>`               PART_OF_VALUE: the closing marker follows.
            `a</function></call><call><function=f>`   AFTER_VALUE: another tool call follows.
            `a</function></call>`                     AFTER_VALUE if the message ends here, or if
                                                      the next `_MAX_UNDECIDED_CHARS` characters
                                                      contain neither a closing marker nor another
                                                      tool call. Otherwise UNDECIDED.

        Args:
            text: The text.
            pos: The position of the stop marker.
            is_final: Whether no more text follows.
            tools: The tools that the request offers. Calls of functions that are not offered are
                ignored.
        """
        search_end = pos + _MAX_UNDECIDED_CHARS
        for match in self._find_close_or_opening(text, pos, search_end):
            is_close = match.group("close") is not None
            if is_close:
                return MarkerRole.PART_OF_VALUE
            if self._is_next_call(text, pos, match.start(), tools):
                return MarkerRole.AFTER_VALUE
        may_be_decided_later = not is_final and len(text) < search_end
        return MarkerRole.UNDECIDED if may_be_decided_later else MarkerRole.AFTER_VALUE

    def _is_next_call(self, text: str, start: int, end: int, tools: Tools) -> bool:
        """Return whether `text[start:end]` consists of markers and the header of another tool call.

        If the tools are known, the request must offer the function that the header names.
        Example: `</function></call><call><function=f>` contains the header of a call of f.
        """
        markers = self._match_markers_between_calls(text, start, end)
        head_start = markers.end() if markers else start
        head = self._head.match(text, head_start, is_final=False)
        if not isinstance(head, PatternMatch):
            return False
        is_whole_text = skip_whitespace(text, head.end) == end
        is_offered = not tools.is_known or head.fields.get("name") in tools.parameters
        return is_whole_text and is_offered

    def is_at_stop_marker(self, text: str, pos: int) -> bool:
        """Return whether the text at `pos` starts with a marker that ends the body."""
        return any(match_marker(marker, text, pos) >= 0 for marker in self.stop_markers)

    def may_become_stop_marker(self, text: str, pos: int) -> bool:
        """Return whether `text[pos:]` is a prefix of a marker that ends the body.

        Example: `</fun` is a prefix of `</function>`.
        """
        return any(match_marker(marker, text, pos) == NEED_MORE for marker in self.stop_markers)
