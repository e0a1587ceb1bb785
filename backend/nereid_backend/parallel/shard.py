# SPDX-License-Identifier: Apache-2.0
"""Loads one rank's part of a model."""

from dataclasses import dataclass
from pathlib import Path

from transformers.distributed.configuration_utils import DistributedConfig

from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.checkpoints.checkpoint_folder import checkpoint_folder
from nereid_backend.checkpoints.read_config import read_config
from nereid_backend.config import EngineConfig
from nereid_backend.errors import UnsupportedModelError, first_line
from nereid_backend.load_checkpoint import Checkpoint, Progress, load_checkpoint
from nereid_backend.model.forward_path.path_spec import PathSpec
from nereid_backend.model.forward_path.path_variants import packed_spec
from nereid_backend.parallel.check_support import model_without_weights, tensor_parallel_plan
from nereid_backend.parallel.kv_heads import keep_own_heads, replication_rules
from nereid_backend.parallel.process_group import Rank


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model.

    Attributes:
        checkpoint: the model. Each divided weight contains only this rank's part.
        spec: the forward path `packed`. Its attention layers have only this rank's heads.
    """

    checkpoint: Checkpoint
    spec: PathSpec


def load_shard(config: EngineConfig, hook: AttentionHook, rank: Rank, progress: Progress) -> Shard:
    """Load one rank's part of a model. All ranks must call this function at the same time.

    A rank is one of the processes that compute the model together. transformers chooses the layers
    that are divided, and reads only this rank's part of each divided weight. If there are fewer KV
    heads than ranks, several ranks compute the same KV head.

    Args:
        config: the settings.
        hook: Nereid's attention function, which transformers calls in each layer.
        rank: this process.
        progress: called with one line of text at the start of each slow operation.

    Raises:
        ModelError: if the weights are damaged.
        UnsupportedModelError: if the divided model cannot use the forward path `packed`.
    """
    # In transformers' plan for dividing the layers, every rank gets different KV heads. If there
    # are fewer KV heads than ranks, `rules` changes the plan: each rank loads all KV heads, and
    # `keep_own_heads` deletes the heads that this rank does not compute. Otherwise, `rules` is
    # empty.
    rules = _replication_rules(config, rank.size)
    with rank.loading():  # lets transformers read only the part of the model for this rank
        checkpoint = load_checkpoint(
            config.model,
            dtype=config.dtype,
            device=rank.device,
            attention=hook.name,
            progress=progress,
            trust_remote_code=config.trust_remote_code,
            # If `tp_plan` is None, transformers uses its own plan without changes.
            distributed=DistributedConfig(tp_size=rank.size, tp_plan=rules or None),
        )
    keep_own_heads(checkpoint.model, rules, rank)
    return Shard(checkpoint, _checked_spec(config, hook, checkpoint))


def _checked_spec(config: EngineConfig, hook: AttentionHook, checkpoint: Checkpoint) -> PathSpec:
    """Return the `PathSpec` of the forward path `packed`, which tensor parallelism requires.

    Raises:
        UnsupportedModelError: if the divided model cannot use this path.
    """
    try:
        return packed_spec(checkpoint, hook, config.max_model_len)
    except Exception as error:
        # The code of a model can raise any exception.
        raise UnsupportedModelError(
            f"{checkpoint.architecture} cannot be combined with tensor_parallel_size="
            f"{config.tensor_parallel_size}. The divided model cannot use the forward path "
            f'"packed", because {first_line(error)}. Set tensor_parallel_size=1.'
        ) from error


def _replication_rules(config: EngineConfig, size: int) -> dict[str, str]:
    """Return the rules that make each rank load all KV heads of the model.

    The rules are empty if there are enough KV heads for all ranks (see
    `kv_heads.replication_rules`).
    """
    folder = Path(checkpoint_folder(config.model))
    model = model_without_weights(read_config(folder, config.trust_remote_code))
    return {} if model is None else replication_rules(model, tensor_parallel_plan(model), size)
