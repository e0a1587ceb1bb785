"""Tiny models of many architectures with random weights.

The attention windows are shorter than the contexts of the tests, so that the answers change if the
engine ignores a window.
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
    """A tiny model of one architecture. Its config has the values in `_COMMON` and in `extra`."""

    name: str
    model_type: str
    extra: dict = field(default_factory=dict)

    def make(self) -> PreTrainedModel:
        torch.manual_seed(0)
        config = AutoConfig.for_model(self.model_type, **{**_COMMON, **self.extra})
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            # The default weights are so small that many logits are nearly equal. With larger
            # weights, the next token depends on the whole context.
            for name, parameter in model.named_parameters():
                if "embed" in name:
                    # With large shared embeddings, a model would always repeat the last token.
                    parameter.normal_(0.0, 0.02)
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
    Family("gemma", "gemma", {"head_dim": 16}),
    Family(
        "mixtral, sliding window", "mixtral", {"num_local_experts": 4, "sliding_window": WINDOW}
    ),
    Family(
        "llama4, chunked attention",
        "llama4_text",
        {
            "head_dim": 16,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
        },
    ),
    Family(
        "deepseek_v3, k and v of different sizes",
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 20,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 48,
        },
    ),
    Family("cohere2", "cohere2", {"sliding_window": WINDOW, "layer_types": _SLIDING}),
    Family("exaone4", "exaone4", {"sliding_window": WINDOW, "layer_types": _SLIDING}),
    Family("glm", "glm", {"head_dim": 16}),
    Family("gpt2", "gpt2", {"n_positions": 256, "n_embd": 64, "n_head": 4, "n_layer": 2}),
    Family("gpt_neox", "gpt_neox"),
    Family("granite", "granite"),
    Family("olmo2", "olmo2"),
    Family("opt", "opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    Family("phi", "phi"),
    Family("smollm3", "smollm3"),
    Family("stablelm", "stablelm"),
    Family("starcoder2", "starcoder2"),
]
BY_NAME = {family.name: family for family in FAMILIES}
