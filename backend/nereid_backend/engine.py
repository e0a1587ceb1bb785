# SPDX-License-Identifier: Apache-2.0
"""The engine. Start here: ``Engine.step`` is the whole program."""

import logging
import operator
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nereid_backend.async_steps import LookAhead
from nereid_backend.attention.interface import AttentionHook
from nereid_backend.config import EngineConfig
from nereid_backend.core.block_pool import BlockPool
from nereid_backend.core.outputs import EngineInfo, RequestOutput, RequestUpdate
from nereid_backend.core.pending_grammars import Preparation
from nereid_backend.core.request import Request
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.step import StepPlan, StepResult
from nereid_backend.errors import CapacityError, RequestError
from nereid_backend.model.startup import load
from nereid_backend.offline import generate
from nereid_backend.sampling.logits_processor import check_token_ids
from nereid_backend.step_failures import StepFailures
from nereid_backend.text.load_decoder import load_decoder

if TYPE_CHECKING:
    from nereid_backend.grammar import Guides

logger = logging.getLogger(__name__)

# How long a step without work waits for a grammar: new requests are not looked at meanwhile.
_GUIDE_WAIT_S = 0.02


class Engine:
    """Generates tokens for many requests at once.

    One thread owns an engine: none of its methods may be called from another one meanwhile.

    Attributes:
        info: what was loaded and how it runs.
        begun: requests of which the last step computed the first tokens (again, after a
            preemption before its first token), and when, by time.monotonic().
    """

    info: EngineInfo

    def __init__(self, config: EngineConfig, progress: Callable[[str], None] | None = None) -> None:
        """Load a checkpoint, check that it runs exactly, and allocate the KV cache.

        Args:
            config: the settings.
            progress: called with one line for each slow step of loading.

        Raises:
            ConfigError: the settings do not fit the machine or the model.
            ModelError: the checkpoint is missing or broken, or its architecture is not supported.
        """
        self._config = config
        self._hook = AttentionHook()
        try:
            loaded = load(config, self._hook, progress or logger.info)
        except BaseException:
            self._hook.remove()
            raise
        self.info = loaded.info
        self._runner = loaded.runner
        self._pool = BlockPool(self.info.num_blocks)
        self._scheduler = Scheduler(
            self._pool,
            block_size=self.info.block_size,
            max_num_seqs=self.info.max_num_seqs,
            max_num_batched_tokens=self.info.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            shares_blocks=loaded.shares_blocks,
            whole_prefill=loaded.whole_prefill,
            num_speculative_tokens=config.num_speculative_tokens,
            sight=loaded.sight,
        )
        if config.num_speculative_tokens > 0 and self._scheduler.lookup is None:
            (progress or logger.info)(
                f"num_speculative_tokens: off, because the {self.info.path} path of "
                f"{self.info.architecture} cannot take a guess back"
            )
        self._seeds = random.Random(config.seed)
        self._guides: Guides | None = None
        self._preparation = Preparation()
        self._decode: Callable[[list[int]], str] | None = None
        self.begun: list[tuple[str, float]] = []
        self._failures = StepFailures(config.max_step_failures)
        self._look_ahead: LookAhead | None = None
        if config.async_scheduling:
            self._look_ahead = self._make_look_ahead(progress or logger.info)

    def step(self) -> list[RequestUpdate]:
        """Compute the next tokens of the requests whose turn it is.

        Returns:
            What is new, one update for each sequence that got tokens or ended. A step that fails
            ends all sequences that took part in it with an error, and the engine goes on. While
            there is nothing to do but to wait for grammars, it returns after some milliseconds.
            With async_scheduling the next step is under way by then; if it could not be begun,
            its sequences have a second update, which ends them.

        Raises:
            EngineError: the device is lost, or max_step_failures steps in a row have failed; this
                engine is of no more use.
        """
        self._start_prepared()
        self.begun = []
        if self._look_ahead is not None:
            updates = self._look_ahead.step()
            return self._wait_for_guides() if updates is None else updates
        plan = self._scheduler.plan()
        if not plan.chunks:
            return self._scheduler.commit(plan, StepResult()) or self._wait_for_guides()
        self._note_begun(plan)
        try:
            result = self._runner.run(plan)
        except Exception as error:  # noqa: BLE001 - the step's requests end here, and are told
            return self._scheduler.fail(plan, self._failures.tell(plan, error))
        self._failures.forget()
        return self._scheduler.commit(plan, result)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
    ) -> None:
        """Accept a request; from now on, step() works on it and ends it exactly once.

        Args:
            request_id: a name that no request in work has.
            prompt_token_ids: at least one, all below info.vocab_size.
            params: None is the defaults.

        Raises:
            RequestError: the request is wrong; the message says how.
            CapacityError: too many requests wait.
        """
        params = params or SamplingParams()
        if request_id in self._scheduler:
            raise RequestError(f"request_id: {request_id!r} is in work already; use another")
        token_ids = self._check_prompt(prompt_token_ids)
        check_token_ids(params, self.info.vocab_size)
        if self._scheduler.num_waiting >= self._config.max_num_waiting:
            raise CapacityError(
                f"{self._scheduler.num_waiting} requests wait; the limit is "
                f"{self._config.max_num_waiting} (max_num_waiting); try again later"
            )
        room = self.info.max_model_len - len(token_ids)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        request = Request(
            request_id,
            token_ids,
            params,
            max_total_tokens=len(token_ids) + min(room, params.max_tokens or room),
            eos_token_ids=self.info.eos_token_ids,
            seed=seed % 2**64,
        )
        if not _needs_guide(params):
            self._scheduler.add(request)
            return
        guide = self._load_guides().prepare(params, request.stop_token_ids)
        self._preparation.add(request_id, guide)
        self._scheduler.add(request, is_prepared=False)

    def warm_up(self) -> None:
        """Load what grammars need, in the background: it takes seconds, once."""
        self._load_guides().warm_up()

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Stop a request, or only one of its sequences; the next step reports the end.

        Its blocks are free at once, or after that step if one is under way (async_scheduling).
        Unknown and ended ones are ignored.
        """
        self._scheduler.abort(request_id, index)
        if not self._scheduler.is_preparing(request_id):
            self._preparation.drop(request_id)

    def has_work(self) -> bool:
        """Whether step() has something to do or to report."""
        return self._scheduler.has_work()

    def generate(
        self,
        prompt_token_ids: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts and return when all are done, in their order.

        Args:
            prompt_token_ids: one list of token ids a prompt.
            params: for all prompts, or one for each.

        Raises:
            RequestError: a prompt or parameter is wrong, or the engine has other requests in work.
        """
        if self._decode is None:
            self._decode = load_decoder(self._config.model)
        return generate(self, prompt_token_ids, params, self._decode)

    def close(self) -> None:
        """End the threads that compile grammars, and leave transformers' attention interface."""
        if self._guides is not None:
            self._guides.close()
        self._hook.remove()

    @property
    def num_running(self) -> int:
        """Sequences that have blocks of the KV cache."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that wait: for their turn, their prompt, or their grammar."""
        return self._scheduler.num_waiting

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the KV cache that no request holds; what they hold may still be found."""
        return self._pool.num_free

    @property
    def num_prefix_cache_queries(self) -> int:
        """Tokens of the prompts that were looked up in the prefix cache, since the start."""
        cache = self._scheduler.cache
        return cache.num_queried_tokens if cache is not None else 0

    @property
    def num_prefix_cache_hits(self) -> int:
        """How many of these were found."""
        cache = self._scheduler.cache
        return cache.num_hit_tokens if cache is not None else 0

    @property
    def num_proposed_tokens(self) -> int:
        """Tokens that were guessed ahead (num_speculative_tokens), since the start."""
        lookup = self._scheduler.lookup
        return lookup.num_proposed if lookup is not None else 0

    @property
    def num_accepted_tokens(self) -> int:
        """How many of these were right."""
        lookup = self._scheduler.lookup
        return lookup.num_accepted if lookup is not None else 0

    @property
    def num_preemptions(self) -> int:
        """How often a running request had to give its blocks back, since the start."""
        return self._scheduler.num_preemptions

    def check(self) -> None:
        """Verify that blocks and requests add up.

        Raises:
            AssertionError: something leaked.
        """
        self._scheduler.check()

    def _make_look_ahead(self, progress: Callable[[str], None]) -> LookAhead | None:
        if self._scheduler.lookup is not None:
            progress("async_scheduling: off, because guesses are made from the last token")
            return None
        if self.info.path != "packed":
            progress(
                f"async_scheduling: off, because only the packed path can, not {self.info.path}"
            )
            return None
        return LookAhead(self._scheduler, self._runner, self._failures, self._note_begun)

    def _note_begun(self, plan: StepPlan) -> None:
        now = time.monotonic()
        self.begun += [
            (chunk.request.request_id, now)
            for chunk in plan.chunks
            if chunk.is_first and not chunk.request.was_reported
        ]

    def _load_guides(self) -> "Guides":
        if self._guides is None:
            # Only requests with grammars pay for what makes them.
            from nereid_backend.grammar import Guides

            config = self._config
            self._guides = Guides(
                config.model,
                vocab_size=self.info.vocab_size,
                eos_token_ids=self.info.eos_token_ids,
                num_threads=config.grammar_threads,
                timeout_s=config.grammar_timeout,
                cache_bytes=config.grammar_cache_bytes,
                max_source_bytes=config.max_grammar_bytes,
            )
        return self._guides

    def _start_prepared(self) -> None:
        """Let requests run whose guides are ready, and end those whose guides cannot be made."""
        for request_id, future in self._preparation.take_done():
            error = future.exception()
            if error is None:
                self._scheduler.start(request_id, future.result())
            else:
                is_refused = isinstance(error, RequestError)
                self._scheduler.refuse(request_id, str(error), is_refused=is_refused)

    def _wait_for_guides(self) -> list[RequestUpdate]:
        self._preparation.wait(_GUIDE_WAIT_S)
        return []

    def _check_prompt(self, prompt: Sequence[int]) -> list[int]:
        limit = self.info.max_model_len
        try:
            token_ids = [operator.index(token_id) for token_id in prompt]
        except TypeError as error:
            raise RequestError(f"prompt: must be a list of token ids: {error}") from error
        if not token_ids:
            raise RequestError("prompt: is empty; give at least one token")
        if len(token_ids) > limit:
            raise RequestError(
                f"prompt has {len(token_ids)} tokens; the limit is {limit} (max_model_len)"
            )
        if len(token_ids) == limit:
            raise RequestError(
                f"prompt has {len(token_ids)} tokens; the limit is {limit} (max_model_len) and "
                "leaves no room for an answer"
            )
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= self.info.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise RequestError(
                f"prompt: token id {wrong} is outside the vocabulary (0 to "
                f"{self.info.vocab_size - 1})"
            )
        return token_ids


def _needs_guide(params: SamplingParams) -> bool:
    has_budget = params.thinking is not None and params.thinking.budget is not None
    return has_budget or params.grammar is not None
