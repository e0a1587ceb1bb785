r"""Split the regular expressions of response templates into literals and variable texts.

A response template declares a marker as a regular expression such as

    \s*<tool_call>\s*<function=(?P<name>[^>\n]+)>

A format is also used to write markers, so a format cannot contain the expression itself. Therefore
the expression is split into six pieces: white space, the literal `<tool_call>`, white space, the
literal `<function=`, the variable text `name` and the literal `>`. Expressions with other elements
are rejected.
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
# Matches the members of a character class if all of them are white space: the `\s\n` of `[\s\n]`.
_WHITE_SPACE_MEMBERS = re.compile(r"(?:\\[sntr]| )+")
_MAX_ALTERNATIVES = 16


@dataclass(frozen=True, slots=True)
class OptionalWhitespace:
    r"""Optional white space: `\s*`."""


@dataclass(frozen=True, slots=True)
class VariableText:
    r"""An element of a regular expression that matches different texts, not one literal.

    Examples: `(?P<key>\w+)` becomes `VariableText("key")`, and `[^>]+` becomes `VariableText("")`.
    """

    name: str


_UNNAMED_TEXT = VariableText("")  # for example `.` or `[^>]`

# A piece of a regular expression. A str is a literal text, which the expression matches exactly.
Piece = str | OptionalWhitespace | VariableText
Pieces = tuple[Piece, ...]


def alternatives(regex: str) -> list[Pieces]:
    r"""Split a regular expression into its alternatives, and each alternative into pieces.

    A piece is a literal text, optional white space, or variable text such as a named group. The
    caller builds the markers of a format from the pieces.

    >>> alternatives(r"\s*<a (?P<name>\w+)>|<b>")
    [(OptionalWhitespace(), '<a ', VariableText(name='name'), '>'), ('<b>',)]

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

    A piece of a regular expression is a literal (a string), optional white space or variable text.

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
    """Return the joined literals of a regular expression, without its optional white space.

    >>> text_of_literals(("<call>", OptionalWhitespace(), "<f>"))
    '<call><f>'

    Raises:
        FormatError: A piece is variable text.
    """
    return "".join(literal_text(piece) for piece in pieces)


def literal_text(piece: Piece) -> str:
    """Return the literal text of one piece. The literal text of optional white space is "".

    >>> literal_text("<call>"), literal_text(OptionalWhitespace())
    ('<call>', '')

    Raises:
        FormatError: The piece is variable text, which has no literal text.
    """
    if isinstance(piece, VariableText):
        raise FormatError(
            "the response_template describes a marker with a regular expression that contains a "
            "group, but a marker must be a fixed text"
        )
    return piece if isinstance(piece, str) else ""


def marker_spellings(field: Mapping[str, Any], key: str) -> tuple[str, ...]:
    r"""Return all spellings of one marker that a response template declares.

    Example: if `key` is "open", the member `open` contains one literal or a list of literals. If
    there is no member `open`, the member `open_pattern` contains a regular expression. If there is
    no such member either, the result is ().

    >>> marker_spellings({"open": "<a>"}, "open")
    ('<a>',)
    >>> marker_spellings({"open_pattern": r"<a>|<b>\s*"}, "open")
    ('<a>', '<b>')

    Args:
        field: The object that declares the marker, for example the member `tool_calls` of a
            response template.
        key: The key of the marker: "open", "close" or "start_anchor".

    Raises:
        FormatError: The regular expression matches variable text, which is not a marker.
    """
    literal = field.get(key)
    if isinstance(literal, str):
        return (literal,)
    if isinstance(literal, list):
        return tuple(str(spelling) for spelling in literal)
    regex = field.get(f"{key}_pattern")
    return () if regex is None else _spellings_of_regex(regex)


def _spellings_of_regex(regex: str) -> tuple[str, ...]:
    r"""Return the literal text of each alternative of a regular expression, without duplicates.

    White space around the texts is removed, and empty texts are omitted.

    >>> _spellings_of_regex(r"<a>|<b>\s*|<a>")
    ('<a>', '<b>')

    Raises:
        FormatError: The expression matches variable text, for example with a named group.
    """
    texts = [text_of_literals(pieces).strip() for pieces in alternatives(regex)]
    distinct_texts = dict.fromkeys(texts)
    return tuple(text for text in distinct_texts if text)


class _Reader:
    """A recursive-descent parser, which splits a regular expression into pieces.

    A method whose name starts with `read_` reads the element at `position`, and moves `position` to
    the end of this element. Most of these methods return the alternatives of the element. An
    alternative is a tuple of pieces. Example: the element `(?:a|b)` has the alternatives `("a",)`
    and `("b",)`, and the element `^`, which matches no text, has one alternative without pieces.

    Attributes:
        regex: The whole regular expression.
        position: The index in `regex` of the next character that is read.
    """

    def __init__(self, regex: str) -> None:
        """Create a parser that starts at the first character of `regex`."""
        self.regex = regex
        self.position = 0

    def error(self, reason: str) -> FormatError:
        """Return an error whose message contains the expression and the given reason."""
        return FormatError(f"the regular expression {self.regex!r} cannot be used: {reason}")

    def read_alternatives(self) -> list[Pieces]:
        """Read alternatives such as `a|b`, up to the end of the group or of the expression.

        The method moves `position` to the end of the alternatives, for example to the `)`.

        >>> _Reader("a|bc").read_alternatives()
        [('a',), ('b', 'c')]
        """
        result = self.read_sequence()
        while self.regex.startswith("|", self.position):
            self.position += len("|")
            result += self.read_sequence()
        return result

    def read_sequence(self) -> list[Pieces]:
        """Read the elements up to the next `|` or `)`, and return their combined alternatives.

        An element is a character or a group, for example. In the expression below, the first
        element has two alternatives, and the second element has one alternative. The method moves
        `position` to the end of the last element.

        >>> _Reader("(?:a|b)c").read_sequence()
        [('a', 'c'), ('b', 'c')]
        """
        combinations: list[Pieces] = [()]
        while self.position < len(self.regex) and self.regex[self.position] not in "|)":
            element = self.read_element()
            combinations = [start + end for start, end in product(combinations, element)]
            if len(combinations) > _MAX_ALTERNATIVES:
                raise self.error(
                    f"the expression has too many alternatives; the limit is {_MAX_ALTERNATIVES}"
                )
        return combinations

    def read_element(self) -> list[Pieces]:
        """Read one element and the quantifier after the element, and return the alternatives.

        An element is a group, a character class, an escape or a single character. A quantifier is,
        for example, the `?` in `a?`. The method moves `position` to the end of the quantifier.

        >>> _Reader("a?").read_element(), _Reader("^").read_element()
        ([('a',), ()], [()])
        """
        char = self.regex[self.position]
        if char in "^$":  # These characters match no text, so their only alternative is empty.
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
            element = [(_UNNAMED_TEXT if matches_any_character else char,)]
        return self.read_quantifier(element)

    def read_quantifier(self, element: list[Pieces]) -> list[Pieces]:
        r"""Read the quantifier at `position`, and return the alternatives of the repeated element.

        The method moves `position` to the end of the quantifier. If there is no quantifier,
        `element` is returned. There are three other cases:

            `\s*`, `[^>]+`   `element` is returned, because the pieces for white space and for
                             variable text already stand for a text of any length.
            `a?`             The alternatives are `a` and the empty text.
            `a+`, `a*`       The quantifier is rejected, because a format cannot write a marker of
                             unlimited length.

        >>> _Reader("?").read_quantifier([("a",)])
        [('a',), ()]
        >>> _Reader("+").read_quantifier([(VariableText("x"),)])
        [(VariableText(name='x'),)]

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
        """Read the group at `position`, and return its alternatives.

        A named group has one alternative, which is a piece of variable text with the name of the
        group. Any other group has the alternatives inside the parentheses. The method moves
        `position` to the end of the group.

        >>> _Reader("(?P<key>[a-z]+)").read_group(), _Reader("(?:a|b)").read_group()
        ([(VariableText(name='key'),)], [('a',), ('b',)])
        """
        named = _NAMED_GROUP.match(self.regex, self.position)
        if named is not None:
            self.position = self.end_of_group()
            return [(VariableText(named.group(1)),)]
        self.position += len(self.opening_of_group())
        inner_alternatives = self.read_alternatives()
        is_closed = self.regex.startswith(")", self.position)
        if not is_closed:
            raise self.error("a group is not closed")
        self.position += len(")")
        return inner_alternatives

    def opening_of_group(self) -> str:
        """Return the characters that open the group at `position`: "(" or "(?:".

        The group has no name. The method does not change `position`.

        >>> _Reader("(?:a|b)").opening_of_group()
        '(?:'

        Raises:
            FormatError: The group is of another kind, for example `(?=..)`.
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

        The group may contain other groups. The method does not change `position`.

        >>> _Reader("(?P<key>(a|b)[)])c").end_of_group()
        17

        Raises:
            FormatError: The group or a character class is not closed.
        """
        num_open_groups = 0
        start = self.position
        while start < len(self.regex):
            end = self.end_of_character(start)
            match self.regex[start:end]:
                case "(":
                    num_open_groups += 1
                case ")":
                    num_open_groups -= 1
            if num_open_groups == 0:
                return end
            start = end
        raise self.error("a group is not closed")

    def end_of_character(self, start: int) -> int:
        r"""Return the index after the character, escape or character class at `start`.

        >>> [_Reader(regex).end_of_character(0) for regex in ("(a", r"\(a", "[(]a")]
        [1, 2, 3]
        """
        match self.regex[start]:
            case "[":
                return self.end_of_class(start)
            case "\\":
                return start + 2  # the backslash and the escaped character
            case _:
                return start + 1

    def end_of_class(self, start: int) -> int:
        """Return the index after the bracket that closes the character class at `start`.

        If the first member of a class is `]`, this bracket does not close the class. So the search
        starts after the first member.

        >>> _Reader("[]a]").end_of_class(0)
        4

        Raises:
            FormatError: The class is not closed.
        """
        first_member = start + len("[")
        closing_bracket = self.regex.find("]", first_member + 1)
        if closing_bracket < 0:
            raise self.error("a character class is not closed")
        return closing_bracket + len("]")

    def read_class(self) -> Piece:
        r"""Read a character class, such as `[^>]`, and return one piece for the class.

        If all members of the class are white space, the piece is optional white space. Otherwise
        the piece is variable text without a name. The method moves `position` to the end of the
        class.

        >>> _Reader("[ \\n]").read_class(), _Reader("[^>]").read_class()
        (OptionalWhitespace(), VariableText(name=''))
        """
        end = self.end_of_class(self.position)
        class_text = self.regex[self.position : end]
        self.position = end
        members = class_text.removeprefix("[").removesuffix("]")
        return OptionalWhitespace() if _WHITE_SPACE_MEMBERS.fullmatch(members) else _UNNAMED_TEXT

    def read_escape(self) -> Piece:
        r"""Read an escape, such as `\s`, and return the piece for the escape.

        The method moves `position` to the end of the escape.

        >>> [_Reader(regex).read_escape() for regex in (r"\s", r"\w", r"\b", r"\n", r"\.")]
        [OptionalWhitespace(), VariableText(name=''), '', '\n', '.']
        """
        char = self.regex[self.position + 1 : self.position + 2]
        self.position += 2
        if char == "s":
            return OptionalWhitespace()
        if char in ("w", "d", "S"):
            return _UNNAMED_TEXT
        if char in ("Z", "b", "A", "z"):  # A boundary, such as `\b`, matches no text.
            return ""
        return _ESCAPED_CHARACTERS.get(char, char)
