# SPDX-License-Identifier: Apache-2.0
"""Creation of guides: compiles the grammar of a request with the library that suits it.

llguidance compiles JSON schemas, regular expressions, choices and Lark grammars. xgrammar compiles
structural tags and EBNF grammars. docs/history/sampling-and-constraints.md has the measurements
that led to this division.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.errors import EngineError, NereidError, RequestError
from nereid_backend.grammar.backend_interface import Compiled, GrammarBackend
from nereid_backend.grammar.compile_cost import check_cost, load
from nereid_backend.grammar.compile_pool import ByteCache, CompilePool
from nereid_backend.grammar.guide_rules import GuideRules, rules_for
from nereid_backend.grammar.thinking_budget import Thinking
from nereid_backend.grammar.token_guide import TokenGuide
from nereid_backend.grammar.vocabulary import Vocabulary, load_vocabulary

# The number of GuideRules that are cached.
_NUM_CACHED_RULES = 256

S = TypeVar("S")


@dataclass(frozen=True)
class _Libraries:
    """The vocabulary and the grammar libraries, loaded when the first request needs them."""

    vocabulary: Vocabulary
    llguidance: GrammarBackend
    xgrammar: GrammarBackend


@dataclass(frozen=True)
class _CompiledSpec:
    """A compiled grammar, and the special tokens that the grammar contains."""

    compiled: Compiled
    special_ids: frozenset[int]


_Maker = Callable[[_Libraries, _CompiledSpec | None], TokenGuide]


class Guides:
    """Creates the guides of all requests to one model."""

    def __init__(  # noqa: PLR0913 - each is a limit of its own
        self,
        model: str,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_threads: int = 2,
        timeout_s: float = 10.0,
        cache_bytes: int = 64 * 2**20,
        max_source_bytes: int = 256 * 2**10,
    ) -> None:
        """Create a factory. Nothing is loaded before the first request or `warm_up`.

        Args:
            model: the folder of the checkpoint. Its tokenizer is loaded; no code from it is run.
            vocab_size: the number of the model's logits. It may exceed the tokenizer's vocabulary.
            eos_token_ids: the checkpoint's stop tokens.
            num_threads: the largest number of grammars that are compiled at the same time.
            timeout_s: the time limit of one compilation, including the time in the queue.
            cache_bytes: the size of the cache of compiled grammars.
            max_source_bytes: the largest accepted size of a grammar's text.
        """
        self._model = model
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._max_source_bytes = max_source_bytes
        self._pool: CompilePool[_CompiledSpec] = CompilePool(num_threads, timeout_s)
        self._cache: ByteCache[_CompiledSpec] = ByteCache(cache_bytes)
        self._rules: ByteCache[GuideRules] = ByteCache(_NUM_CACHED_RULES)
        self._lock = threading.Lock()
        self._libraries: Future[_Libraries] | None = None
        self._compiling: dict[tuple[str, str], Future[_CompiledSpec]] = {}

    def warm_up(self) -> "Future[_Libraries]":
        """Start a thread that loads the tokenizer and the grammar libraries, if it has not started.

        Returns:
            A future with the vocabulary and the libraries.
        """
        with self._lock:
            if self._libraries is None:
                self._libraries = Future()
                threading.Thread(
                    target=self._load, args=(self._libraries,), name="grammar-load", daemon=True
                ).start()
            return self._libraries

    def prepare(
        self, params: SamplingParams, stop_token_ids: frozenset[int]
    ) -> "Future[TokenGuide]":
        """Start to create the guide of a request's first sequence, without blocking.

        The other sequences of the request use forks of the guide.

        Args:
            params: the request's grammar and thinking specifications are read.
            stop_token_ids: all tokens that end this request's answer. If empty, the checkpoint's
                stop tokens are used.

        Returns:
            A future with the guide, or with a RequestError that describes the problem and its
            position.
        """
        answer: Future[TokenGuide] = Future()
        answer.set_running_or_notify_cancel()
        try:
            spec = params.grammar
            if spec is not None:
                self._check_size(spec)
            stops = stop_token_ids or frozenset(self._eos_token_ids)
            make = partial(self._guide, params, stops)
            _when_done(self.warm_up(), answer, partial(self._complete, answer, spec, make))
        except NereidError as error:
            answer.set_exception(error)
        return answer

    def close(self) -> None:
        """End the threads. Requests that wait for a guide get an error."""
        self._pool.close()

    # ---- loading ---------------------------------------------------------------------------------

    def _load(self, libraries: "Future[_Libraries]") -> None:
        """Load the vocabulary and the grammar libraries, and store the result in `libraries`."""
        try:
            vocabulary = load_vocabulary(self._model, self._vocab_size)
            libraries.set_result(
                _load_libraries(vocabulary, self._eos_token_ids, self._num_threads)
            )
        except NereidError as error:
            libraries.set_exception(error)
        except Exception as error:  # noqa: BLE001 - a thread ends here, and requests wait for it
            libraries.set_exception(
                RequestError(
                    "grammar: grammars and thinking budgets cannot be used with this checkpoint, "
                    f"because the grammar libraries cannot use its tokenizer: {error}"
                )
            )

    # ---- compiling -------------------------------------------------------------------------------

    def _check_size(self, spec: GrammarSpec) -> None:
        """Raise RequestError if a grammar's text is too large."""
        size = len(spec.source.encode("utf-8", "surrogatepass"))
        if size > self._max_source_bytes:
            raise RequestError(
                f"{spec.kind}: the grammar is {size} bytes long, but the limit is "
                f"{self._max_source_bytes} bytes (max_grammar_bytes)."
            )

    def _complete(
        self,
        answer: "Future[TokenGuide]",
        spec: GrammarSpec | None,
        make: _Maker,
        libraries: _Libraries,
    ) -> None:
        """Create a guide once the libraries are loaded, and store the guide in `answer`.

        Equal grammars are compiled once: a request uses the cached grammar, or waits for the
        compilation that another request has started.

        Args:
            answer: receives the guide or an error.
            spec: the request's grammar; None if the request has only a thinking budget.
            make: creates the guide from the libraries and the compiled grammar.
            libraries: the vocabulary and the grammar libraries.
        """
        if spec is None:
            answer.set_result(make(libraries, None))
            return
        key = (spec.kind, spec.source)
        compiled_spec = self._cache.get(key)
        if compiled_spec is not None:
            answer.set_result(make(libraries, compiled_spec))
            return
        with self._lock:
            future = self._compiling.get(key)
            is_new = future is None
            if future is None:
                future = self._pool.submit(partial(self._compile, libraries, key))
                self._compiling[key] = future
        if is_new:
            future.add_done_callback(partial(self._forget, key))
        _when_done(future, answer, lambda result: answer.set_result(make(libraries, result)))

    def _forget(self, key: tuple[str, str], future: "Future[_CompiledSpec]") -> None:
        """Remove a finished compilation, so that a later request looks into the cache instead."""
        with self._lock:
            if self._compiling.get(key) is future:
                del self._compiling[key]

    def _compile(self, libraries: _Libraries, key: tuple[str, str]) -> _CompiledSpec:
        """Compile a grammar in a thread of the pool, and store it in the cache."""
        spec = GrammarSpec(*key)
        compiled = compile_grammar(
            libraries.llguidance, libraries.xgrammar, spec, self._vocab_size, self._timeout_s
        )
        compiled_spec = _CompiledSpec(compiled, special_ids_in(libraries.vocabulary, spec))
        self._cache.put(key, compiled_spec, compiled.num_bytes)
        return compiled_spec

    def _guide(
        self,
        params: SamplingParams,
        stops: frozenset[int],
        libraries: _Libraries,
        compiled_spec: _CompiledSpec | None,
    ) -> TokenGuide:
        """Create a guide from the libraries and the compiled grammar."""
        special_ids = compiled_spec.special_ids if compiled_spec is not None else frozenset[int]()
        after = params.grammar.after if params.grammar is not None else ""
        key = (stops, special_ids, after)
        rules = self._rules.get(key)
        if rules is None:
            rules = rules_for(libraries.vocabulary, stops, special_ids, after)
            self._rules.put(key, rules, 1)
        thinking = Thinking(params.thinking) if params.thinking is not None else None
        matcher = compiled_spec.compiled.matcher() if compiled_spec is not None else None
        return TokenGuide(rules, matcher, thinking)


def _when_done(
    first: "Future[S]", answer: "Future[TokenGuide]", follow: Callable[[S], None]
) -> None:
    """Call `follow` with the result of `first`: at once if there is one, otherwise when it arrives.

    An error of `first` or of `follow` is stored in `answer`.
    """

    def call_follow(done: "Future[S]") -> None:
        try:
            follow(done.result())
        except NereidError as error:
            answer.set_exception(error)
        except Exception as error:  # noqa: BLE001 - a callback ends here, and a request waits
            answer.set_exception(EngineError(f"The request's guide could not be created: {error}"))

    if first.done():
        call_follow(first)
    else:
        first.add_done_callback(call_follow)


def _load_libraries(
    vocabulary: Vocabulary, eos_token_ids: tuple[int, ...], num_threads: int
) -> _Libraries:
    """Create the backends of both grammar libraries."""
    # Imported here, because these libraries load slowly and most servers never need them.
    from nereid_backend.grammar.llguidance_backend import LLGuidanceBackend
    from nereid_backend.grammar.xgrammar_backend import XGrammarBackend

    return _Libraries(
        vocabulary,
        LLGuidanceBackend(vocabulary, eos_token_ids),
        XGrammarBackend(vocabulary, eos_token_ids, num_threads),
    )


def compile_grammar(
    llguidance: GrammarBackend,
    xgrammar: GrammarBackend,
    spec: GrammarSpec,
    vocab_size: int,
    limit_s: float,
) -> Compiled:
    """Compile a grammar with the library that suits it.

    Args:
        llguidance: the backend of llguidance.
        xgrammar: the backend of xgrammar.
        spec: the grammar.
        vocab_size: the number of tokens in the vocabulary.
        limit_s: xgrammar gets no grammar whose estimated time to compile exceeds this limit.

    Raises:
        RequestError: if the grammar is not valid, takes too long to compile, or contains keywords
            that cannot be enforced.
    """
    kind = spec.kind
    source = spec.source
    if kind == "structural_tag":
        tag = load(kind, source)
        plain = _simple_grammar(tag)
        if plain is not None:
            try:
                return llguidance.compile(*plain)
            except RequestError:
                pass  # xgrammar ignores some keywords that llguidance rejects, so it is tried next
        check_cost(kind, source, vocab_size, limit_s)
        return xgrammar.compile(kind, source)
    if kind == "ebnf" and "::=" in source:
        try:
            check_cost(kind, source, vocab_size, limit_s)
        except RequestError:
            return llguidance.compile(kind, source)
        return xgrammar.compile(kind, source)
    if kind in ("json_schema", "choice"):
        load(kind, source)
    return llguidance.compile(kind, source)


def _simple_grammar(tag: object) -> tuple[str, str] | None:
    """Return the (kind, source) of a structural tag that contains only a schema or a regex.

    Return None for other tags. Example: the tag `{"format": {"type": "regex", "pattern": "a+"}}`
    gives `("regex", "a+")`.
    """
    node = tag.get("format") if isinstance(tag, Mapping) else None
    if not isinstance(node, Mapping):
        return None
    if node.get("type") == "json_schema" and not {"style", "excludes", "any_order"} & set(node):
        return "json_schema", json.dumps(node.get("json_schema"))
    if node.get("type") == "regex" and isinstance(node.get("pattern"), str):
        return "regex", node["pattern"]
    return None


def special_ids_in(vocabulary: Vocabulary, spec: GrammarSpec) -> frozenset[int]:
    """Return the special tokens that a grammar contains as text.

    Only structural tags can contain special tokens. Example: a tag that begins with "<tool_call>"
    contains the special token <tool_call>. All other special tokens are forbidden
    in the answer.
    """
    if spec.kind != "structural_tag":
        return frozenset()
    written = "\0".join(_texts(json.loads(spec.source)))
    return frozenset(
        number
        for number in vocabulary.special_ids
        if vocabulary.tokens[number] and vocabulary.tokens[number].decode() in written
    )


def _texts(node: object) -> Iterator[str]:
    """Yield the texts of a structural tag, except those of JSON schemas."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, list):
        for part in node:
            yield from _texts(part)
    elif isinstance(node, Mapping):
        for word, part in node.items():
            if word not in ("json_schema", "excludes", "type"):
                yield from _texts(part)
