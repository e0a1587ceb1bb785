# SPDX-License-Identifier: Apache-2.0
"""The engine, which generates tokens for many requests at the same time.

The main loop is in step_loop.py.
"""

import gc
import logging
import operator
import random
import time
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nereid_backend.attention.interface import AttentionHook
from nereid_backend.checkpoints.checkpoint_folder import GGUF_LINK, checkpoint_folder
from nereid_backend.checkpoints.same_tensors import (
    Layout,
    check_same_layout,
    read_architecture,
    read_layout,
)
from nereid_backend.config import EngineConfig
from nereid_backend.core.block_pool import BlockPool
from nereid_backend.core.drafter import Drafter
from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.core.outputs import EngineInfo, EngineStats, RequestOutput, RequestUpdate
from nereid_backend.core.pending_grammars import PendingGrammars
from nereid_backend.core.prompt_lookup import PromptLookup
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.sequence import Sequence
from nereid_backend.disk_tier import DiskTier, open_disk_tier, prepare_folder
from nereid_backend.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    ModelError,
    NereidError,
    RequestError,
)
from nereid_backend.model.limits import available_memory
from nereid_backend.model.startup import Loaded, load
from nereid_backend.offline import generate
from nereid_backend.runner import ForwardPath
from nereid_backend.sampling.logits_processor import check_token_ids
from nereid_backend.step_loop import StepLoop
from nereid_backend.text.load_decoder import load_decoder
from nereid_backend.vision.chat_processor import ChatProcessor, ImagePrompt, TextProcessor

if TYPE_CHECKING:
    from nereid_backend.grammar import Guides
    from nereid_backend.parallel.ranks import Ranks

logger = logging.getLogger(__name__)

# If all requests wait for their grammars, `Engine.step` waits at most this long for a grammar. The
# time is short, because the engine receives no new requests while `step` waits.
_GUIDE_WAIT_S = 0.02


class Engine:
    """Generates tokens for many requests at the same time.

    An engine is not thread-safe: only one thread may call its methods.

    Attributes:
        info: facts about the loaded model and the engine.
    """

    info: EngineInfo

    def __init__(self, config: EngineConfig, progress: Callable[[str], None] | None = None) -> None:
        """Load the model, check the engine's logits, and allocate the KV cache.

        The check compares the logits of the engine's steps with the logits of a plain forward pass.

        Args:
            config: the settings.
            progress: a function that is called with one line of text for each slow phase of
                loading. None writes the lines to the log.

        Raises:
            ConfigError: if the settings do not fit the machine or the model.
            ModelError: if the checkpoint is missing or broken, or the architecture is unsupported.
        """
        self._config = config
        # The shapes of the checkpoint's tensors. `reload` compares them with the shapes in a new
        # checkpoint. They are read now, because a new checkpoint may overwrite the files later.
        self._layout: Layout | None = None
        folder = Path(config.model)
        if any(folder.glob("*.safetensors")) and not (folder / GGUF_LINK).is_file():
            self._layout = read_layout(config.model)
        if config.prefix_cache_disk is not None:
            prepare_folder(config.prefix_cache_disk)
        self._hook = AttentionHook()
        # The other processes of tensor parallelism; None if this process computes the whole model.
        self._ranks: Ranks | None = None
        report = progress or logger.info
        try:
            loaded = self._load(report)
        except BaseException:
            self._hook.remove()
            raise
        self.info = loaded.info
        self._runner = loaded.runner
        self._images = loaded.images
        self._place_images = loaded.place_images
        self._swap = loaded.swap
        self._draft = loaded.draft
        self._processor: ChatProcessor | TextProcessor | None = None
        self._seeds = random.Random(config.seed)
        self._guides: Guides | None = None
        self._pending_grammars = PendingGrammars()
        self.compiled: list[tuple[str, float, float]] = []
        self._decode: Callable[[list[int]], str] | None = None
        self._pool = BlockPool(self.info.num_blocks)
        self._scheduler = Scheduler(
            self._pool,
            block_size=self.info.block_size,
            max_num_seqs=self.info.max_num_seqs,
            max_num_batched_tokens=self.info.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            shares_blocks=loaded.spec.shares_blocks,
            whole_prefill=loaded.spec.whole_prefill,
            drafter=_make_drafter(config, loaded, report),
            attention_window=loaded.attention_window,
            num_states=loaded.num_states,
        )
        self._adapters = loaded.make_adapter_store(self._scheduler.adapters)
        obstacle = self._async_obstacle()
        if config.async_scheduling and obstacle is not None:
            report(f"Async scheduling is off, because {obstacle}.")
        self._loop = StepLoop(
            self._scheduler,
            self._runner,
            max_step_failures=config.max_step_failures,
            is_async=config.async_scheduling and obstacle is None,
        )
        self._disk = self._open_disk(loaded.path, report)
        for name, path in config.lora_adapters.items():
            self._load_configured(name, path)

    def _load(self, report: Callable[[str], None]) -> Loaded:
        """Load the model, and start the other processes of tensor parallelism."""
        if self._config.tensor_parallel_size == 1:
            return load(self._config, self._hook, report)
        # torch.distributed is imported only if it is used.
        from nereid_backend.parallel.load_sharded import load_sharded

        loaded, self._ranks = load_sharded(self._config, self._hook, report)
        return loaded

    def step(self) -> list[RequestUpdate]:
        """Plan a step, run the step, and return the new tokens of its sequences.

        If a step fails, its sequences end with an error and the engine continues. If every request
        waits for a grammar, the call returns after some milliseconds. With async_scheduling, the
        next step is already running when the call returns. If that next step could not start, its
        sequences get a second update, which ends them.

        Returns:
            One update for each sequence that got tokens or ended. Example: if the step computes the
            last part of the prompt of "a" and one more token of "b", the updates contain the first
            output token of "a" and the next output token of "b".

        Raises:
            EngineError: if the device or a process of tensor parallelism is lost, or if
                max_step_failures steps in a row have failed. After this error, the engine cannot be
                used any more.
        """
        if self._ranks is not None:
            self._ranks.check()
        if self._swap is not None:
            self._swap.advance()
            if self._swap.is_done:
                self._swap = None
        self._start_prepared()
        updates = self._loop.step()
        if self._disk is not None:
            self._disk.save()
        if not updates and self._scheduler.num_running == 0:
            self._wait_for_preparation()
        return updates

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: abc.Sequence[int],
        params: SamplingParams | None = None,
        images: ImageInputs | None = None,
    ) -> None:
        """Add a request. Later calls of `step` compute its tokens.

        Args:
            request_id: an id that no unfinished request has.
            prompt_token_ids: at least one token id. All ids must be less than info.vocab_size.
            params: the sampling parameters; None selects the defaults.
            images: the images of the prompt; None if it has none.

        Raises:
            RequestError: if the request is invalid, or if it has images and the model accepts none.
            CapacityError: if max_num_waiting requests are waiting already.
        """
        params = params or SamplingParams()
        token_ids = self._check_request(request_id, prompt_token_ids, params)
        sequence = self._make_sequence(request_id, token_ids, params)
        if images is not None:
            sequence.images = self._accept_images(token_ids, images)
        is_reading = self._disk is not None and self._disk.begin(sequence)
        if _needs_guide(params):
            future = self._load_guides().prepare(params, sequence.stop_token_ids)
            self._pending_grammars.add(request_id, future)
            self._scheduler.add(sequence, is_prepared=False)
        else:
            self._scheduler.add(sequence, is_prepared=not is_reading)

    def load_lora(self, name: str, path: str) -> None:
        """Load a LoRA adapter. Requests can then select the adapter with `lora_name`.

        If an adapter with this name exists, the new adapter replaces it for new requests.

        Args:
            name: the name of the adapter.
            path: a folder in the layout of the library PEFT.

        Raises:
            RequestError: if the files are missing or broken, or the adapter does not fit the model.
            CapacityError: if the adapters of unfinished requests leave too little memory.
        """
        if not name or set(name) & set("=,"):
            raise RequestError(
                f"lora_name: the name of an adapter must be a text without '=' and ',', but it is "
                f"{name!r}."
            )
        if self._ranks is not None:
            raise RequestError(
                "lora_path: LoRA adapters cannot be combined with tensor_parallel_size="
                f"{self._config.tensor_parallel_size}."
            )
        try:
            self._adapters.load(name, path)
        except ModelError as error:
            raise RequestError(f"lora_path: {error}") from error

    def unload_lora(self, name: str) -> None:
        """Unload a LoRA adapter. Requests that use the adapter continue until they end.

        Raises:
            RequestError: if no adapter has this name.
        """
        self._adapters.unload(name)

    def reload(self, path: str = "", progress: Callable[[str], None] | None = None) -> None:
        """Replace the weights of the model by the weights of another checkpoint.

        The new checkpoint must have the same tensors as the present checkpoint. The LoRA adapters
        are loaded again, and the prefix cache is empty afterwards. If the new checkpoint is
        refused, the engine continues with the old weights.

        On a CPU with enough free memory, the new weights are loaded before the old weights are
        freed. Otherwise, the old weights are freed first. If the new checkpoint then cannot be
        loaded, the old checkpoint is loaded again.

        Args:
            path: the folder of the new checkpoint; "" reads the present folder again.
            progress: as for the constructor.

        Raises:
            RequestError: if requests are running, if the weights of this engine cannot be replaced
                (tensor parallelism, GGUF files), or if the new checkpoint is broken or has other
                tensors than the present checkpoint.
            EngineError: if the old checkpoint could not be loaded again. After this error, the
                engine cannot be used any more.
        """
        config = replace(
            self._config,
            model=path or self._config.model,
            max_model_len=self.info.max_model_len,
            lora_adapters=self._adapters.paths,
        )
        self._check_reload(config)
        old_config = replace(self._config, lora_adapters=self._adapters.paths)
        has_guides = self._guides is not None
        needed = self.info.weights_bytes + self.info.kv_cache_bytes
        fits = self.info.device == "cpu" and needed < available_memory()
        try:
            if not fits:
                self._release()
            new = type(self)(config, progress)
        except Exception as error:
            # Loading can raise any exception. The exception must end only the request for new
            # weights.
            if not fits:
                self._restore(old_config, progress)
            raise RequestError(f"path: the new weights cannot be loaded: {error}") from error
        if fits:
            self._release()
        # The callers keep their references to this object, so it takes over all attributes.
        self.__dict__ = new.__dict__
        if has_guides:
            self.warm_up()

    def _check_reload(self, config: EngineConfig) -> None:
        """Raise a RequestError if the checkpoint `config.model` cannot replace the present one."""
        if self._scheduler.has_work():
            raise RequestError(
                "path: the weights can be replaced only while no request runs. Wait until all "
                "requests have ended."
            )
        if self._ranks is not None:
            raise RequestError(
                "path: the weights cannot be replaced with tensor_parallel_size="
                f"{config.tensor_parallel_size}. Restart the server."
            )
        if self._layout is None or config.model.endswith(".gguf"):
            raise RequestError(
                "path: the present checkpoint and the new checkpoint must have safetensors files, "
                "but one of the checkpoints has none. Restart the server with the new checkpoint."
            )
        try:
            check_same_layout(self._layout, read_layout(config.model))
            architecture = read_architecture(config.model)
        except ModelError as error:
            raise RequestError(f"path: {error}") from error
        if architecture not in ("", self.info.architecture):
            raise RequestError(
                f"path: the new checkpoint has the architecture {architecture}, but the served "
                f"model has the architecture {self.info.architecture}."
            )

    def _release(self) -> None:
        """Close the engine, and free its weights and its KV cache."""
        self.close()
        self.__dict__ = {}
        # The modules of a model refer to each other in cycles, so only the garbage collector frees
        # them.
        gc.collect()

    def _restore(self, config: EngineConfig, progress: Callable[[str], None] | None) -> None:
        """Load the old weights again after `_release` has freed them.

        Raises:
            EngineError: if the old weights cannot be loaded.
        """
        try:
            self.__dict__ = type(self)(config, progress).__dict__
        except NereidError as error:
            raise EngineError(f"the old weights cannot be loaded again: {error}") from error

    @property
    def lora_names(self) -> list[str]:
        """The names of the loaded LoRA adapters."""
        return self._adapters.names

    def _load_configured(self, name: str, path: str) -> None:
        """Load an adapter of the setting lora_adapters. Raise a ConfigError if this fails."""
        try:
            self.load_lora(name, path)
        except RequestError as error:
            self.close()
            detail = str(error).removeprefix("lora_path: ").removeprefix("lora_name: ")
            raise ConfigError(f"lora_adapters: {detail}") from error

    def _check_request(
        self, request_id: str, prompt_token_ids: abc.Sequence[int], params: SamplingParams
    ) -> list[int]:
        """Check a new request, and return the token ids of its prompt.

        `add_request` documents the errors.
        """
        if request_id in self._scheduler:
            raise RequestError(
                f"request_id: the id {request_id!r} belongs to a request that has not ended. Use "
                "another id."
            )
        token_ids = self._check_prompt(prompt_token_ids)
        check_token_ids(params, self.info.vocab_size)
        if self._scheduler.num_waiting >= self._config.max_num_waiting:
            raise CapacityError(
                f"{self._scheduler.num_waiting} requests are waiting, and the limit is "
                f"{self._config.max_num_waiting} (max_num_waiting). Try again later."
            )
        return token_ids

    def _make_sequence(
        self, request_id: str, token_ids: list[int], params: SamplingParams
    ) -> Sequence:
        """Return the first sequence of a request that `_check_request` has accepted."""
        max_total_tokens = self.info.max_model_len
        if params.max_tokens is not None:
            max_total_tokens = min(max_total_tokens, len(token_ids) + params.max_tokens)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        sequence = Sequence(
            request_id,
            token_ids,
            params,
            max_total_tokens=max_total_tokens,
            eos_token_ids=self.info.eos_token_ids,
            # A client can send any integer as the seed, but the random number generator needs a
            # seed of 64 bits.
            seed=seed % 2**64,
        )
        if params.lora_name:
            sequence.adapter = self._adapters.acquire(params.lora_name)
        return sequence

    def warm_up(self) -> None:
        """Load the grammar libraries in the background. Loading takes some seconds.

        Without this call, the first request with a grammar waits for the libraries.
        """
        self._load_guides().warm_up()

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Abort a request. If `index` is given, abort only this sequence of the request.

        The next call of `step` returns the last update of each aborted sequence.

        The blocks of the request become free immediately. With async_scheduling, they become free
        after the running step. Do nothing if the request is unknown or has ended.
        """
        self._scheduler.abort(request_id, index)
        if not self._scheduler.is_preparing(request_id):
            self._pending_grammars.drop(request_id)
            if self._disk is not None:
                self._disk.cancel(request_id)

    def has_work(self) -> bool:
        """Return whether `step` must be called again.

        This is the case if the next call would compute tokens, return updates or raise an error.
        """
        has_lost_rank = self._ranks is not None and self._ranks.has_lost_rank
        return self._scheduler.has_work() or has_lost_rank

    def is_swapping(self) -> bool:
        """Return whether the next call of `step` would check or use a compiled forward pass.

        `has_work` ignores this work, because it belongs to no request. While no request runs, the
        caller can call `step` for this work, so that it does not delay later requests.
        """
        return self._swap is not None and self._swap.is_ready

    def generate(
        self,
        prompt_token_ids: abc.Sequence[abc.Sequence[int]],
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate the answers to prompts and return them in the order of the prompts.

        Args:
            prompt_token_ids: one list of token ids for each prompt.
            params: the sampling parameters of all prompts, or one item for each prompt. None
                selects the defaults.

        Raises:
            RequestError: if a prompt or a parameter is invalid, or if the engine has other
                requests.
        """
        if self._decode is None:
            self._decode = load_decoder(self._config.model)
        return generate(self, prompt_token_ids, params, self._decode)

    def chat(
        self, messages: abc.Sequence[abc.Mapping[str, Any]], params: SamplingParams | None = None
    ) -> RequestOutput:
        """Answer the messages of a chat, which may contain images.

        The checkpoint's own processor renders and tokenises the messages and prepares the images.
        If the checkpoint has no chat template, the prompt consists of the images and the texts.

        Example of a message: {"role": "user", "content": [{"type": "image_url", "image_url":
        {"url": "data:image/png;base64,..."}}, {"type": "text", "text": "What is this?"}]}.

        Args:
            messages: messages in the shape of OpenAI's chat completions. An image part has the type
                "image_url" or "image". The image is a data URL, the bytes of an image file or an
                image of Pillow.
            params: the sampling parameters; None selects the defaults.

        Raises:
            RequestError: if a message, an image or a parameter is invalid, if the model accepts no
                images, or if the engine has other requests.
            ModelError: if the processor needs a package that is not installed.
        """
        prompt = self.image_prompt(messages)
        if self._decode is None:
            self._decode = load_decoder(self._config.model)
        add = partial(self.add_request, images=prompt.images)
        return generate(self, [prompt.token_ids], params, self._decode, add)[0]

    def image_prompt(self, messages: abc.Sequence[abc.Mapping[str, Any]]) -> ImagePrompt:
        """Return the token ids and the images of a chat, for `add_request`.

        Args:
            messages: as in `chat`.

        Raises:
            RequestError: if a message or an image is invalid, or if the model accepts no images.
            ModelError: if the processor needs a package that is not installed.
        """
        if self._processor is None:
            folder = Path(checkpoint_folder(self._config.model))
            if self._images.reason:
                self._processor = TextProcessor(folder, self._images.reason)
            else:
                self._processor = ChatProcessor(folder, self._images.config)
        return self._processor.prepare(messages)

    def _accept_images(self, token_ids: list[int], images: ImageInputs) -> ImageInputs:
        """Return the images of a prompt on the device of the model.

        Raises:
            RequestError: if the model accepts no images, or cannot process these images.
        """
        if self._images.reason:
            raise RequestError(f"messages: images are refused, because {self._images.reason}")
        if not self._images.shares_blocks:
            # This model stores no keys and values in the blocks of a prompt with images. Other
            # prompts must therefore not reuse these blocks. With first_token=0, this also applies
            # to the blocks of the text before the first image.
            images = replace(images, first_token=0)
        images = self._place_images(images)
        self._images.check(token_ids, images)
        return images

    def close(self) -> None:
        """Stop the other threads and processes, and unregister the engine from transformers."""
        if self._swap is not None:
            self._swap.close()
        if self._disk is not None:
            self._disk.close()
        if self._guides is not None:
            self._guides.close()
        if self._ranks is not None:
            self._ranks.close()
        if self._draft is not None:
            self._draft.close()
        self._hook.remove()

    @property
    def started(self) -> list[tuple[str, float]]:
        """The requests whose first tokens were planned in the last step.

        Each item is a pair of request id and start time of the step (time.monotonic()). If a
        request is preempted before its first output token, the request appears in a later step
        again.
        """
        return self._loop.started

    def stats(self) -> EngineStats:
        """Return the present load of the engine, and its counters since the start."""
        cache, drafter = self._scheduler.cache, self._scheduler.drafter
        features = self._images.features
        return EngineStats(
            num_requests_running=self._scheduler.num_running,
            num_requests_waiting=self._scheduler.num_waiting,
            kv_cache_blocks_used=self._pool.num_used,
            kv_cache_blocks=self.info.num_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            num_prefix_cache_queries=cache.num_queried_tokens if cache else 0,
            num_prefix_cache_hits=cache.num_hit_tokens if cache else 0,
            num_drafts=drafter.lengths.num_drafts if drafter else 0,
            num_proposed_tokens=drafter.lengths.num_proposed if drafter else 0,
            num_accepted_tokens=drafter.lengths.num_accepted if drafter else 0,
            num_image_encodings=features.num_encoded if features else 0,
        )

    def check(self) -> None:
        """Verify that the blocks, the rows and the requests agree.

        Raises:
            AssertionError: if a block, a row or a request was lost.
        """
        self._scheduler.check()

    def _async_obstacle(self) -> str | None:
        """Return the reason why async scheduling is impossible, or None if it is possible."""
        if self._scheduler.drafter is not None:
            return "speculative decoding needs the last token before it can propose draft tokens"
        if self._images.name not in ("", "packed"):
            return "images need a forward path that computes one sequence at a time"
        if self.info.path != "packed":
            return (
                "it requires the forward path packed, but this model uses the forward path "
                f"{self.info.path}"
            )
        return None

    def _load_guides(self) -> "Guides":
        """Return the factory of guides. The first call creates the factory."""
        if self._guides is None:
            # The grammar libraries are imported only when a request needs a grammar.
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
        """Start the requests whose grammar is compiled and whose cached prefix is read from disk.

        End the requests whose grammar failed.
        """
        self.compiled = []
        for request_id in self._disk.take_ready() if self._disk is not None else ():
            if request_id not in self._pending_grammars:
                self._scheduler.start(request_id, None)
        for request_id, future, added in self._pending_grammars.take_done():
            self.compiled.append((request_id, added, time.monotonic()))
            if self._disk is not None:
                self._disk.finish(request_id)
            error = future.exception()
            if error is None:
                self._scheduler.start(request_id, future.result())
            else:
                is_refused = isinstance(error, RequestError)
                self._scheduler.refuse(request_id, str(error), is_refused=is_refused)

    def _wait_for_preparation(self) -> None:
        """Wait a few milliseconds until a prefix is read from disk or a grammar is compiled."""
        if self._disk is None or not self._disk.wait(_GUIDE_WAIT_S):
            self._pending_grammars.wait(_GUIDE_WAIT_S)

    def _open_disk(self, path: ForwardPath, report: Callable[[str], None]) -> DiskTier | None:
        """Return the prefix cache on disk; None if it is not configured or not possible."""
        config, cache = self._config, self._scheduler.cache
        if config.prefix_cache_disk is None:
            return None
        reason = None
        if cache is None:
            reason = f"{self.info.architecture} has no prefix cache"
        elif config.tensor_parallel_size > 1:
            reason = "it does not support tensor parallelism"
        if cache is None or reason is not None:
            report(f"The prefix cache on disk (prefix_cache_disk) is off, because {reason}.")
            return None
        return open_disk_tier(config, self.info, cache, path)

    def _check_prompt(self, prompt: abc.Sequence[int]) -> list[int]:
        """Return the token ids of a prompt as a list of Python integers.

        Raises:
            RequestError: if the prompt is empty, too long, or contains an invalid token id.
        """
        limit = self.info.max_model_len
        try:
            token_ids = [operator.index(token_id) for token_id in prompt]
        except TypeError as error:
            raise RequestError(
                f"prompt: the value must be a list of token ids, but it is not ({error})."
            ) from error
        if not token_ids:
            raise RequestError("prompt: the prompt is empty. Send at least one token.")
        if len(token_ids) > limit:
            raise RequestError(
                f"prompt has {len(token_ids)} tokens; the limit is {limit} (max_model_len). Send a "
                "shorter prompt."
            )
        if len(token_ids) == limit:
            raise RequestError(
                f"prompt has {len(token_ids)} tokens; the limit is {limit} (max_model_len), which "
                "leaves no token for the answer. Send a shorter prompt."
            )
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self.info.vocab_size:
                raise RequestError(
                    f"prompt: the token id {token_id} is outside the vocabulary (0 to "
                    f"{self.info.vocab_size - 1})."
                )
        return token_ids


def _make_drafter(
    config: EngineConfig, loaded: Loaded, report: Callable[[str], None]
) -> Drafter | None:
    """Return the object that proposes draft tokens; None if speculative decoding is off."""
    if loaded.draft is not None or config.max_draft_tokens == 0:
        return loaded.draft
    if loaded.spec.removes_tokens:
        return PromptLookup(config.max_draft_tokens)
    report(
        "Speculative decoding (num_speculative_tokens) is off, because the forward path "
        f"{loaded.info.path} of {loaded.info.architecture} cannot remove rejected draft tokens."
    )
    return None


def _needs_guide(params: SamplingParams) -> bool:
    """Return whether a request limits its tokens by a grammar or by a thinking budget."""
    has_budget = params.thinking is not None and params.thinking.budget is not None
    return has_budget or params.grammar is not None
