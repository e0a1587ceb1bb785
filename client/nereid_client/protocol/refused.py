"""The fields of OpenAI, vLLM and SGLang that Nereid does not support, and the reasons.

A request with such a field is rejected with a 400 that names the field. A field that is neither
listed here nor declared in generation_requests.py is passed on to the backend.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereid_client.errors import FieldError, shown


@dataclass(frozen=True)
class Refusal:
    """The reason why a field is not supported.

    Attributes:
        reason: the end of the sentence "FIELD=VALUE is not supported: REASON".
        harmless: values that turn the feature off. A request with such a value, or with null, is
            accepted.
        code: the machine-readable reason in the error.
    """

    reason: str
    harmless: tuple[Any, ...] = ()
    code: str | None = None


VIDEO_PARTS = ("video", "video_url", "input_video")
"""The types of content parts that contain a video, by the names of several APIs."""
AUDIO_PARTS = ("audio", "audio_url", "input_audio")
"""The types of content parts that contain audio, by the names of several APIs."""

_FALSE = (False,)
_ONE_SERVER = "Nereid runs on one server and does not distribute a request among several"
_TEXT_ONLY = "the served model writes text only"
_CACHE_EVICTION = "cached prefixes are evicted when their memory is needed"

REFUSED = {
    # vLLM
    "truncation_side": Refusal("Nereid removes tokens only at the start of a prompt", ("left",)),
    "return_prompt_text": Refusal(
        "the response cannot contain the prompt's text; return_token_ids returns its token ids",
        _FALSE,
    ),
    "return_token_offsets": Refusal(
        "only logprobs of /v1/completions returns text offsets", _FALSE
    ),
    # SGLang
    "return_cached_tokens_details": Refusal(
        "Nereid has one prefix cache, and usage contains its cached_tokens", _FALSE
    ),
    "return_meta_info": Refusal("the response has no meta_info; usage has the counts", _FALSE),
    "input_embeds": Refusal("a prompt consists of text or token ids"),
    "ngram_corpus_id": Refusal("draft tokens are taken from the request's own text only"),
    "bootstrap_host": Refusal(_ONE_SERVER),
    "bootstrap_port": Refusal(_ONE_SERVER),
    "bootstrap_room": Refusal(_ONE_SERVER),
    "routed_dp_rank": Refusal(_ONE_SERVER),
    "disagg_prefill_dp_rank": Refusal(_ONE_SERVER),
    "data_parallel_rank": Refusal(_ONE_SERVER),
    # Nereid
    "client_id": Refusal("send the header X-Client-Id instead"),
    "client_weight": Refusal("only the table of an API key sets the weight of a client"),
}
"""Fields that chat completions, completions and responses refuse."""

REFUSED_IN_CHAT = {
    # OpenAI
    "audio": Refusal(_TEXT_ONLY),
    "modalities": Refusal(_TEXT_ONLY, (["text"],)),
    "functions": Refusal("the field tools has replaced it", ([],)),
    "function_call": Refusal("the field tool_choice has replaced it", ("none",)),
    "web_search_options": Refusal(
        "Nereid does not search the web; send a tool that searches instead"
    ),
    "moderation": Refusal("Nereid has no moderation model"),
    "prediction": Refusal("Nereid does not use predicted outputs, which only save time"),
    "store": Refusal("chat completions are not stored; /v1/responses stores its responses", _FALSE),
    "verbosity": Refusal(
        "chat templates have no such variable; ask for the desired length in a message", ("medium",)
    ),
    "prompt_cache_options": Refusal(_CACHE_EVICTION),
    # SGLang
    "input_ids": Refusal("only /v1/completions accepts token ids, in its field prompt"),
    # vLLM
    "echo": Refusal("only /v1/completions repeats text of the request", _FALSE),
    # completions
    "best_of": Refusal("only /v1/completions has it", (1,)),
}
"""Fields that only chat completions refuse."""

REFUSED_IN_COMPLETIONS = {
    "tools": Refusal("only /v1/chat/completions has tools", ([],)),
    "tool_choice": Refusal("only /v1/chat/completions has tools", ("none",)),
    "top_logprobs": Refusal(
        "only /v1/chat/completions has it; here, logprobs is the number of tokens", (0,)
    ),
}
"""Fields that only completions refuse."""

REFUSED_BY_BACKEND = frozenset(
    {
        # vLLM
        *("use_beam_search", "length_penalty", "early_stopping", "logprob_token_ids"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("guided_decoding_backend", "guided_whitespace_pattern", "logits_processors"),
        *("prompt_embeds", "repetition_detection", "stream_interval"),
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
        # KoboldCpp
        "typical",
    }
)
"""The backend refuses these fields, so that gRPC clients receive the same error as HTTP clients.

The frontend sends the fields to the backend unchanged."""


def refuse(body: Mapping[str, Any], *tables: Mapping[str, Refusal]) -> None:
    """Raise an error if a request body contains an unsupported field.

    A field is accepted if its value is null or harmless. For example, n=1 is harmless if the server
    supports only one choice.

    Args:
        body: the request body.
        tables: the unsupported fields. Each table maps the name of a field to the reason.

    Raises: FieldError that names the field, its value and the reason.
    """
    for table in tables:
        for name, refusal in table.items():
            value = body.get(name)
            # Python's `==` cannot distinguish the JSON values true and 1.
            is_harmless = any(_is_equal_json(value, one) for one in refusal.harmless)
            if value is None or is_harmless:
                continue
            raise FieldError(
                name,
                f"{name}={shown(value)} is not supported: {refusal.reason}. Remove {name} from the "
                "request.",
                code=refusal.code,
            )


def refuse_nested(
    place: str, value: Mapping[str, Any] | None, table: Mapping[str, Refusal]
) -> None:
    """Raise an error if an object in a request body contains an unsupported field.

    Args:
        place: the path of the object in the body, such as "reasoning".
        value: the object, or None if the body does not contain it.
        table: maps the name of each unsupported field of the object to the reason.

    Raises: FieldError.
    """
    if value is None:
        return
    # The error names the path of a field, such as "reasoning.generate_summary".
    fields = {f"{place}.{name}": member for name, member in value.items()}
    refusals = {f"{place}.{name}": refusal for name, refusal in table.items()}
    refuse(fields, refusals)


def _is_equal_json(first: object, second: object) -> bool:
    """Return whether two JSON values are equal. True and 1 are equal in Python, but not in JSON."""
    return first == second and isinstance(first, bool) == isinstance(second, bool)
