# SPDX-License-Identifier: Apache-2.0
"""Loads the part of a model that one rank computes."""

from dataclasses import dataclass

from transformers.distributed.configuration_utils import DistributedConfig

from nereid_backend.attention.interface import AttentionHook
from nereid_backend.checkpoint import Checkpoint, Progress, load_checkpoint
from nereid_backend.config import EngineConfig
from nereid_backend.errors import UnsupportedModelError, first_line
from nereid_backend.model.path_variants import PathSpec, path_variants
from nereid_backend.parallel.process_group import Rank


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model.

    Attributes:
        checkpoint: the model, whose divided weights are the parts of this rank.
        spec: the forward path `packed`. Its attention layers have only the heads of this rank.
    """

    checkpoint: Checkpoint
    spec: PathSpec


def load_shard(config: EngineConfig, hook: AttentionHook, rank: Rank, progress: Progress) -> Shard:
    """Load one rank's part of a model. All ranks must call this function at the same time.

    transformers divides the layers by its own plan, and reads only the rank's part of each divided
    weight.

    Args:
        config: the settings.
        hook: the engine's entry in transformers' attention interface.
        rank: this process.
        progress: called with one line for each slow operation.

    Raises:
        ModelError: if the weights are damaged.
        UnsupportedModelError: if the divided model cannot use the forward path `packed`.
    """
    with rank.loading():
        checkpoint = load_checkpoint(
            config.model,
            dtype=config.dtype,
            device=rank.device,
            attention=hook.name,
            progress=progress,
            trust_remote_code=config.trust_remote_code,
            distributed=DistributedConfig(tp_size=rank.size),
        )
    (_, variants), *_ = path_variants(checkpoint, hook, config.max_model_len)
    try:
        return Shard(checkpoint, next(variants))
    except Exception as error:
        # A model's code can raise any exception.
        raise UnsupportedModelError(
            f"{checkpoint.architecture} cannot be combined with tensor_parallel_size={rank.size}. "
            "The divided model cannot use the forward path packed, because "
            f"{first_line(error)}. Set tensor_parallel_size=1."
        ) from error
