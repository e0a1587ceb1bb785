r"""Split a regular expression into fixed texts and parts that can match more than one text.

A response template declares a marker as a regular expression such as

    \s*<tool_call>\s*<function=(?P<name>[^>\n]+)>

A format is also used to write markers, so a format cannot contain the expression itself. Therefore
the expression is split into six pieces: white space, the literal `<tool_call>`, white space, the
literal `<function=`, the variable text `name` and the literal `>`. Expressions with other elements
are rejected.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

from nereid_parsers.errors import FormatError

# Matches one token of a regular expression.
_TOKEN = re.compile(
    r"""
      \\.                                         # an escape, such as `\s`
    | \[ \^? (?:\\.|[^\\]) (?:\\.|[^\\\]])* \]    # a character class, such as `[^>]` or `[]a]`
    | \( (?: \?P<\w+> | \?:? )?                   # the start of a group, such as `(?:`
    | [*+?]\?? | \{\d+(?:,\d*)?\}\??              # a quantifier, such as `*` or `{2,4}`
    | .                                           # any other character
    """,
    re.VERBOSE | re.DOTALL,
)
_QUANTIFIER = re.compile(r"[*+?]\??|\{\d+(?:,\d*)?\}\??")
# Matches a character class, such as `[\s\n]`, if all its members are white space.
_WHITE_SPACE_CLASS = re.compile(r"\[(?:\\[sntr]| )+\]")
_MAX_ALTERNATIVES = 16
_MAX_CHARACTERS = 4000  # Splitting a longer expression into tokens may take long.


@dataclass(frozen=True, slots=True)
class OptionalWhitespace:
    r"""A part of a regular expression, such as `\s*`, that matches optional white space."""


@dataclass(frozen=True, slots=True)
class VariableText:
    r"""A part of a regular expression, such as `\w+`, that can match more than one text.

    Examples: `(?P<key>\w+)` becomes `VariableText("key")`, and `[^>]+` becomes `VariableText("")`.
    """

    name: str


_UNNAMED_TEXT = VariableText("")  # for example `.` or `[^>]`

# A part of a regular expression: a fixed text (str), optional white space, or variable text.
Piece = str | OptionalWhitespace | VariableText
Pieces = tuple[Piece, ...]

# This dict maps an escape to a `Piece`, which describes the text that the escape matches. A
# boundary, such as `\b`, matches no character, so its value is an empty text. Escaped punctuation,
# such as `\.`, is not in the dict, because it matches the character after the backslash.
_ESCAPES: dict[str, Piece] = {
    r"\s": OptionalWhitespace(),
    **dict.fromkeys((r"\w", r"\W", r"\d", r"\D", r"\S"), _UNNAMED_TEXT),
    **dict.fromkeys((r"\A", r"\b", r"\B", r"\Z", r"\z"), ""),
    r"\n": "\n",
    r"\r": "\r",
    r"\t": "\t",
}


def alternatives(regex: object) -> list[Pieces]:
    r"""Split a regular expression into its alternatives, and each alternative into its parts.

    A part is called a piece. It is a literal text, optional white space, or variable text such as a
    named group. The caller builds the markers of a format from the pieces.

    >>> alternatives(r"\s*<a (?P<name>\w+)>|<b>")
    [(OptionalWhitespace(), '<a ', VariableText(name='name'), '>'), ('<b>',)]

    Raises:
        FormatError: The expression is malformed, or has elements other than literals, white space,
            groups, character classes, options (`?`) and alternatives (`|`).
    """
    if not isinstance(regex, str):
        raise FormatError(f"a regular expression must be a string, but it is {regex!r}")
    if len(regex) > _MAX_CHARACTERS:
        raise FormatError(f"a regular expression has more than {_MAX_CHARACTERS} characters")
    reader = _Reader(regex)
    try:
        unjoined_alternatives = reader.read_alternatives()
    except RecursionError as error:
        raise reader.error("the groups are nested too deeply") from error
    unread_text = "".join(reader.unread)  # "" unless the reader has stopped at a `)`
    if unread_text:
        index = len(regex) - len(unread_text)
        raise reader.error(f"the parenthesis at index {index} does not close a group")
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
    """Join the fixed texts of a regular expression. Optional white space is omitted.

    >>> text_of_literals(("<call>", OptionalWhitespace(), "<f>"))
    '<call><f>'

    Raises:
        FormatError: A piece is variable text.
    """
    return "".join(literal_text(piece) for piece in pieces)


def literal_text(piece: Piece) -> str:
    """Convert a part of a regular expression into a fixed text. Optional white space becomes "".

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
    r"""Return all spellings of a marker, such as `<a>`, that a `response_template` declares.

    The marker is declared by a literal, by a list of literals, or by a regular expression:

    >>> marker_spellings({"open": "<a>"}, "open")
    ('<a>',)
    >>> marker_spellings({"open": ["<a>", "<b>"]}, "open")
    ('<a>', '<b>')
    >>> marker_spellings({"open_pattern": r"<a>|<b>\s*"}, "open")
    ('<a>', '<b>')

    White space around the texts that a regular expression matches is removed. The result is empty
    if `field` does not declare the marker.

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
    if regex is None:
        return ()
    texts = [text_of_literals(pieces).strip() for pieces in alternatives(regex)]
    distinct_texts = dict.fromkeys(texts)
    return tuple(text for text in distinct_texts if text)


class _Reader:
    """A recursive-descent parser that splits a regular expression into its parts.

    The expression is first split into tokens. Example: the tokens of `(?:a|[bc]*)` are `(?:`, `a`,
    `|`, `[bc]`, `*` and `)`. A method whose name starts with `read_` removes the tokens that it
    reads from `unread`, and returns the alternatives of the text that these tokens match. An
    alternative is a tuple of pieces: `(?:a|b)` has the alternatives `("a",)` and `("b",)`.

    Attributes:
        regex: The whole regular expression, which error messages contain.
        unread: The tokens that no method has read yet, in order.
    """

    def __init__(self, regex: str) -> None:
        """Split `regex` into tokens.

        Raises:
            FormatError: A character class is not closed, or a backslash at the end escapes nothing.
        """
        self.regex = regex
        self.unread: deque[str] = deque(_TOKEN.findall(regex))
        if "[" in self.unread:  # A closed character class is one token, such as `[bc]`.
            raise self.error("a character class is not closed")
        if "\\" in self.unread:  # A complete escape is one token, such as `\s`.
            raise self.error("the backslash at the end escapes no character")

    def error(self, reason: str) -> FormatError:
        """Return an error whose message contains the expression and the given reason."""
        return FormatError(f"the regular expression {self.regex!r} cannot be used: {reason}")

    def peek_token(self) -> str:
        """Return the next token, but do not remove it. Return "" at the end of the expression."""
        return self.unread[0] if self.unread else ""

    def take_token(self) -> str:
        """Remove the next token from `unread`, and return this token.

        Raises:
            FormatError: No token is left. The methods call this method at the end of the expression
                only if the parenthesis that closes a group is missing.
        """
        if not self.unread:
            raise self.error("a group is not closed")
        return self.unread.popleft()

    def read_alternatives(self) -> list[Pieces]:
        """Read alternatives such as `a|b`, up to the end of the group or of the expression.

        The parenthesis that closes the group is not read.

        >>> _Reader("a|bc").read_alternatives()
        [('a',), ('b', 'c')]
        """
        # `read_sequence` returns a list, because a sequence with a group, such as `(?:a|b)c`, has
        # several alternatives even without `|` outside the group.
        result = self.read_sequence()
        while self.peek_token() == "|":
            self.take_token()
            result.extend(self.read_sequence())
        return result

    def read_sequence(self) -> list[Pieces]:
        """Read elements up to the next `|` or `)`. Return all combinations of their alternatives.

        An element is, for example, a group or a character. In this example, the group has two
        alternatives, and the character `c` has one alternative:

        >>> _Reader("(?:a|b)c").read_sequence()
        [('a', 'c'), ('b', 'c')]
        """
        combinations: list[Pieces] = [()]
        while self.peek_token() not in ("|", ")", ""):  # "" is the end of the expression.
            element_alternatives = self.read_element()
            if _QUANTIFIER.fullmatch(self.peek_token()):
                quantifier = self.take_token()
                element_alternatives = self.apply_quantifier(element_alternatives, quantifier)
            # `start` and `end` are tuples of pieces. `start + end` concatenates the tuples.
            combinations = [
                start + end for start, end in product(combinations, element_alternatives)
            ]
            if len(combinations) > _MAX_ALTERNATIVES:
                raise self.error(
                    f"the expression has too many alternatives; the limit is {_MAX_ALTERNATIVES}"
                )
        return combinations

    def read_element(self) -> list[Pieces]:
        """Read a group, a character class, an escape or a single character.

        The method returns the alternatives of this element. An alternative is a tuple of pieces: a
        literal (a string), optional white space or variable text. A group may have several
        alternatives, and all other elements have one:

        >>> _Reader("(?:a|b)").read_element()
        [('a',), ('b',)]
        >>> _Reader("[^>]").read_element()
        [(VariableText(name=''),)]

        The alternative of `^` has no pieces, because `^` matches no text:

        >>> _Reader("^").read_element()
        [()]
        """
        token = self.take_token()
        match token[0]:
            case "(":
                return self.read_group(opening=token)
            case "[":
                is_white_space = _WHITE_SPACE_CLASS.fullmatch(token) is not None
                return [(OptionalWhitespace() if is_white_space else _UNNAMED_TEXT,)]
            case "\\":
                return [(self.piece_of_escape(token),)]
            case ".":
                return [(_UNNAMED_TEXT,)]
            case "^" | "$":
                return [()]
            case _:
                return [(token,)]

    def read_group(self, opening: str) -> list[Pieces]:
        """Read the rest of a group after its opening parenthesis, and return its alternatives.

        For a group without a name, the result contains the alternatives between the parentheses:

        >>> _Reader("a|b)").read_group(opening="(?:")
        [('a',), ('b',)]

        For a named group, the result is one alternative: variable text with the group's name.

        >>> _Reader("[a-z]+)").read_group(opening="(?P<key>")
        [(VariableText(name='key'),)]

        Args:
            opening: The token that opens the group: `(`, `(?:`, `(?P<name>`, or `(?` for a group of
                any other kind. The caller has already read this token.

        Raises:
            FormatError: The group is not closed, or is of another kind, for example `(?=..)`.
        """
        match opening:
            case "(" | "(?:":
                inner_alternatives = self.read_alternatives()  # This stops before the `)`.
                self.take_token()  # the `)`, or an error if the group is not closed
                return inner_alternatives
            case "(?":
                raise self.error(
                    "a group that looks ahead or behind, or that sets flags, is not supported"
                )
            case _:
                self.skip_group()
                return [(VariableText(opening.removeprefix("(?P<").removesuffix(">")),)]

    def skip_group(self) -> None:
        """Skip the tokens of a group, up to and including its closing parenthesis.

        The caller has already read the token that opens the group. The group may contain groups.

        Raises:
            FormatError: The group is not closed.
        """
        num_open_groups = 1
        while num_open_groups > 0:
            token = self.take_token()  # raises FormatError at the end of the expression
            if token.startswith("("):
                num_open_groups += 1
            elif token == ")":
                num_open_groups -= 1

    def piece_of_escape(self, escape: str) -> Piece:
        r"""Convert an escape, such as `\s`, into a literal text, white space or variable text.

        The escape `\b` matches the boundary of a word, which has no characters, so the result is
        the empty text. `\w` can match several characters, so the result is variable text.

        >>> [_Reader("").piece_of_escape(escape) for escape in (r"\s", r"\w", r"\b", r"\n", r"\.")]
        [OptionalWhitespace(), VariableText(name=''), '', '\n', '.']

        Raises:
            FormatError: The escape is a letter or a digit with another meaning, such as `\x`.
        """
        if escape in _ESCAPES:
            return _ESCAPES[escape]
        character = escape.removeprefix("\\")
        if character.isalnum():
            raise self.error(f"the escape {escape} is not supported")
        return character  # The backslash only removes the special meaning, as in `\.`.

    def apply_quantifier(self, element_alternatives: list[Pieces], quantifier: str) -> list[Pieces]:
        r"""Apply a quantifier, such as `?`, to the preceding element of the regular expression.

        The quantifiers `?` and `??` make a literal optional. Example: `a?` matches "a" or "".

        >>> _Reader("").apply_quantifier([("a",)], quantifier="?")
        [('a',), ()]

        Optional white space and variable text already match texts of any length, including the
        empty text, so quantifiers have no effect on them. Example: `\s*`.

        >>> _Reader("").apply_quantifier([(OptionalWhitespace(),)], quantifier="*")
        [(OptionalWhitespace(),)]

        Raises:
            FormatError: The quantifier repeats a literal, as in `a+`, because a format cannot
                declare a marker of unlimited length.
        """
        # The element contains a literal if one of its alternatives does. Example: `(a|\s)*`
        # contains the literal `a`.
        pieces = chain.from_iterable(element_alternatives)
        contains_literal = any(isinstance(piece, str) for piece in pieces)
        if not contains_literal:
            return element_alternatives
        if quantifier in ("?", "??"):
            return [*element_alternatives, ()]  # The empty tuple is the empty text.
        raise self.error(f"the quantifier {quantifier} must not repeat a literal")
