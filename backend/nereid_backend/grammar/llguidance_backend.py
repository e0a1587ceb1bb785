# SPDX-License-Identifier: Apache-2.0
"""Schemas, regexes, choices and grammars through llguidance: quick to compile, lazy, strict."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard, cast

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from nereid_backend.errors import RequestError
from nereid_backend.grammar.backend_interface import Matcher
from nereid_backend.grammar.compile_cost import depth_of, subschemas
from nereid_backend.grammar.vocabulary import Row, Rows, Vocabulary

# One blank, or a line's end and its indentation: unbounded white space may never end when sampled.
_WHITE_SPACE = r"( |\n {0,16})"
_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": _WHITE_SPACE}
# 20k lexer states are 20-40 MB at most, for one grammar.
_LIMITS = {"max_lexer_states": 20_000, "max_grammar_size": 200_000, "verbose_errors": False}
_NUM_BYTES = 64 * 1024  # of a small grammar; the library does not tell
_BESIDE = 1e-9
_MAX_MESSAGE = 300
_MAX_LOCATED = 200  # parts of a schema that are tried to find the one that is wrong


class _Tokens:
    """What LLTokenizer reads of a tokenizer."""

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
    """See GrammarBackend."""

    def __init__(self, vocabulary: Vocabulary, eos_token_ids: tuple[int, ...]) -> None:
        self._vocabulary = vocabulary
        wrapper: Any = _Tokens(vocabulary, eos_token_ids[0])
        self._tokenizer = LLTokenizer(wrapper, n_vocab=vocabulary.size)
        self._limits = LLParserLimits(**_LIMITS)  # type: ignore[arg-type]

    def compile(self, kind: str, source: str) -> "LLGuidanceGrammar":
        """See GrammarBackend.compile; all kinds but structural tags."""
        if kind == "json_schema":
            schema = _with_mended_bounds(json.loads(source))
            matcher = self._matcher(_schema_grammar(schema))
            if matcher.is_error():
                raise self._schema_error(schema, _problem(matcher))
        else:
            grammar = {"regex": _regex, "choice": _choice, "ebnf": _ebnf}[kind](source)
            matcher = self._matcher(grammar)
            if matcher.is_error():
                if kind == "regex":  # told of the text as it was written
                    matcher = self._matcher(LLMatcher.grammar_from_regex(source))
                raise RequestError(f"{kind}: {_problem(matcher, kind == 'regex')}")
        # The first mask is kept with the matcher, so all of its copies have it: 70 against 0.4 ms
        # for a batch of 64 that begins with a regex, at 151k tokens.
        matcher.compute_bitmask()
        return LLGuidanceGrammar(matcher, self._vocabulary, len(source))

    def _matcher(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)

    def _schema_error(self, schema: object, problem: str) -> RequestError:
        where = self._where(schema, problem)
        words = re.match(r"Unimplemented keys: \[(.*)\]", problem)
        if words is None:
            return RequestError(f"json_schema: {where}: {problem}")
        keywords = ", ".join(re.findall(r'"([^"]+)"', words[1]))
        return RequestError(
            f"json_schema: {where}: {keywords} cannot be enforced; leave it out, or do not ask for "
            "strict"
        )

    def _where(self, schema: object, problem: str) -> str:
        """The innermost part of the schema that has this problem."""
        shared = {
            word: schema[word]
            for word in ("$defs", "definitions")
            if isinstance(schema, Mapping) and word in schema
        }
        best = "$"
        for count, (part, path) in enumerate(subschemas(schema)):
            if count == _MAX_LOCATED or depth_of(path) <= depth_of(best):
                continue
            if not path.startswith(best) or not isinstance(part, Mapping):
                continue
            alone = {**shared, **part}
            for word in shared:
                if path.startswith(f"$.{word}"):
                    alone = dict(part)
            if _problem(self._matcher(_schema_grammar(alone))) == problem:
                best = path
        return best


class LLGuidanceGrammar:
    """See Compiled."""

    def __init__(self, start: LLMatcher, vocabulary: Vocabulary, source_length: int) -> None:
        self._start = start
        self._vocabulary = vocabulary
        self.num_bytes = _NUM_BYTES + 30 * source_length

    def matcher(self) -> "LLGuidanceMatcher":
        """See Compiled.matcher."""
        return LLGuidanceMatcher(self._start.deep_copy(), self._vocabulary)


class LLGuidanceMatcher:
    """See Matcher."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def accept(self, token_id: int) -> bool:
        """See Matcher.accept."""
        return self._matcher.try_consume_tokens([token_id]) == 1

    def accept_bytes(self, data: bytes) -> bool:
        """See Matcher.accept_bytes."""
        try:
            tokens = self._vocabulary.spell(data)
        except KeyError:
            return False
        taken = self._matcher.try_consume_tokens(tokens)
        if taken < len(tokens):
            self._matcher.rollback(taken)
        return taken == len(tokens)

    def fill(self, row: Row) -> None:
        """See Matcher.fill."""
        self.fill_all([self], row[None], [0])

    @staticmethod
    def fill_all(matchers: Sequence[Matcher], rows: Rows, places: Sequence[int]) -> None:
        """See Matcher.fill_all."""
        address, row_bytes = rows.ctypes.data, rows.nbytes // len(rows)
        for matcher, place in zip(cast(Sequence[LLGuidanceMatcher], matchers), places, strict=True):
            if matcher._matcher.is_stopped():
                rows[place] = 0
            else:
                matcher._matcher.unsafe_compute_mask_ptr(address + place * row_bytes, row_bytes)

    def is_complete(self) -> bool:
        """See Matcher.is_complete."""
        return bool(self._matcher.is_accepting())

    def forced(self) -> bytes:
        """See Matcher.forced."""
        if self._matcher.is_stopped() or self._matcher.is_accepting():
            return b""
        return bytes(self._matcher.compute_ff_bytes())

    def fork(self) -> "LLGuidanceMatcher":
        """See Matcher.fork."""
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._vocabulary)


def _problem(matcher: LLMatcher, has_pattern: bool = False) -> str:
    """The library's message in one line; a pattern's with the column at which it stops."""
    text = str(matcher.get_error())
    column = re.search(r"^( +)\^", text, re.MULTILINE)
    said = re.findall(r"^error: (.*)$", text, re.MULTILINE)
    if said:
        at = f" (column {len(column[1]) - 3})" if column and has_pattern else ""
        return f"{said[-1]}{at}"
    if has_pattern:
        text = re.sub(r'^at \d+\(\d+\): invalid regex "(?:[^"\\]|\\.)*" \(in regex\): ', "", text)
    return " ".join(text.partition("\n")[0].split())[:_MAX_MESSAGE]


def _with_mended_bounds(schema: object) -> object:
    """The same schema, without the bounds that llguidance 1.9 takes wrongly. Mutates: schema.

    Between an exclusive bound that is whole and another within the same unit (above 3, at most
    3.6) it lets the whole number itself through. An inclusive bound just beside it is right.
    """
    for part, _ in subschemas(schema):
        if not isinstance(part, dict):
            continue
        low, high = part.get("exclusiveMinimum"), part.get("exclusiveMaximum")
        top, bottom = part.get("maximum", high), part.get("minimum", low)
        if _is_whole(low) and _is_number(top) and low >= 0 and top < low + 1:
            part["minimum"] = part.pop("exclusiveMinimum") + _BESIDE
        elif _is_whole(high) and _is_number(bottom) and high <= 0 and bottom > high - 1:
            part["maximum"] = part.pop("exclusiveMaximum") - _BESIDE
    return schema


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> TypeGuard[float]:
    return _is_number(value) and value == int(value)


def _schema_grammar(schema: object) -> str:
    text = json.dumps(schema)
    return str(LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS))


def _regex(source: str) -> str:
    # Digits are ASCII's, as in the patterns of JSON schemas.
    return str(LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(source)}/"))


def _choice(source: str) -> str:
    choices = json.loads(source)
    if not isinstance(choices, list) or not choices:
        raise RequestError("choice: must be a list of at least one string")
    for number, one in enumerate(choices):
        if not isinstance(one, str) or not one:
            raise RequestError(f"choice: member {number} must be a string with text, got {one!r}")
    return _regex("(?:" + "|".join(map(_escaped, choices)) + ")")


def _escaped(text: str) -> str:
    return "".join(_escaped_characters(text))


def _escaped_characters(text: str) -> Iterator[str]:
    for char in text:
        if char.isalnum() and char.isascii():
            yield char
        else:
            yield f"\\x{{{ord(char):x}}}"


def _ebnf(source: str) -> str:
    try:
        return str(llguidance.grammar_from("ebnf" if "::=" in source else "lark", source))
    except ValueError as error:
        text = str(error).removeprefix("Failed to convert the grammar from GBNF to Lark: ")
        raise RequestError(f"grammar: {text}") from error
