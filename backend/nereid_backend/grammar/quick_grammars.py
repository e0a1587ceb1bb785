# SPDX-License-Identifier: Apache-2.0
"""Finds grammars that compile quickly. Such grammars are not tested in a child process first."""

import json
import re
from collections.abc import Iterator

from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.grammar.compile_cost import pattern_repetitions

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
# The patterns and lengths of a structural tag allow repetitions. xgrammar 0.2.8, which compiles
# structural tags, needs time for each repetition. A repetition in a pattern takes about 20 times as
# long as a repetition in a length. Even with a vocabulary of 2048 tokens, 60 patterns `.{0,99}`
# take nine seconds. The sum of all repetitions in a quick tag is at most _QUICK_TAG_REPETITIONS.
_QUICK_TAG_REPETITIONS = 640
_PATTERN_WEIGHT = 20
# xgrammar compiles these string formats slowly. For each format, the number is the upper bound of a
# length, such as maxLength, that takes the same time to compile. With a vocabulary of 150,000
# tokens, 20 properties with the format `uri-template` take five seconds. The other formats are
# quick.
_FORMAT_REPETITIONS = {
    "email": 340,
    "hostname": 140,
    "uri": 230,
    "uri-reference": 290,
    "uri-template": 750,
}


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
        lengths = (node.get(name) for name in _LENGTHS)
        total += sum(max(length, 0) for length in lengths if isinstance(length, int | float))
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
