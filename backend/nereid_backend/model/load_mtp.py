# SPDX-License-Identifier: Apache-2.0
"""Loads the MTP layers (multi-token prediction) of a checkpoint as a source of draft tokens."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from transformers.modeling_layers import MtpModel

from nereid_backend.attention.layers import LayerSpec
from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.config import EngineConfig
from nereid_backend.draft_model import DraftModel
from nereid_backend.errors import ConfigError, first_line
from nereid_backend.load_checkpoint import Checkpoint, Progress
from nereid_backend.model.forward_path.length_limits import model_limit
from nereid_backend.model.forward_path.make_kv_cache import make_blocks
from nereid_backend.model.forward_path.path_spec import PathSpec
from nereid_backend.model.forward_path.probe_layers import plain_token_ids, record_layers
from nereid_backend.model.load_draft import draft_sizes, path_sizes
from nereid_backend.model.memory.memory_plan import MemoryPlan
from nereid_backend.mtp_path import HiddenStates, MtpPath, run_layer
from nereid_backend.step_runner import ForwardPath


class MtpDrafts(NamedTuple):
    """A source of draft tokens, and a forward path that records hidden states for this source."""

    source: DraftModel
    recording_path: HiddenStates


@dataclass(frozen=True, slots=True)
class OpenedMtp:
    """MTP layers whose weights are loaded.

    Attributes:
        checkpoint: the large model.
        model: the MtpModel of transformers.
        layers: the attention layers of the first MTP layer.
        bytes_per_token: the memory of one token in the KV cache of the MTP layer.
        hook: Nereid's attention function, which transformers calls in each layer.
    """

    checkpoint: Checkpoint
    model: Any
    layers: list[LayerSpec]
    bytes_per_token: int
    hook: AttentionHook

    def build(
        self, config: EngineConfig, memory: MemoryPlan, num_tokens: int, path: ForwardPath
    ) -> MtpDrafts:
        """Allocate the KV cache of the MTP layer, and return an object that generates draft tokens.

        An MTP (multi-token prediction) layer reads hidden states of the large model. Therefore, the
        caller must replace `path` by the `recording_path` of the result. The cache has as many
        blocks as the cache of the large model.

        Args:
            config: the settings of the engine.
            memory: the size of the large model's KV cache.
            num_tokens: the largest number of tokens in one step.
            path: the forward path of the large model.
        """
        length_limit = model_limit(self.checkpoint.text_config)
        sizes = draft_sizes(config, memory, num_tokens, length_limit)
        # `batch_builder` creates the input tensors of each step.
        kv_cache, batch_builder = make_blocks(self.checkpoint, self.layers, path_sizes(sizes))
        large_model: Any = self.checkpoint.model
        hidden_states = HiddenStates(path, large_model.get_decoder())
        mtp_path = MtpPath(
            self.model,
            hook=self.hook,
            cache=kv_cache,
            builder=batch_builder,
            hidden=hidden_states,
        )
        return MtpDrafts(DraftModel(mtp_path, sizes), hidden_states)


def open_mtp(
    config: EngineConfig,
    target: Checkpoint,
    target_spec: PathSpec,
    hook: AttentionHook,
    progress: Progress,
) -> OpenedMtp | None:
    """Load the MTP layers of a checkpoint. Return None if the settings select no MTP layers.

    An MTP layer (multi-token prediction) generates draft tokens for speculative decoding from the
    hidden states of the large model.

    Args:
        config: the settings of the engine.
        target: the large model, whose attention is `hook`.
        target_spec: the forward path of the large model.
        hook: Nereid's attention function, which transformers calls in each layer.
        progress: called with one line for each slow operation.

    Raises:
        ConfigError: if the checkpoint has no MTP layers that transformers can load, or if the
            forward path does not provide the hidden states of the large model.
    """
    if config.speculative_method != "mtp" or config.max_draft_tokens == 0:
        return None
    if getattr(target.text_config, "num_mtp_layers", None) in (None, 0):
        raise _refusal(
            f"the config of {target.architecture} has no num_mtp_layers. transformers "
            f"{transformers.__version__} reads MTP layers only if the config of the architecture "
            "has this field, and ignores the MTP layers of other checkpoints"
        )
    if target_spec.name != "packed":
        raise _refusal(
            f'the forward path "{target_spec.name}" of {target.architecture} does not return the '
            'hidden states that MTP layers need. Only the forward path "packed" returns them'
        )
    progress("loading the MTP layers of the checkpoint")
    try:
        mtp_model = MtpModel.from_pretrained(target.model, device_map={"": target.device})
        mtp_model.train(False)
        layers = _probe_attention(target, mtp_model, hook)
    except Exception as error:
        raise _refusal(
            f"transformers {transformers.__version__} cannot load or run the MTP layers of "
            f"{config.model} ({type(error).__name__}: {first_line(error)})"
        ) from error
    itemsize = target.model.dtype.itemsize
    layer_bytes = sum(layer.bytes_per_token(itemsize) for layer in layers)
    return OpenedMtp(target, mtp_model, layers, layer_bytes, hook)


@torch.inference_mode()
def _probe_attention(target: Checkpoint, mtp_model: Any, hook: AttentionHook) -> list[LayerSpec]:  # noqa: ANN401
    """Run the first MTP layer on one token, and return its attention layers."""
    ids = torch.tensor([plain_token_ids(target)[:1]], device=target.device)
    weight = mtp_model.layers[0].eh_proj.weight
    hidden = weight.new_zeros(1, weight.shape[0])
    return record_layers(
        mtp_model.config, hook, lambda: run_layer(mtp_model, ids, hidden, torch.ones_like(ids))
    )


def _refusal(reason: str) -> ConfigError:
    return ConfigError(
        f"speculative_method: the value mtp cannot be used, because {reason}. Use ngram, or use "
        "draft with draft_model."
    )
