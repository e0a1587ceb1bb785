# SPDX-License-Identifier: Apache-2.0
"""Structural tags and EBNF through xgrammar."""

import re
from collections.abc import Sequence
from typing import Any, cast

import xgrammar

from nereid_backend.errors import RequestError
from nereid_backend.grammar.backend_interface import Matcher
from nereid_backend.grammar.vocabulary import Row, Rows, Vocabulary

_BOUNDED = re.compile(r'"(?:min|max)Length"')
# Classes of characters as serialised: negated; then ranges, of `"`, backslash, CR, LF and of the
# controls, `"`, backslash (twice, for both must be of one length).
_LOOSE_CLASS = ",1,34,34,92,92,13,13,10,10,"
_JSON_CLASS = ",1,0,31,34,34,92,92,92,92,"
# In the thread that calls: several masks are as quick as waking another thread.
_BATCH = xgrammar.BatchGrammarMatcher(max_threads=1)


class XGrammarBackend:
    """See GrammarBackend. A compilation uses up to `num_threads` threads of its own."""

    def __init__(
        self, vocabulary: Vocabulary, eos_token_ids: tuple[int, ...], num_threads: int
    ) -> None:
        info = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(eos_token_ids),
        )
        # The pool keeps what is compiled; a second cache would hold it twice.
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=num_threads, cache_enabled=False
        )

    def compile(self, kind: str, source: str) -> "XGrammarGrammar":
        """See GrammarBackend.compile; structural tags and EBNF."""
        try:
            return XGrammarGrammar(self._compile(kind, source))
        except (RuntimeError, ValueError, TypeError) as error:
            raise RequestError(f"{kind}: {_problem(error)}") from error

    def _compile(self, kind: str, source: str) -> Any:  # noqa: ANN401 - xgrammar is untyped
        if kind == "structural_tag":
            if _BOUNDED.search(source) is None:
                return self._compiler.compile_structural_tag(source)
            return self._compiler.compile_grammar(_without_controls(source))
        if kind == "ebnf":
            return self._compiler.compile_grammar(source)
        raise RequestError(f"{kind}: is not compiled by this backend")


class XGrammarGrammar:
    """See Compiled."""

    def __init__(self, grammar: Any) -> None:  # noqa: ANN401 - xgrammar is untyped
        self._grammar = grammar
        self.num_bytes = int(grammar.memory_size_bytes)

    def matcher(self) -> "XGrammarMatcher":
        """See Compiled.matcher."""
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._grammar))


class XGrammarMatcher:
    """See Matcher."""

    def __init__(self, matcher: Any) -> None:  # noqa: ANN401 - xgrammar is untyped
        self._matcher = matcher

    def accept(self, token_id: int) -> bool:
        """See Matcher.accept."""
        return bool(self._matcher.accept_token(token_id))

    def accept_bytes(self, data: bytes) -> bool:
        """See Matcher.accept_bytes."""
        return bool(self._matcher.accept_string(data))

    def fill(self, row: Row) -> None:
        """See Matcher.fill."""
        self.fill_all([self], row[None], [0])

    @staticmethod
    def fill_all(matchers: Sequence[Matcher], rows: Rows, places: Sequence[int]) -> None:
        """See Matcher.fill_all."""
        chosen = [one._matcher for one in cast(Sequence[XGrammarMatcher], matchers)]
        _BATCH.batch_fill_next_token_bitmask(chosen, rows, list(places))

    def is_complete(self) -> bool:
        """See Matcher.is_complete."""
        return bool(self._matcher.is_completed())

    def forced(self) -> bytes:
        """See Matcher.forced."""
        if self._matcher.is_completed():
            return b""
        try:
            return str(self._matcher.find_jump_forward_string()).encode()
        except UnicodeDecodeError:  # it would begin in the middle of a character
            return b""

    def fork(self) -> "XGrammarMatcher":
        """See Matcher.fork."""
        return XGrammarMatcher(self._matcher.fork())


def _without_controls(source: str) -> Any:  # noqa: ANN401 - xgrammar is untyped
    """The grammar of a structural tag whose strings hold no control characters.

    xgrammar 0.2.8 lets them, tabs too, into strings that have a minLength or maxLength, and then
    they are no JSON. That class of characters is replaced by the one that other strings have.
    """
    grammar = xgrammar.Grammar.from_structural_tag(source)
    text = grammar.serialize_json().replace(_LOOSE_CLASS, _JSON_CLASS)
    return xgrammar.Grammar.deserialize_json(text)


def _problem(error: Exception) -> str:
    """The library's message without the place in its own source."""
    text = " ".join(str(error).split())
    text = re.sub(r"^\[[\d:]+\] \S+: ", "", text)
    return re.sub(r"^Check failed: \(.*?\) is false: ", "", text)
