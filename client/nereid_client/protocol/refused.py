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
_BEAM = "beam search is not offered; best_of of /v1/completions picks the likeliest of samples"
_ONE_NODE = "splits work between servers, which there are none of here"
_TEXT_ONLY = "the served model writes and reads text only"

REFUSED = {
    # vLLM and SGLang, chat and completions
    "use_beam_search": Refusal(_BEAM, _OFF),
    "length_penalty": Refusal(_BEAM, (1,)),
    "logprob_token_ids": Refusal(
        "log-probabilities are given of the likeliest tokens; see logprobs"
    ),
    "truncation_side": Refusal("prompts are not cut; send one that fits"),
    "add_special_tokens": Refusal("the chat template and the tokenizer decide about them"),
    "media_io_kwargs": Refusal(_TEXT_ONLY, ({},)),
    "mm_processor_kwargs": Refusal(_TEXT_ONLY, ({},)),
    "images_config": Refusal(_TEXT_ONLY, ({},)),
    "kv_transfer_params": Refusal(_ONE_NODE),
    "vllm_xargs": Refusal("no extension of the engine reads it", ({},)),
    "repetition_detection": Refusal("not offered; see repetition_penalty and frequency_penalty"),
    "return_prompt_text": Refusal("not offered; return_token_ids gives the prompt's ids", _OFF),
    "return_token_offsets": Refusal("not offered; see logprobs of /v1/completions", _OFF),
    "stop_regex": Refusal("stops are strings and token ids; see stop, stop_token_ids and regex"),
    "return_hidden_states": Refusal("hidden states do not leave the engine", _OFF),
    "return_routed_experts": Refusal("expert choices do not leave the engine", _OFF),
    "return_cached_tokens_details": Refusal("usage has cached_tokens; there is one cache", _OFF),
    "return_meta_info": Refusal("not offered; see usage", _OFF),
    "lora_path": Refusal("one model is served, without adapters"),
    "session_params": Refusal("not offered; the prefix cache finds what conversations share"),
    "custom_logit_processor": Refusal("runs the caller's code in the engine; see logit_bias"),
    "input_embeds": Refusal("prompts are text or token ids"),
    "prompt_embeds": Refusal("prompts are text or token ids"),
    "bootstrap_host": Refusal(_ONE_NODE),
    "bootstrap_port": Refusal(_ONE_NODE),
    "bootstrap_room": Refusal(_ONE_NODE),
    "routed_dp_rank": Refusal(_ONE_NODE),
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
    "service_tier": Refusal("all requests have one tier; see priority", ("auto", "default")),
    "verbosity": Refusal("chat templates know no such switch; say it in a message", ("medium",)),
    "prompt_cache_retention": Refusal("cached prefixes go when room is needed", ("in_memory",)),
    "prompt_cache_options": Refusal("cached prefixes go when room is needed"),
    # vLLM and SGLang
    "echo": Refusal("is for /v1/completions; see continue_final_message", _OFF),
    "chat_template": Refusal(
        "the checkpoint's own template is used; send /v1/completions a prompt"
    ),
    "documents": Refusal("send them in chat_template_kwargs, where the template looks for them"),
    "input_ids": Refusal("send token ids as prompt to /v1/completions"),
    "task": Refusal("belongs to one model's prompt encoder; write it into the prompt"),
    "best_of": Refusal("is for /v1/completions", (1,)),
    "suffix": Refusal("is for /v1/completions"),
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
