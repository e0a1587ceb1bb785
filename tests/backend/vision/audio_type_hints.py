"""Hints for the types that read audio. See image_type_hints.py for the meaning of the keys."""

from typing import Any

_SMALL_CODEC = {"num_filters": 4, "depths": [1, 1, 1, 1, 1, 1, 2], "vae_std": 0.0}
_GRANITE = {
    "encoder_config": {"hidden_dim": 64, "num_heads": 4, "dim_head": 16},
    "projector_config": {"encoder_hidden_size": 64},
    "window_size": 15,
}
AUDIO_HINTS: dict[str, dict[str, Any]] = {
    "qwen2_audio": {
        "_tokens": {
            "audio_token": "<|AUDIO|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
        }
    },
    "qwen3_asr": {"audio_config": {"output_dim": 64}},
    # Token ids from 280 represent images, and token ids from 300 represent audio.
    "gemma3n": {
        "vision_config": {"vocab_size": 20, "vocab_offset": 280},
        "audio_config": {"vocab_size": 20, "vocab_offset": 300},
    },
    "gemma4": {"_birth": {"vision_config": {}, "audio_config": {}}},
    "gemma4_unified": {"_birth": {"vision_config": {}, "audio_config": {}}},
    "phi4_multimodal": {
        "_vision": {"crop_size": 56},
        # The names of the encoders' weights contain "embed_tokens_extend". These weights must not
        # get the small values of embeddings.
        "_embeddings": ("embed_tokens.",),
        "audio_config": {
            "nemo_conv_channels": 64,
            "ext_pw_out_channel": 64,
            "depthwise_separable_out_channel": 64,
        },
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "muse_spark": {"_audio": {"samples_per_token": 96}},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": _SMALL_CODEC,
        "semantic_tokenizer_encoder_config": _SMALL_CODEC,
    },
    "granite_speech": _GRANITE,
    "granite_speech_plus": _GRANITE,
    "nemotron_h_omni": {
        "_audio_class": "ParakeetFeatureExtractor",
        "_birth": {"audio_config": {"projection_hidden_size": 64, "projection_bias": False}},
    },
    "nemo_speechlm": {
        "_audio": {"feature_size": 128},
        "audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 64}}},
    },
    "kyutai_speech_to_text": {"codec_config": {"upsample_groups": 64}},
}
