"""What image_types.py cannot derive from the source of transformers, by type."""

from typing import Any

HINTS: dict[str, dict[str, Any]] = {
    "glm_ocr": {"_processor": "Glm46VProcessor", "_image_processor": "Glm46VImageProcessorPil"},
    "glmga": {"_processor": "Glm46VProcessor", "_image_processor": "GlmgaImageProcessorPil"},
    "fast_vlm": {"_processor": "LlavaProcessor", "_image_processor": "CLIPImageProcessorPil"},
    "glm4v_moe": {"_image_processor": "Glm4vImageProcessorPil"},
    "qwen3_vl_moe": {"_image_processor": "Qwen2VLImageProcessorPil"},
    "kosmos-2": {"_processor": "Kosmos2Processor"},
    "kosmos-2.5": {"_processor": "Kosmos2_5Processor"},
    "cosmos3_omni": {"_processor": "Qwen3VLProcessor"},
    "qwen2_5_omni_thinker": {
        "_processor": "Qwen2_5OmniProcessor",
        "_image_processor": "Qwen2VLImageProcessorPil",
    },
    "qwen3_omni_moe_thinker": {
        "_processor": "Qwen3OmniMoeProcessor",
        "_image_processor": "Qwen2VLImageProcessorPil",
    },
}

_MROPE_TEXT = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
HINTS |= {
    "aria": {
        "_values": {"projector_patch_to_query_dict": {900: 16}},
        "_arguments": {"size_conversion": {490: 16, 980: 16}},
    },
    "aya_vision": {
        "_vision": {"image_size": 364, "patch_size": 14},
        "_image": {"size": {"height": 364, "width": 364}},
    },
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
}

_WINDOWS = {"_vision": {"window_size": 112}}
HINTS |= {
    "gemma3": {"_vision": {"image_size": 224, "patch_size": 14}},
    "qwen2_5_vl": _WINDOWS,
    "exaone4_5": _WINDOWS,
    "hyperclovax_vision_v2": _WINDOWS,
    "mistral3": {"_arguments": {"spatial_merge_size": 2}},
    "internvl": {
        "_vision": {"image_size": [448, 448], "patch_size": [14, 14]},
        "_image": {"size": {"height": 448, "width": 448}},
    },
    "idefics3": {"_vision": {"image_size": 364, "patch_size": 14}},
    "smolvlm": {"_vision": {"image_size": 364, "patch_size": 14}},
    "granite_docling": {"_vision": {"image_size": 512, "patch_size": 16}},
}

HINTS |= {
    "paligemma": {"_image": {"image_seq_length": 196}},
    "fuyu": {"_special": ["|SPEAKER|", "|NEWLINE|"]},
    "llama4": {"_sizes": "processor"},
}

_NO_TILES = {"do_image_splitting": False, "size": {"longest_edge": 364}}
HINTS |= {
    "aya_vision": {
        "_vision": {"image_size": 56, "patch_size": 14},
        "_image": {"size": {"height": 56, "width": 56}},
        "_arguments": {"img_size": 56, "patch_size": 28},
    },
    "internvl": {
        "_vision": {"image_size": [56, 56], "patch_size": [14, 14]},
        "_image": {"size": {"height": 56, "width": 56}},
        "_values": {"image_seq_length": 4},
        "_arguments": {"image_seq_length": 4},
    },
    "idefics3": {"_vision": {"image_size": 364, "patch_size": 14}, "_image": _NO_TILES},
    "smolvlm": {"_vision": {"image_size": 364, "patch_size": 14}, "_image": _NO_TILES},
    "granite_docling": {
        "_vision": {"image_size": 512, "patch_size": 16},
        "_image": {"do_image_splitting": False, "size": {"longest_edge": 512}},
    },
}
HINTS |= {"paligemma": {"_sizes": "defaults", "_image": {"image_seq_length": 256}}}


def _template(placeholder: str) -> str:
    """Return a chat template that prints this text for each image."""
    return (
        "{% for message in messages %}{% for part in message.content %}"
        f"{{% if part.type == 'image' %}}{placeholder}{{% else %}}{{{{ part.text }}}}{{% endif %}}"
        "{% endfor %}{% endfor %}"
    )


_SMALL_PINPOINTS = [[56, 56], [112, 56], [56, 112], [112, 112]]
_AUDIO_TOKENS = {"audio_token": "<audio>", "boa_token": "<boa>", "eoa_token": "<eoa>"}
_INDICATORS = ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
HINTS |= {
    "vipllava": {"_values": {"vision_feature_layer": [-1, -2]}},
    "mllama": {"_vision": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 192}},
    "granite4_vision": {
        "_values": {
            "deepstack_layer_map": [[-1, 0]],
            "spatial_target_layers": [0, 1],
            "downsample_rate": "1/2",
        }
    },
    "glm4v_moe": {**HINTS["glm4v_moe"], "_sections": [1, 1, 2]},
    "llava_onevision": {
        "_vision": {"image_size": 56, "patch_size": 14},
        "_values": {"image_grid_pinpoints": _SMALL_PINPOINTS},
        "_image": {
            "image_grid_pinpoints": _SMALL_PINPOINTS,
            "size": {"height": 56, "width": 56},
        },
        "_arguments": {"num_image_tokens": 16},
    },
    "inkling2": {"_vision": {"text_hidden_size": 64}},
    "molmo2": {
        "_parts": {"adapter_config": {"vision_feature_layer": [-1, -2], "text_hidden_size": 64}},
        "_ids": {"image_patch_id": "<im_patch>"},
    },
    "kimi_k25": {"_values": {"projection_hidden_size": 64}},
    "gemma4": {"_tokens": _AUDIO_TOKENS, "_birth": {"vision_config": {}}},
    "gemma4_unified": {"_tokens": _AUDIO_TOKENS, "_birth": {"vision_config": {}}},
    "diffusion_gemma": {
        "_tokens": _AUDIO_TOKENS,
        "_birth": {"vision_config": {}},
        "_image_processor": "Gemma4ImageProcessorPil",
    },
    "ovis2": {
        "_template": _template("<image>"),
        "_special": ["<IMG_ATOM>", *_INDICATORS],
        "_ids": {"image_token_id": "<IMG_ATOM>", "visual_indicator_token_ids": _INDICATORS},
    },
    "qianfan_ocr": {"_template": _template("<image>"), "_special": ["<image>"]},
    "instructblip": {"_arguments": {"num_query_tokens": 4}},
    "fast_vlm": {**HINTS["fast_vlm"], "_arguments": {"patch_size": 64}},
}

_OMNI_IDS = {
    f"{kind}_token_id": f"<{kind}_token>"
    for kind in ("vision_start", "vision_end", "audio_start", "audio_end")
}
_OMNI_TOKENS = {
    f"{kind}_token": f"<{kind}_token>"
    for kind in (
        "vision_bos",
        "vision_eos",
        "vision_start",
        "vision_end",
        "audio_start",
        "audio_end",
    )
}
for _omni in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"):
    HINTS[_omni] |= {"_ids": _OMNI_IDS, "_tokens": _OMNI_TOKENS}
HINTS["qwen2_5_omni_thinker"] |= _WINDOWS
