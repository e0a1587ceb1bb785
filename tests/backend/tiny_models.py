"""Tiny random checkpoints of many architectures, saved and loaded as real ones are.

Windows are shorter than the contexts of the tests, so that a missing window shows.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 320
WINDOW = 12

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SLIDING = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """One architecture and what its tiny config says beyond the common values."""

    name: str
    model_type: str
    extra: dict = field(default_factory=dict)

    def make(self) -> PreTrainedModel:
        torch.manual_seed(0)
        config = AutoConfig.for_model(self.model_type, **{**_COMMON, **self.extra})
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            # Initial weights are so small that logits tie; larger ones make tokens depend on
            # the whole context.
            for name, parameter in model.named_parameters():
                if "embed" in name:
                    parameter.normal_(0.0, 0.02)  # tied ones would repeat the last token
                elif parameter.dim() > 1 or "sinks" in name:
                    parameter.normal_(0.0, 0.25)
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model.eval()

    def save(self, folder: Path) -> Path:
        self.make().save_pretrained(folder)
        return folder


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

FAMILIES = [
    Family("llama", "llama"),
    Family("mistral, sliding window", "mistral", {"sliding_window": WINDOW, "head_dim": 16}),
    Family("qwen2", "qwen2"),
    Family("qwen3", "qwen3", {"head_dim": 24}),
    Family("qwen3_moe", "qwen3_moe", {**_EXPERTS, "head_dim": 16}),
    Family(
        "gemma2",
        "gemma2",
        {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    ),
    Family(
        "gemma3",
        "gemma3_text",
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": _SLIDING},
    ),
    Family("phi3", "phi3", {"sliding_window": WINDOW}),
    Family(
        "gpt_oss",
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _SLIDING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
]
BY_NAME = {family.name: family for family in FAMILIES}
