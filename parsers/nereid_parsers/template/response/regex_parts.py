r"""Split the regular expressions of response templates into literals and fields.

A response template declares a marker as a regular expression such as

    \s*<tool_call>\s*<function=(?P<name>[^>\n]+)>

A format is also used to write markers, so it cannot contain the expression itself. Therefore the
expression is split into white space, the literal `<tool_call>`, white space, the literal
`<function=`, the field `name` and the literal `>`. Expressions with other elements are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

from nereid_parsers.errors import FormatError

_ESCAPED_CHARACTERS = {"n": "\n", "t": "\t", "r": "\r"}
_QUANTIFIER = re.compile(r"[*+?]\??|\{\d+(?:,\d*)?\}\??")
_NAMED_GROUP = re.compile(r"\(\?P<(\w+)>")
_WHITE_SPACE_CLASS = re.compile(r"(?:\\[sntr]| )+")  # Matches the `\s\n` of `[\s\n]`.
_MAX_ALTERNATIVES = 16


@dataclass(frozen=True, slots=True)
class OptionalWhitespace:
    r"""Optional white space: `\s*`."""


@dataclass(frozen=True, slots=True)
class Field:
    r"""A part of a regular expression that matches varying text.

    Examples: `(?P<key>\w+)` is a field with the name "key", and `[^>]+` is a field with the name
    "".
    """

    name: str


_UNNAMED_FIELD = Field("")  # for example `.` or `[^>]`

Piece = str | OptionalWhitespace | Field  # A str is a literal.
Pieces = tuple[Piece, ...]


def alternatives(regex: str) -> list[Pieces]:
    r"""Split a regular expression into its alternatives, and each alternative into pieces.

    A piece is a literal text, optional white space, or a field, which matches varying text. A
    format consists of such pieces, so this function converts an expression for a format.

    >>> alternatives(r"\s*<a (?P<name>\w+)>|<b>")
    [(OptionalWhitespace(), '<a ', Field(name='name'), '>'), ('<b>',)]

    Raises:
        FormatError: The expression is malformed, or has elements other than literals, white space,
            groups, character classes, options (`?`) and alternatives (`|`).
    """
    reader = _Reader(regex)
    unjoined_alternatives = reader.read_alternatives()
    is_at_end = reader.position == len(regex)
    if not is_at_end:
        raise reader.error(f"the parenthesis at index {reader.position} does not close a group")
    return [_join_literals(pieces) for pieces in unjoined_alternatives]


def _join_literals(pieces: Pieces) -> Pieces:
    """Join neighbouring literals, and remove empty literals.

    A piece of a regular expression is a literal (a string), white space, or a field.

    >>> _join_literals(("<", "a", OptionalWhitespace(), ">"))
    ('<a', OptionalWhitespace(), '>')
    """
    joined: list[Piece] = []
    for piece in pieces:
        previous = joined[-1] if joined else None
        if isinstance(piece, str) and isinstance(previous, str):
            joined[-1] = previous + piece
        elif piece != "":
            joined.append(piece)
    return tuple(joined)


def text_of_literals(pieces: Pieces) -> str:
    """Join the literals of a regular expression. White space is omitted.

    Raises:
        FormatError: A piece is a group of the regular expression.
    """
    return "".join(literal_text(piece) for piece in pieces)


def literal_text(piece: Piece) -> str:
    """Return the text of one piece of a regular expression: a literal, or "" for white space.

    >>> literal_text("<call>"), literal_text(OptionalWhitespace())
    ('<call>', '')

    Raises:
        FormatError: The piece is a group of a regular expression.
    """
    if isinstance(piece, Field):
        raise FormatError(
            "the response_template describes a marker with a regular expression that contains a "
            "group, but a marker must be a fixed text"
        )
    return piece if isinstance(piece, str) else ""


def marker_spellings(field: Mapping[str, Any], key: str) -> tuple[str, ...]:
    r"""Return all spellings of one marker. `key` selects the marker, for example "open".

    If `key` is "open", the member `open` of the field contains one or more literals, or the member
    `open_pattern` contains a regular expression. The result is () if the field has no such member.

    >>> marker_spellings({"open": "<a>"}, "open")
    ('<a>',)
    >>> marker_spellings({"open_pattern": r"<a>|<b>\s*"}, "open")
    ('<a>', '<b>')

    Args:
        field: The declaration of a field, such as "tool_calls", in a response template.
        key: The key of the marker: "open", "close" or "start_anchor".

    Raises:
        FormatError: A regular expression contains a group.
    """
    literal = field.get(key)
    if isinstance(literal, str):
        return (literal,)
    if isinstance(literal, list):
        return tuple(str(spelling) for spelling in literal)
    regex = field.get(f"{key}_pattern")
    return () if regex is None else _spellings_of_regex(regex)


def _spellings_of_regex(regex: str) -> tuple[str, ...]:
    r"""Return the texts that a regular expression matches, without white space around the texts.

    >>> _spellings_of_regex(r"<a>|<b>\s*")
    ('<a>', '<b>')

    Raises:
        FormatError: The expression contains a group.
    """
    texts = [text_of_literals(pieces).strip() for pieces in alternatives(regex)]
    distinct_texts = dict.fromkeys(texts)
    return tuple(text for text in distinct_texts if text)


class _Reader:
    """A recursive-descent parser of a regular expression.

    Each `read_` method reads one element that starts at `position`, and moves `position` to the end
    of the element. The method returns the alternatives of the element. Each alternative is a tuple
    of pieces. An element that matches no text, such as `^`, has one alternative without pieces, so
    the method returns `[()]`.
    """

    def __init__(self, regex: str) -> None:
        """Create a parser for `regex`. The parser starts at the first character."""
        self.regex = regex
        self.position = 0

    def error(self, reason: str) -> FormatError:
        """Return an error whose message explains why `regex` cannot be used."""
        return FormatError(f"the regular expression {self.regex!r} cannot be used: {reason}")

    def read_alternatives(self) -> list[Pieces]:
        """Read alternatives such as `a|b`, up to the end of the group or of the expression.

        >>> _Reader("a|b").read_alternatives()
        [('a',), ('b',)]
        """
        result = self.read_sequence()
        while self.regex.startswith("|", self.position):
            self.position += 1
            result += self.read_sequence()
        return result

    def read_sequence(self) -> list[Pieces]:
        """Read the elements up to `|` or `)`, and return all combinations of their alternatives.

        An element is, for example, a character or a group. The method moves `position` to the end
        of the sequence.

        >>> _Reader("(?:a|b)c").read_sequence()
        [('a', 'c'), ('b', 'c')]
        """
        combinations: list[Pieces] = [()]
        while self.position < len(self.regex) and self.regex[self.position] not in "|)":
            element = self.read_element()
            combinations = [before + after for before, after in product(combinations, element)]
            if len(combinations) > _MAX_ALTERNATIVES:
                raise self.error(
                    f"the expression has too many alternatives; the limit is {_MAX_ALTERNATIVES}"
                )
        return combinations

    def read_element(self) -> list[Pieces]:
        """Read one element with its quantifier: a group, a class, an escape or a character.

        The method returns the alternatives of the element, and moves `position` to the end of the
        element. `^` and `$` match no text, so their only alternative is empty.

        >>> _Reader("a?").read_element(), _Reader("^").read_element()
        ([('a',), ()], [()])
        """
        char = self.regex[self.position]
        if char in "^$":
            self.position += 1
            return [()]
        element: list[Pieces]
        if char == "(":
            element = self.read_group()
        elif char == "[":
            element = [(self.read_class(),)]
        elif char == "\\":
            element = [(self.read_escape(),)]
        else:
            self.position += 1
            matches_any_character = char == "."
            element = [(_UNNAMED_FIELD if matches_any_character else char,)]
        return self.read_quantifier(element)

    def read_quantifier(self, element: list[Pieces]) -> list[Pieces]:
        r"""Read the quantifier after `element`, if any, and return the quantified alternatives.

        The method moves `position` to the end of the quantifier. There are three cases:

            `\s*`, `[^>]+`   The quantifier has no effect, because white space and fields already
                             match any length.
            `a?`             The alternatives are `a` and the empty text.
            `a+`, `a*`       The quantifier is rejected, because a format cannot write a marker of
                             unlimited length.

        >>> _Reader("?").read_quantifier([("a",)]), _Reader("+").read_quantifier([(Field("x"),)])
        ([('a',), ()], [(Field(name='x'),)])

        Args:
            element: The alternatives of the element before the quantifier.

        Raises:
            FormatError: The quantifier repeats a literal.
        """
        quantifier = _QUANTIFIER.match(self.regex, self.position)
        if quantifier is None:
            return element
        self.position = quantifier.end()
        contains_literal = any(isinstance(piece, str) for piece in chain.from_iterable(element))
        if not contains_literal:
            return element
        if quantifier.group().startswith("?"):
            return [*element, ()]
        raise self.error(f"the quantifier {quantifier.group()} must not repeat a literal")

    def read_group(self) -> list[Pieces]:
        """Read a named group as a field. For any other group, return the alternatives inside it.

        The method moves `position` to the end of the group.

        >>> _Reader("(?P<key>[a-z]+)").read_group(), _Reader("(?:a|b)").read_group()
        ([(Field(name='key'),)], [('a',), ('b',)])
        """
        named = _NAMED_GROUP.match(self.regex, self.position)
        if named is not None:
            self.position = self.end_of_group()
            return [(Field(named.group(1)),)]
        self.position += len(self.start_of_group())
        inner_alternatives = self.read_alternatives()
        is_closed = self.regex.startswith(")", self.position)
        if not is_closed:
            raise self.error("a group is not closed")
        self.position += len(")")
        return inner_alternatives

    def start_of_group(self) -> str:
        """Return the characters that start the group without a name at `position`.

        `position` is not changed.

        >>> _Reader("(?:a|b)").start_of_group()
        '(?:'
        """
        if self.regex.startswith("(?:", self.position):
            return "(?:"
        if self.regex.startswith("(?", self.position):
            raise self.error(
                "a group that looks ahead or behind, or that sets flags, is not supported"
            )
        return "("

    def end_of_group(self) -> int:
        """Return the index after the parenthesis that closes the group at `position`.

        Groups inside this group are skipped. `position` is not changed.

        >>> _Reader("(?P<key>(a|b)[)])c").end_of_group()
        17
        """
        num_open_groups = 0
        index = self.position
        while index < len(self.regex):
            char = self.regex[index]
            if char == "[":
                index = self.end_of_class(index)  # Parentheses in a character class are literals.
            elif char == "\\":
                index += 2  # The backslash and the character that it escapes.
            else:
                index += 1
            if char == "(":
                num_open_groups += 1
            elif char == ")":
                num_open_groups -= 1
                if num_open_groups == 0:
                    return index
        raise self.error("a group is not closed")

    def end_of_class(self, start: int) -> int:
        """Return the index after the bracket that closes the character class at `start`.

        A bracket directly after the opening bracket is a member of the class, so the search starts
        after the first member.

        >>> _Reader("[]a]").end_of_class(0)
        4
        """
        first_member = start + len("[")
        closing_bracket = self.regex.find("]", first_member + 1)
        if closing_bracket < 0:
            raise self.error("a character class is not closed")
        return closing_bracket + len("]")

    def read_class(self) -> Piece:
        r"""Read a character class, such as `[^>]`, and return the piece for this class.

        The piece is `OptionalWhitespace` if the class contains only white space, otherwise a
        `Field`. The method moves `position` to the end of the class.

        >>> _Reader("[ \\n]").read_class(), _Reader("[^>]").read_class()
        (OptionalWhitespace(), Field(name=''))
        """
        end = self.end_of_class(self.position)
        class_text = self.regex[self.position : end]
        self.position = end
        members = class_text.removeprefix("[").removesuffix("]")
        return OptionalWhitespace() if _WHITE_SPACE_CLASS.fullmatch(members) else _UNNAMED_FIELD

    def read_escape(self) -> Piece:
        r"""Read an escape: `\s` as white space, `\w` as a field, `\b` as nothing, `\.` as "."."""
        char = self.regex[self.position + 1 : self.position + 2]
        self.position += 2
        if char == "s":
            return OptionalWhitespace()
        if char in ("w", "d", "S"):
            return _UNNAMED_FIELD
        if char in ("Z", "b", "A", "z"):
            return ""
        return _ESCAPED_CHARACTERS.get(char, char)
