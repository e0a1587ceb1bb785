"""Compiles the regexes that find the end of an argument's value, such as `</parameter>`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from nereid_parsers.stream.lexer import spaced_marker_prefixes, spaced_marker_regex
from nereid_parsers.stream.pattern_matching import (
    Pattern,
    compile_opening_tag,
    looks_like_markup,
)
from nereid_parsers.tool_declarations import TaggedArguments

_NEVER = "(?!)"  # A regex that never matches.
# Matches a closing marker of one or two characters, without letters, digits, quotes and brackets:
# for example a line break, `;` or `,`.
_SEPARATOR = re.compile(r"""(?:(?![\w"'`<>()\[\]{}]).){1,2}""", re.DOTALL)


class CompiledTag:
    r"""The regular expressions for one way to write an argument, such as `<p=a>1</p>`.

    Example: the text before a value is declared as `<p={key}>\n`, and the text after a value as
    `\n</p>`. Then `opening` is the pattern `<p={key}>`, `padding` is `\n`, and `closing_marker` is
    `</p>`. The value of the argument `<p=a>\n1\n</p>` is `1`.

    Attributes:
        opening: The pattern of the opening tag.
        padding: The declared white space after the opening tag. The padding is not a part of the
            value.
        closing_marker: The closing marker, see `TaggedArguments.closing_marker`.
        separator: The text that may follow the closing marker before the next argument, such as `,`
            in `a="x", b="y"`, or "".
        is_json: Whether the text between the tags is a JSON value that is no string, because the
            format encloses strings in quotes.
        escapes: The kind of escape sequences in the value, see `TaggedArguments`.
        is_closed_by_separator: Whether only a separator, a line break or punctuation, such as `;`
            in `a=1; b=2`, or the next argument ends the value. A value may contain such a
            separator, and the separator may be missing after the last value.
        may_be_escaped: Whether a backslash before the closing marker makes the marker a part of the
            value.
        find_end: A function that finds the closing marker (group "close") or an early end (group
            "early"). An early end is another marker, such as `</call>`, before which the closing
            marker may be missing. The match includes the declared white space before the marker.
        find_possible_end: A function that does the same as `find_end`, and also finds an incomplete
            marker at the end of the text, such as `</`. If the marker is incomplete, both groups
            are empty.
    """

    def __init__(
        self, declaration: TaggedArguments, early_ends: tuple[str, ...], *, is_json: bool = False
    ) -> None:
        """Compile the regular expressions for one way to write a value, such as `<p={key}>..</p>`.

        `early_ends` are the markers that follow the value if its closing marker is missing. Example
        for the early end `</call>`: both `a</p>` and `a</call>` have the value `a`. `is_json`
        states whether the values are JSON in which strings have quotes.
        """
        self.opening: Pattern = compile_opening_tag(declaration.open)
        # The declared white space between the opening tag and the value.
        self.padding = declaration.open.removeprefix(declaration.open.rstrip())
        self.closing_marker = declaration.closing_marker
        self.separator = declaration.separator.strip() if declaration.close else ""
        self.is_json = is_json
        self.escapes = declaration.escapes
        # A value may contain a separator, such as `;` in `a=1; b=2`. Another argument, or the end
        # of the tool call, must follow the separator that ends the value.
        is_punctuation = _SEPARATOR.fullmatch(self.closing_marker) is not None
        self.is_closed_by_separator = not declaration.close or is_punctuation
        # Whether the value continues after `\"` if a quote is the closing marker.
        self.may_be_escaped = _may_escape_closing_marker(declaration)
        regexes = _compile_value_end_regexes(declaration, early_ends)
        self.find_end = regexes.complete.search
        # Also finds an incomplete marker, such as `</`, at the end of the text.
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
    r"""Compile the regexes that find the closing marker of a value, or one of `early_ends`.

    `early_ends` are the markers that follow the value if its closing marker is missing. Examples
    for the declared end `\n</p>`, and the early end `</call>`:

        text           match of `complete`   match of `possible`
        `3\n</p>`      `\n</p>`              `\n</p>`
        `3</call>`     `</call>`             `</call>`
        `3\n</`        none                  `\n</`, which may become `\n</p>`
    """
    closing_marker = declaration.closing_marker
    markers = tuple(marker for marker in (closing_marker, *early_ends) if marker)
    # If no text closes the value, the separator or the next opening tag follows.
    closing_text = declaration.close or declaration.separator or declaration.open
    # The white space that may precede each marker: `\n` in the example, often "".
    whitespace = _whitespace_before_marker(closing_text)
    complete_end = _value_end_regex(closing_marker, early_ends, whitespace)
    incomplete_ends = _value_end_prefixes(markers, whitespace)
    first_texts = (whitespace, *markers)  # Each match starts with one of these texts.
    return _ValueEndRegexes(
        complete=_compile_alternatives([complete_end], first_texts),
        possible=_compile_alternatives([complete_end, *incomplete_ends], first_texts),
    )


def _compile_alternatives(regexes: Iterable[str], first_texts: Iterable[str]) -> re.Pattern[str]:
    r"""Compile a regex that matches any of `regexes`. Each match starts with one of `first_texts`.

    A look-ahead for the first characters of these texts makes the search faster, because it rejects
    most positions with one test. Example: the regexes `</p>` and `#b`, which are also the first
    texts, give `(?=[<\#])(?:</p>|#b)`.
    """
    lookahead_regex = _first_char_lookahead(first_texts)
    return re.compile(f"{lookahead_regex}(?:{'|'.join(regexes)})")


def _value_end_regex(closing_marker: str, early_ends: tuple[str, ...], whitespace: str) -> str:
    r"""Return a regex that matches any of the markers that can end a value.

    The group "close" matches the closing marker of the value. The group "early" matches a marker
    that follows the value if the closing marker is missing. `whitespace` is the optional white
    space before these markers. Example: for the closing marker `</p>`, the early end `</call>` and
    the white space `\n`, the regex matches `\n</p>` and `</call>`.
    """
    close_group = f"(?P<close>{any_marker_regex((closing_marker,))})"
    early_group = f"(?P<early>{any_marker_regex(early_ends)})"
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


def any_marker_regex(markers: Iterable[str]) -> str:
    """Return a regex that matches any of `markers`, or never matches if all of them are empty.

    White space between the tags of a marker is optional. Example: the marker `<a><b>` gives a regex
    that also matches `<a> <b>`.
    """
    return "|".join(spaced_marker_regex(marker) for marker in markers if marker) or _NEVER
