# SPDX-License-Identifier: Apache-2.0
"""Compiles JSON schemas, regular expressions, choices and Lark grammars with llguidance.

llguidance compiles quickly, because it builds its automata while the answer is generated. It
rejects schemas with keywords that it cannot enforce.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from nereid_backend.errors import RequestError
from nereid_backend.grammar.backend_interface import Matcher
from nereid_backend.grammar.llguidance_schemas import (
    convert_lengths_to_integers,
    ignore_additional_items,
    limit_bounds,
    replace_exclusive_bounds,
)
from nereid_backend.grammar.request_spec import is_lenient
from nereid_backend.grammar.schema_parts import MAX_LOCATED, path_of_problem, subschemas
from nereid_backend.grammar.vocabulary import TokenMask, TokenMasks, Vocabulary

# The white space that is allowed in JSON: one space, or a newline and up to 16 spaces. If white
# space were unlimited, a model could generate only white space until max_tokens.
_WHITE_SPACE = r"( |\n {0,16})"
_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": _WHITE_SPACE}
# The limits that are passed to llguidance. A grammar with the largest allowed number of lexer
# states takes 20 to 40 MB.
_LIMITS = {"max_lexer_states": 20_000, "max_grammar_size": 200_000, "verbose_errors": False}
# llguidance does not report how much memory a compiled grammar needs. The estimate is _BASE_BYTES,
# plus _BYTES_PER_CHARACTER for each character of the grammar's text.
_BASE_BYTES = 64 * 1024
_BYTES_PER_CHARACTER = 30
# An error message contains at most this number of characters of llguidance's message.
_MAX_MESSAGE = 300
# The library's message quotes the source text and indents each quoted line by this number of
# characters.
_EXCERPT_INDENT = 4
# Matches the start of llguidance's message for an invalid regular expression. The message contains
# the expression in quotes.
_INVALID_REGEX = re.compile(r'^at \d+\(\d+\): invalid regex "(?:[^"\\]|\\.)*" \(in regex\): ')


class _Tokens:
    """Provides the attributes that llguidance's LLTokenizer reads from a tokenizer."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = list(vocabulary.tokens)
        special = vocabulary.special_ids | {eos_token_id}
        self.special_token_ids = sorted(special)
        for number in special:
            self.tokens[number] = vocabulary.tokens[number] or b"<|end|>"
        self._vocabulary = vocabulary

    def __call__(self, text: str | bytes) -> list[int]:
        return self._vocabulary.encode(text if isinstance(text, str) else text.decode())


class LLGuidanceBackend:
    """Implements `GrammarBackend` for all kinds of grammars except structural tags."""

    def __init__(self, vocabulary: Vocabulary, eos_token_ids: tuple[int, ...]) -> None:
        """Create a backend.

        Args:
            vocabulary: the tokens of the model.
            eos_token_ids: the checkpoint's stop tokens, at least one.
        """
        self._vocabulary = vocabulary
        wrapper: Any = _Tokens(vocabulary, eos_token_ids[0])
        self._tokenizer = LLTokenizer(wrapper, n_vocab=vocabulary.size)
        self._limits = LLParserLimits(**_LIMITS)  # type: ignore[arg-type]

    def compile(self, kind: str, source: str) -> "LLGuidanceGrammar":
        """Compile a grammar; see GrammarBackend.compile."""
        try:
            if kind == "json_schema":
                matcher = self._schema_matcher(source)
            else:
                matcher = self._text_matcher(kind, source)
        except (ValueError, OverflowError) as error:
            # Examples of errors: the schema is not an object, a text contains half of a surrogate
            # pair, or a number is infinite.
            raise RequestError(
                f"{kind}: the grammar is not valid: {_short_line(str(error))}"
            ) from error
        # Compute the mask of the first token once, because all copies of the matcher use this mask.
        # If 64 sequences use one regular expression, and the vocabulary has 151k tokens, the first
        # masks of all sequences then take 0.4 ms instead of 70 ms.
        matcher.compute_bitmask()
        if matcher.is_stopped() and not matcher.is_accepting():
            raise RequestError(
                f"{kind}: no text that the model can write matches the grammar. Check for empty "
                "character classes, and for rules or references that only refer to themselves."
            )
        return LLGuidanceGrammar(matcher, self._vocabulary, len(source))

    def _schema_matcher(self, source: str) -> LLMatcher:
        """Return llguidance's matcher for a JSON schema. Matchers track a position in the grammar.

        Raises:
            RequestError: if the schema is not valid, or has keywords that cannot be enforced.
        """
        schema = json.loads(source)
        # These functions change the parts of `schema` that llguidance rejects or handles
        # incorrectly.
        convert_lengths_to_integers(schema)
        ignore_additional_items(schema)
        limit_bounds(schema)
        replace_exclusive_bounds(schema)
        matcher = self._matcher(_schema_grammar(schema))
        if matcher.is_error() and is_lenient(schema):
            self._ignore_unsupported_patterns(schema)
            matcher = self._matcher(_schema_grammar(schema))
        if matcher.is_error():
            raise self._schema_error(schema, _problem(matcher))
        return matcher

    def _ignore_unsupported_patterns(self, schema: object) -> None:
        """Remove each valid `pattern` that llguidance 1.9 refuses, such as one with a lookahead.

        llguidance itself ignores other keywords that it does not support. The search ends after
        `MAX_LOCATED` patterns, so that a large schema does not take too long.

        Mutates: schema.
        """
        parts = (part for part, _ in subschemas(schema) if isinstance(part, dict))
        with_pattern = (part for part in parts if isinstance(part.get("pattern"), str))
        # `list` reads the generator before the first pattern is removed, because the schema must
        # not change while the generator searches the schema.
        for part in list(itertools.islice(with_pattern, MAX_LOCATED)):
            grammar = _schema_grammar({"type": "string", "pattern": part["pattern"]})
            # Example: "look-around, including look-ahead and look-behind, is not supported". The
            # messages about invalid patterns do not contain these words.
            if "not supported" in _problem(self._matcher(grammar)):
                del part["pattern"]

    def _text_matcher(self, kind: str, source: str) -> LLMatcher:
        """Return llguidance's matcher for a regular expression, a choice or an EBNF grammar.

        Raises:
            RequestError: if the grammar is not valid.
        """
        convert = {"regex": _regex, "choice": _choice, "ebnf": _ebnf}[kind]
        matcher = self._matcher(convert(source))
        if matcher.is_error():
            raise self._grammar_error(kind, source, matcher)
        return matcher

    def _matcher(self, grammar: str) -> LLMatcher:
        """Return llguidance's matcher for a grammar.

        If the grammar is not valid, the methods `is_error` and `get_error` of the matcher report
        the error.
        """
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)

    def _grammar_error(self, kind: str, source: str, matcher: LLMatcher) -> RequestError:
        """Return the RequestError for an invalid grammar that is not a JSON schema."""
        if kind == "regex":
            # `matcher` was created from a converted text, so the columns in its error belong to
            # that text. Create a matcher from the original text to get the right columns.
            matcher = self._matcher(LLMatcher.grammar_from_regex(source))
            problem = _pattern_problem(matcher)
        else:
            problem = _problem(matcher)
        return RequestError(f"{kind}: the grammar is not valid: {problem}")

    def _schema_error(self, schema: object, problem: str) -> RequestError:
        """Return the RequestError for an invalid JSON schema.

        Args:
            schema: the whole schema.
            problem: the message with which llguidance rejects the schema.
        """
        path = self._path_of_problem(schema, problem)
        # The library's message is, for example, 'Unimplemented keys: ["not", "if"]'.
        unsupported = re.match(r"Unimplemented keys: \[(.*)\]", problem)
        if unsupported is None:
            return RequestError(f"json_schema: the schema at {path} is not valid: {problem}")
        keywords = ", ".join(re.findall(r'"([^"]+)"', unsupported[1]))
        return RequestError(
            f"json_schema: the schema at {path} has keywords that cannot be enforced: {keywords}. "
            'Leave them out, or do not set "strict".'
        )

    def _path_of_problem(self, schema: object, problem: str) -> str:
        """Return the path of the innermost part of a schema that causes the error `problem`.

        llguidance does not report the position of an error. Example: if "not" cannot be enforced,
        the schema `{"properties": {"a": {"not": {}}}}` gives `$.properties.a`.
        """

        def has_problem(part: Mapping[str, object]) -> bool:
            return _problem(self._matcher(_schema_grammar(part))) == problem

        return path_of_problem(schema, has_problem)


class LLGuidanceGrammar:
    """Implements the interface `Compiled` with llguidance."""

    def __init__(self, start: LLMatcher, vocabulary: Vocabulary, source_length: int) -> None:
        self._start = start
        self._vocabulary = vocabulary
        self.num_bytes = _BASE_BYTES + _BYTES_PER_CHARACTER * source_length

    def matcher(self) -> "LLGuidanceMatcher":
        """Return a new matcher; see Compiled.matcher."""
        return LLGuidanceMatcher(self._start.deep_copy(), self._vocabulary)


class LLGuidanceMatcher:
    """Implements the interface `Matcher` with llguidance."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def accept(self, token_id: int) -> bool:
        """Advance by one token; see Matcher.accept."""
        return self._matcher.try_consume_tokens([token_id]) == 1

    def accept_bytes(self, data: bytes) -> bool:
        """Advance by bytes; see Matcher.accept_bytes."""
        try:
            tokens = self._vocabulary.spell(data)
        except KeyError:
            return False
        num_consumed = self._matcher.try_consume_tokens(tokens)
        if num_consumed < len(tokens):
            self._matcher.rollback(num_consumed)
        return num_consumed == len(tokens)

    def fill(self, row: TokenMask) -> None:
        """Write the mask of the possible next tokens into `row`; see Matcher.fill."""
        self.fill_all([self], row[None], [0])

    @staticmethod
    def fill_all(matchers: Sequence[Matcher], rows: TokenMasks, row_indices: Sequence[int]) -> None:
        """Write the token mask of each matcher into a row of `rows`; see `Matcher.fill_all`.

        The library writes each mask directly to the memory address of its row. Therefore, the array
        `rows` must be contiguous: row number i must begin i * row_bytes after the first row.
        """
        first_row_address = rows.ctypes.data
        row_bytes = rows.nbytes // len(rows)
        # The caller passes only matchers of this class.
        own_matchers = cast(Sequence[LLGuidanceMatcher], matchers)
        for matcher, row_index in zip(own_matchers, row_indices, strict=True):
            if matcher._matcher.is_stopped():
                rows[row_index] = 0  # The grammar has ended, so it allows no further token.
            else:
                row_address = first_row_address + row_index * row_bytes
                matcher._matcher.unsafe_compute_mask_ptr(row_address, row_bytes)

    def is_complete(self) -> bool:
        """Return whether the grammar allows the text to end here; see `Matcher.is_complete`."""
        return bool(self._matcher.is_accepting())

    def forced(self) -> bytes:
        """Return the bytes that must follow the text so far; see Matcher.forced."""
        if self._matcher.is_stopped() or self._matcher.is_accepting():
            return b""
        return bytes(self._matcher.compute_ff_bytes())

    def fork(self) -> "LLGuidanceMatcher":
        """Return an independent copy; see Matcher.fork."""
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._vocabulary)


def _problem(matcher: LLMatcher) -> str:
    """Return the library's error message as one line.

    Example: the library's message 'at 1(8): unknown name: "x"' is returned unchanged. For a message
    of several lines, the result is the text after the last "error: "; see `_pattern_problem`.
    """
    error_text = str(matcher.get_error())
    message = _last_error(error_text)
    return _short_line(error_text) if message is None else message


def _pattern_problem(matcher: LLMatcher) -> str:
    """Return the library's error message for a regular expression as one line, with the column.

    Example: for `(ab`, the result is "unclosed group (column 1)".
    """
    error_text = str(matcher.get_error())
    message = _last_error(error_text)  # the text after "error: ", such as "unclosed group"
    if message is None:
        # llguidance's message has no line that begins with "error: ". Remove the regular expression
        # from the message, and return the message's first line.
        return _short_line(_INVALID_REGEX.sub("", error_text))
    column = _error_column(error_text)
    return message if column is None else f"{message} (column {column})"


def _error_column(error_text: str) -> int | None:
    """Return the column at which a regular expression is wrong; None if the message has no column.

    Example: the result is 1 for the message

        at 1(8): invalid regex "(ab" (in regex): regex parse error:
            (ab
            ^
        error: unclosed group
    """
    # The first line that consists only of spaces and "^" points at the error in the expression
    # above this line. Both lines are indented by `_EXCERPT_INDENT` spaces.
    marker = re.search(r"^(?P<spaces> +)\^+$", error_text, re.MULTILINE)
    return None if marker is None else len(marker["spaces"]) - _EXCERPT_INDENT + 1


def _last_error(error_text: str) -> str | None:
    """Return the text of the last line that begins with "error: ", or None.

    Example: the line "error: unclosed group" gives "unclosed group".
    """
    messages: list[str] = re.findall(r"^error: (.*)$", error_text, re.MULTILINE)
    return messages[-1] if messages else None


def _short_line(text: str) -> str:
    """Return the first line of a text, with single spaces and at most _MAX_MESSAGE characters."""
    first_line, _, _ = text.partition("\n")
    return " ".join(first_line.split())[:_MAX_MESSAGE]


def _schema_grammar(schema: object) -> str:
    """Convert a JSON schema into the grammar format of llguidance."""
    text = json.dumps(schema)
    return str(LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS))


def _regex(source: str) -> str:
    """Convert a regular expression into the grammar format of llguidance.

    Raises:
        RequestError: if the expression ends with an incomplete escape sequence.
    """
    num_backslashes = len(source) - len(source.rstrip("\\"))
    if num_backslashes % 2 == 1:  # `regex_to_lark` would ignore the last backslash.
        raise RequestError(
            "regex: the grammar is not valid: the expression ends with an incomplete escape "
            f"sequence (column {len(source)})"
        )
    # In a Lark grammar, \d matches only ASCII digits, as in the patterns of JSON schemas.
    return str(LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(source)}/"))


def _choice(source: str) -> str:
    """Convert a JSON list of strings into a grammar that matches each of these strings.

    Example: the list `["yes", "no"]` gives the grammar of the regular expression `(?:yes|no)`.

    Raises:
        RequestError: if the JSON value is not a list of strings, or if the list or a string is
            empty.
    """
    choices = json.loads(source)
    if not isinstance(choices, list) or not choices:
        raise RequestError(
            f"choice: the value must be a list of at least one string, but it is {choices!r}."
        )
    for index, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise RequestError(
                f"choice: member {index} must be a string that is not empty, but it is {choice!r}."
            )
    alternatives = "|".join(_escaped(choice) for choice in choices)
    return _regex(f"(?:{alternatives})")


def _escaped(text: str) -> str:
    r"""Return a regular expression that matches only `text`. Example: "a-b" gives `a\x{2d}b`."""
    return "".join(
        char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):x}}}" for char in text
    )


def _ebnf(source: str) -> str:
    """Convert an EBNF grammar (with "::=") or a Lark grammar into the format of llguidance."""
    try:
        return str(llguidance.grammar_from("ebnf" if "::=" in source else "lark", source))
    except ValueError as error:
        text = str(error).removeprefix("Failed to convert the grammar from GBNF to Lark: ")
        raise RequestError(f"grammar: the grammar is not valid: {text}") from error
