"""Creates tiny random checkpoints of all types of causal LM in transformers.

The functions take the default config of a type and replace the sizes in the config and in its
sub-configs. The name of an attribute determines its new value. HINTS contains further changes for
each type whose config needs them.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from backend.shrink_hints import HINTS
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCAB_SIZE = 320
WINDOW = 12
HIDDEN = 64
LENGTH = 256
_MAX_PARAMETERS = 40_000_000
_MAX_LAYERS = 4

# Each key is a small value. The text names the attributes that get this value if their default is
# larger.
_SIZES: dict[int, str] = {
    VOCAB_SIZE: "vocab_size vocab_size_per_layer_input decoder_vocab_size audio_vocab_size "
    "unpadded_vocab_size",
    HIDDEN: "hidden_size d_model n_embd dim_model embedding_size input_embedding_size emb_dim "
    "output_embedding_size word_embed_proj_dim attention_hidden_size lru_width embedding_dim "
    "mamba_d_ssm out_hidden_size projection_dim backbone_hidden_size embed_dim "
    "index_topk pronunciation_embed_dim shape_embed_dim adapter_out_dim",
    96: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_ff dim_ff dff d_inner "
    "feed_forward_size ffn_hidden_size intermediate_size_mlp dense_intermediate_size mlp_dim",
    48: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
    "shared_experts_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size",
    32: "q_lora_rank o_lora_rank router_hidden_size conv_state_size linear_head_dim",
    16: "head_dim kv_lora_rank qk_nope_head_dim d_head d_kv dim_head index_head_dim mamba_d_head "
    "swa_head_dim kv_channels mamba_headdim mamba_head_dim linear_key_head_dim mamba_d_state "
    "linear_value_head_dim attention_head_size state_size ssm_state_size global_head_dim "
    "hidden_size_per_layer_input d_rel rel_extent mamba_chunk_size chunk_size "
    "query_pre_attn_scalar laurel_rank adapter_rank swa_v_head_dim hc_lowrank "
    "gated_norm_rank ple_embed_dim",
    20: "v_head_dim",
    8: "qk_rope_head_dim rotary_dim mamba_n_heads mamba_num_heads mamba_dt_rank time_step_rank",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads attention_heads "
    "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
    "num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads "
    "swa_num_attention_heads linear_num_heads index_n_heads block_multiple_of zero_expert_num",
    2: "num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers depth "
    "num_encoder_layers num_decoder_layers num_experts_per_tok num_experts_per_token moe_topk "
    "moe_k moe_top_k num_blocks linear_num_key_heads num_layers_per_stack o_groups",
    1: "first_k_dense_replace num_dense_layers n_group topk_group num_expert_group n_groups "
    "mamba_n_groups mamba_ngroups",
    WINDOW: "sliding_window attention_chunk_size window_size local_attention sliding_window_size "
    "attention_window_size",
    LENGTH: "max_position_embeddings n_positions max_seq_len n_ctx context_length model_max_length "
    "max_target_positions original_max_position_embeddings ffn_round_up_to_multiple_of",
}
_RULES = {name: value for value, names in _SIZES.items() for name in names.split()}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_KV_HEADS = ("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "num_query_groups")
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")


def tiny_config(model_type: str) -> PretrainedConfig:
    """Return the default config of a type with small sizes."""
    hints = HINTS.get(model_type, {})
    config_class = type(AutoConfig.for_model(model_type, **hints.get("_birth", {})))
    whole = config_class(**hints.get("_birth", {}))
    return config_class(**_shrunk(whole, hints))


def tiny_model(model_type: str) -> PreTrainedModel:
    """Return a random model of a type. Its next token depends on all tokens of the context."""
    config = tiny_config(model_type)
    with torch.device("meta"):
        size = sum(p.numel() for p in _build(config).parameters())
    if size > _MAX_PARAMETERS:
        problem = "the rules do not make all of its sizes small"
        raise ValueError(f"{model_type}: the model has {size} parameters, so {problem}")
    torch.manual_seed(0)
    hints = HINTS.get(model_type, {})
    model = _build(config)
    if "_language" in hints:
        model.set_default_language(hints["_language"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("embed" in name or "wte" in name) and not hints.get("_wide"):
                # With large shared embeddings, a model would always repeat the last token.
                parameter.normal_(0.0, 0.02)
            elif parameter.dim() > 1 or "sinks" in name:
                parameter.normal_(0.0, 0.25)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def _build(config: PretrainedConfig) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(copy.deepcopy(config))


def _shrunk(config: PretrainedConfig, hints: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a config. Replace large sizes by small ones, and apply `hints`."""
    old = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    for name in ("transformers_version", "model_type", "architectures", "dtype", "torch_dtype"):
        old.pop(name, None)
    kept_layers = _kept_layers(old, hints)
    depth = next((old[name] for name in _DEPTHS if isinstance(old.get(name), int)), None)
    sub_configs = {
        name: value for name, value in vars(config).items() if isinstance(value, PretrainedConfig)
    }
    new = {name: _small(name, value) for name, value in old.items()}
    new |= _sizes_of_heads(old, new)
    for name, value in old.items():
        if name in sub_configs:
            sub = sub_configs[name]
            new[name] = {**_shrunk(sub, hints.get(name, {})), "model_type": sub.model_type}
        elif isinstance(value, list) and kept_layers and len(value) == depth:
            # This list has one item for each layer. Keep the items of the layers that remain.
            new[name] = [value[layer] for layer in kept_layers]
    if kept_layers:
        new |= {name: len(kept_layers) for name in _DEPTHS if name in new}
    if old.get("per_layer_config"):
        new["per_layer_config"] = _per_layer(old["per_layer_config"], kept_layers, old, new)
    new |= {
        name: value
        for name, value in hints.items()
        if not name.startswith("_") and name not in sub_configs
    }
    # The config class computes these attributes from others.
    for name in hints.get("_drop", ()):
        new.pop(name, None)
    return new


def _sizes_of_heads(old: dict[str, Any], new: dict[str, Any]) -> dict[str, int]:
    """Return the numbers and sizes of attention heads that depend on other attributes."""
    sizes = {}
    num_heads = old.get("num_attention_heads") or old.get("n_head")
    for name in _KV_HEADS:
        if isinstance(old.get(name), int):
            sizes[name] = 4 if old[name] == num_heads else 2
    if "qk_rope_head_dim" in old and old.get("head_dim") == old["qk_rope_head_dim"]:
        sizes["head_dim"] = new["qk_rope_head_dim"]
    return sizes


def _per_layer(
    layers: dict[Any, Any], kept: list[int], old: dict[str, Any], new: dict[str, Any]
) -> dict[int, Any]:
    """Return the sizes of layers that differ from the common sizes, with the same ratios."""
    sizes_of_layers = {int(old_layer): sizes for old_layer, sizes in layers.items()}
    return {
        new_layer: {
            name: new[name] * value // old[name] if old.get(name) else value
            for name, value in sizes_of_layers[old_layer].items()
        }
        for new_layer, old_layer in enumerate(kept)
        if old_layer in sizes_of_layers
    }


def _small(name: str, value: Any) -> Any:
    """Return a small value for an attribute: only token ids and positive integers change."""
    if name in _TOKENS:
        return _TOKENS[name] if value is not None else None
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return value
    if name == "qk_head_dim":
        return 24  # the sum of qk_nope_head_dim and qk_rope_head_dim
    return min(_RULES[name], value) if name in _RULES else value


def _kept_layers(old: dict[str, Any], hints: dict[str, Any]) -> list[int]:
    """Return the indices of the layers that the tiny model keeps.

    The tiny model has one layer of every kind, but at most `_MAX_LAYERS` layers. If all layers are
    of one kind, it has two layers. Return an empty list if the config does not list the kinds of
    its layers.
    """
    if "_layers" in hints:
        return hints["_layers"]
    lists = [
        old[name]
        for name in ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
        if isinstance(old.get(name), list) and old[name]
    ]
    if not lists:
        return []
    # The kind of a layer is the tuple of its items in all lists, for example ("full_attention",
    # "sparse"). Lists of another length are ignored.
    kinds = list(zip(*[items for items in lists if len(items) == len(lists[0])], strict=True))
    first_layers = {kind: kinds.index(kind) for kind in kinds}
    kept = sorted(first_layers.values())[:_MAX_LAYERS]
    if len(kept) == 1 and len(kinds) > 1:
        # All layers are of one kind. Keep two of them.
        kept = [0, 1]
    return kept


def save(model_type: str, folder: Path) -> Path:
    """Save a tiny random checkpoint of a type in the safetensors format, and return the folder."""
    tiny_model(model_type).save_pretrained(folder)
    return folder
