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
_KINDS_THAT_CANNOT_REPEAT = ("open", "bar", "anchor", "repeat")
"""The kinds of tokens after which a repetition, such as `*`, is not valid."""
_SET_OF_CHARACTERS_THAT_NEED_JSON_ESCAPES = re.compile(
    r"""\[ (?: \\?["\x00-\x1f] | \\[\\nrtfv] | \\x(?:[01][0-9a-fA-F]|22|5[cC])
    | \\u00(?:[01][0-9a-fA-F]|22|5[cC]) )+ \]""",
    re.VERBOSE,
)
"""A set that contains only characters that JSON writes with a backslash, such as `["\\n]`."""
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_MAX_SHOWN_CHARACTERS = 24
"""The length at which the wrong part of an expression is cut in an error message."""
_NEEDS_JSON_ESCAPE = (
    "requires a quotation mark, a backslash or a control character, which JSON writes with a "
    "backslash"
)


class PatternError(ConstraintError):
    """A regular expression is not valid, or xgrammar does not enforce it.

    The message is a sentence about the part of the expression that causes the error. Example: for
    the expression "a(b", the message is "the part '(b' at the position 1 has no closing
    parenthesis".
    """

    def __init__(self, regex: str, position: int, problem: str) -> None:
        """Create the error.

        The wrong part of `regex` begins at the index `position`. `problem` is the predicate of the
        message's sentence, such as "has no closing parenthesis".
        """
        part = shorten(regex[position : position + _MAX_SHOWN_CHARACTERS])
        super().__init__(f"the part {part} at the position {position} {problem}")
        self.needs_json_escape = problem == _NEEDS_JSON_ESCAPE
        """Whether the expression requires a character that JSON writes with a backslash. xgrammar
        would let the model write this character without the backslash."""
        self.is_lookahead = regex.startswith(("(?=", "(?!"), position)
        """Whether the part is a lookahead, which xgrammar ignores."""


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
    tokens: list[PatternToken] = []
    for token in _tokens_of(regex):
        problem = _problem_of(token, tokens[-1] if tokens else None)
        if problem:
            raise PatternError(regex, token.position, problem)
        tokens.append(token)
    for index, token in enumerate(tokens):
        if token.kind == "anchor" and not _begins_or_ends_alternative(tokens, index):
            raise PatternError(regex, token.position, "is an anchor inside the expression")
    return tokens


def _tokens_of(regex: str) -> Iterator[PatternToken]:
    """Yield the tokens of a regular expression.

    Raises:
        PatternError: The text at a position is not a token, or a parenthesis has no partner.
    """
    open_groups: list[int] = []  # The positions of the groups around the next token.
    position = 0
    while position < len(regex):
        match = _TOKEN.match(regex, position)
        if match is None:
            raise PatternError(regex, position, "is incomplete or not supported")
        token = PatternToken(match.lastgroup or "", match[0], position, depth=len(open_groups))
        if token.kind == "close" and not open_groups:
            raise PatternError(regex, position, "has no opening parenthesis")
        yield token
        if token.kind == "open":
            open_groups.append(position)
        elif token.kind == "close":
            open_groups.pop()
        position = match.end()
    if open_groups:
        raise PatternError(regex, open_groups[-1], "has no closing parenthesis")


def _problem_of(token: PatternToken, previous: PatternToken | None) -> str:
    r"""Return the reason why xgrammar does not enforce a token, or "" if xgrammar enforces it.

    Examples: a `*` at the beginning of the expression gives "repeats nothing". A quotation mark
    gives "requires a quotation mark, ...", because JSON writes a quotation mark as `\"`.
    """
    match token.kind:
        case "repeat":
            has_target = previous is not None and previous.kind not in _KINDS_THAT_CANNOT_REPEAT
            return "" if has_target else "repeats nothing"
        case "needs_json_escape":
            return _NEEDS_JSON_ESCAPE
        case "set":
            return _problem_of_set(token.text)
        case "code_point":
            return _problem_of_character(chr(int(token.text[2:], 16)))
        case "escape":
            return _problem_of_escape(token.text[1])
    return ""


def _problem_of_escape(character: str) -> str:
    r"""If xgrammar does not enforce an escape such as `\A`, return the reason. Otherwise return "".

    `character` is the character after the backslash. Examples: "n" gives `_NEEDS_JSON_ESCAPE`,
    because `\n` is a control character. "A" gives "is not supported", because `\A` has no meaning
    in xgrammar. "d" and "." give "".
    """
    if character in _CONTROL_LETTERS:
        return _NEEDS_JSON_ESCAPE
    if character.isalnum():
        return "" if character in _SUPPORTED_LETTERS else "is not supported"
    return _problem_of_character(character)


def _problem_of_character(character: str) -> str:
    """If xgrammar does not enforce a character, return the reason. Otherwise return ""."""
    if character in ('"', "\\") or character < " ":
        return _NEEDS_JSON_ESCAPE
    return "is half of a surrogate pair" if "\ud800" <= character <= "\udfff" else ""


def _problem_of_set(text: str) -> str:
    r"""If xgrammar does not enforce a set such as `[a-z]`, return the reason. Otherwise return "".

    A set is refused only if JSON writes all its characters with a backslash, as in `["\n]`. With
    the set `["a]`, the model writes only `a`, which is valid.
    """
    if _SET_OF_CHARACTERS_THAT_NEED_JSON_ESCAPES.fullmatch(text):
        return _NEEDS_JSON_ESCAPE
    if any(character < " " for character in text):
        return r"contains a control character, which must be written as an escape such as \n"
    # Libraries for regular expressions interpret a set inside a set differently, as in
    # `[[:alpha:]]` and `[a-z&&[^b]]`.
    without_escapes = _ESCAPE.sub("", text[1:-1])
    if "[" in without_escapes or "&&" in without_escapes:
        return "contains another set"
    for letter in _ESCAPE.findall(text):
        if letter.isalnum() and letter not in _LETTERS_SUPPORTED_IN_SETS:
            return rf"contains \{letter}, which is not supported"
    return ""


def _begins_or_ends_alternative(tokens: list[PatternToken], at: int) -> bool:
    """Return whether the anchor `tokens[at]` begins or ends a top-level alternative.

    Examples: both anchors of `^a$|b` do, but the anchors of `a^b` and `(^a)` do not.
    """
    anchor = tokens[at]
    neighbour = at - 1 if anchor.text == "^" else at + 1
    has_neighbour = 0 <= neighbour < len(tokens)
    return anchor.depth == 0 and (not has_neighbour or tokens[neighbour].kind == "bar")
