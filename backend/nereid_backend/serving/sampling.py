# SPDX-License-Identifier: Apache-2.0
"""From the fields of a request to SamplingParams and stop strings; nothing is accepted and ignored.

The names are those of vLLM's SamplingParams and of the OpenAI API, which mostly agree.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereid_backend.core.params import SamplingParams
from nereid_backend.errors import RequestError

# Fields that become SamplingParams, with the type that text is read as: genai-perf and Triton's
# request parameters send numbers as strings.
_ENGINE_FIELDS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "max_tokens": int,
    "min_tokens": int,
    "stop_token_ids": list,
    "ignore_eos": bool,
}
_TEXT_FIELDS: dict[str, type] = {
    "stop": list,
    "include_stop_str_in_output": bool,
    "skip_special_tokens": bool,
}

_SPOKEN = {float: "a number", int: "an integer", bool: "true or false", list: "a list"}

# Known fields that ask for something that is not there yet: the value that asks for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (0, False),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "use_beam_search": (False,),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "regex": (),
    "ebnf": (),
    "grammar": (),
    "lora_name": ("",),
    "suffix": ("",),
    "echo": (False,),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
}

MAX_STOP_STRINGS = 16


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What the postprocessor does with the text.

    Attributes:
        stop: strings that end the answer.
        include_stop_str_in_output: leave the one that was found in the text.
        skip_special_tokens: drop special tokens from the text.
    """

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


def read_generation_defaults(model: Path) -> dict[str, Any]:
    """Sampling defaults of a checkpoint: what its generation_config.json says.

    ``do_sample: false`` in so many words means greedy; a file that does not mention it leaves the
    API's default temperature of 1.
    """
    path = model / "generation_config.json"
    if not path.is_file():
        return {}
    config = json.loads(path.read_text(encoding="utf-8"))
    defaults = {
        name: config[name]
        for name in ("temperature", "top_p", "top_k", "min_p")
        if config.get(name) is not None
    }
    if config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def read_sampling(
    fields: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[SamplingParams, TextOptions]:
    """Sampling parameters and text options from a request's fields, over a checkpoint's defaults.

    Fields with other names are not looked at.

    Raises:
        RequestError: a wrong value, or a field that asks for what is not supported yet.
    """
    _refuse_unsupported(fields)
    engine = dict(defaults)
    text: dict[str, Any] = {}
    for known, values in ((_ENGINE_FIELDS, engine), (_TEXT_FIELDS, text)):
        for name, kind in known.items():
            if fields.get(name) is not None:
                values[name] = _typed(name, fields[name], kind)
    return SamplingParams(**engine), TextOptions(**text | {"stop": _stops(text.get("stop", []))})


def refuse_unknown(fields: Mapping[str, Any]) -> None:
    """Refuse names that no sampling parameter has, naming the nearest one.

    Raises:
        RequestError: an unknown name.
    """
    known = [*_ENGINE_FIELDS, *_TEXT_FIELDS, *_UNSUPPORTED]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            raise RequestError(f"{name}: is no sampling parameter{hint}")


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    for name, harmless in _UNSUPPORTED.items():
        value = fields.get(name)
        if value is None or value in harmless:
            continue
        if isinstance(value, str) and value.strip() in {str(v) for v in harmless}:
            continue
        allowed = f"leave it out or send {json.dumps(harmless[0])}" if harmless else "leave it out"
        raise RequestError(f"{name}: is not supported yet, got {value!r}; {allowed}")


def _typed(name: str, value: Any, kind: type) -> Any:  # noqa: ANN401 - any JSON value
    if not isinstance(value, str) or (name == "stop"):
        return value
    try:
        if kind is bool:
            return {"true": True, "false": False}[value.strip().lower()]
        if kind is list:
            return json.loads(value)
        return kind(value)
    except (ValueError, KeyError):
        raise RequestError(f"{name}: must be {_SPOKEN[kind]}, got {value!r}") from None


def _stops(value: Any) -> tuple[str, ...]:  # noqa: ANN401 - any JSON value
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError(f"stop: must be a string or a list of strings, got {value!r}")
    if any(stop == "" for stop in stops):
        raise RequestError("stop: an empty string would stop before the first token; remove it")
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(f"stop: has {len(stops)} strings; the limit is {MAX_STOP_STRINGS}")
    return tuple(stops)
