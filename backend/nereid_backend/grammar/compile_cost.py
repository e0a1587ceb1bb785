# SPDX-License-Identifier: Apache-2.0
"""Estimates how long a grammar takes to compile, and finds grammars that compile quickly.

Grammars that compile quickly are not tested in a child process first.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.errors import RequestError
from nereid_backend.grammar.schema_parts import subschemas

# The pattern of a repetition in a regular expression or a grammar: {3}, {3,}, {,5} or {3,5}.
_REPETITION = re.compile(r"\{(\d*)(?:,(\d*))?\}")
# The largest number of digits that are read from a bound. int() is slow for a very long number.
_MAX_DIGITS = 9

_LENGTH_KEYWORDS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip

# To compile one bound (a limit on repetitions), xgrammar 0.2.8 needs this number of seconds:
# repetitions * vocabulary size * a constant. The constant is _PATTERN_S for a bound in a pattern,
# such as a{0,50}, and _LENGTH_S for a length limit in a JSON schema, such as "maxLength": 50. The
# constants were measured on one core; see docs/history/sampling-and-constraints.md.
_PATTERN_S = 2.0e-7
_LENGTH_S = 1.0e-8

# A schema of at most _QUICK_BYTES characters compiles in at most a tenth of a second, unless it
# contains a slow keyword or pattern.
_QUICK_BYTES = 8192
_QUICK_PATTERN_CHARS = 128
# Matches the parts of a regular expression that can take a long time to compile: a bound with three
# or more digits, such as `{0,500}`, and a repetition of a group or of another repetition, such as
# `(a{9}){9}` and `a{9}{9}`.
_SLOW_REPETITION = re.compile(r"\{\d*,?\d{3,}|\)\s*[*+?{]|\}\s*\{")
# These keywords can make even a small schema slow to compile. For example, the libraries combine
# all schemas of an `allOf` with each other, and xgrammar 0.2.8 needs minutes for `minProperties`
# with 250 properties.
_SLOW_WORDS = frozenset(
    {
        *("allOf", "oneOf", "not", "if", "patternProperties", "propertyNames", "grammar"),
        *("dependentSchemas", "multipleOf", "uniqueItems", "contains"),
        *("minProperties", "maxProperties"),
    }
)
# Types of nodes in structural tags. Structural tags from the project itself do not contain these
# types, but structural tags from clients may contain them. xgrammar 0.2.8 crashes when it compiles
# some of these nodes. Example: a node with a token that the vocabulary does not contain.
_RISKY_NODES = frozenset(
    {
        *("token", "exclude_token", "any_tokens", "token_triggered_tags"),
        *("dispatch", "token_dispatch", "repeat"),
    }
)
_LENGTHS = frozenset({"minLength", "maxLength", "minItems", "maxItems"})
_QUICK_LENGTH = 1000
# A child process first tests whether a structural tag compiles in time if the patterns and lengths
# of the tag allow more than `_QUICK_TAG_REPETITIONS` repetitions in total. xgrammar 0.2.8, which
# compiles structural tags, needs time for each allowed repetition. Example: even with a vocabulary
# of 2048 tokens, 60 patterns `.{0,99}` take nine seconds.
_QUICK_TAG_REPETITIONS = 640
# A repetition in a pattern takes about `_PATTERN_WEIGHT` times as long to compile as a repetition
# in a length, such as maxLength.
_PATTERN_WEIGHT = 20
# The string formats that xgrammar compiles slowly, with their costs in repetitions. Example: the
# format "email" takes as long to compile as the keyword `"maxLength": 340`. With a vocabulary of
# 150,000 tokens, 20 properties with the format "uri-template" take five seconds. All other formats
# compile quickly, so their cost is 0.
_FORMAT_REPETITIONS = {
    "email": 340,
    "hostname": 140,
    "uri": 230,
    "uri-reference": 290,
    "uri-template": 750,
}


class _Bound(NamedTuple):
    """A limit on a number of repetitions, such as `{0,2000}` or `"maxLength": 2000`.

    Attributes:
        repetitions: the number of repetitions that the bound allows.
        unit_s: the time to compile one repetition for one token of the vocabulary, in seconds.
        place: a description of the position, for error messages.
    """

    repetitions: int
    unit_s: float
    place: str

    def seconds(self, vocab_size: int) -> float:
        """Return the compile time that this bound causes, for a vocabulary of `vocab_size`."""
        return self.repetitions * self.unit_s * vocab_size


def compile_time_s(kind: str, source: str, vocab_size: int) -> float:
    """Estimate how many seconds xgrammar takes to compile a grammar.

    The time is estimated from the limits on repetitions in the grammar, such as `{0,2000}` or
    `"maxLength": 2000`. Such a limit is called a bound.
    """
    return sum(bound.seconds(vocab_size) for bound in _bounds(kind, source))


def check_cost(kind: str, source: str, vocab_size: int, limit_s: float) -> None:
    """Raise a RequestError if xgrammar would take too long to compile a grammar.

    Args:
        kind: one of core.grammar.KINDS.
        source: the text of the grammar.
        vocab_size: the number of tokens in the vocabulary.
        limit_s: the largest accepted estimate, in seconds.

    Raises:
        RequestError: if the estimate is above the limit. The message names the most expensive
            bound and the largest value that the limit allows.
    """
    total_s = compile_time_s(kind, source, vocab_size)
    if total_s <= limit_s:
        return
    worst = max(_bounds(kind, source), key=lambda bound: bound.seconds(vocab_size))
    max_repetitions = int(limit_s / (worst.unit_s * vocab_size))
    raise RequestError(
        f"{kind}: the grammar would take about {total_s:.0f} s to compile, but the limit is "
        f"{limit_s:g} s. The bound in {worst.place} asks for {worst.repetitions} repetitions. "
        f"Lower it to about {max_repetitions} or less."
    )


def pattern_repetitions(pattern: str) -> int:
    """Return the sum of all bounds in a regular expression. Example: 6 for `a{4}b{1,2}`."""
    return sum(bound.repetitions for bound in _pattern_bounds(pattern, "the pattern"))


def _bounds(kind: str, source: str) -> Iterator[_Bound]:
    """Yield all limits on repetitions in a grammar."""
    if kind == "structural_tag":
        yield from _tag_bounds(json.loads(source), "$")
    elif kind == "json_schema":
        yield from _schema_bounds(json.loads(source), "$")
    else:
        yield from _pattern_bounds(source, "the text")


def _tag_bounds(node: object, path: str) -> Iterator[_Bound]:
    """Yield all limits on repetitions in a structural tag.

    A structural tag is a JSON value that describes an answer. It can contain JSON schemas, regular
    expressions and grammars. Example: if a schema in the tag contains `"maxLength": 2000`, one of
    the limits is 2000 repetitions.

    Args:
        node: the tag, or a part of the tag that this function has found in it.
        path: the position of `node` in the tag, for error messages.
    """
    if isinstance(node, list):
        for index, part in enumerate(node):
            yield from _tag_bounds(part, f"{path}[{index}]")
    elif isinstance(node, Mapping):
        for key, part in node.items():
            part_path = f"{path}.{key}"
            if key == "json_schema":
                yield from _schema_bounds(part, part_path)
            elif key in ("pattern", "grammar") and isinstance(part, str):
                yield from _pattern_bounds(part, part_path)
            else:
                yield from _tag_bounds(part, part_path)


def _schema_bounds(schema: object, path: str) -> Iterator[_Bound]:
    """Yield all limits on repetitions in a JSON schema: length limits and bounds in patterns."""
    for part, part_path in subschemas(schema, path):
        if not isinstance(part, Mapping):
            continue
        for keyword in _LENGTH_KEYWORDS:
            if isinstance(part.get(keyword), int):
                yield _Bound(part[keyword], _LENGTH_S, f"{part_path}.{keyword}")
        if isinstance(part.get("pattern"), str):
            yield from _pattern_bounds(part["pattern"], f"{part_path}.pattern")


def _pattern_bounds(pattern: str, path: str) -> Iterator[_Bound]:
    """Yield each bound (a limit on repetitions) in a regular expression or in a grammar.

    Example: `ab.{0,2000}` has one bound of 2000 at column 4. `path` is the position of the pattern,
    for error messages.
    """
    for match in _REPETITION.finditer(pattern):
        limits = [int(digits[:_MAX_DIGITS]) for digits in match.groups() if digits]
        if limits:
            yield _Bound(max(limits), _PATTERN_S, f"{path}, column {match.start() + 1}")


def is_quick(spec: GrammarSpec) -> bool:
    """Return whether a grammar is known to compile within a fraction of a second.

    Any other grammar needs a trial: a child process tests whether the grammar compiles in time.
    Examples: a schema with ten properties is quick. A schema with `allOf`, a schema of 100 kB and
    every EBNF grammar need a trial.
    """
    if len(spec.source) > _QUICK_BYTES or spec.kind == "ebnf":
        return False
    if spec.kind == "regex":
        return is_quick_pattern(spec.source)
    try:
        value = json.loads(spec.source)
    except (ValueError, RecursionError):
        # The text is not valid JSON. The compiler reports this error quickly, so the grammar need
        # not be tested in a child process.
        return True
    if _needs_trial(value):
        return False
    return spec.kind != "structural_tag" or _num_repetitions(value) <= _QUICK_TAG_REPETITIONS


def _num_repetitions(tag: object) -> float:
    """Estimate the cost of compiling a structural tag, as a number of repetitions.

    A repetition in a pattern is counted _PATTERN_WEIGHT (20) times. Example: a schema with
    `"maxLength": 50` has 50 repetitions. A schema with the pattern `a{4}b{1,2}` has (4 + 2) * 20
    repetitions. If a length is NaN, the result is NaN.
    """
    total = 0.0
    for node in _objects_in(tag):
        pattern = node.get("pattern")
        if isinstance(pattern, str):
            total += _PATTERN_WEIGHT * pattern_repetitions(pattern)
        text_format = node.get("format")
        if isinstance(text_format, str):
            total += _FORMAT_REPETITIONS.get(text_format, 0)
        for name in _LENGTHS:
            length = node.get(name)
            # JSON from a client can contain NaN as a length. NaN must be added to `total`, because
            # a tag whose total is NaN is then tested first. For NaN, `not length < 0` is True, but
            # `length >= 0` is False.
            if isinstance(length, int | float) and not length < 0:
                total += length
    return total


def _needs_trial(value: object) -> bool:
    """Return whether a grammar, as a JSON value, may be slow to compile or may crash xgrammar.

    The value is a JSON schema, a structural tag or a list of choices. Example: a schema needs a
    trial if it contains the keyword `allOf` at any depth.
    """
    return any(_can_crash(node) or _is_slow(node) for node in _objects_in(value))


def _objects_in(value: object) -> Iterator[dict[str, object]]:
    """Yield all JSON objects in a JSON value, at any depth."""
    nodes = [value]  # the values that are not examined yet
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += node
        elif isinstance(node, dict):
            yield node
            nodes += node.values()


def _can_crash(node: dict[str, object]) -> bool:
    """Return whether a node of a structural tag has a type that can crash xgrammar.

    Example: if the token `<tool>` does not exist, xgrammar crashes when it compiles the node
    `{"type": "token", "token": "<tool>"}`. The crash ends the process that compiles the tag.
    """
    node_type = node.get("type")
    return isinstance(node_type, str) and node_type in _RISKY_NODES


def _is_slow(schema: dict[str, object]) -> bool:
    """Return whether the keywords of one schema can make the compilation slow.

    Schemas inside this schema are not examined. Examples: `{"allOf": [...]}`, `{"maxLength": 5000}`
    and `{"pattern": "(ab)*"}` can take long.
    """
    if not _SLOW_WORDS.isdisjoint(schema):
        return True
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and not is_quick_pattern(pattern):
        return True
    return any(_is_long(schema.get(name)) for name in _LENGTHS)


def is_quick_pattern(pattern: str) -> bool:
    """Return whether a regular expression is short, repeats no group, and has only small bounds.

    Examples: `[a-z]{1,99}` is quick. `[a-z]{1,100}` and `(ab)*` need a trial.
    """
    return len(pattern) <= _QUICK_PATTERN_CHARS and _SLOW_REPETITION.search(pattern) is None


def _is_long(length: object) -> bool:
    """Return whether the value of a keyword such as `maxLength` is too large to compile quickly."""
    return isinstance(length, int | float) and length > _QUICK_LENGTH
