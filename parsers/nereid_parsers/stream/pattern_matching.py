"""Matches patterns such as `<function={name}>` in text that arrives in pieces."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import zip_longest
from typing import Final, Literal, NamedTuple

from nereid_parsers.pattern_syntax import split_pattern


class Mismatch(Enum):
    """The reason why a text does not match a pattern.

    Examples for the pattern `<call>`:

    NEED_MORE  The text is the beginning of a match, such as `<ca`. More text may complete it.
    NO_MATCH   The text is not the beginning of a match: `<cat`.
    """

    NEED_MORE = "need_more"
    NO_MATCH = "no_match"


NEED_MORE: Final = Mismatch.NEED_MORE
NO_MATCH: Final = Mismatch.NO_MATCH
NeedMore = Literal[Mismatch.NEED_MORE]  # The type of the constant NEED_MORE.

# The maximum length, in characters, of the header of a tool call, such as `<function=f>`. A longer
# text is not treated as a header.
MAX_HEAD_CHARS = 2048

_SUPERFLUOUS_CHARS = "}])`"
_MAX_SUPERFLUOUS_CHARS = 16
_FIRST_TAG = re.compile(r"<\|[^<>|]+\|>|<[^<>\s]+>")
_MARKUP = re.compile(r"\A\s*[<\[◁]\S{2}|<[^<>\s]{2,}>")
_SPECIAL_TOKEN = re.compile(r"\A<(?:[|｜].+|.+[|｜])>")

_match_whitespace = re.compile(r"\s*").match
# Byte-level tokenizers write Ġ for a space and Ċ for a line break. If a tokenizer does not decode
# these characters, they appear in the model's text.
_RAW_SPACE = "Ġ"
_match_whitespace_in_pattern = re.compile(r"[\sĠĊ]*").match
# Matches white space, and each position where a model may insert white space: before a tag, after a
# tag, before or after punctuation such as `=`. Example: the positions in `<a>f="x` are marked with
# `|` in `<a>|f|=|"x`.
_WHITESPACE_OR_GAP = re.compile(
    r"""\s+|(?<=>)(?=\S)|(?<=\S)(?=<)|(?<=[\w"])(?=[.:=`])|(?<=[.:=`])(?=[\w"])"""
)
# In a marker such as `<|start|>assistant`, a model may write each of these texts before or after a
# tag.
_SPELLINGS_OF_TAG_BOUNDARY = ("", " ", "\n")
_MAX_PLACES_IN_SPELLINGS = 12  # The largest number of spaces and tag boundaries in a marker.
_WHITESPACE_IN_MARKER = re.compile(r"(?<=\S)\s+(?=\S)")
# Matches the boundary between a tag and the adjacent text, including white space. Example: the
# space in `<a> b` is matched.
_TAG_BOUNDARY = re.compile(r"(?<=>)\s*(?=[^\s>])|(?<=\S)\s*(?=<)")
_MARKER_GAP = re.compile(r"\s+|(?<=>)(?=<)|(?<=```)(?=<)")
_NO_NAME_CHARS = r"""\s<>{}\[\]()"'`|=,;◁▷«»《》【】〔〕〖〗｟｠⟦⟧⟨⟩⟪⟫"""
# The field `{rest}` matches the rest of a line, which may be empty. All other fields match at least
# one character.
_QUOTES = "\"'`"
_REST_FIELD = "rest"
_NAME_FIELD = "name"
_MAX_WORDS_ON_SECOND_LINE = 2  # The limit for a line break inside the field `rest`.
# Maps each field to the characters that the field cannot contain. The syntax is that of a regex
# character class.
_EXCLUDED_CHARS = {
    "name": _NO_NAME_CHARS,
    "key": r"""<>"'\r\n""",
    "id": _NO_NAME_CHARS,
    "number": r"\D",
    "string": r"\W",
    "type": r"\W",
    "word": r"\s<>",
}


@dataclass(frozen=True, slots=True)
class FieldStep:
    """A step of a compiled pattern that matches the text of a field, such as `{name}`.

    Attributes:
        name: The name of the field, for example `name`.
        regex: The regex that matches the characters which the field may contain.
    """

    name: str
    regex: re.Pattern[str]

    def match(self, text: str, pos: int, is_final: bool) -> int | Mismatch:
        """Match the text of one field, such as `{name}`, at `pos`.

        Return the end of the match, NEED_MORE or NO_MATCH. Examples for the field `name`:

            `sum>`   The field matches `sum`.
            `sum`    NEED_MORE, because the name may continue. If `is_final` shows that no more text
                     follows, the result is NO_MATCH, because the name may be incomplete.
            `12>`    NO_MATCH, because a number is not a valid name.

        A field at the end of the text with `MAX_HEAD_CHARS` characters gives NO_MATCH, too.
        """
        match = self.regex.match(text, pos)
        end = match.end() if match else pos  # If the regex does not match, the field is empty.
        is_at_text_end = end == len(text)
        if is_at_text_end and not is_final:  # The field may continue in the next piece of text.
            is_too_long = end - pos >= MAX_HEAD_CHARS
            return NO_MATCH if is_too_long else NEED_MORE
        is_accepted = self._accepts(text[pos:end], is_at_message_end=is_at_text_end)
        return end if is_accepted else NO_MATCH

    def _accepts(self, value: str, is_at_message_end: bool) -> bool:
        """Return whether this field accepts `value`, which consists of allowed characters.

        Only the field `rest` may be empty. The field `name` has two additional rules:

        - At the end of the message, a name may be cut off: `sum` may be the beginning of `summary`.
          Such a name is not accepted, so that no wrong function is called.
        - A text of digits is not accepted, because some models write the number of a tool call next
          to the function's name.
        """
        if not value:
            return self.name == _REST_FIELD
        if self.name == _NAME_FIELD:
            return not is_at_message_end and not value.isdigit()
        return True


@dataclass(frozen=True, slots=True)
class LiteralStep:
    """A fixed text in a compiled pattern, such as `<function=`."""

    literal: str

    def match(self, text: str, pos: int, is_final: bool) -> int | Mismatch:
        """Match the fixed text `literal` at `pos`. Return its end, NEED_MORE or NO_MATCH.

        Example: for the literal `<f=`, the text `<f` gives NEED_MORE, because `=` may follow.
        """
        literal = self.literal
        if text.startswith(literal, pos):
            return pos + len(literal)
        may_become_literal = not is_final and literal.startswith(text[pos:])
        return NEED_MORE if may_become_literal else NO_MATCH


class WhitespaceStep:
    """A step of a compiled pattern that matches any amount of white space."""

    __slots__ = ()

    def match(self, text: str, pos: int, is_final: bool) -> int:  # noqa: ARG002 - as in other steps
        """Return the position after the white space at `pos`. `Ġ` and `Ċ` are white space, too."""
        match = _match_whitespace_in_pattern(text, pos)
        assert match is not None  # The regex also matches the empty text.
        return match.end()


Step = LiteralStep | WhitespaceStep | FieldStep


class PatternMatch(NamedTuple):
    """The match of a pattern such as `<function={name}>` in a text.

    Attributes:
        end: The position after the match.
        fields: The text of each field, for example `{"name": "sum"}`.
    """

    end: int
    fields: dict[str, str]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern. It consists of literals, white space and fields such as `{name}`."""

    steps: tuple[Step, ...]

    def match(self, text: str, pos: int, is_final: bool) -> PatternMatch | Mismatch:
        """Match the pattern at `pos`. Return the match, NEED_MORE or NO_MATCH.

        Each step of the pattern matches a literal, white space or a field. Example: for the pattern
        `<f={name}>` and the text `"<f=sum>{"`, the result is `PatternMatch(7, {"name": "sum"})`.
        For the text `"<f=su"`, the result is NEED_MORE, or NO_MATCH if `is_final` is true.
        """
        fields: dict[str, str] = {}
        for step in self.steps:
            end = step.match(text, pos, is_final)
            if not isinstance(end, int):  # The step does not match.
                return end
            if isinstance(step, FieldStep):
                value = text[pos:end]
                is_second_name = step.name == _NAME_FIELD and _NAME_FIELD in fields
                if is_second_name and value != fields[_NAME_FIELD]:
                    return NO_MATCH  # The pattern contains the name twice, but the texts differ.
                fields[step.name] = value
            pos = end
        return PatternMatch(pos, fields)


def compile_opening_tag(source: str) -> Pattern:
    r"""Compile the pattern of the tag before a value. The white space after the tag is not matched.

    Examples: `<p={key}>\n` gives the pattern `<p={key}>`. If spaces end the key, as in `--{key} `,
    the pattern matches a key without white space.
    """
    tag = source.rstrip()
    spaces = source.removeprefix(tag)
    is_ended_by_space = tag.endswith("}") and bool(spaces) and "\n" not in spaces
    if not is_ended_by_space:
        return compile_pattern(tag)
    steps = list(compile_pattern(source).steps)
    while isinstance(steps[-1], WhitespaceStep):
        steps.pop()
    return Pattern(tuple(steps))


def skip_whitespace(text: str, pos: int) -> int:
    """Return the position of the first character at or after `pos` that is not white space.

    Example: `skip_whitespace("a  b", 1)` returns 3.
    """
    match = _match_whitespace(text, pos)
    assert match is not None  # The regex also matches the empty text.
    return match.end()


def skip_superfluous(text: str, pos: int) -> int:
    """Skip superfluous characters such as `}`, and then white space. Return the new position.

    Some models write superfluous closing brackets before the closing marker of a tool call.
    Example: for the text `}} </tool_call>`, the result is the position of `</tool_call>`.
    """
    max_end = min(len(text), pos + _MAX_SUPERFLUOUS_CHARS)
    while pos < max_end and text[pos] in _SUPERFLUOUS_CHARS:
        pos += 1
    return skip_whitespace(text, pos)


def marker_spellings(marker: str) -> tuple[str, ...]:
    r"""Return `marker`, and spellings that differ from `marker` only in their white space.

    A model may write the white space of a marker in another way. Examples of such spellings:

        marker                  spelling                 difference
        `<|start|>assistant`    `<|start|> assistant`    a space or line break after a tag
        `<invoke name="`        `<invoke  name="`        a longer space
        `<invoke name="`        `<invokename="`          all spaces are omitted

    A single tag without white space, such as `<think>`, has no other spelling. A marker with very
    many spaces has no other spelling either, because its spellings would need much memory.
    """
    tag_boundaries = list(_TAG_BOUNDARY.finditer(marker))
    spaces = list(_WHITESPACE_IN_MARKER.finditer(marker))
    if len(tag_boundaries) + len(spaces) > _MAX_PLACES_IN_SPELLINGS:
        return (marker,)
    spellings = [marker]
    for boundary in tag_boundaries:
        spellings += _with_replacements(marker, boundary, _SPELLINGS_OF_TAG_BOUNDARY)
    for space in spaces:
        longer_spaces = (" \n", "\n ", space.group() + " ")
        spellings += _with_replacements(marker, space, longer_spaces)
    spellings += _spellings_without_spaces(marker)
    return tuple(dict.fromkeys(spellings))  # Duplicates are removed, and the order is kept.


def _spellings_without_spaces(marker: str) -> list[str]:
    """Return a copy of `marker` without spaces, and a copy with `Ġ` instead of each space.

    `Ġ` is the sign for a space in the vocabulary of some tokenizers. Example: `<a b` gives `<ab`
    and `<aĠb`. A marker that does not start with a tag, such as `Final answer:`, gives [], because
    ordinary words need the spaces between them.
    """
    if not marker.startswith("<"):
        return []
    return [marker.replace(" ", ""), marker.replace(" ", _RAW_SPACE)]


def _with_replacements(text: str, match: re.Match[str], replacements: tuple[str, ...]) -> list[str]:
    """For each replacement, return a copy of `text` in which the matched text is replaced."""
    before = text[: match.start()]
    after = text[match.end() :]
    return [before + replacement + after for replacement in replacements]


def match_marker(marker: str, text: str, pos: int) -> int | Mismatch:
    """Match a marker at `pos`. White space between the tags and words of the marker is optional.

    Example: the marker `<|close|>call<|sep|>` also matches `<|close|> call<|sep|>`.

    Return the end of the match, NEED_MORE or NO_MATCH.
    """
    source = marker.replace("{", "{{").replace("}", "}}")  # The marker contains no fields.
    match = compile_pattern(source).match(text, pos, is_final=False)
    return match.end if isinstance(match, PatternMatch) else match


@lru_cache(maxsize=4096)
def compile_pattern(source: str) -> Pattern:
    r"""Compile a pattern that is given as text, such as `<function={name}>`, to a `Pattern`.

    The compiled pattern allows optional white space before and after each field, and at some places
    inside the fixed text, for example before and after a tag.

    Example: `"<call>\n<f={name}>"` becomes the literals `<call>`, `<f`, `=`, the field `name` and
    the literal `>`, with optional white space between them. The pattern matches `<call><f=sum>` and
    `<call> <f= sum >`.
    """
    steps: list[Step] = []
    parts = split_pattern(source)
    for part, next_part in zip_longest(parts, parts[1:], fillvalue=""):
        if steps:
            steps.append(WhitespaceStep())
        if isinstance(part, str):
            steps += _literal_steps(part)
        else:
            next_literal = next_part if isinstance(next_part, str) else ""
            steps.append(FieldStep(part.field, field_regex(part.field, next_literal)))
    return Pattern(tuple(steps))


def _literal_steps(literal: str) -> list[LiteralStep | WhitespaceStep]:
    r"""Split a literal into pieces. Insert a `WhitespaceStep` where a model may write white space.

    A model may write white space where the literal contains white space, and at each "gap", for
    example between a word and `=`. `_WHITESPACE_OR_GAP` matches these places. Example:
    `"<call>\n<f="` gives `<call>`, white space, `<f`, white space and `=`.
    """
    steps: list[LiteralStep | WhitespaceStep] = []
    for index, piece in enumerate(_WHITESPACE_OR_GAP.split(literal)):
        if index > 0:
            steps.append(WhitespaceStep())
        if piece:  # A literal that starts or ends with white space has an empty piece there.
            steps.append(LiteralStep(piece))
    return steps


def field_regex(name: str, next_literal: str) -> re.Pattern[str]:
    """Return the regex that matches the text of a field, such as `{name}`, before a literal.

    `next_literal` is the literal after the field, or "". Examples:

        field   next literal   the matched text ends before
        name    `>`            `>`, or a character that no name contains
        key     ` type="`      white space and `type`, see `_regex_before_whitespace`
        rest    `<sep>`        the whole literal `<sep>`, see `_rest_regex`
    """
    if name == _REST_FIELD:
        return _rest_regex(next_literal)
    excluded_chars = _EXCLUDED_CHARS[name]
    next_char = next_literal[:1]
    if next_char.isspace():
        return _regex_before_whitespace(excluded_chars, next_literal)
    return re.compile(f"[^{excluded_chars}{re.escape(next_char)}]+")


def _regex_before_whitespace(excluded_chars: str, next_literal: str) -> re.Pattern[str]:
    """Return the regex of a field before a literal that starts with white space, such as ` type="`.

    The text of the field may contain white space, so white space alone does not end the text. The
    text ends before white space if the first word of the literal follows this white space. Example:
    in `first name type="string"`, the regex matches `first name`, because `type` follows. One or
    two white-space characters are accepted before `type`, because some models write one too many.
    If the literal has no word, as in `--city "Paris"` or `--days 3`, the text of the field contains
    no white space.

    `excluded_chars` are the characters that the field cannot contain, in the syntax of a regex
    character class, for example `<>`.
    """
    first_word, *_ = _WHITESPACE_OR_GAP.split(next_literal.lstrip())
    allowed_char = f"[^{excluded_chars}]"
    if not first_word.strip(_QUOTES):
        return re.compile(rf"[^{excluded_chars}\s]+")
    # With `\s+` instead, the search in a long run of white space would take quadratic time.
    end = rf"\s{{1,2}}{re.escape(first_word)}"
    return re.compile(f"(?:(?!{end}){allowed_char})+")  # The match stops where `end` starts.


def _rest_regex(next_literal: str) -> re.Pattern[str]:
    r"""Return the regex of the field `{rest}`, which matches any text before the next literal.

    Examples for the literal `<sep>`:

        ` to=f<sep>`         The regex matches ` to=f`.
        ` to=f\njson<sep>`   The regex matches ` to=f\njson`, because a model may insert one line
                             break into a header.

    On the second line, the regex matches at most `_MAX_WORDS_ON_SECOND_LINE` words, because a
    longer line is probably ordinary text. If `next_literal` is "", the regex matches the rest of
    the first line.
    """
    stop = re.escape(next_literal.strip())
    if not stop:
        return re.compile(".*")
    first_line = f"(?:(?!{stop}).)*"  # All characters before the literal.
    spaces = r"[^\S\n]*"  # White space without line breaks.
    words = rf"(?:{spaces}\w+){{0,{_MAX_WORDS_ON_SECOND_LINE}}}"
    second_line = rf"\n{words}{spaces}"
    return re.compile(f"{first_line}(?:{second_line})?")


def tag_parts(marker: str) -> list[str]:
    """Split a marker into tags and words. The white space between these parts is removed.

    Example: `"<|close|>call<|sep|>"` gives `["<|close|>", "call", "<|sep|>"]`.
    """
    return _TAG_BOUNDARY.split(marker)


def marker_parts(marker: str) -> tuple[str, ...]:
    r"""Split a marker at white space, and between two adjacent tags.

    Example: `"</function>\n</tool_call>"` gives `("</function>", "</tool_call>")`.
    """
    return tuple(part for part in _MARKER_GAP.split(marker.strip()) if part)


def contains_first_tag(incomplete_marker: str, marker: str) -> bool:
    """Return whether `incomplete_marker` contains at least the first tag of `marker`.

    Example: for the marker `<|message|><|content|>`, the result is True for `<|message|><|con` and
    False for `<|mess`. It is also False for the complete marker. The caller must check that
    `incomplete_marker` is a prefix of `marker`.
    """
    first_tag = _FIRST_TAG.match(marker)
    return first_tag is not None and first_tag.end() <= len(incomplete_marker) < len(marker)


def looks_like_markup(text: str) -> bool:
    r"""Return whether `text` looks like markup: it contains a tag, or starts like a marker.

    Examples: `"<tool_call>\n{"` and `"[TOOL_CALLS]"` look like markup, `"a < b"` does not.
    """
    return _MARKUP.search(text) is not None


def is_special_token(marker: str) -> bool:
    """Return whether a marker starts with a special token, such as `<|end|>` or `<channel|>`.

    Examples: the result is True for `<|channel>thought`, `<channel|>` and `<｜end｜>`. The result
    is False for `<think>`, because ordinary text may contain `<think>`.
    """
    return _SPECIAL_TOKEN.match(marker) is not None
