"""Matches the tags of arguments such as `<parameter=city>Paris</parameter>`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from nereid_parsers.pattern_syntax import first_literal
from nereid_parsers.stream.bodies.compiled_tag import CompiledTag, any_marker_regex
from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    Mismatch,
    Pattern,
    PatternMatch,
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
        next_header_start: str,
    ) -> None:
        """Compile the regexes for arguments such as `<parameter=city>Paris</parameter>`.

        Args:
            declaration: Declares the text before and after each value. `declaration.also` declares
                other ways to write a value.
            head: The pattern of the text before the arguments, such as `<function={name}>`.
            stop_markers: The markers that end the arguments, for example `</function>`.
            markers_between_calls: The markers that may separate the last value of a tool call from
                the next header, for example `</function>` and `<tool_call>`.
            next_header_start: The first fixed text of the header that ends the arguments of the
                previous tool call, or "" if a marker ends the arguments. Example: in the lines
                `- f:`, ` a: 1` and `- g:`, the header `- g:` ends the arguments of `f`, and this
                text is `-`.
        """
        self.stop_markers = stop_markers
        self._declaration = declaration
        self._head = head
        self._markers_between_calls = markers_between_calls
        self._next_header_start = next_header_start
        declarations = (declaration, *declaration.also)
        # The fixed texts with which an argument may start, such as `<parameter=`.
        self._tag_starts = _tag_starts(declarations)
        # If an opening tag starts with the same text as the header, the parser cannot distinguish
        # the next header from an argument.
        is_header_like_tag = next_header_start in self._tag_starts
        self._next_header_ends_arguments = bool(next_header_start) and not is_header_like_tag
        self.variants = tuple(map(self._compile_variant, declarations))
        self._close_or_tag_start_regex = _compile_close_or_tag_start(
            self.variants, self._tag_starts
        )
        self._between_calls_regex = _compile_between_calls(markers_between_calls)

    def _compile_variant(self, form: TaggedArguments) -> CompiledTag:
        """Compile one of the declared ways to write an argument.

        Example: a format writes strings as `a="x"`, and all other values as `a=1`. The second form
        then contains JSON values without quotes.
        """
        has_quoted_strings = self._declaration.escapes == "json"
        is_string_form = bool(form.escapes)
        return CompiledTag(
            form,
            _early_ends(form, self.stop_markers, self._tag_starts),
            is_json=has_quoted_strings and not is_string_form,
        )

    @lru_cache(maxsize=1024)  # noqa: B019  # A program has few formats, and keeps all of them.
    def for_key(self, key: str) -> CompiledTags:
        """Return the tags of the argument `key`. The closing tag may contain the argument's name.

        Example: for the declaration `<{key}>`, `</{key}>`, the value of `city` ends at `</city>`.
        """
        declaration = self._declaration.for_key(key)
        if declaration == self._declaration:
            return self
        return CompiledTags(
            declaration,
            self._head,
            self.stop_markers,
            self._markers_between_calls,
            self._next_header_start,
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
        """Return None if the body of a tool call starts at `pos`, otherwise NEED_MORE or NO_MATCH.

        The body is the text after the header of the tool call: an argument, or a stop marker if
        there are no arguments. Examples for arguments that start with `<parameter={key}>`:

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
        if isinstance(end, int):  # The body has no arguments.
            return None
        if end is NEED_MORE:
            return NEED_MORE
        opening = self.match(text, pos, is_final)
        return None if isinstance(opening, TagOpening) else opening

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
            # The caller must wait, because it could mistake an incomplete stop marker for a tag.
            # Example: the stop marker is `[[end]]`, and the tags have the form `[{key}]`. Then the
            # incomplete marker `[[end]` looks like the opening tag of an argument `[end`.
            return NEED_MORE
        return self.match_next_call(text, pos, is_final, tools)

    def match_next_call(
        self, text: str, pos: int, is_final: bool, tools: Tools = _NO_TOOLS
    ) -> int | Mismatch:
        """Match the header of the next tool call at `pos`, if the arguments end at this header.

        In most formats, arguments end at a marker instead, so the result is NO_MATCH. If the
        offered `tools` are known, the header must name one of these tools. Examples for the header
        `- {name}:` and the offered tool `f`:

            text at `pos`   result
            `- f:`          the position after the header
            `- `            NEED_MORE
            `- g:`          NO_MATCH, because the tool `g` is not offered
            `a: 1`          NO_MATCH
        """
        if not self._next_header_ends_arguments:
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
        if not self._tag_starts:
            # `_role_shown_by_tag` searches for the fixed text of a tag, such as `<parameter=`, but
            # an argument such as `a=1` has no fixed text. Therefore, the start of the next tool
            # call must follow the stop marker directly.
            next_call = self._match_call_after_markers(
                text[pos:search_end], is_search_complete, tools
            )
            if next_call is NEED_MORE:
                return MarkerRole.UNDECIDED
            if isinstance(next_call, TagOpening):
                return MarkerRole.AFTER_VALUE
        role = self._role_shown_by_tag(text, pos, search_end, tools)
        if role is MarkerRole.UNDECIDED and is_search_complete:
            return MarkerRole.AFTER_VALUE
        return role

    def _role_shown_by_tag(
        self, text: str, stop_marker_pos: int, search_end: int, tools: Tools
    ) -> MarkerRole:
        """Search for a tag that shows the role of the stop marker at `stop_marker_pos`.

        The closing marker of the value, such as `</parameter>`, shows that the stop marker is a
        part of the value. An opening tag, such as `<parameter=`, shows that the stop marker follows
        the value, but only if the tag belongs to the next tool call. If there is no such tag before
        `search_end`, the result is UNDECIDED.
        """
        next_arguments_pos = self._arguments_of_next_call(text, stop_marker_pos, search_end, tools)
        for tag in self._close_or_tag_start_regex.finditer(text, stop_marker_pos, search_end):
            is_closing_marker = tag["close"] is not None
            if is_closing_marker:
                return MarkerRole.PART_OF_VALUE
            if tag.start() == next_arguments_pos:
                return MarkerRole.AFTER_VALUE
        return MarkerRole.UNDECIDED

    def _arguments_of_next_call(
        self, text: str, stop_marker_pos: int, search_end: int, tools: Tools
    ) -> int | None:
        """Return the position after the header of the tool call that follows a stop marker.

        Example: in the text `</function></call><call><function=f><parameter=`, the stop marker is
        `</function>`, and the result is the position of `<parameter=`. The result is None if other
        text than markers precedes the header, or if the header names a function that the request
        does not offer.
        """
        head_start = self._skip_markers_between_calls(text, stop_marker_pos, search_end)
        # The text after the header has arrived, so `is_final` has no effect.
        head = self._head.match(text, head_start, is_final=False)
        if not isinstance(head, PatternMatch) or not _is_offered(head, tools):
            return None
        return skip_whitespace(text, head.end)

    def _match_call_after_markers(
        self, text: str, is_final: bool, tools: Tools
    ) -> TagOpening | Mismatch:
        """Match the start of the next tool call, up to the opening tag of its first argument.

        `text` starts with the markers between two tool calls, such as `</call>` and `<call>`. A
        header and an argument must follow these markers. Examples for arguments such as `a=1`:

            `</call><call>f a=1`   the `TagOpening` of the argument `a`
            `</call><ca`           NEED_MORE, because `<ca` may become the marker `<call>`
            `</call> text`         NO_MATCH
        """
        head_start = self._skip_markers_between_calls(text, 0, len(text))
        if not is_final and self._may_become_marker_between_calls(text, head_start):
            return NEED_MORE
        head = self._head.match(text, head_start, is_final)
        if not isinstance(head, PatternMatch):
            return head
        if not _is_offered(head, tools):
            return NO_MATCH
        return self.match(text, skip_whitespace(text, head.end), is_final)

    def _may_become_marker_between_calls(self, text: str, pos: int) -> bool:
        """Return whether `text[pos:]` is a prefix of a marker between two tool calls: `<ca`."""
        markers = self._markers_between_calls
        return any(match_marker(marker, text, pos) is NEED_MORE for marker in markers)

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


def _early_ends(
    declaration: TaggedArguments, stop_markers: tuple[str, ...], tag_starts: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the texts that follow a value if its closing marker is missing (the "early ends").

    Examples: the stop marker `</function>`, and the start `<parameter=` of the next tag. The tag
    start `<` of `<{key}>` is omitted, because a value may contain any tag, such as `<b>`. A tag
    start of one character is not omitted if no other text ends the value, as in `-a=1 -b=2`. A
    string in quotes, such as `"--b x"`, contains the start of the next tag.
    """
    is_quoted = declaration.escapes == "json" and len(declaration.closing_marker) == 1
    if is_quoted:
        return stop_markers
    min_chars = 2 if declaration.closing_marker else 1
    return (*stop_markers, *(start for start in tag_starts if len(start) >= min_chars))


def _compile_close_or_tag_start(
    variants: Iterable[CompiledTag], tag_starts: Iterable[str]
) -> re.Pattern[str]:
    """Return a regex that matches the closing marker of any variant, or the start of a tag.

    The group "close" matches a closing marker, such as `</parameter>`. If the regex matches the
    start of an opening tag, such as `<parameter=`, the group is empty.
    """
    closing_markers = any_marker_regex(variant.closing_marker for variant in variants)
    return re.compile(f"(?P<close>{closing_markers})|{any_marker_regex(tag_starts)}")


def _compile_between_calls(markers: Iterable[str]) -> re.Pattern[str]:
    """Return a regex that matches any number of `markers` and the white space around them.

    Example: for the markers `</function>` and `</call>`, the regex matches `</function> </call>`.
    """
    return re.compile(rf"(?:\s*(?:{any_marker_regex(markers)}))*\s*")
