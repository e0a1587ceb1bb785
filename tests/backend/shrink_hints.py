"""The changes of default configs that shrink.py cannot derive from the names of attributes.

HINTS maps a type to a dict of these changes. A key is the name of an attribute or of a sub-config,
or one of these names:

- "_drop": attributes that the config class computes from other attributes.
- "_layers": the indices of the layers that the tiny model keeps.
- "_wide": whether the embeddings get large values. Models that normalise embeddings need large
  values, because small embeddings would become too similar.
"""

from typing import Any

Hints = dict[str, Any]

_ENCODERS = [
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
    "reformer",
]
_NORMED = [
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "marian",
    "mbart",
    "mvp",
    "pegasus",
    "plbart",
    "prophetnet",
    "trocr",
    "xglm",
    "xlm",
    "xlnet",
    "openai-gpt",
    "ctrl",
    "git",
    "cpmant",
    "whisper",
    "zaya",
]
_UNTIED = {"tie_word_embeddings": False, "_wide": True}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_SPECIAL: dict[str, Hints] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64, "cross_attn_k": 1, "patch_size": 4},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        "layer_types": ["sliding_attention", "full_attention"],
        "_layers": [0, 1],
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"head_dim": 32},
    "hrm_text": {"_drop": ["num_hidden_layers", "layer_types"]},
    "gemma3n_text": {"_layers": [0, 4, 20, 24], "num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "_drop": ["attention_layers"]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "_layers": [0, 1]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "_layers": [0, 1],
        "_drop": ["full_attn_idxs"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "_layers": [0, 1]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "head_dim": 16},
    "reformer": {
        "axial_pos_embds_dim": [32, 32],
        "axial_pos_shape": [16, 16],
        "attn_layers": ["local", "local"],
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "xlstm": {"qk_dim_factor": 1.0},
    "xlm": {"mask_token_id": 5, "pad_token_id": 2},
    "zamba2": {
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "_layers": [0, 6],
        "hybrid_layer_ids": [1],
    },
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "_layers": [0, 2, 3, 7],
    },
}
_SPECIAL["dots3_note"] = {
    "text_config": _SPECIAL["dots3_note_text"],
    "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
}
_SPECIAL["qwen4_exp"] = {"text_config": _SPECIAL["qwen4_exp_text"]}

HINTS: dict[str, Hints] = {
    **{name: {"is_decoder": True, **_UNTIED} for name in _ENCODERS},
    **{name: dict(_UNTIED) for name in _NORMED},
}
for _name, _hints in _SPECIAL.items():
    HINTS[_name] = {**HINTS.get(_name, {}), **_hints}
