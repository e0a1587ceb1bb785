# SPDX-License-Identifier: Apache-2.0
"""Loads a model, and creates the objects of the engine that depend on the model."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.checkpoints.checkpoint_folder import GGUF_LINK, checkpoint_folder
from nereid_backend.checkpoints.same_tensors import Layout, read_layout
from nereid_backend.config import EngineConfig
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.blocks.prefix_cache import PrefixCache
from nereid_backend.core.draft_tokens.drafter import Drafter
from nereid_backend.core.draft_tokens.prompt_lookup import PromptLookup
from nereid_backend.core.outputs import EngineInfo
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.engine.disk_tier import DiskTier
from nereid_backend.engine.new_sequences import NewSequences
from nereid_backend.engine.open_disk_tier import open_disk_tier, prepare_folder
from nereid_backend.engine.prefix_sessions import PrefixSessions
from nereid_backend.engine.request_preparation import RequestPreparation
from nereid_backend.engine.step_loop import StepLoop
from nereid_backend.errors import ConfigError, ModelError, RequestError
from nereid_backend.model.startup import Loaded, load
from nereid_backend.step_runner import ForwardPath
from nereid_backend.text.load_decoder import load_decoder
from nereid_backend.vision.chat_processor import ChatProcessor, TextProcessor

if TYPE_CHECKING:
    from nereid_backend.parallel.ranks import Ranks

Report = Callable[[str], None]


class EngineParts:
    """All objects of an engine that depend on the loaded model. The scheduler is an example.

    `Engine.reload` replaces this object; see reload_weights.py.

    Attributes:
        config: the settings with which the model was loaded.
        layout: the shapes of the checkpoint's tensors; None if the checkpoint has no safetensors
            files. The shapes are read when the model is loaded, because a new checkpoint may
            overwrite the files later.
        ranks: the other processes of tensor parallelism; None if this process computes the whole
            model.
        info: facts about the model and the engine.
        runner: runs the steps.
        images: how the model computes prompts that contain images.
        swap: the compilation that runs in the background; None if no compilation is running.
        draft: the draft model; None if there is none.
        pool: the blocks of the KV cache.
        scheduler: plans the steps.
        sessions: the sessions of the prefix cache.
        adapters: the LoRA adapters.
        loop: plans, runs and commits the steps.
        disk: the prefix cache on disk; None if there is none.
        new_sequences: checks new requests.
        preparation: compiles the grammars of requests, and reads prefixes from disk.
    """

    def __init__(self, config: EngineConfig, report: Report) -> None:
        """Load the model, and create the objects that depend on the model.

        Args:
            config: the settings.
            report: this function is called with one line of text for each slow phase of loading.

        Raises:
            ConfigError: if the settings do not fit the machine or the model.
            ModelError: if the checkpoint is missing or broken, or the architecture is unsupported.
        """
        self.config = config
        self.layout = _read_layout(config.model)
        if config.prefix_cache_disk is not None:
            prepare_folder(config.prefix_cache_disk)
        self._hook = AttentionHook()
        try:
            loaded, self.ranks = _load(config, self._hook, report)
        except BaseException:
            self._hook.remove()
            raise
        self.info = loaded.info
        self.runner = loaded.runner
        self.images = loaded.images
        self.swap = loaded.swap
        self.draft = loaded.draft

        # The objects that plan and run the steps.
        self.pool = BlockPool(self.info.num_blocks)
        self.scheduler = _make_scheduler(config, loaded, self.pool, report)
        self.loop = StepLoop(
            self.scheduler,
            self.runner,
            max_step_failures=config.max_step_failures,
            is_async=_can_be_async(config, loaded, self.scheduler, report),
        )

        # The objects that receive new requests.
        self.sessions = PrefixSessions(self.scheduler.cache, self.pool, self.info.block_size)
        self.adapters = loaded.make_adapter_store(self.scheduler.adapters)
        self.disk = _open_disk(config, self.info, self.scheduler.cache, loaded.path, report)
        self.new_sequences = NewSequences(
            config, self.info, self.scheduler, self.adapters, self.images, loaded.place_images
        )
        self.preparation = RequestPreparation(config, self.info, self.scheduler, self.disk)
        for name, path in config.lora_adapters.items():
            self._load_configured(name, path)

    @cached_property
    def decode(self) -> Callable[[list[int]], str]:
        """A function that converts token ids to text."""
        return load_decoder(self.config.model)

    @cached_property
    def chat_processor(self) -> ChatProcessor | TextProcessor:
        """The object that converts the messages of chats into token ids and images."""
        folder = Path(checkpoint_folder(self.config.model))
        if self.images.reason:
            return TextProcessor(folder, self.images.reason)
        return ChatProcessor(folder, self.images.config)

    def advance_model_compilation(self) -> None:
        """Load, check or activate the compiled forward pass, if the compiler has finished.

        Mutates: `swap`, which becomes None when no work is left.
        """
        if self.swap is not None:
            self.swap.advance()
            if self.swap.is_done:
                self.swap = None

    def load_lora(self, name: str, path: str) -> None:
        """Load a LoRA adapter, so that requests can select the adapter with `name`.

        `Engine.load_lora` documents the arguments and the errors.
        """
        # The setting lora_adapters has the form name=path,name=path, so a name must contain neither
        # "=" nor ",".
        has_separator = "=" in name or "," in name
        if not name or has_separator:
            raise RequestError(
                "lora_name: the name of an adapter must not be empty and must not contain '=' or "
                f"',', but it is {name!r}."
            )
        if self.ranks is not None:
            raise RequestError(
                "lora_path: LoRA adapters cannot be combined with tensor_parallel_size="
                f"{self.config.tensor_parallel_size}."
            )
        try:
            self.adapters.load(name, path)
        except ModelError as error:
            raise RequestError(f"lora_path: {error}") from error

    def _load_configured(self, name: str, path: str) -> None:
        """Load an adapter from the setting `lora_adapters`. Raise a ConfigError if this fails."""
        try:
            self.load_lora(name, path)
        except RequestError as error:
            self.close()
            detail = str(error).removeprefix("lora_path: ").removeprefix("lora_name: ")
            raise ConfigError(f"lora_adapters: {detail}") from error

    def close(self) -> None:
        """Stop the engine's threads and processes, and unregister its attention function."""
        for part in (self.swap, self.disk, self.preparation, self.ranks, self.draft):
            if part is not None:
                part.close()
        self._hook.remove()


def _read_layout(model: str) -> Layout | None:
    """Return the shapes of a checkpoint's tensors; None if there are no safetensors files."""
    folder = Path(model)
    if not any(folder.glob("*.safetensors")) or (folder / GGUF_LINK).is_file():
        return None
    return read_layout(model)


def _load(
    config: EngineConfig, hook: AttentionHook, report: Report
) -> "tuple[Loaded, Ranks | None]":
    """Load the model. With tensor parallelism, also return the processes of the other ranks."""
    if config.tensor_parallel_size == 1:
        return load(config, hook, report), None
    # torch.distributed is imported only if it is used.
    from nereid_backend.parallel.load_sharded import load_sharded

    return load_sharded(config, hook, report)


def _make_scheduler(
    config: EngineConfig, loaded: Loaded, pool: BlockPool, report: Report
) -> Scheduler:
    """Create the scheduler for a loaded model.

    `report` is called with a line of text if speculative decoding was requested but is impossible.
    """
    # `shares_blocks` is true if sequences can share KV cache blocks. `whole_prefill` is true if the
    # forward path must compute each prompt in one pass. `num_states` is the number of recurrent
    # states that fit into the memory.
    return Scheduler(
        pool,
        block_size=loaded.info.block_size,
        max_num_seqs=loaded.info.max_num_seqs,
        max_num_batched_tokens=loaded.info.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        shares_blocks=loaded.spec.shares_blocks,
        whole_prefill=loaded.spec.whole_prefill,
        drafter=_make_drafter(config, loaded, report),
        windows=loaded.groups.windows,
        num_states=loaded.num_states,
    )


def _make_drafter(config: EngineConfig, loaded: Loaded, report: Report) -> Drafter | None:
    """Return the object that proposes draft tokens; None if speculative decoding is off.

    The draft model proposes the tokens if there is one. Otherwise, prompt lookup proposes tokens if
    the settings select it, and if the forward path can remove rejected tokens from the KV cache.
    """
    if loaded.draft is not None:
        return loaded.draft
    if not _selects_prompt_lookup(config, loaded.info.device):
        return None
    if loaded.spec.removes_tokens:
        # The keys and values of sequences with images may be stored outside the blocks of the KV
        # cache. Rejected tokens of such a sequence cannot be removed, so the sequence gets no draft
        # tokens.
        accepts_images = loaded.images.shares_blocks
        return PromptLookup(config.max_draft_tokens, accepts_images=accepts_images)
    if config.requests_drafts:  # A default that is impossible is not reported.
        report(
            "Speculative decoding (num_speculative_tokens) is off, because the forward path "
            f"{loaded.info.path} of {loaded.info.architecture} cannot remove rejected draft tokens."
        )
    return None


def _selects_prompt_lookup(config: EngineConfig, device: str) -> bool:
    """Return whether the settings, or their default values for a device, select prompt lookup.

    By default, prompt lookup is used only on a CPU, because it has not been measured on a GPU, and
    only without async scheduling, which excludes draft tokens.
    """
    is_default = device == "cpu" and not config.async_scheduling
    return config.max_draft_tokens > 0 and (config.requests_drafts or is_default)


def _can_be_async(
    config: EngineConfig, loaded: Loaded, scheduler: Scheduler, report: Report
) -> bool:
    """Return whether async scheduling is used: a step is planned while the previous step runs.

    If the settings request async scheduling but it is impossible, report the reason.
    """
    if not config.async_scheduling:
        return False
    obstacle = _async_obstacle(loaded, scheduler)
    if obstacle is not None:
        report(f"Async scheduling is off, because {obstacle}.")
    return obstacle is None


def _async_obstacle(loaded: Loaded, scheduler: Scheduler) -> str | None:
    """Return the reason why async scheduling is impossible, as a clause; None if it is possible.

    Async scheduling requires the forward path "packed" for texts and, if the model accepts images,
    also for images.
    """
    if scheduler.drafter is not None:
        return "speculative decoding needs the last token before it can propose draft tokens"
    path_for_images = loaded.images.name  # "" if the model does not accept images
    if path_for_images not in ("", "packed"):
        return "images need a forward path that computes one sequence at a time"
    if loaded.info.path != "packed":
        return (
            'it requires the forward path "packed", but this model uses the forward path '
            f'"{loaded.info.path}"'
        )
    return None


def _open_disk(
    config: EngineConfig,
    info: EngineInfo,
    cache: PrefixCache | None,
    path: ForwardPath,
    report: Report,
) -> DiskTier | None:
    """Open the prefix cache on disk. Return None if the settings do not request this cache.

    If the settings request this cache but it is impossible, report the reason and return None.
    """
    if config.prefix_cache_disk is None:
        return None
    message = "The prefix cache on disk (prefix_cache_disk) is off, because"
    if not config.enable_prefix_caching:
        report(f"{message} the setting enable_prefix_caching is false.")
        return None
    if cache is None:
        report(f"{message} {info.architecture} has no prefix cache.")
        return None
    if config.tensor_parallel_size > 1:
        report(f"{message} it does not support tensor parallelism.")
        return None
    return open_disk_tier(config, info, cache, path)
