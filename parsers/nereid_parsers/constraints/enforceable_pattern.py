r"""Finds the parts of a regular expression that xgrammar 0.2.8 does not enforce.

A JSON schema has regular expressions in the keyword `pattern`. Measurements show these limits:

- xgrammar ignores lookaheads and anchors inside an expression, and reads unknown escapes such as
  `\A` as letters. The model could then write a string that violates the expression.
- In JSON text, a quotation mark, a backslash and a control character are written with a backslash,
  for example as `\n`. xgrammar does not add the backslash, so the model would write a text that is
  not JSON. Sets such as `[^a]` do not match these characters.
- xgrammar does not support backreferences, word boundaries, lookbehinds and flags.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from nereid_parsers.errors import ConstraintError, shorten

_TOKEN = re.compile(
    r"""
      (?P<code_point>\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4})   # a character by its number, as in \x41
    | (?P<escape>\\.)                                 # \d, \n, \.
    | (?P<set>\[\^?(?:\\.|[^\]\\])+\])                # [a-z], [^"\n]
    | (?P<open>\((?:\?:|\?P?<[A-Za-z_]\w*>)?)(?!\?)   # (, (?:, (?<name>, (?P<name>
    | (?P<close>\))
    | (?P<repeat>(?:[*+?]|\{\d+(?:,\d*)?\})\??)       # *, +?, {2,3}
    | (?P<bar>\|)
    | (?P<anchor>[\^$])
    | (?P<needs_json_escape>["\x00-\x1f])             # written with a backslash in JSON
    | (?P<text>[^\\\[(){*+?|^$"\x00-\x1f]+)
    """,
    re.VERBOSE | re.DOTALL,
)
"""One token of a regular expression. The name of the group that matches is the token's kind.

The pattern does not match at the beginning of a token that is incomplete or not supported, such as
`(?=`, `[]` or a backslash at the end.
"""

_SUPPORTED_LETTERS = frozenset("dDsSwWnrtfv")
"""The letters after a backslash that have the same meaning in xgrammar."""
_LETTERS_SUPPORTED_IN_SETS = _SUPPORTED_LETTERS | {"x", "u"}
r"""The letters after a backslash that have the same meaning in the sets of xgrammar.

Outside a set, `\x41` and `\u0041` are tokens of the kind "code_point".
"""
_CONTROL_LETTERS = frozenset("nrtfv")
"""The letters after a backslash that stand for control characters."""
_REFUSED_ESCAPES = frozenset("bBk123456789")
"""The characters after a backslash that xgrammar refuses: word boundaries and backreferences."""
_KINDS_THAT_CANNOT_REPEAT = ("open", "bar", "anchor", "repeat")
"""The kinds of tokens after which a repetition, such as `*`, is not valid."""
_SET_OF_CHARACTERS_THAT_NEED_JSON_ESCAPES = re.compile(
    r"""\[ (?: \\?["\x00-\x1f] | \\[\\nrtfv] | \\x(?:[01][0-9a-fA-F]|22|5[cC])
    | \\u00(?:[01][0-9a-fA-F]|22|5[cC]) )+ \]""",
    re.VERBOSE,
)
"""A set that contains only characters that JSON writes with a backslash, such as `["\\n]`."""
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
"""An escape sequence. The group is the character after the backslash."""
_MAX_SHOWN_CHARACTERS = 24
"""The length at which the wrong part of an expression is cut in an error message."""
_MAX_CHARACTERS = 2**16
"""The length of the longest expression that is checked. Each token needs about 300 bytes."""


class _Kind(Enum):
    """The kind of a problem in a regular expression.

    JSON_ESCAPE  The expression contains a token that matches only characters which JSON writes with
                 a backslash, such as `"`, or the expression is too long to be checked.
    LOOKAHEAD    The expression contains a lookahead, such as `(?=a)`.
    REFUSED      xgrammar refuses the expression, because it contains a lookbehind, a word boundary
                 or a backreference.
    OTHER        Any other problem.
    """

    JSON_ESCAPE = "JSON escape"
    LOOKAHEAD = "lookahead"
    REFUSED = "refused"
    OTHER = "other"


@dataclass(frozen=True)
class _Problem:
    """The reason why xgrammar does not enforce a part of a regular expression.

    Attributes:
        predicate: The predicate of a sentence about the part, such as "repeats nothing".
        kind: The kind of the problem.
    """

    predicate: str
    kind: _Kind = _Kind.OTHER


_NEEDS_JSON_ESCAPE = _Problem(
    "requires a quotation mark, a backslash or a control character, which JSON writes with a "
    "backslash",
    _Kind.JSON_ESCAPE,
)


_TOO_LONG = _Problem(
    f"begins an expression that exceeds the limit of {_MAX_CHARACTERS} characters",
    _Kind.JSON_ESCAPE,
)


class PatternError(ConstraintError):
    """A regular expression is not valid, or xgrammar does not enforce it.

    The message is a sentence about the part of the expression that causes the error. Example: for
    the expression "a(b", the message is "the part '(b' at the position 1 has no closing
    parenthesis".
    """

    def __init__(self, regex: str, position: int, problem: _Problem) -> None:
        """Create the error for the part of `regex` that begins at the index `position`."""
        part = shorten(regex[position : position + _MAX_SHOWN_CHARACTERS])
        super().__init__(f"the part {part} at the position {position} {problem.predicate}")
        self.needs_json_escape = problem.kind is _Kind.JSON_ESCAPE
        """Whether the expression requires a character that JSON writes with a backslash, such as
        `"`, or is too long to be checked. xgrammar would let the model write this character without
        the backslash."""
        self.is_lookahead = problem.kind is _Kind.LOOKAHEAD
        """Whether the part is a lookahead, which xgrammar ignores."""
        self.is_refused = problem.kind is _Kind.REFUSED
        """Whether xgrammar refuses the expression because of the part."""


@dataclass(frozen=True)
class PatternToken:
    """One token of a regular expression.

    Attributes:
        kind: The name of the group of `_TOKEN` that matched, such as "set" or "anchor".
        text: The text of the token.
        position: The index of the token's first character.
        depth: The number of groups that are open before the token.
    """

    kind: str
    text: str
    position: int
    depth: int


def check_pattern(regex: str) -> PatternError | None:
    """If xgrammar does not enforce a regular expression, return an error. Otherwise return None.

    xgrammar matches the whole string, even if the expression has no anchors. A string that xgrammar
    accepts therefore also matches the expression.
    """
    try:
        split_pattern(regex)
    except PatternError as error:
        return error
    return None


def split_pattern(regex: str) -> list[PatternToken]:
    r"""Split a regular expression into tokens, and check that xgrammar enforces each token.

    Example: `(a\d)+` returns tokens with the kinds "open", "text", "escape", "close" and "repeat".

    Raises:
        PatternError: The expression is not valid, or xgrammar does not enforce it.
    """
    if len(regex) > _MAX_CHARACTERS:
        raise PatternError(regex, 0, _TOO_LONG)
    tokens: list[PatternToken] = []
    for token in _tokens_of(regex):
        previous = tokens[-1] if tokens else None
        problem = _problem_of(token, previous)
        if problem is not None:
            raise PatternError(regex, token.position, problem)
        tokens.append(token)
    for index, token in enumerate(tokens):
        if token.kind == "anchor" and not _begins_or_ends_alternative(tokens, index):
            raise PatternError(
                regex, token.position, _Problem("is an anchor inside the expression")
            )
    return tokens


def _tokens_of(regex: str) -> Iterator[PatternToken]:
    """Yield the tokens of a regular expression.

    Example: `a+` yields a token of the kind "text" and a token of the kind "repeat".

    Raises:
        PatternError: The text at a position is not a token, or a parenthesis has no partner.
    """
    open_groups: list[int] = []  # The positions of the groups around the next token.
    position = 0
    while position < len(regex):
        match = _TOKEN.match(regex, position)
        if match is None:
            raise PatternError(regex, position, _problem_of_unknown_text(regex, position))
        token = PatternToken(match.lastgroup or "", match[0], position, depth=len(open_groups))
        if token.kind == "close" and not open_groups:
            raise PatternError(regex, position, _Problem("has no opening parenthesis"))
        yield token
        if token.kind == "open":
            open_groups.append(position)
        elif token.kind == "close":
            open_groups.pop()
        position = match.end()
    if open_groups:
        raise PatternError(regex, open_groups[-1], _Problem("has no closing parenthesis"))


def _problem_of_unknown_text(regex: str, position: int) -> _Problem:
    """Return the problem at a position where no supported token starts, such as `(?=a)`."""
    kind = _Kind.OTHER
    if regex.startswith(("(?=", "(?!"), position):
        kind = _Kind.LOOKAHEAD
    elif regex.startswith(("(?<=", "(?<!"), position):
        kind = _Kind.REFUSED
    return _Problem("is incomplete or not supported", kind)


def _problem_of(token: PatternToken, previous: PatternToken | None) -> _Problem | None:
    r"""Return the reason why xgrammar does not enforce a token, or None if xgrammar enforces it.

    `previous` is the token before `token`, or None at the beginning of the expression. Examples: a
    `*` at the beginning repeats nothing. A quotation mark must be written as `\"` in JSON, but
    xgrammar would write the quotation mark without the backslash.
    """
    match token.kind:
        case "repeat":
            has_target = previous is not None and previous.kind not in _KINDS_THAT_CANNOT_REPEAT
            return None if has_target else _Problem("repeats nothing")
        case "needs_json_escape":
            return _NEEDS_JSON_ESCAPE
        case "set":
            return _problem_of_set(token.text)
        case "code_point":
            return _problem_of_character(_decode_code_point(token.text))
        case "escape":
            return _problem_of_escape(token.text.removeprefix("\\"))
    return None


def _decode_code_point(escape: str) -> str:
    r"""Return the character with a hexadecimal number: `\x41` and `\u0041` give "A"."""
    digits = escape.removeprefix("\\x").removeprefix("\\u")
    return chr(int(digits, 16))


def _problem_of_escape(character: str) -> _Problem | None:
    r"""Return the reason why xgrammar does not enforce an escape such as `\A`, or None.

    `character` is the character after the backslash. Examples: "n" gives `_NEEDS_JSON_ESCAPE`,
    because `\n` is a control character. "A" gives a problem, because `\A` has no meaning in
    xgrammar. "d" and "." give None.
    """
    if character in _CONTROL_LETTERS:
        return _NEEDS_JSON_ESCAPE
    if character in _REFUSED_ESCAPES:
        return _Problem("is not supported", _Kind.REFUSED)
    if character.isalnum():
        is_supported = character in _SUPPORTED_LETTERS
        return None if is_supported else _Problem("is not supported")
    return _problem_of_character(character)


def _problem_of_character(character: str) -> _Problem | None:
    """Return the reason why xgrammar does not enforce a character, or None."""
    if character in ('"', "\\") or character < " ":
        return _NEEDS_JSON_ESCAPE
    is_half_of_pair = "\ud800" <= character <= "\udfff"
    return _Problem("is half of a surrogate pair") if is_half_of_pair else None


def _problem_of_set(text: str) -> _Problem | None:
    r"""Return the reason why xgrammar does not enforce a set such as `[a-z]`, or None.

    A set is not enforced in four cases:

        `["\n]`        JSON writes every character of the set with a backslash, as in `\"`, but
                       xgrammar would write it without a backslash. `["a]` has no problem, because
                       the model can write the character `a`.
        a line break   An unescaped control character in the set.
        `[[:alpha:]]`  Libraries interpret a set inside a set differently, also in `[a-z&&[^b]]`.
        `[\A]`         xgrammar does not support the escape sequence.
    """
    if _SET_OF_CHARACTERS_THAT_NEED_JSON_ESCAPES.fullmatch(text):
        return _NEEDS_JSON_ESCAPE
    if any(character < " " for character in text):
        return _Problem(
            r"contains a control character, which must be written as an escape such as \n"
        )
    members = text.removeprefix("[").removesuffix("]")
    members_without_escapes = _ESCAPE.sub("", members)
    if "[" in members_without_escapes or "&&" in members_without_escapes:
        return _Problem("contains another set")
    escaped_characters: list[str] = _ESCAPE.findall(members)
    for character in escaped_characters:
        if character.isalnum() and character not in _LETTERS_SUPPORTED_IN_SETS:
            return _Problem(rf"contains \{character}, which is not supported")
    return None


def _begins_or_ends_alternative(tokens: list[PatternToken], at: int) -> bool:
    """Return whether the anchor `tokens[at]` begins or ends a top-level alternative.

    Examples: both anchors of `^a$|b` do, but the anchors of `a^b` and `(^a)` do not.
    """
    anchor = tokens[at]
    neighbour = at - 1 if anchor.text == "^" else at + 1
    has_neighbour = 0 <= neighbour < len(tokens)
    return anchor.depth == 0 and (not has_neighbour or tokens[neighbour].kind == "bar")
