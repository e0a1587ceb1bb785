# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars, and creates guides. A guide decides which tokens may come next in a sequence.

The interface of a guide is defined in core/grammar.py.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.errors import EngineError, NereidError, RequestError
from nereid_backend.grammar.backend_interface import Compiled
from nereid_backend.grammar.byte_cache import ByteCache
from nereid_backend.grammar.compile_grammar import (
    Libraries,
    compile_grammar,
    load_libraries,
    special_ids_in,
)
from nereid_backend.grammar.compile_pool import CompilePool
from nereid_backend.grammar.guide_rules import GuideRules, rules_for
from nereid_backend.grammar.shared_compilations import SharedCompilations
from nereid_backend.grammar.thinking_budget import Thinking
from nereid_backend.grammar.token_guide import TokenGuide
from nereid_backend.grammar.trials.trial_compiler import TrialCompiler
from nereid_backend.grammar.vocabulary import Vocabulary, load_vocabulary

# The largest number of `GuideRules` objects in the cache.
_NUM_CACHED_RULES = 256

S = TypeVar("S")


@dataclass(frozen=True)
class _CompiledSpec:
    """A compiled grammar, together with the special tokens that it contains."""

    compiled: Compiled
    special_ids: frozenset[int]


@dataclass(frozen=True, eq=False)
class _PendingGuide:
    """A request that waits for its guide, which will decide which tokens may come next.

    Attributes:
        params: the sampling parameters of the request.
        stop_ids: the tokens that end the answer.
        future: receives the guide, or an error. The request waits for this future.
    """

    params: SamplingParams
    stop_ids: frozenset[int]
    future: Future[TokenGuide] = field(default_factory=Future)


class Guides:
    """Creates guides for the requests to one model. A guide decides which tokens may come next."""

    def __init__(  # noqa: PLR0913 - the arguments are separate settings
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
        """Create a factory. The grammar libraries are loaded by the first request or by `warm_up`.

        Args:
            model: the folder of the checkpoint. Its tokenizer is loaded, but no code from the
                folder is run.
            vocab_size: the number of the model's logits. It may exceed the tokenizer's vocabulary.
            eos_token_ids: the checkpoint's stop tokens.
            num_threads: the largest number of quick grammars that are compiled at the same time.
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
        # The compiled grammars, and the token masks that were computed from these grammars.
        self._cache: ByteCache[_CompiledSpec] = ByteCache(cache_bytes)
        self._rules: ByteCache[GuideRules] = ByteCache(_NUM_CACHED_RULES)
        # A future whose result is the grammar libraries. It is None before the first call of
        # `warm_up`. `_lock` prevents two threads from starting to load the libraries at the same
        # time.
        self._libraries: Future[Libraries] | None = None
        self._lock = threading.Lock()
        # The threads and processes that compile grammars. No lock is needed, because
        # `_load_libraries` sets this attribute before the first compilation starts.
        self._pool: CompilePool[_CompiledSpec] | None = None
        # The running compilations. If a grammar is already being compiled, a new request with this
        # grammar waits for the running compilation.
        self._compilations: SharedCompilations[_CompiledSpec] = SharedCompilations()

    def warm_up(self) -> "Future[Libraries]":
        """Start to load the tokenizer and the grammar libraries in a thread.

        Only the first call starts the thread.

        Returns:
            A future with the vocabulary and the libraries.
        """
        with self._lock:
            if self._libraries is None:
                self._libraries = Future()
                threading.Thread(
                    target=self._load_libraries,
                    args=(self._libraries,),
                    name="grammar-load",
                    daemon=True,
                ).start()
            return self._libraries

    def prepare(
        self, params: SamplingParams, stop_token_ids: frozenset[int]
    ) -> "Future[TokenGuide]":
        """Start to create a request's guide, which decides which tokens may come next.

        The libraries are loaded first (`warm_up`), then the grammar is compiled
        (`_create_guide_when_compiled`), and then the guide is created (`_create_guide`). Each of
        these operations is started when the future of the previous operation is done.

        Args:
            params: the sampling parameters of the request. Only the fields `grammar` and `thinking`
                are read.
            stop_token_ids: all tokens that end this request's answer. If empty, the checkpoint's
                stop tokens are used.

        Returns:
            A future with the guide, or with a RequestError that describes the problem and its
            position. If the server has failed, the exception is another NereidError. Several
            requests can wait for the compilation of one grammar. If the futures of all these
            requests are cancelled, the compilation is stopped.
        """
        pending = _PendingGuide(params, stop_token_ids or frozenset(self._eos_token_ids))
        spec = params.grammar
        size_error = self._size_error(spec) if spec is not None else None
        if size_error is not None:
            _set_error(pending.future, size_error)
            return pending.future

        future_libraries = self.warm_up()
        create_guide = partial(self._create_guide_when_compiled, pending)
        _continue_with(future_libraries, pending.future, create_guide)
        return pending.future

    def close(self) -> None:
        """Stop the threads and processes that compile grammars. Waiting requests get an error."""
        if self._pool is not None:
            self._pool.close()

    # ---- loading ---------------------------------------------------------------------------------

    def _load_libraries(self, future: "Future[Libraries]") -> None:
        """Load the vocabulary and the grammar libraries. Store them as the result of `future`.

        A separate thread runs this method. If the loading fails, store a RequestError in `future`,
        so that only the requests with a grammar or a thinking budget fail.

        Mutates: `_pool`, whose threads and processes compile grammars.
        """
        try:
            vocabulary = load_vocabulary(self._model, self._vocab_size)
            libraries = load_libraries(vocabulary, self._eos_token_ids, self._num_threads)
            trials = TrialCompiler(vocabulary, self._eos_token_ids, self._timeout_s)
            self._pool = CompilePool(self._num_threads, trials)
            future.set_result(libraries)
        except NereidError as error:
            future.set_exception(error)
        except Exception as error:  # noqa: BLE001 - a thread ends here, and requests wait for it
            future.set_exception(
                RequestError(
                    "grammar: grammars and thinking budgets cannot be used with this checkpoint, "
                    f"because the grammar libraries cannot use its tokenizer: {error}"
                )
            )

    # ---- compiling -------------------------------------------------------------------------------

    def _size_error(self, spec: GrammarSpec) -> RequestError | None:
        """Return an error if a grammar's text is too large, otherwise None."""
        num_bytes = len(spec.source.encode("utf-8", "surrogatepass"))
        if num_bytes <= self._max_source_bytes:
            return None
        return RequestError(
            f"{spec.kind}: the grammar is {num_bytes} bytes long, but the limit is "
            f"{self._max_source_bytes} bytes (max_grammar_bytes)."
        )

    def _create_guide_when_compiled(self, pending: _PendingGuide, libraries: Libraries) -> None:
        """Create a request's guide, as soon as the grammar of the request is compiled.

        A guide determines which tokens may come next in a sequence. Equal grammars are compiled
        once: a request uses the cached grammar, or waits for the compilation that another request
        has started.

        Args:
            pending: the guide to create. Its future receives the guide, or an error.
            libraries: the vocabulary and the grammar libraries.
        """
        spec = pending.params.grammar
        if spec is None:
            self._create_guide(pending, libraries, None)
            return
        # `key` omits the field `spec.after`, because the compiled grammar does not depend on this
        # field.
        key = GrammarSpec(spec.kind, spec.source)
        compiled_spec = self._cache.get(key)  # Each finished compilation fills the cache.
        if compiled_spec is not None:
            self._create_guide(pending, libraries, compiled_spec)
            return
        start = partial(self._start_compiling, libraries, key)
        # `join` calls `start` only if no other request has started to compile this grammar.
        compiling = self._compilations.join(key, pending.future, start)
        _continue_with(compiling, pending.future, partial(self._create_guide, pending, libraries))

    def _start_compiling(self, libraries: Libraries, spec: GrammarSpec) -> "Future[_CompiledSpec]":
        """Start to compile a grammar in a thread, and return a future for the compiled grammar."""
        assert self._pool is not None
        return self._pool.submit(spec, partial(self._compile, libraries, spec))

    def _compile(self, libraries: Libraries, spec: GrammarSpec) -> _CompiledSpec:
        """Compile a grammar in a thread of the pool, and cache the compiled grammar."""
        compiled = compile_grammar(libraries, spec, self._timeout_s)
        compiled_spec = _CompiledSpec(compiled, special_ids_in(libraries.vocabulary, spec))
        self._cache.put(spec, compiled_spec, compiled.num_bytes)
        return compiled_spec

    def _create_guide(
        self, pending: _PendingGuide, libraries: Libraries, compiled_spec: _CompiledSpec | None
    ) -> None:
        """Create a guide, which decides which tokens are allowed, and store it in `pending.future`.

        Args:
            pending: the request for which the guide is created.
            libraries: the vocabulary and the grammar libraries.
            compiled_spec: the compiled grammar; None if the request has only a thinking budget.
        """
        params = pending.params
        # The grammar applies after this text, such as "</think>", or from the start if it is "".
        marker = "" if params.grammar is None else params.grammar.after
        # Special tokens, such as "<tool_call>", are allowed only if the grammar contains them.
        special_ids = frozenset[int]() if compiled_spec is None else compiled_spec.special_ids
        rules = self._cached_rules(libraries.vocabulary, pending.stop_ids, special_ids, marker)
        # The matcher tracks the position of the answer in the grammar.
        matcher = None if compiled_spec is None else compiled_spec.compiled.matcher()
        thinking = None if params.thinking is None else Thinking(params.thinking)
        _set_guide(pending.future, TokenGuide(rules, matcher, thinking))

    def _cached_rules(
        self,
        vocabulary: Vocabulary,
        stop_ids: frozenset[int],
        special_ids: frozenset[int],
        marker: str,
    ) -> GuideRules:
        """Return the constant data of a guide (such as token masks), from the cache if possible.

        Requests with equal arguments share one GuideRules object, because `rules_for` is slow.

        Args:
            vocabulary: the tokens of the model, which are equal in every call.
            stop_ids: the tokens that end the answer.
            special_ids: the special tokens that the grammar contains.
            marker: the text after which the grammar applies, such as "</think>".
        """
        key = (stop_ids, special_ids, marker)  # without `vocabulary`, which never changes
        rules = self._rules.get(key)
        if rules is None:
            rules = rules_for(vocabulary, stop_ids, special_ids, marker)
            # Each value counts as one byte, so this cache limits the number of its values.
            self._rules.put(key, rules, 1)
        return rules


def _continue_with(
    operation: "Future[S]", guide_future: "Future[TokenGuide]", use_result: Callable[[S], None]
) -> None:
    """Call `use_result` with the result of `operation` as soon as `operation` is done.

    Args:
        operation: the future of an operation that is needed to create a guide, such as the
            compilation of the grammar.
        guide_future: the future for which the request waits. It receives the error if the operation
            or `use_result` fails.
        use_result: starts the next operation, or creates the guide.
    """

    def on_done(done_operation: "Future[S]") -> None:
        if done_operation.cancelled():
            # An operation is cancelled only after all requests that need it have been cancelled, so
            # no request waits for the result.
            return
        try:
            use_result(done_operation.result())
        except NereidError as error:
            _set_error(guide_future, error)
        except Exception as error:  # noqa: BLE001 - a callback ends here, and a request waits
            _set_error(
                guide_future, EngineError(f"The request's guide could not be created: {error}")
            )

    # If the operation is already done, this call runs `on_done` immediately.
    operation.add_done_callback(on_done)


def _set_guide(guide_future: "Future[TokenGuide]", guide: TokenGuide) -> None:
    """Set the result of `guide_future` to `guide`, unless the future has been cancelled."""
    if guide_future.set_running_or_notify_cancel():
        guide_future.set_result(guide)


def _set_error(guide_future: "Future[TokenGuide]", error: NereidError) -> None:
    """Set `error` as the exception of `guide_future`, unless the future has been cancelled."""
    if guide_future.set_running_or_notify_cancel():
        guide_future.set_exception(error)
