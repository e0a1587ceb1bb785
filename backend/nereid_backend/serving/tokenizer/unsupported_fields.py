# SPDX-License-Identifier: Apache-2.0
"""Known fields of the APIs that ask for what this server does not do: refused, with the reason."""

import json
from collections.abc import Mapping
from typing import Any

from nereid_backend.errors import RequestError

_BEAM = "beam search is not available"
_GUIDED = "was replaced by structured_outputs; send structured_outputs."
_IMAGES = "the served model takes no images, audio or video"
_LORA = "adapters are not available"
_SAMPLER = "this sampler is not available; use temperature, top_p, top_k and min_p"
_TRANSFER = "one server computes the whole request"

# Name -> (the values that ask for nothing, why others are refused).
_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    # vLLM
    "length_penalty": ((1,), _BEAM),
    "use_beam_search": ((False,), _BEAM),
    "early_stopping": ((False,), _BEAM),
    "guided_json": ((), _GUIDED + "json"),
    "guided_regex": ((), _GUIDED + "regex"),
    "guided_choice": ((), _GUIDED + "choice"),
    "guided_grammar": ((), _GUIDED + "grammar"),
    "guided_decoding_backend": ((), "was replaced by structured_outputs; the server chooses"),
    "guided_whitespace_pattern": ((), "was replaced by structured_outputs"),
    "lora_name": (("",), _LORA),
    "logits_processors": (([],), "code from requests is not run"),
    "logprob_token_ids": (([],), "log-probabilities are of the likeliest tokens"),
    "prompt_embeds": ((), "prompts are text or token ids"),
    "truncate_prompt_tokens": ((), "prompts are not cut; a prompt that is too long is refused"),
    "spaces_between_special_tokens": ((True,), "special tokens stand as they are written"),
    "suffix": (("",), "filling in the middle is not available"),
    "echo": ((False,), "the prompt is not repeated; use exclude_input_in_output false"),
    "chat_template": (("",), "the checkpoint's own chat template is used"),
    "watermarking": ((False,), "watermarks are not available"),
    "repetition_detection": ((), "repetition is not looked for; use the penalties"),
    "kv_transfer_params": ((), _TRANSFER),
    "ec_transfer_params": ((), _TRANSFER),
    "vllm_xargs": (({},), "there are no extra arguments"),
    "media_io_kwargs": (({},), _IMAGES),
    "mm_processor_kwargs": (({},), _IMAGES),
    "stream_interval": ((1,), "tokens are merged as the load demands (responses_per_second)"),
    # SGLang
    "stop_regex": (([], ""), "stops are strings and token ids"),
    "lora_path": (("", []), _LORA),
    "session_params": (({},), "sessions are not kept; equal prompts share their prefix anyway"),
    "custom_logit_processor": (("",), "code from requests is not run"),
    "return_hidden_states": ((False,), "hidden states are not given out"),
    "return_routed_experts": ((False,), "routed experts are not given out"),
    "return_sampling_mask": ((False,), "sampling masks are not given out"),
    "stream_reasoning": ((True,), "reasoning is streamed like the rest"),
    "images_config": (({},), _IMAGES),
    "video_config": (({},), _IMAGES),
    "use_audio_in_video": ((False,), _IMAGES),
    "max_dynamic_patch": ((), _IMAGES),
    "min_dynamic_patch": ((), _IMAGES),
    "watermark": (({},), "watermarks are not available"),
    "task": ((), "the chat template alone builds the prompt"),
    # llama.cpp
    "mirostat": ((0,), _SAMPLER),
    "typical_p": ((1,), _SAMPLER),
    "tfs_z": ((1,), _SAMPLER),
    "dynatemp_range": ((0,), _SAMPLER),
    "dry_multiplier": ((0,), _SAMPLER),
    "xtc_probability": ((0,), _SAMPLER),
    "samplers": (([],), _SAMPLER),
    "n_probs": ((0,), "send logprobs and top_logprobs"),
}

NAMES = tuple(_FIELDS)


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Refuse fields that are known but not served here, naming the field and the reason.

    Raises:
        RequestError: one of them asks for something.
    """
    for name, (harmless, reason) in _FIELDS.items():
        value = fields.get(name)
        if value is None or value in harmless:
            continue
        if isinstance(value, str) and value.strip().lower() in {str(v).lower() for v in harmless}:
            continue
        shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
        remedy = f"leave it out or send {json.dumps(harmless[0])}" if harmless else "leave it out"
        raise RequestError(f"{name}: {reason}, got {shown}; {remedy}")
