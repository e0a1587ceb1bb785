"""Compiles and matches the tags of arguments such as `<parameter=city>Paris</parameter>`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

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
# such as `</parameter>`, in the next `_MAX_UNDECIDED_CHARS` characters.
_MAX_UNDECIDED_CHARS = 2048
_NEVER = "(?!)"  # A regex that never matches.


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

    Example: for the declaration `<p={key}>\n` and `\n</p>` of a value such as `<p=a>\n1\n</p>`, the
    opening is `<p={key}>`, the padding is `\n` and the closing marker is `</p>`.

    Attributes:
        opening: The pattern of the opening tag.
        padding: The declared white space after the opening tag. The padding is not a part of the
            value.
        close: The closing marker, without white space.
        escapes: The kind of escape sequences in the value, see `TaggedArguments`.
        may_be_escaped: Whether `close` is a part of the value if a backslash precedes it.
        find_end: A function that finds the closing marker (group "close") or an early end (group
            "early"). An early end is a marker that follows a value without a closing marker. The
            match includes the declared white space before the marker.
        find_possible_end: A function like `find_end`, except that the function also finds an
            incomplete marker at the end of the text. If the marker is incomplete, both groups are
            empty.
    """

    def __init__(self, declaration: TaggedArguments, early_ends: tuple[str, ...]) -> None:
        r"""Compile the regular expressions for one way to write a value, such as `<p={key}>..</p>`.

        White space before a closing marker is optional in the model's text. Example: with the
        declaration `close="\n</p>\n"`, both `a\n</p>` and `a</p>` have the value `a`. If
        `early_ends` contains `</call>`, the text `a</call>` has the value `a`, too.

        `early_ends` are the markers that follow the value if its closing marker is missing.
        """
        opening_tag = declaration.open.rstrip()
        self.opening: Pattern = compile_pattern(opening_tag)
        # The format may declare white space between the opening tag and the value, such as `\n` in
        # `<p={key}>\n`. This white space is not a part of the value.
        self.padding = declaration.open.removeprefix(opening_tag)
        self.close = declaration.closing_marker
        self.escapes = declaration.escapes
        # In a JSON string, a quote after a backslash does not close the value. But `"</p>` always
        # closes the value, because a string rarely contains this text, and because models sometimes
        # forget to escape a backslash at the end of a string.
        self.may_be_escaped = self.escapes == "json" and not looks_like_markup(self.close)
        # The format may declare white space before the closing marker, such as the first `\n` in
        # `\n</p>\n`. This white space is not a part of the value, so the regex matches it together
        # with the marker. The model may also omit the white space. If `declaration.close` is only a
        # line break, the line break is the marker, and no white space precedes it.
        close = declaration.close.rstrip()
        whitespace = close.removesuffix(close.lstrip())
        markers = (self.close, *early_ends)
        complete = _value_end_regex(self.close, early_ends, whitespace)
        possible = "|".join([complete, *_value_end_prefixes(markers, whitespace)])
        # The look-ahead makes the search faster, because it rejects most characters with one test.
        lookahead = _first_char_lookahead((*markers, whitespace))
        self.find_end = re.compile(f"{lookahead}(?:{complete})").search
        # `find_possible_end` also finds an incomplete marker, such as `</`, at the end of the text.
        self.find_possible_end = re.compile(f"{lookahead}(?:{possible})").search


def _value_end_regex(close: str, early_ends: tuple[str, ...], whitespace: str) -> str:
    r"""Return a regex that matches any of the markers that can end a value.

    The group "close" matches `close`, the closing marker of the value. The group "early" matches a
    marker that follows the value if the closing marker is missing. If there is no such marker, this
    group never matches. `whitespace` is the optional white space before these markers. Example: for
    the closing marker `</p>`, the early end `</call>` and the white space `\n`, the regex matches
    `\n</p>` and `</call>`.
    """
    close_group = f"(?P<close>{_any_marker_regex((close,))})"
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
        variant: The declared way to write a value whose opening tag matches the text.
        end: The position after the opening tag.
        fields: The texts of the pattern's fields. Example: `{"key": "city"}` for the pattern
            `<parameter={key}>`.
    """

    variant: CompiledTag
    end: int
    fields: dict[str, str]


class CompiledTags:
    """Matches the tags of arguments such as `<parameter=city>Paris</parameter>`.

    Tagged arguments are written as `<parameter=city>Paris</parameter>`. A stop marker, such as
    `</function>`, follows the last argument.

    Attributes:
        variants: The declared ways to write a value, in the order in which they are tried.
        stop_markers: The markers that end the arguments.
    """

    def __init__(
        self,
        declaration: TaggedArguments,
        head: Pattern,
        stop_markers: tuple[str, ...],
        markers_between_calls: tuple[str, ...],
    ) -> None:
        """Compile the regexes for arguments such as `<parameter=city>Paris</parameter>`.

        Args:
            declaration: The declaration. `declaration.also` contains other ways to write a value.
            head: The pattern of the text before the arguments, which contains the function's name.
                Example: `<function={name}>`.
            stop_markers: The markers that end the arguments, for example `</function>`.
            markers_between_calls: The markers that may occur between the last value of a tool call
                and the header of the next tool call. Example: `</function>` and `<tool_call>`.
        """
        self.stop_markers = stop_markers
        self._declaration = declaration
        self._head = head
        self._all_markers_between_calls = markers_between_calls
        declarations = (declaration, *declaration.also)
        # The start of each opening tag, such as `<parameter=`, without duplicates. There is no such
        # text if a tag starts with the key, as `{key}=` does.
        literals = [first_literal(each.open) for each in declarations]
        openings = tuple(dict.fromkeys(literal for literal in literals if literal))
        # If the closing tag of a value is missing, the value ends before one of these texts. The
        # opening `<` of `<{key}>` is omitted, because a value may contain any tag, such as `<b>`.
        early_ends = (*stop_markers, *(opening for opening in openings if len(opening) > 1))
        self.variants = tuple(CompiledTag(each, early_ends) for each in declarations)
        # Matches a closing tag (group "close"), or the start of an opening tag.
        closes = _any_marker_regex(variant.close for variant in self.variants)
        self._close_or_opening = re.compile(f"(?P<close>{closes})|{_any_marker_regex(openings)}")
        # Matches any number of markers and the white space around them: `</function> </call>`.
        between_calls = _any_marker_regex(markers_between_calls)
        self._markers_between_calls = re.compile(rf"(?:\s*(?:{between_calls}))*\s*")

    @lru_cache(maxsize=1024)  # noqa: B019  # A program has few formats, and keeps all of them.
    def for_key(self, key: str) -> CompiledTags:
        """Return the tags of the argument `key`. The closing tag may contain the argument's name.

        Example: for the declaration `<{key}>`, `</{key}>`, the value of `city` ends at `</city>`.
        """
        declaration = self._declaration.for_key(key)
        if declaration == self._declaration:
            return self
        between_calls = self._all_markers_between_calls
        return CompiledTags(declaration, self._head, self.stop_markers, between_calls)

    def match(self, text: str, pos: int, is_final: bool) -> TagOpening | Mismatch:
        """Match the opening tag of a value at `text[pos]`.

        Example: for a format with the tag `<parameter={key}>`, the text `<parameter=city>` gives a
        `TagOpening` with the fields `{"key": "city"}`.

        Returns:
            The matched tag. NEED_MORE if more text could complete a tag, as in `<param`. NO_MATCH
            if no tag starts at `pos`.
        """
        if text.startswith("</", pos):
            return NO_MATCH  # With the declaration `<{key}>`, a closing tag would match, too.
        for variant in self.variants:  # The ways to write a tag. The first match is the result.
            match = variant.opening.match(text, pos, is_final)
            if isinstance(match, PatternMatch):
                return TagOpening(variant, match.end, match.fields)
            if match is NEED_MORE:
                return NEED_MORE
        return NO_MATCH

    def start_mismatch(self, text: str, pos: int, is_final: bool) -> Mismatch | None:
        """Test whether the text at `pos` may follow the header of a tool call.

        Return None if arguments start at `pos`, or if the tool call ends there without arguments.
        Return NEED_MORE if more text is required to decide, and NO_MATCH if the text is neither.
        Examples for arguments that start with `<parameter={key}>`:

            text at `pos`        result
            `<parameter=city>`   None
            `</function>`        None: this stop marker shows that there are no arguments.
            none                 None: the message has ended before the arguments.
            `<param`, `</func`   NEED_MORE
            `Paris`              NO_MATCH
        """
        is_message_end = pos == len(text)  # Before the end, the caller waits for text at `pos`.
        has_no_arguments = is_message_end or self.is_at_stop_marker(text, pos)
        if has_no_arguments:
            return None
        opening = self.match(text, pos, is_final)
        if isinstance(opening, TagOpening):
            return None
        if opening is NEED_MORE:
            return NEED_MORE
        may_become_stop_marker = not is_final and self.may_become_stop_marker(text, pos)
        return NEED_MORE if may_become_stop_marker else NO_MATCH

    def role_of_stop_marker(self, text: str, pos: int, is_final: bool, tools: Tools) -> MarkerRole:
        """Decide whether a marker such as `</function>` is a part of a value, or follows the value.

        The marker has been found in the text of a value that `</parameter>` should close. Either
        the value contains the marker, or the model has omitted `</parameter>`:

            `a</function>b</parameter>`                    PART_OF_VALUE: its closing marker follows
            `a</function><function=f><parameter=b>`        AFTER_VALUE: another tool call follows
            neither, as in `a</function>`                  UNDECIDED if more text may follow,
                                                           otherwise AFTER_VALUE

        `pos` is the position of the marker. A call of a function that `tools` does not offer does
        not count as another tool call.
        """
        search_end = pos + _MAX_UNDECIDED_CHARS
        # An opening tag that starts no other tool call is skipped, because the value may contain
        # such a tag.
        for tag in self._close_or_opening.finditer(text, pos, search_end):
            if tag["close"] is not None:
                return MarkerRole.PART_OF_VALUE
            if self._starts_next_call(text, pos, opening_pos=tag.start(), tools=tools):
                return MarkerRole.AFTER_VALUE
        is_search_complete = is_final or len(text) >= search_end
        return MarkerRole.AFTER_VALUE if is_search_complete else MarkerRole.UNDECIDED

    def _starts_next_call(self, text: str, pos: int, opening_pos: int, tools: Tools) -> bool:
        """Return whether the next tool call starts between a stop marker and an opening tag.

        The stop marker, such as `</function>`, is at `pos`. The opening tag, such as `<p=`, is at
        `opening_pos`. The text between these positions must consist of markers, then the header of
        the next tool call, and nothing else. If the request offers tools, the header must name one
        of them. Example: the result is True for the text `</function></call><call><function=f><p=`
        if the request offers `f`.
        """
        markers = self._markers_between_calls.match(text, pos, opening_pos)
        assert markers is not None  # The regex also matches the empty text.
        # `is_final` has no effect, because text follows the header, which ends at `opening_pos`.
        head = self._head.match(text, markers.end(), is_final=False)
        if not isinstance(head, PatternMatch):
            return False
        is_directly_before_opening = skip_whitespace(text, head.end) == opening_pos
        is_offered = not tools.is_known or head.fields.get("name") in tools.parameters
        return is_directly_before_opening and is_offered

    def is_at_stop_marker(self, text: str, pos: int) -> bool:
        """Return whether `text[pos:]` starts with a marker that ends the arguments."""
        return any(isinstance(match_marker(marker, text, pos), int) for marker in self.stop_markers)

    def may_become_stop_marker(self, text: str, pos: int) -> bool:
        """Return whether `text[pos:]` is a prefix of a marker that ends the arguments.

        Example: `</fun` is a prefix of `</function>`.
        """
        return any(match_marker(marker, text, pos) is NEED_MORE for marker in self.stop_markers)
