r"""Regular expressions for the input of custom tools.

The engine enforces the keyword `pattern` of a JSON schema while the model writes the string in a
tool call. The postprocessor then validates the string with Python's module `re`. Measurements with
xgrammar 0.2.8, the grammar library of the engine, show these limits:

- The library ignores lookaheads, and reads unknown escapes such as `\A` as letters. The input could
  then violate the expression.
- In JSON text, a quotation mark, a backslash and a control character are written with a backslash,
  for example as `\n`. The library does not add the backslash, so a call with such an input would
  not be JSON. Sets such as `[^a]` do not match these characters.
- The library does not support backreferences, word boundaries, lookbehinds and flags.

An expression beyond these limits is refused, because the engine cannot enforce the expression.
Errors that this module does not find, such as the range `[z-a]`, are errors of the backend.
"""

import re
from dataclasses import dataclass

from nereid_client.errors import FieldError, shown

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
"""The letters after a backslash that have the same meaning in the grammar library."""
_CONTROL_LETTERS = frozenset("nrtfv")
"""The letters after a backslash that stand for control characters."""
_SET_THAT_NEEDS_JSON_ESCAPES = re.compile(
    r"""\[ (?: \\?["\x00-\x1f] | \\[\\nrtfv] | \\x(?:[01][0-9a-fA-F]|22|5[cC])
    | \\u00(?:[01][0-9a-fA-F]|22|5[cC]) )+ \]""",
    re.VERBOSE,
)
"""A set that contains only characters that JSON writes with a backslash, such as `["\\n]`."""
_NEEDS_JSON_ESCAPE = (
    "requires a quotation mark, a backslash or a control character, which JSON writes with a "
    "backslash"
)
_MAX_CHARS = 4096


def whole_input_pattern(regex: str, place: str) -> str:
    r"""Return a JSON schema `pattern` that matches only if the whole input matches `regex`.

    Anchors at the ends of the expression, and at the ends of its alternatives, have no effect on a
    match of the whole input. The result does not contain these anchors, because the engine's
    grammar library would log a warning for each anchor. Groups have no names in the result, because
    the postprocessor validates the input with Python's module `re`, which knows `(?P<name>` but not
    `(?<name>`.

    Example: `^a|b$` returns `^(?:a|b)$`, which matches the inputs "a" and "b".

    Args:
        regex: the regular expression of a custom tool.
        place: the path of the expression in the request body, for the error.

    Raises: FieldError if the expression is not valid, or if the engine cannot enforce it.
    """
    if len(regex) > _MAX_CHARS:
        raise FieldError(
            place,
            f"{place} must have at most {_MAX_CHARS} characters, but the request has {len(regex)}",
        )
    tokens = _split(regex, place)
    kept = []
    for at, token in enumerate(tokens):
        if token.kind == "open":
            kept.append("(?:")
        elif token.kind != "anchor":
            kept.append(token.text)
        elif not _is_at_end_of_alternative(tokens, at):
            problem = "is an anchor inside the expression; the whole input must match anyway"
            raise _error(place, regex, token.position, problem)
    return f"^(?:{''.join(kept)})$"


@dataclass(frozen=True)
class _Token:
    """One token of a regular expression.

    Attributes:
        kind: the name of the group of `_TOKEN` that matched.
        text: the text of the token.
        position: the index of the token's first character.
        depth: the number of groups that are open before the token.
    """

    kind: str
    text: str
    position: int
    depth: int


def _split(regex: str, place: str) -> list[_Token]:
    r"""Split a regular expression into tokens, and check each token.

    Example: `(a\d)+` returns tokens with the texts `(`, `a`, `\d`, `)` and `+`.

    Raises: FieldError, as described by `whole_input_pattern`.
    """
    tokens: list[_Token] = []
    open_groups: list[int] = []  # the positions of the groups around the next token
    position = 0
    while position < len(regex):
        match = _TOKEN.match(regex, position)
        if match is None:
            raise _error(place, regex, position, "is incomplete or not supported")
        token = _Token(match.lastgroup or "", match[0], position, len(open_groups))
        problem = _problem_of(token, tokens[-1] if tokens else None)
        if problem:
            raise _error(place, regex, position, problem)
        tokens.append(token)
        if token.kind == "open":
            open_groups.append(position)
        elif token.kind == "close":
            open_groups.pop()
        position = match.end()
    if open_groups:
        raise _error(place, regex, open_groups[-1], "has no closing parenthesis")
    return tokens


def _problem_of(token: _Token, previous: _Token | None) -> str:
    r"""Return the reason why a token is refused, or "" if the token is accepted.

    The reason is the end of the sentence "the part ... at the position ... ...". Example: a `*` at
    the beginning of the expression gives "repeats nothing".

    A character is refused if JSON writes it with a backslash. The character can be a token of its
    own, such as a quotation mark, or an escape of the expression: `\x22` by its number, or `\n`.
    """
    match token.kind:
        case "repeat" if previous is None or previous.kind in ("open", "bar", "anchor", "repeat"):
            return "repeats nothing"
        case "close" if token.depth == 0:
            return "has no opening parenthesis"
        case "needs_json_escape":
            return _NEEDS_JSON_ESCAPE
        case "set":
            return _problem_of_set(token.text)
        case "code_point":
            return _problem_of_character(chr(int(token.text[2:], 16)))
        case "escape" if token.text[1] in _CONTROL_LETTERS:
            return _NEEDS_JSON_ESCAPE
        case "escape" if token.text[1].isalnum():
            return "" if token.text[1] in _SUPPORTED_LETTERS else "is not supported"
        case "escape":
            return _problem_of_character(token.text[1])
    return ""


def _problem_of_character(character: str) -> str:
    """Return the reason why one character is refused, or "" if the character is accepted."""
    if character in ('"', "\\") or character < " ":
        return _NEEDS_JSON_ESCAPE
    return "is half of a surrogate pair" if "\ud800" <= character <= "\udfff" else ""


def _problem_of_set(text: str) -> str:
    r"""Return the reason why a set such as `[a-z]` is refused, or "" if the set is accepted.

    A set is refused if JSON writes all its characters with a backslash, as in `["\n]`. The set
    `["a]` is accepted, but the model then writes only the `a`. Sets in sets, as in `[[:alpha:]]`
    and `[a-z&&[^b]]`, are refused, because they have different meanings in the libraries for
    regular expressions.
    """
    if _SET_THAT_NEEDS_JSON_ESCAPES.fullmatch(text):
        return _NEEDS_JSON_ESCAPE
    if any(character < " " for character in text):
        return r"contains a control character, which must be written as an escape such as \n"
    escapes = re.findall(r"\\.", text, re.DOTALL)
    without_escapes = re.sub(r"\\.", "", text[1:], flags=re.DOTALL)
    if "[" in without_escapes or "&&" in without_escapes:
        return "contains another set"
    for escape in escapes:
        if escape[1].isalnum() and escape[1] not in _SUPPORTED_LETTERS | {"x", "u"}:
            return f"contains {escape}, which is not supported"
    return ""


def _is_at_end_of_alternative(tokens: list[_Token], at: int) -> bool:
    """Return whether the anchor `tokens[at]` begins or ends a top-level alternative.

    Examples: both anchors of `^a$|b` do, but the anchors of `a^b` and `(^a)` do not.
    """
    anchor = tokens[at]
    neighbour = at - 1 if anchor.text == "^" else at + 1
    has_neighbour = 0 <= neighbour < len(tokens)
    return anchor.depth == 0 and (not has_neighbour or tokens[neighbour].kind == "bar")


def _error(place: str, regex: str, position: int, problem: str) -> FieldError:
    """Return the FieldError for a regular expression.

    Example: the expression "a(" has the message 'tools[0].format.definition must be a regular
    expression that can be enforced, but the part "(" at the position 1 has no closing parenthesis'.

    Args:
        place: the path of the expression in the request body.
        regex: the expression.
        position: the index at which the refused part begins.
        problem: the end of the sentence "the part ... ...".
    """
    part = shown(regex[position:], limit=24)
    return FieldError(
        place,
        f"{place} must be a regular expression that can be enforced, but the part {part} at the "
        f"position {position} {problem}",
    )
