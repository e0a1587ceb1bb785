"""Changes of configs and processors that image_types.py cannot derive from transformers' source.

HINTS maps a type to a dict of these changes. A key without an underscore is the name of an
attribute or of a sub-config; see shrink_hints.py. The other keys have these meanings:

- "_processor", "_image_processor", "_audio_class": the names of classes of transformers.
- "_birth": the arguments with which the default config is created.
- "_values", "_vision", "_parts": changes of the config, of its image encoder, and of sub-configs.
- "_image", "_video", "_audio": arguments of the image, video and audio processor.
- "_arguments": arguments of the processor that combines these processors.
- "_template": the chat template.
- "_special", "_tokens", "_without": special tokens of the tokenizer, special tokens with the names
  of their attributes, and attributes without a special token.
- "_ids": the special tokens whose ids become values of the config.
- "_sizes": one of `image_types.SIZES`.
- "_sections": the sections of three-dimensional positions.
- "_embeddings": parts of the names of weights that get small values.
"""

from typing import Any

from backend.vision.audio_type_hints import AUDIO_HINTS

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
}

HINTS |= {
    "paligemma": {"_image": {"image_seq_length": 196}},
    "fuyu": {"_special": ["|SPEAKER|", "|NEWLINE|"]},
    "llama4": {
        "_vision": {
            "intermediate_size": 256,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "vision_output_dim": 64,
        },
        "_ids": {"image_token_index": "<|patch|>"},
    },
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
    "granite_docling": {"_vision": {"image_size": 512, "patch_size": 16}, "_sizes": "defaults"},
}
HINTS |= {"paligemma": {"_sizes": "defaults", "_image": {"image_seq_length": 256}}}


def _template(image: str, video: str = "") -> str:
    """Return a chat template that writes `image` for each image and `video` for each video."""
    return (
        "{% for message in messages %}{% for part in message.content %}"
        f"{{% if part.type == 'image' %}}{image}{{% elif part.type == 'video' %}}{video}"
        "{% else %}{{ part.text }}{% endif %}"
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
            "image_grid_pinpoints": _SMALL_PINPOINTS,
        },
        "_vision": {"image_size": 56, "patch_size": 14},
        "_image": {
            "image_grid_pinpoints": _SMALL_PINPOINTS,
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
        },
        "_arguments": {"downsample_rate": "1/2"},
    },
    "glm4v_moe": {**HINTS["glm4v_moe"], "_sections": [1, 1, 2]},
    "llava_onevision": {
        "_vision": {"image_size": 56, "patch_size": 14},
        "_values": {"image_grid_pinpoints": _SMALL_PINPOINTS},
        "_image": {
            "image_grid_pinpoints": _SMALL_PINPOINTS,
            "size": {"height": 56, "width": 56},
        },
        "_arguments": {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
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
    "qianfan_ocr": {
        "_template": _template("<image>"),
        "_special": ["<image>"],
        "_vision": {"image_size": [56, 56], "patch_size": [14, 14]},
        "_image": {"size": {"height": 56, "width": 56}},
        "_values": {"image_seq_length": 4},
        "_arguments": {"image_seq_length": 4},
    },
    "instructblip": {
        "_arguments": {"num_query_tokens": 4},
        "_without": ["image_token"],
        "_ids": {"image_token_index": "<image>"},
    },
    "fast_vlm": {
        **HINTS["fast_vlm"],
        "_birth": {
            "vision_config": {
                "model_type": "timm_wrapper",
                "architecture": "fastvit_mci3",
                "do_pooling": True,
                "global_pool": "avg",
                "hidden_size": 64,
                "model_args": {
                    "inference_mode": True,
                    "layers": [1, 1, 1, 1, 1],
                    "embed_dims": [32, 32, 32, 32, 32],
                },
            }
        },
        "_image": {
            "size": {"shortest_edge": 128},
            "crop_size": {"height": 128, "width": 128},
        },
        "_arguments": {
            "patch_size": 64,
            "num_additional_image_tokens": 0,
            "vision_feature_select_strategy": "full",
        },
    },
    "gemma3n": {
        "_birth": {
            "vision_config": {
                "architecture": "mobilenetv5_300m_enc",
                "hidden_size": 2048,
                "model_args": {"channel_multiplier": 0.1},
            }
        },
        "_tokens": _AUDIO_TOKENS,
        "_vision": {"hidden_size": 2048},
        "_image": {"size": {"height": 128, "width": 128}},
    },
    "perception_lm": {
        "_birth": {
            "vision_config": {
                "architecture": "vit_pe_core_large_patch14_336",
                "model_args": {
                    "embed_dim": 64,
                    "depth": 2,
                    "num_heads": 4,
                    "img_size": [56, 56],
                    "ref_feat_shape": [4, 4],
                    "global_pool": "",
                    "use_post_transformer_norm": False,
                    "init_values": 0.1,
                },
            }
        },
        "_image": {"tile_size": 56, "max_num_tiles": 4},
        "_arguments": {"patch_size": 14, "pooling_ratio": 1},
    },
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

# The image encoder merges four patches, so its outputs are four times as wide as its hidden states.
_ADAPTER = {"out_hidden_size": 256, "projector_hidden_size": 64}
_SMALL_SAM = {
    "output_channels": 16,
    "downsample_channels": [32, 64],
    "global_attn_indexes": [1],
    "mlp_dim": 96,
}
HINTS |= {
    "muse_glimmer": {"_values": _ADAPTER},
    "muse_spark": {
        "_values": _ADAPTER,
        "audio_config": {"patch_sizes": [16, 6], "hidden_sizes": [16, 32], "depths": [1, 1]},
    },
    "nemotron_h_omni": {"_values": {"vision_hidden_size": 64, "projector_hidden_size": 64}},
    "hunyuan_vl": {"text_config": {"head_dim": 16}, "_vision": {"text_hidden_size": 64}},
    "mistral_large4": {"_arguments": {"spatial_merge_size": 2}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
        "vision_config": {"sam_config": _SMALL_SAM},
    },
    "unlimited_ocr": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"]},
        "vision_config": {"sam_config": _SMALL_SAM},
    },
    "deepseek_vl_hybrid": {
        "high_res_vision_config": {
            "global_attn_indexes": [0],
            "output_channels": 16,
            "image_size": 64,
        },
        "_image": {"high_res_size": {"height": 64, "width": 64}},
        "_arguments": {"num_image_tokens": 16},
    },
    "chameleon": {
        "vq_config": {
            "base_channels": 32,
            "embed_dim": 8,
            "latent_channels": 32,
            "num_embeddings": 16,
            "resolution": 64,
        },
        "_special": [f"IMGIMG{chr(65 + i // 10)}{chr(65 + i % 10)}Z" for i in range(16)],
        "_image": {
            "size": {"shortest_edge": 64},
            "crop_size": {"height": 64, "width": 64},
        },
        "_arguments": {"image_seq_length": 16},
        "_tokens": {"image_token": "<image>"},
    },
    "emu3": {
        "vq_config": {
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 2],
            "codebook_size": 16,
            "hidden_size": 64,
        },
        "_image": {"min_pixels": 64 * 64, "max_pixels": 96 * 96},
        "_tokens": {"image_token": "<image>"},
        "_special": ["<|extra_200|>", *(f"<|visual token {i:06d}|>" for i in range(16))],
    },
    "pp_chart2table": {
        "_sizes": "defaults",
        "_template": _template("<img>" + "<imgpad>" * 256 + "</img>"),
        "_special": ["<img>", "</img>", "<imgpad>"],
        "_ids": {"image_token_index": "<imgpad>"},
    },
}
HINTS |= {
    "ernie4_5_vl_moe": {"_sections": [3, 3, 2]},
    "step3p7": {"_sizes": "defaults", "text_config": {"sliding_window": 12}},
}
HINTS |= {
    "dots3_note": {
        "_image": {"temporal_patch_size": 1},
        "vision_config": {
            "adapter_in_dim": 64,
            "per_layer_config": {1: {"num_local_experts": 4, "num_experts_per_tok": 2}},
        },
    },
    "kosmos-2.5": {
        **HINTS["kosmos-2.5"],
        "_values": {"latent_query_num": 16},
        "_arguments": {"num_image_tokens": 16},
        "_image": {"max_patches": 64},
    },
    "granite_docling": {
        "_sizes": "defaults",
        "_vision": {"image_size": 64, "patch_size": 16},
        "_image": {"size": {"height": 64, "width": 64}},
        "_arguments": {"image_seq_len": 1},
    },
    "hunyuan_vl": {
        **HINTS["hunyuan_vl"],
        "_template": _template("<image_start_token><image_token><image_end_token>"),
    },
}
HINTS |= {
    "mllama": {**HINTS["mllama"], "text_config": {"cross_attention_layers": [1]}},
    "idefics": {"_values": {"alpha_initializer": "ones"}},
    "florence2": {
        "vision_config": {
            "depths": [1, 1, 1, 1],
            "embed_dim": [16, 32, 64, 64],
            "num_heads": [1, 2, 4, 4],
            "num_groups": [1, 2, 4, 4],
            "projection_dim": 64,
        },
        # An image has a token for each of 7 x 7 patches, and a token for the mean of all patches.
        "_image": {"image_seq_length": 50},
    },
    "t5gemma2": {
        "_sizes": "defaults",
        "encoder": {"vision_config": {"image_size": 224, "patch_size": 14}},
    },
}
_VIDEO_IDS = {
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
# The code of these models finds the frames of a video between two special tokens.
HINTS |= {
    name: {
        **HINTS.get(name, {}),
        "_template": _template("<|image|>", "<|begin_of_video|><|video|><|end_of_video|>"),
        "_ids": _VIDEO_IDS,
    }
    for name in ("glm4v", "glm4v_moe", "glm46v", "glmga", "glm5_next")
}
HINTS["ernie4_5_vl_moe"] |= {"_video": {"draw_on_frames": False}}
for _name, _hints in AUDIO_HINTS.items():
    HINTS[_name] = {**HINTS.get(_name, {}), **_hints}
