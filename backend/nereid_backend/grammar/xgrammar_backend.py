# SPDX-License-Identifier: Apache-2.0
"""Compiles structural tags and EBNF grammars with the library xgrammar."""

import json
import re
from collections.abc import Sequence
from typing import Any, cast

import xgrammar

from nereid_backend.errors import RequestError, one_line
from nereid_backend.grammar.backend_interface import Matcher
from nereid_backend.grammar.compile_cost import is_quick_pattern
from nereid_backend.grammar.tag_problem import place_of_problem
from nereid_backend.grammar.vocabulary import TokenMask, TokenMasks, Vocabulary

_BOUNDED = re.compile(r'"(?:min|max)Length"')
# Two negated character classes, in the format in which xgrammar serialises grammars. The number 1
# means that the class is negated. Each following pair of numbers is a range of code points.
# Example: 34,34 contains only `"`, and 0,31 contains all control characters. The first class
# excludes `"`, backslash, CR and LF. The second class excludes control characters, `"` and
# backslash. The second class contains the backslash (92,92) twice, because both classes must have
# the same length.
_LOOSE_CLASS = ",1,34,34,92,92,13,13,10,10,"
_JSON_CLASS = ",1,0,31,34,34,92,92,92,92,"
# The masks are filled in the calling thread, because waking another thread takes as long as filling
# several masks.
_BATCH = xgrammar.BatchGrammarMatcher(max_threads=1)


class XGrammarBackend:
    """Implements `GrammarBackend` for structural tags and EBNF grammars."""

    def __init__(
        self, vocabulary: Vocabulary, eos_token_ids: tuple[int, ...], num_threads: int
    ) -> None:
        """Create xgrammar's compiler for a vocabulary.

        Args:
            vocabulary: the tokens of the model.
            eos_token_ids: the checkpoint's stop tokens.
            num_threads: the largest number of threads that one compilation starts.
        """
        info = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,  # `tokens` contains the bytes of each token
            vocab_size=vocabulary.size,
            stop_token_ids=list(eos_token_ids),
        )
        # The class `Guides` already caches compiled grammars, so a second cache would only take
        # memory.
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=num_threads, cache_enabled=False
        )

    def compile(self, kind: str, source: str) -> "XGrammarGrammar":
        """Compile a structural tag or an EBNF grammar; see GrammarBackend.compile."""
        try:
            grammar = self._compile(kind, source)
        except (RuntimeError, ValueError, TypeError) as error:
            problem = _problem(error)
            place = _place_of_problem(source, problem) if kind == "structural_tag" else ""
            raise RequestError(
                f"{kind}: the grammar is not valid{place and f' ({place})'}: {problem}"
            ) from error
        # Forced texts are never computed for an EBNF grammar, because such a grammar can force an
        # endless text. Example: `root ::= "a" root`.
        can_force = kind == "structural_tag" and _has_short_forced_texts(source)
        return XGrammarGrammar(grammar, can_force=can_force)

    def _compile(self, kind: str, source: str) -> Any:  # noqa: ANN401 - xgrammar is untyped
        """Compile a grammar, and return xgrammar's compiled grammar."""
        if kind == "structural_tag":
            # If a string has a minimum or maximum length, xgrammar wrongly allows control
            # characters in the string.
            has_bounded_string = _BOUNDED.search(source) is not None
            if has_bounded_string:
                return self._compiler.compile_grammar(_without_controls(source))
            return self._compiler.compile_structural_tag(source)
        if kind == "ebnf":
            return self._compiler.compile_grammar(source)
        raise RequestError(f"{kind}: xgrammar does not compile this kind of grammar.")


class XGrammarGrammar:
    """Implements the interface `Compiled` with xgrammar."""

    def __init__(self, grammar: Any, *, can_force: bool) -> None:  # noqa: ANN401 - untyped
        self._grammar = grammar
        self._can_force = can_force
        self.num_bytes = int(grammar.memory_size_bytes)

    def matcher(self) -> "XGrammarMatcher":
        """Return a new matcher; see Compiled.matcher."""
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._grammar), can_force=self._can_force)


class XGrammarMatcher:
    """Implements the interface `Matcher` with xgrammar."""

    def __init__(self, matcher: Any, *, can_force: bool) -> None:  # noqa: ANN401 - untyped
        self._matcher = matcher
        # If True, all texts that the grammar forces are short, and `forced` computes these texts.
        # If False, `forced` always returns b"".
        self._can_force = can_force

    def accept(self, token_id: int) -> bool:
        """Advance by one token; see Matcher.accept."""
        return bool(self._matcher.accept_token(token_id))

    def accept_bytes(self, data: bytes) -> bool:
        """Advance by bytes; see Matcher.accept_bytes."""
        return bool(self._matcher.accept_string(data))

    def fill(self, row: TokenMask) -> None:
        """Write the mask of the possible next tokens into `row`; see Matcher.fill."""
        self.fill_all([self], row[None], [0])

    @staticmethod
    def fill_all(matchers: Sequence[Matcher], rows: TokenMasks, row_indices: Sequence[int]) -> None:
        """Write the token mask of each matcher into a row of `rows`; see `Matcher.fill_all`."""
        inner = [matcher._matcher for matcher in cast(Sequence[XGrammarMatcher], matchers)]
        _BATCH.batch_fill_next_token_bitmask(inner, rows, list(row_indices))

    def is_complete(self) -> bool:
        """Return whether the grammar allows the text to end here; see `Matcher.is_complete`."""
        return bool(self._matcher.is_completed())

    def forced(self) -> bytes:
        """Return the bytes that must follow the text so far; see Matcher.forced.

        Return b"" if the bytes could be very many; see `_has_short_forced_texts`.
        """
        if not self._can_force or self._matcher.is_completed():
            return b""
        try:
            return str(self._matcher.find_jump_forward_string()).encode()
        except UnicodeDecodeError:  # the forced bytes begin in the middle of a character
            return b""

    def fork(self) -> "XGrammarMatcher":
        """Return an independent copy; see Matcher.fork."""
        return XGrammarMatcher(self._matcher.fork(), can_force=self._can_force)


def _has_short_forced_texts(source: str) -> bool:
    """Return True only if it is certain that a structural tag cannot force a long text.

    A grammar forces a text if no other text may follow the answer so far. xgrammar computes the
    whole forced text, whatever its length. Example: the regular expression `((a{900}){900}){900}`
    forces a text of 729 MB.
    """
    nodes = [json.loads(source)]  # the values of the structural tag that are not examined yet
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += node
        elif isinstance(node, dict):
            if _can_force_long_text(node):
                return False
            nodes += node.values()
    return True


def _can_force_long_text(node: dict[str, Any]) -> bool:
    """Return whether a node of a structural tag can force a long text.

    This is possible for EBNF grammars, for nodes of the type "repeat", and for regular expressions
    that are long, repeat a group or have a large bound. Values inside the node are not examined.

    Example: {"type": "regex", "pattern": "(ab){2}"} returns True, because the pattern repeats a
    group.
    """
    if node.get("type") in ("grammar", "repeat"):
        return True
    names = node.get("patternProperties")  # The names of these properties are regular expressions.
    patterns = [node.get("pattern"), *(names if isinstance(names, dict) else ())]
    return not all(is_quick_pattern(text) for text in patterns if isinstance(text, str))


def _without_controls(source: str) -> Any:  # noqa: ANN401 - xgrammar is untyped
    """Convert a structural tag to a grammar whose strings contain no control characters.

    xgrammar 0.2.8 allows control characters, such as tabs, in strings with a minLength or a
    maxLength. An answer with control characters is not valid JSON. This function therefore replaces
    the character class of such strings by the class that xgrammar uses for all other strings.
    """
    grammar = xgrammar.Grammar.from_structural_tag(source)
    text = grammar.serialize_json().replace(_LOOSE_CLASS, _JSON_CLASS)
    return xgrammar.Grammar.deserialize_json(text)


def _place_of_problem(source: str, problem: str) -> str:
    """Return the place in a structural tag that xgrammar refuses with the message `problem`.

    Return "" if the place is not found; see `place_of_problem`.
    """

    def has_problem(part_source: str) -> bool:
        try:
            xgrammar.Grammar.from_structural_tag(part_source)
        except (RuntimeError, ValueError, TypeError) as error:
            return _problem(error) == problem
        return False

    return place_of_problem(source, has_problem)


def _problem(error: Exception) -> str:
    """Return the message of an xgrammar error without the position in xgrammar's source code.

    Example: "[12:30:01] /src/a.cc:7: Check failed: (ok) is false: bad tag" gives "bad tag".
    """
    text = one_line(error)
    text = re.sub(r"^\[[\d:]+\] \S+: ", "", text)
    return re.sub(r"^Check failed: \(.*?\) is false: ", "", text)
