# SPDX-License-Identifier: Apache-2.0
"""Loads the draft model for speculative decoding."""

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import transformers
from tokenizers import Tokenizer

from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.checkpoints.checkpoint_folder import checkpoint_folder
from nereid_backend.config import EngineConfig
from nereid_backend.draft_model import DraftModel, DraftSizes
from nereid_backend.errors import ConfigError, ModelError
from nereid_backend.load_checkpoint import Checkpoint, Progress, choose_device
from nereid_backend.model.accelerate_path import CompileTarget, compile_or_fuse_norms
from nereid_backend.model.forward_path.choose_path import ChosenPath, choose_path
from nereid_backend.model.forward_path.length_limits import LengthLimit
from nereid_backend.model.forward_path.path_spec import PathSpec
from nereid_backend.model.load_weights import load_weights
from nereid_backend.model.memory.memory_plan import MemoryPlan
from nereid_backend.paths.model_call import Sizes


@dataclass(frozen=True, slots=True)
class OpenedDraft:
    """A draft model with loaded weights, and the way in which the engine runs the draft model.

    Attributes:
        checkpoint: the draft model.
        chosen: the forward path of the draft model.
        bytes_per_token: the memory of one token in the KV cache of the draft model.
        hook: the entry of the draft model in transformers' attention interface.
    """

    checkpoint: Checkpoint
    chosen: ChosenPath
    bytes_per_token: int
    hook: AttentionHook

    def build(
        self, config: EngineConfig, memory: MemoryPlan, num_tokens: int, progress: Progress
    ) -> DraftModel:
        """Allocate the KV cache of the draft model, and return an object that runs the draft model.

        The draft model gets as many blocks as the large model. Each running sequence therefore
        usually finds enough blocks in the caches of both models.

        Args:
            config: the settings of the engine.
            memory: the size of the large model's KV cache.
            num_tokens: the largest number of tokens in one step.
            progress: called with one line for each slow operation.
        """
        sizes = draft_sizes(config, memory, num_tokens, self.chosen.limit)
        path = self.chosen.spec.build(path_sizes(sizes))
        # With compile_forward=auto (the default), only the large model is compiled.
        if config.compile_forward is True:
            target = CompileTarget(path, self.checkpoint, self.hook, self.chosen)
            compile_or_fuse_norms(target, progress)
        return DraftModel(path, sizes, self.hook)


def draft_sizes(
    config: EngineConfig, memory: MemoryPlan, num_tokens: int, limit: LengthLimit
) -> DraftSizes:
    """Return the size of a draft model's KV cache, and the limits of its forward passes.

    Args:
        config: the settings of the engine.
        memory: the size of the large model's KV cache.
        num_tokens: the largest number of tokens in one step.
        limit: the length limit of the draft model.
    """
    return DraftSizes(
        num_blocks=memory.num_blocks,
        block_size=config.block_size,
        max_num_seqs=memory.max_num_seqs,
        max_model_len=min(memory.max_model_len, limit.num_tokens),
        max_num_batched_tokens=num_tokens,
        max_draft_tokens=config.max_draft_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
    )


def path_sizes(sizes: DraftSizes) -> Sizes:
    """Convert the sizes of a draft model to a `Sizes` object."""
    return Sizes(
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
    )


def check_draft_folder(config: EngineConfig) -> None:
    """Raise a ConfigError if the setting draft_model does not name the folder of a usable model.

    The folder must contain a config.json whose architecture is not an EAGLE head. This function is
    called before the weights of the large model are loaded, because loading these weights takes
    long.
    """
    if config.draft_model is None:
        return
    path = Path(config.draft_model) / "config.json"
    try:
        is_file = path.is_file()
    except OSError as error:
        raise ConfigError(
            f"draft_model: {path} cannot be read ({error.strerror}). Allow the user that runs the "
            "server to read this folder."
        ) from error
    if not is_file:
        raise ConfigError(
            f"draft_model: {config.draft_model} is not a folder with a file config.json. Set "
            "draft_model to the folder of a Hugging Face checkpoint."
        )
    try:
        model_config = json.loads(path.read_text(encoding="utf-8"))
        architectures = list(model_config.get("architectures") or [])
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return  # The function that loads the checkpoint reports the damaged file later.
    for architecture in architectures:
        _check_architecture(config.draft_model, str(architecture))


def _check_architecture(folder: str, architecture: str) -> None:
    """Raise a ConfigError if a checkpoint contains an EAGLE head instead of a complete model.

    An EAGLE head is a draft model of one layer, which reads hidden states of the large model. The
    model type in its config is that of the large model. Therefore only `architecture`, the name of
    the class in the config, shows that the checkpoint is not a complete model.
    """
    if "eagle" in architecture.lower():
        raise ConfigError(
            f"draft_model: {folder} is an EAGLE checkpoint ({architecture}), which transformers "
            f"{transformers.__version__} cannot load, because it has no class for EAGLE heads. Set "
            "draft_model to a complete smaller model of the same family, or use "
            "speculative_method=mtp if the checkpoint of the large model has MTP layers."
        )


def open_draft(
    config: EngineConfig, target: Checkpoint, target_spec: PathSpec, progress: Progress
) -> OpenedDraft | None:
    """Load the weights of the draft model, and choose how the engine runs the draft model.

    Args:
        config: the settings of the engine.
        target: the large model.
        target_spec: the forward path of the large model.
        progress: called with one line for each slow operation.

    Returns:
        The draft model; None if the settings select no draft model.

    Raises:
        ConfigError: if one of the models cannot be used for speculative decoding, or if their
            vocabularies differ.
        ModelError: if the checkpoint is missing or broken, or its architecture is not supported.
    """
    if config.draft_model is None or config.max_draft_tokens == 0:
        return None
    # After a draft token is rejected, both models must remove it from their caches.
    _check_can_remove_draft_tokens(target, target_spec)
    draft_config = _draft_config(config, config.draft_model)
    with ExitStack() as on_error:
        hook = AttentionHook()  # the attention function that transformers calls for the draft model
        on_error.callback(hook.remove)
        progress(f"loading the draft model {config.draft_model}")
        try:
            checkpoint = load_weights(draft_config, choose_device(config.device), hook, progress)
        except ModelError as error:
            # The message must name the setting. Otherwise, users could think that the error
            # concerns the large model.
            raise type(error)(f"draft_model: {error}") from error
        _check_vocabulary(config, target, checkpoint)
        chosen = choose_path(checkpoint, hook, draft_config, progress)
        _check_can_remove_draft_tokens(checkpoint, chosen.spec)
        on_error.pop_all()
    # The KV cache of the draft model stores unrounded numbers, even if kv_cache_dtype selects 8-bit
    # numbers.
    itemsize = checkpoint.model.dtype.itemsize
    layer_bytes = sum(layer.bytes_per_token(itemsize) for layer in chosen.spec.layers)
    return OpenedDraft(checkpoint, chosen, layer_bytes, hook)


def _draft_config(config: EngineConfig, draft_folder: str) -> EngineConfig:
    """Return the engine's settings with the changes that are necessary to load the draft model.

    The draft model itself has no draft model and no LoRA adapters, and runs in one process. Its KV
    cache stores unrounded keys and values.
    """
    return replace(
        config,
        model=draft_folder,
        draft_model=None,
        speculative_method=None,
        num_speculative_tokens=0,
        tensor_parallel_size=1,
        kv_cache_dtype="auto",
        lora_adapters={},
        lora_memory=0,
    )


def _check_can_remove_draft_tokens(checkpoint: Checkpoint, spec: PathSpec) -> None:
    """Raise a ConfigError if rejected draft tokens cannot be removed from the model's cache."""
    if not spec.removes_tokens:
        raise ConfigError(
            f"draft_model: the forward path {spec.name} of {checkpoint.architecture} cannot remove "
            "rejected draft tokens. Speculative decoding requires models that store only keys and "
            "values. Remove draft_model."
        )


def _check_vocabulary(config: EngineConfig, target: Checkpoint, draft: Checkpoint) -> None:
    """Raise a ConfigError if the two models have different vocabularies.

    The tokens are compared only if both checkpoints contain a file tokenizer.json.
    """
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft_model: the draft model has a vocabulary of {draft.vocab_size} tokens, but the "
            f"model has a vocabulary of {target.vocab_size} tokens. The vocabularies must be the "
            "same. Use a smaller model of the same family."
        )
    assert config.draft_model is not None
    target_ids = _read_vocabulary(config.model)
    draft_ids = _read_vocabulary(config.draft_model)
    if target_ids is None or draft_ids is None:
        return
    if target_ids != draft_ids:
        raise ConfigError(
            f"draft_model: the tokenizers of the two models assign different ids to the tokens, "
            f"although both vocabularies have {target.vocab_size} tokens. Use a smaller model of "
            "the same family."
        )


def _read_vocabulary(model: str) -> dict[str, int] | None:
    """Return the vocabulary (token to id) of tokenizer.json. Added tokens are not included.

    Return None if the checkpoint has no file tokenizer.json.
    """
    file = Path(checkpoint_folder(model)) / "tokenizer.json"
    if not file.is_file():
        return None
    return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=False)
