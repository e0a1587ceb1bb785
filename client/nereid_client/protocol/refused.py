"""Fields that OpenAI, vLLM or SGLang have and Nereid refuses: by name, with the reason.

A field that is not listed, here or in requests.py, is passed on. Fields that the backend may refuse
are the backend's to refuse.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereid_client.errors import shown


@dataclass(frozen=True)
class Refusal:
    """Why a field is refused.

    Attributes:
        reason: ends the sentence "FIELD: ...".
        harmless: values that ask for nothing and may be sent; null always may.
    """

    reason: str
    harmless: tuple[Any, ...] = ()


_OFF = (False,)
_ONE_NODE = "splits work between servers, which there are none of here"
_TEXT_ONLY = "the served model writes and reads text only"

REFUSED = {
    # vLLM
    "truncation_side": Refusal("prompts are not cut; send one that fits"),
    "return_prompt_text": Refusal("not offered; return_token_ids gives the prompt's ids", _OFF),
    "return_token_offsets": Refusal("not offered; see logprobs of /v1/completions", _OFF),
    # SGLang
    "return_cached_tokens_details": Refusal("usage has cached_tokens; there is one cache", _OFF),
    "return_meta_info": Refusal("not offered; see usage", _OFF),
    "input_embeds": Refusal("prompts are text or token ids"),
    "ngram_corpus_id": Refusal("guesses come from the request's own text alone"),
    "bootstrap_host": Refusal(_ONE_NODE),
    "bootstrap_port": Refusal(_ONE_NODE),
    "bootstrap_room": Refusal(_ONE_NODE),
    "routed_dp_rank": Refusal(_ONE_NODE),
    "disagg_prefill_dp_rank": Refusal(_ONE_NODE),
    "data_parallel_rank": Refusal(_ONE_NODE),
}

REFUSED_IN_CHAT = {
    # OpenAI
    "audio": Refusal(_TEXT_ONLY),
    "modalities": Refusal(_TEXT_ONLY, (["text"],)),
    "functions": Refusal("replaced by tools", ([],)),
    "function_call": Refusal("replaced by tool_choice", ("none",)),
    "web_search_options": Refusal("nothing here searches the web; offer a tool that does"),
    "moderation": Refusal("nothing here judges texts"),
    "prediction": Refusal("not offered; speculation with a given text changes no answer"),
    "store": Refusal("answers are not stored", _OFF),
    "verbosity": Refusal("chat templates know no such switch; say it in a message", ("medium",)),
    "prompt_cache_retention": Refusal("cached prefixes go when room is needed", ("in_memory",)),
    "prompt_cache_options": Refusal("cached prefixes go when room is needed"),
    # SGLang
    "input_ids": Refusal("send token ids as prompt to /v1/completions"),
    # completions
    "best_of": Refusal("is for /v1/completions", (1,)),
}

REFUSED_IN_COMPLETIONS = {
    "suffix": Refusal(
        "filling in the middle needs markers that no chat template or tokenizer declares; write "
        "the model's own into the prompt",
        ("",),
    ),
    "tools": Refusal("is for /v1/chat/completions", ([],)),
    "tool_choice": Refusal("is for /v1/chat/completions", ("none",)),
    "top_logprobs": Refusal("is for /v1/chat/completions; here logprobs is their number", (0,)),
}


REFUSED_BY_BACKEND = frozenset(
    {
        # vLLM
        *("use_beam_search", "length_penalty", "early_stopping", "logprob_token_ids"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "lora_name"),
        *("guided_decoding_backend", "guided_whitespace_pattern", "logits_processors"),
        *("prompt_embeds", "truncate_prompt_tokens", "repetition_detection", "stream_interval"),
        *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "media_io_kwargs"),
        *("mm_processor_kwargs", "chat_template", "watermarking"),
        # SGLang
        *("stop_regex", "lora_path", "session_params", "custom_logit_processor", "watermark"),
        *("return_hidden_states", "return_routed_experts", "return_sampling_mask"),
        *("images_config", "video_config", "use_audio_in_video", "task"),
        *("max_dynamic_patch", "min_dynamic_patch"),
        # llama.cpp
        *("mirostat", "typical_p", "tfs_z", "dynatemp_range", "dry_multiplier"),
        *("xtc_probability", "samplers", "n_probs"),
    }
)
"""Fields that go on to the backend, which refuses them for its other clients too."""


def refuse(body: Mapping[str, Any], *tables: Mapping[str, Refusal]) -> None:
    """Refuse what these tables list.

    Raises: ValueError that names the field, its value and the reason.
    """
    for table in tables:
        for name, refusal in table.items():
            value = body.get(name)
            if value is None or any(_same(value, harmless) for harmless in refusal.harmless):
                continue
            raise ValueError(f"{name}: {refusal.reason}; got {shown(value)}, leave it out")


def _same(value: object, harmless: object) -> bool:
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)
