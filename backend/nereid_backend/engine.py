# SPDX-License-Identifier: Apache-2.0
"""The engine. Start here: ``Engine.step`` is the whole program."""

import logging
import operator
import random
from collections.abc import Callable, Sequence

from nereid_backend.attention.interface import AttentionHook
from nereid_backend.config import EngineConfig
from nereid_backend.core.block_pool import BlockPool
from nereid_backend.core.outputs import EngineInfo, RequestOutput, RequestUpdate
from nereid_backend.core.params import SamplingParams
from nereid_backend.core.request import Request
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.step import StepResult
from nereid_backend.errors import CapacityError, RequestError
from nereid_backend.execution.startup import load
from nereid_backend.execution.text import load_decoder
from nereid_backend.generate import generate

logger = logging.getLogger(__name__)


class Engine:
    """Generates tokens for many requests at once.

    One thread owns an engine: none of its methods may be called from another one meanwhile.

    Attributes:
        info: what was loaded and how it runs.
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
        )
        self._seeds = random.Random(config.seed)
        self._decode: Callable[[list[int]], str] | None = None

    def step(self) -> list[RequestUpdate]:
        """Compute the next tokens of the requests whose turn it is.

        Returns:
            What is new, one update for each request that got a token or ended. A step that fails
            ends all requests that took part in it with an error, and the engine goes on.
        """
        plan = self._scheduler.plan()
        if not plan.chunks:
            return self._scheduler.commit(plan, StepResult())
        try:
            result = self._runner.run(plan)
        except Exception as error:
            logger.exception("a step of %d requests failed", len(plan.chunks))
            return self._scheduler.fail(plan, f"the engine failed: {type(error).__name__}: {error}")
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
        if self._scheduler.num_waiting >= self._config.max_num_waiting:
            raise CapacityError(
                f"{self._scheduler.num_waiting} requests wait; the limit is "
                f"{self._config.max_num_waiting} (max_num_waiting); try again later"
            )
        room = self.info.max_model_len - len(token_ids)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        self._scheduler.add(
            Request(
                request_id,
                token_ids,
                params,
                max_total_tokens=len(token_ids) + min(room, params.max_tokens or room),
                eos_token_ids=self.info.eos_token_ids,
                seed=seed % 2**64,
            )
        )

    def abort(self, request_id: str) -> None:
        """Stop a request; the next step reports its end. Unknown and ended ones are ignored."""
        self._scheduler.abort(request_id)

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
        """Forget this engine in transformers' attention interface, so that it can be freed."""
        self._hook.remove()

    @property
    def num_running(self) -> int:
        """Requests that have blocks of the KV cache."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return self._scheduler.num_waiting

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the KV cache that no request holds."""
        return self._pool.num_free

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
