# SPDX-License-Identifier: Apache-2.0
"""The engine. Start here: ``Engine.step`` is the whole program."""

import logging
import random
import time
from collections.abc import Callable, Sequence

import torch

from nereid_backend.attention.interface import AttentionHook
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.config import EngineConfig
from nereid_backend.core.block_pool import BlockPool
from nereid_backend.core.outputs import EngineInfo, RequestOutput, RequestUpdate
from nereid_backend.core.params import SamplingParams
from nereid_backend.core.request import Request
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.step import StepResult
from nereid_backend.errors import CapacityError, RequestError
from nereid_backend.execution.batch import BatchBuilder
from nereid_backend.execution.limits import (
    format_bytes,
    kv_cache_budget,
    model_limit,
    plan_memory,
    usable_cpus,
)
from nereid_backend.execution.loader import choose_device, load_checkpoint
from nereid_backend.execution.probe import check_packed, probe_layers
from nereid_backend.execution.runner import PackedRunner
from nereid_backend.execution.text import load_decoder
from nereid_backend.generate import generate

logger = logging.getLogger(__name__)

# Enough rows to keep the matrix products busy; more only makes running requests wait longer.
_CPU_TOKENS, _GPU_TOKENS = 512, 4096


class Engine:
    """Generates tokens for many requests at once.

    One thread owns an engine: none of its methods may be called from another one meanwhile.

    Attributes:
        info: what was loaded and how it runs.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[str], None] | None = None) -> None:
        """Load a checkpoint, check that it runs exactly, and allocate the KV cache.

        Args:
            config: the settings.
            progress: called with one line for each slow step of loading.

        Raises:
            ConfigError: the settings do not fit the machine or the model.
            ModelError: the checkpoint is missing or broken, or its architecture is not supported.
        """
        started = time.monotonic()
        progress = progress or logger.info
        num_threads = config.num_threads or max(1, usable_cpus() - 1)
        torch.set_num_threads(num_threads)
        device = choose_device(config.device)
        self._config = config
        self._hook = AttentionHook()
        checkpoint = load_checkpoint(
            config.model,
            dtype=config.dtype,
            device=device,
            attention=self._hook.name,
            progress=progress,
        )
        loaded = time.monotonic()
        progress("comparing packed steps with the model alone")
        limit = model_limit(checkpoint.text_config)
        layers = probe_layers(checkpoint, self._hook)
        check = check_packed(checkpoint, self._hook, layers, limit.num_tokens)
        checked = time.monotonic()
        dtype = checkpoint.model.dtype
        memory = plan_memory(config, layers, limit, kv_cache_budget(config, device), dtype.itemsize)
        max_tokens = config.max_num_batched_tokens or max(
            config.max_num_seqs, _CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS
        )
        progress(
            f"KV cache: {format_bytes(memory.num_bytes)}, {memory.num_blocks * config.block_size} "
            f"tokens; a request may have {memory.max_model_len}"
        )
        cache = KVCache(
            layers,
            num_blocks=memory.num_blocks,
            block_size=config.block_size,
            dtype=dtype,
            device=device,
        )
        builder = BatchBuilder(
            max_num_seqs=config.max_num_seqs,
            max_model_len=memory.max_model_len,
            block_size=config.block_size,
            null_block=cache.null_block,
        )
        self._runner = PackedRunner(checkpoint.model, self._hook, layers, cache, builder)
        self._pool = BlockPool(memory.num_blocks)
        self._scheduler = Scheduler(
            self._pool,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max_tokens,
        )
        self._decode: Callable[[list[int]], str] | None = None
        self._seeds = random.Random(config.seed)
        finished = time.monotonic()
        self.info = EngineInfo(
            model=config.model,
            architecture=checkpoint.architecture,
            path="packed",
            attention="reference",
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            max_model_len=memory.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max_tokens,
            block_size=config.block_size,
            num_blocks=memory.num_blocks,
            kv_cache_bytes=memory.num_bytes,
            weights_bytes=checkpoint.weights_bytes,
            vocab_size=checkpoint.vocab_size,
            eos_token_ids=checkpoint.eos_token_ids,
            num_threads=num_threads,
            self_check_difference=check.difference,
            load_seconds=finished - started,
            seconds={"weights": loaded - started, "self-check": checked - loaded},
        )

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
        self._check_prompt(prompt_token_ids)
        if self._scheduler.num_waiting >= self._config.max_num_waiting:
            raise CapacityError(
                f"{self._scheduler.num_waiting} requests wait; the limit is "
                f"{self._config.max_num_waiting} (max_num_waiting); try again later"
            )
        room = self.info.max_model_len - len(prompt_token_ids)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        self._scheduler.add(
            Request(
                request_id,
                prompt_token_ids,
                params,
                max_total_tokens=len(prompt_token_ids) + min(room, params.max_tokens or room),
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

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        limit = self.info.max_model_len
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
