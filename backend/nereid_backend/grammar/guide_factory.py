# SPDX-License-Identifier: Apache-2.0
"""From a request's parameters to its guide: which backend compiles what, and when.

Schemas, regexes, choices and Lark go to llguidance; structural tags and EBNF to xgrammar.
docs/constraints.md has the measurements behind it.
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
from nereid_backend.grammar.thinking_budget import Thinking
from nereid_backend.grammar.token_guide import Rules, TokenGuide, rules_for
from nereid_backend.grammar.vocabulary import Vocabulary, load_vocabulary

_MAX_RULES = 256

S = TypeVar("S")


@dataclass(frozen=True)
class _Tools:
    """What is loaded once, when the first request needs it."""

    vocabulary: Vocabulary
    llguidance: GrammarBackend
    xgrammar: GrammarBackend


@dataclass(frozen=True)
class _Ready:
    """A compiled grammar and the special tokens that it names."""

    compiled: Compiled
    special_ids: frozenset[int]


_Maker = Callable[[_Tools, _Ready | None], TokenGuide]


class Guides:
    """Makes guides for one model.

    Args:
        model: folder of the checkpoint, for its tokenizer; no code of its own is run.
        vocab_size: width of the model's logits, which may exceed the tokenizer's vocabulary.
        eos_token_ids: the checkpoint's own stop tokens.
        num_threads: compilations at once.
        timeout_s: for one compilation, waiting included, loading the tokenizer not.
        cache_bytes: of compiled grammars that are kept.
        max_source_bytes: of one grammar's text.
    """

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
        self._model = model
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._max_source_bytes = max_source_bytes
        self._pool: CompilePool[_Ready] = CompilePool(num_threads, timeout_s)
        self._cache: ByteCache[_Ready] = ByteCache(cache_bytes)
        self._rules: ByteCache[Rules] = ByteCache(_MAX_RULES)
        self._lock = threading.Lock()
        self._tools: Future[_Tools] | None = None
        self._compiling: dict[tuple[str, str], Future[_Ready]] = {}

    def warm_up(self) -> "Future[_Tools]":
        """Begin to load the tokenizer and the grammar libraries, where that is not done yet."""
        with self._lock:
            if self._tools is None:
                self._tools = Future()
                threading.Thread(
                    target=self._load, args=(self._tools,), name="grammar-load", daemon=True
                ).start()
            return self._tools

    def prepare(
        self, params: SamplingParams, stop_token_ids: frozenset[int]
    ) -> "Future[TokenGuide]":
        """A guide for a request's first sequence; its others are forks of it. Never blocks.

        Args:
            params: its grammar and its thinking are read.
            stop_token_ids: all tokens that end this request's answer; if there are none, the
                checkpoint's own do.

        Returns:
            A future with the guide, or with a RequestError that says what is wrong and where.
        """
        answer: Future[TokenGuide] = Future()
        answer.set_running_or_notify_cancel()
        try:
            spec = params.grammar
            if spec is not None:
                self._check_size(spec)
            stops = stop_token_ids or frozenset(self._eos_token_ids)
            make = partial(self._guide, params, stops)
            _then(self.warm_up(), answer, partial(self._with_tools, answer, spec, make))
        except NereidError as error:
            answer.set_exception(error)
        return answer

    def close(self) -> None:
        """End the threads; requests that wait get an error."""
        self._pool.close()

    # ---- loading ---------------------------------------------------------------------------------

    def _load(self, tools: "Future[_Tools]") -> None:
        try:
            vocabulary = load_vocabulary(self._model, self._vocab_size)
            tools.set_result(_make_tools(vocabulary, self._eos_token_ids, self._num_threads))
        except NereidError as error:
            tools.set_exception(error)
        except Exception as error:  # noqa: BLE001 - a thread ends here, and requests wait for it
            tools.set_exception(RequestError(f"grammar: the tokenizer cannot be used: {error}"))

    # ---- compiling -------------------------------------------------------------------------------

    def _check_size(self, spec: GrammarSpec) -> None:
        size = len(spec.source.encode("utf-8", "surrogatepass"))
        if size > self._max_source_bytes:
            raise RequestError(
                f"{spec.kind}: has {size} bytes; the limit is {self._max_source_bytes} "
                "(max_grammar_bytes)"
            )

    def _with_tools(
        self,
        answer: "Future[TokenGuide]",
        spec: GrammarSpec | None,
        make: _Maker,
        tools: _Tools,
    ) -> None:
        if spec is None:
            answer.set_result(make(tools, None))
            return
        key = (spec.kind, spec.source)
        ready = self._cache.get(key)
        if ready is not None:
            answer.set_result(make(tools, ready))
            return
        with self._lock:
            future = self._compiling.get(key)
            is_new = future is None
            if future is None:
                future = self._pool.submit(partial(self._compile, tools, key))
                self._compiling[key] = future
        if is_new:
            future.add_done_callback(partial(self._forget, key))
        _then(future, answer, lambda found: answer.set_result(make(tools, found)))

    def _forget(self, key: tuple[str, str], future: "Future[_Ready]") -> None:
        with self._lock:
            if self._compiling.get(key) is future:
                del self._compiling[key]

    def _compile(self, tools: _Tools, key: tuple[str, str]) -> _Ready:
        spec = GrammarSpec(*key)
        compiled = compile_grammar(
            tools.llguidance, tools.xgrammar, spec, self._vocab_size, self._timeout_s
        )
        ready = _Ready(compiled, special_ids_in(tools.vocabulary, spec))
        self._cache.put(key, ready, compiled.num_bytes)
        return ready

    def _guide(
        self,
        params: SamplingParams,
        stops: frozenset[int],
        tools: _Tools,
        ready: _Ready | None,
    ) -> TokenGuide:
        special = ready.special_ids if ready is not None else frozenset[int]()
        after = params.grammar.after if params.grammar is not None else ""
        key = (stops, special, after)
        rules = self._rules.get(key)
        if rules is None:
            rules = rules_for(tools.vocabulary, stops, special, after)
            self._rules.put(key, rules, 1)
        thinking = Thinking(params.thinking) if params.thinking is not None else None
        return TokenGuide(rules, ready.compiled.matcher() if ready is not None else None, thinking)


def _then(first: "Future[S]", answer: "Future[TokenGuide]", follow: Callable[[S], None]) -> None:
    """Go on with what a future brings, at once if it is there; its error is the answer's too."""

    def go_on(done: "Future[S]") -> None:
        try:
            follow(done.result())
        except NereidError as error:
            answer.set_exception(error)
        except Exception as error:  # noqa: BLE001 - a callback ends here, and a request waits
            answer.set_exception(EngineError(f"a guide could not be made: {error}"))

    if first.done():
        go_on(first)
    else:
        first.add_done_callback(go_on)


def _make_tools(vocabulary: Vocabulary, eos_token_ids: tuple[int, ...], num_threads: int) -> _Tools:
    # Heavy imports, hence here.
    from nereid_backend.grammar.llguidance_backend import LLGuidanceBackend
    from nereid_backend.grammar.xgrammar_backend import XGrammarBackend

    return _Tools(
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
    """Compile a grammar with the backend that is better at it.

    Raises:
        RequestError: it is wrong, costs too much, or has keywords that cannot be enforced.
    """
    kind, source = spec.kind, spec.source
    if kind == "structural_tag":
        tag = load(kind, source)
        plain = _plain(tag)
        if plain is not None:
            try:
                return llguidance.compile(*plain)
            except RequestError:
                pass  # the tag may still be one for xgrammar, which passes over more
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


def _plain(tag: object) -> tuple[str, str] | None:
    """The (kind, source) of a structural tag that holds just a schema or a regex."""
    node = tag.get("format") if isinstance(tag, Mapping) else None
    if not isinstance(node, Mapping):
        return None
    if node.get("type") == "json_schema" and not {"style", "excludes", "any_order"} & set(node):
        return "json_schema", json.dumps(node.get("json_schema"))
    if node.get("type") == "regex" and isinstance(node.get("pattern"), str):
        return "regex", node["pattern"]
    return None


def special_ids_in(vocabulary: Vocabulary, spec: GrammarSpec) -> frozenset[int]:
    """Special tokens that a grammar itself writes, as markers; any other never is plain text."""
    if spec.kind != "structural_tag":
        return frozenset()
    written = "\0".join(_texts(json.loads(spec.source)))
    return frozenset(
        number
        for number in vocabulary.special_ids
        if vocabulary.tokens[number] and vocabulary.tokens[number].decode() in written
    )


def _texts(node: object) -> Iterator[str]:
    """The strings of a structural tag, schemas left out."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, list):
        for part in node:
            yield from _texts(part)
    elif isinstance(node, Mapping):
        for word, part in node.items():
            if word not in ("json_schema", "excludes", "type"):
                yield from _texts(part)
