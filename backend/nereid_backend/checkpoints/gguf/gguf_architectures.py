# SPDX-License-Identifier: Apache-2.0
"""Declares the supported architectures of GGUF files, and their fields in config.json."""

from collections.abc import Mapping
from dataclasses import dataclass

# Each of these three mappings maps metadata keys to fields of the config.
_WINDOW = {"attention.sliding_window": "sliding_window"}
_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Describes how llama.cpp stores the models of a GGUF architecture.

    Attributes:
        model_type: The model type in transformers.
        class_name: The name of the model's class in transformers.
        more_fields: Maps additional metadata keys to fields of the config.
        has_rotated_pairs: Whether the two numbers of a rotated pair are adjacent in the file; see
            `gguf_weights._row_order`.
        has_sandwich_norms: Whether each layer has norms before and after attention, and before and
            after the MLP. In the file, 1 is added to each weight of a norm.
        num_layers_with_other_scale: The file does not contain the attention scale, which is usually
            1 / sqrt(head_dim). The model with this number of layers has the scale 1 /
            sqrt(hidden_size / heads) instead. 0 if the architecture has no such model.
        has_local_rope: Whether layers with a sliding window use other rotary embeddings than layers
            with full attention.
    """

    model_type: str
    class_name: str
    more_fields: Mapping[str, str]
    has_rotated_pairs: bool = False
    has_sandwich_norms: bool = False
    num_layers_with_other_scale: int = 0
    has_local_rope: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether the models have several experts in place of one MLP."""
        return self.more_fields is _EXPERTS

    @property
    def has_attention_scale(self) -> bool:
        """Whether every config contains a number s that gives the attention scale 1 / sqrt(s)."""
        return self.num_layers_with_other_scale > 0


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", {}, has_rotated_pairs=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", {}),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {}),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _EXPERTS),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        _WINDOW | _SOFTCAPS,
        has_sandwich_norms=True,
        num_layers_with_other_scale=46,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _WINDOW | _SOFTCAPS,
        has_sandwich_norms=True,
        num_layers_with_other_scale=62,
        has_local_rope=True,
    ),
}
