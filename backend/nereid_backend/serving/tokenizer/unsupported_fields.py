# SPDX-License-Identifier: Apache-2.0
"""The known but unsupported request fields of vLLM, SGLang and llama.cpp.

If a request uses such a field, the request is refused, and the error message contains the reason.
Exception: the default value of a field, such as `use_beam_search: false`, is accepted, because it
has no effect.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereid_backend.errors import RequestError
from nereid_backend.request_field_checks import shown


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Describes a request field that this server does not support.

    Attributes:
        reason: a clause without a full stop. docs/reference/request-fields.md contains this clause.
        accepted: values that have no effect, such as the API's default.
        remedy: an imperative clause. If the clause is empty, the error message says to leave the
            field out or to send an accepted value.
    """

    reason: str
    accepted: tuple[Any, ...] = ()
    remedy: str = ""


_NO_BEAM_SEARCH = "this server does not support beam search"
_NO_MEDIA_OPTIONS = "a request cannot choose how images, videos and audio are prepared"
_NO_REQUEST_CODE = "this server does not run code from requests"
_NO_TRANSFER = "this server does not transfer the state of a request to other servers"
_NO_WATERMARKS = "this server does not support watermarks"
_USE_OTHER_SAMPLING = "Use temperature, top_p, top_k or min_p instead"
_NO_SUCH_SAMPLER = "this server does not support this sampler"


def _replaced_by(field: str) -> _Refusal:
    """Return a `_Refusal` which says that clients must send `field` instead."""
    return _Refusal(f"{field} replaces this field", remedy=f"Send {field} instead")


_REFUSALS: dict[str, _Refusal] = {
    # Fields of vLLM
    "length_penalty": _Refusal(_NO_BEAM_SEARCH, (1,)),
    "use_beam_search": _Refusal(_NO_BEAM_SEARCH, (False,)),
    "early_stopping": _Refusal(_NO_BEAM_SEARCH, (False,)),
    "guided_json": _replaced_by("structured_outputs.json"),
    "guided_regex": _replaced_by("structured_outputs.regex"),
    "guided_choice": _replaced_by("structured_outputs.choice"),
    "guided_grammar": _replaced_by("structured_outputs.grammar"),
    "guided_decoding_backend": _Refusal("a request cannot choose the grammar library"),
    "guided_whitespace_pattern": _Refusal(
        "a request cannot choose the whitespace of its JSON output"
    ),
    "logits_processors": _Refusal(_NO_REQUEST_CODE, ([],)),
    "logprob_token_ids": _Refusal(
        "this server reports log-probabilities only of the most likely tokens",
        ([],),
    ),
    "prompt_embeds": _Refusal("a prompt must be text or token ids"),
    "spaces_between_special_tokens": _Refusal(
        "a request cannot choose the spaces between special tokens", (True,)
    ),
    "suffix": _Refusal("this server does not support filling in the middle", ("",)),
    "echo": _Refusal(
        "this server repeats the prompt only for exclude_input_in_output=false", (False,)
    ),
    "chat_template": _Refusal(
        "a request cannot choose the chat template (the setting chat_template does)", ("",)
    ),
    "watermarking": _Refusal(_NO_WATERMARKS, (False,)),
    "repetition_detection": _Refusal(
        "this server does not detect repetition",
        remedy="Use repetition_penalty, presence_penalty or frequency_penalty instead",
    ),
    "kv_transfer_params": _Refusal(_NO_TRANSFER),
    "ec_transfer_params": _Refusal(_NO_TRANSFER),
    "vllm_xargs": _Refusal("this server accepts no extra arguments", ({},)),
    "media_io_kwargs": _Refusal(_NO_MEDIA_OPTIONS, ({},)),
    "mm_processor_kwargs": _Refusal(_NO_MEDIA_OPTIONS, ({},)),
    "stream_interval": _Refusal(
        "a request cannot choose how many tokens a response carries "
        "(the setting responses_per_second does)",
        (1,),
    ),
    # Fields of SGLang
    "stop_regex": _Refusal(
        "a stop condition must be a string or a token id, not a regular expression", ([], "")
    ),
    "lora_path": _Refusal(
        "lora_name replaces this field", ("", []), remedy="Send lora_name instead"
    ),
    "session_params": _Refusal("this server does not store sessions", ({},)),
    "custom_logit_processor": _Refusal(_NO_REQUEST_CODE, ("",)),
    "return_hidden_states": _Refusal("this server does not return hidden states", (False,)),
    "return_routed_experts": _Refusal("this server does not return routed experts", (False,)),
    "return_sampling_mask": _Refusal("this server does not return sampling masks", (False,)),
    "stream_reasoning": _Refusal("this server always streams reasoning", (True,)),
    "images_config": _Refusal(_NO_MEDIA_OPTIONS, ({},)),
    "video_config": _Refusal(_NO_MEDIA_OPTIONS, ({},)),
    "use_audio_in_video": _Refusal(_NO_MEDIA_OPTIONS, (False,)),
    "max_dynamic_patch": _Refusal(_NO_MEDIA_OPTIONS),
    "min_dynamic_patch": _Refusal(_NO_MEDIA_OPTIONS),
    "watermark": _Refusal(_NO_WATERMARKS, ({},)),
    "task": _Refusal("this server builds the prompt with the chat template alone"),
    # Fields of llama.cpp
    "mirostat": _Refusal(_NO_SUCH_SAMPLER, (0,), _USE_OTHER_SAMPLING),
    "typical_p": _Refusal(_NO_SUCH_SAMPLER, (1,), _USE_OTHER_SAMPLING),
    "typical": _Refusal(_NO_SUCH_SAMPLER, (1,), _USE_OTHER_SAMPLING),  # KoboldCpp's name
    "tfs_z": _Refusal(_NO_SUCH_SAMPLER, (1,), _USE_OTHER_SAMPLING),
    "dynatemp_range": _Refusal(_NO_SUCH_SAMPLER, (0,), _USE_OTHER_SAMPLING),
    "dry_multiplier": _Refusal(_NO_SUCH_SAMPLER, (0,), _USE_OTHER_SAMPLING),
    "xtc_probability": _Refusal(_NO_SUCH_SAMPLER, (0,), _USE_OTHER_SAMPLING),
    "samplers": _Refusal(_NO_SUCH_SAMPLER, ([],), _USE_OTHER_SAMPLING),
    "n_probs": _Refusal(
        "logprobs and top_logprobs replace this field",
        (0,),
        "Send logprobs and top_logprobs instead",
    ),
}

NAMES = tuple(_REFUSALS)


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Raise a RequestError if a request has an unsupported field.

    Example: `{"use_beam_search": True}` raises "use_beam_search: this server does not support beam
    search, but the request has true. Leave the field out or send false."

    Raises:
        RequestError: the request has an unsupported field, and the value of the field is not
            accepted.
    """
    for name, refusal in _REFUSALS.items():
        value = fields.get(name)
        if value is None or _is_accepted(value, refusal.accepted):
            continue
        raise RequestError(
            f"{name}: {refusal.reason}, but the request has {shown(value)}. {_remedy(refusal)}."
        )


def _is_accepted(value: object, accepted: tuple[Any, ...]) -> bool:
    """Return whether `value` is in `accepted`. The text "false" counts as the value False."""
    if isinstance(value, str):
        texts = {str(accepted_value).lower() for accepted_value in accepted}
        return value in accepted or value.strip().lower() in texts
    return value in accepted


def _remedy(refusal: _Refusal) -> str:
    """Return the last sentence of an error message, without its full stop."""
    if refusal.remedy:
        return refusal.remedy
    if refusal.accepted:
        return f"Leave the field out or send {json.dumps(refusal.accepted[0])}"
    return "Leave the field out"
