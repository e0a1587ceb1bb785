# SPDX-License-Identifier: Apache-2.0
"""From the fields of a request to SamplingParams and stop strings; nothing is accepted and ignored.

The names are those of vLLM's SamplingParams and of the OpenAI API, which mostly agree.
"""

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereid_backend.core.sampling_params import MAX_LOGPROBS, SamplingParams
from nereid_backend.errors import RequestError
from nereid_backend.serving.tokenizer import unsupported_fields

Encode = Callable[[str], list[int]]

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
    "n": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "allowed_token_ids": list,
    "prompt_logprobs": int,
    "priority": int,
    "cache_salt": str,
}
_TEXT_FIELDS: dict[str, type] = {
    "stop": list,
    "include_stop_str_in_output": bool,
    "no_stop_trim": bool,
    "skip_special_tokens": bool,
    "separate_reasoning": bool,
    "include_reasoning": bool,
    "return_token_ids": bool,
    "return_prompt_token_ids": bool,
}
# Read by functions of their own, here and in grammars.py and thinking.py.
_OTHER_FIELDS = (
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "bad_words",
    "best_of",
    "extra_key",
    "add_special_tokens",
    "reasoning_format",
    "response_format",
    "structured_outputs",
    "regex",
    "ebnf",
    "json_schema",
    "grammar",
    "thinking_token_budget",
    "reasoning_budget_tokens",
    "custom_params",
    "timeout",
    "queue_timeout",
)

_SPOKEN = {
    float: "a number",
    int: "an integer",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}

MAX_BAD_WORDS = 128
MAX_STOP_STRINGS = 16


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What the postprocessor does with the text.

    Attributes:
        stop: strings that end the answer.
        include_stop_str_in_output: leave the one that was found in the text.
        skip_special_tokens: drop special tokens from the text.
        separate_reasoning: False leaves reasoning in the content, as written.
        include_reasoning: False leaves reasoning out.
        return_token_ids: give the ids of the answer and the prompt.
    """

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    separate_reasoning: bool = True
    include_reasoning: bool = True
    return_token_ids: bool = False


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
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        if config.get(name) is not None
    }
    if config.get("max_new_tokens") is not None:
        defaults["max_tokens"] = config["max_new_tokens"]
    if config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def read_sampling(
    fields: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    encode: Encode | None = None,
    is_chat: bool = False,
    **parts: Any,  # noqa: ANN401 - fields of SamplingParams
) -> tuple[SamplingParams, TextOptions]:
    """Sampling parameters and text options from a request's fields, over a checkpoint's defaults.

    Fields with other names are not looked at.

    Args:
        fields: what the request says.
        defaults: what the checkpoint says.
        encode: text to token ids, for bad_words.
        is_chat: whether logprobs is the chat API's (true, with top_logprobs) or a number.
        parts: parameters that were made elsewhere: grammar, thinking.

    Raises:
        RequestError: a wrong value, or a field that asks for what is not supported.
    """
    unsupported_fields.refuse_unsupported(fields)
    engine = dict(defaults)
    text: dict[str, Any] = {}
    for known, values in ((_ENGINE_FIELDS, engine), (_TEXT_FIELDS, text)):
        for name, kind in known.items():
            if fields.get(name) is not None:
                values[name] = _typed(name, fields[name], kind)
    if engine.get("allowed_token_ids") == []:
        del engine["allowed_token_ids"]
    engine["logprobs"] = _logprobs(fields, is_chat=is_chat)
    engine["logit_bias"] = _logit_bias(fields.get("logit_bias"))
    engine["bad_words_token_ids"] = _bad_words(fields.get("bad_words"), encode)
    engine["cache_salt"] = _cache_salt(engine.get("cache_salt", ""), fields.get("extra_key"))
    params = SamplingParams(**engine | parts)
    _check_best_of(fields.get("best_of"), params.n)
    return params, _text_options(text, fields)


def read_timeouts(fields: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """How long a request may take in all, and how long it may wait; seconds, None for unsaid.

    Raises:
        RequestError: no number of seconds.
    """
    return _seconds("timeout", fields.get("timeout")), _seconds(
        "queue_timeout", fields.get("queue_timeout")
    )


def _seconds(name: str, value: Any) -> float | None:  # noqa: ANN401 - any JSON value
    seconds = _typed(name, value, float)
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise RequestError(f"{name}: must be a number of seconds, got {value!r}")
    if not 0 <= seconds < math.inf:
        raise RequestError(f"{name}: must be at least 0 seconds (0 is no limit), got {value!r}")
    return float(seconds)


def refuse_unknown(fields: Mapping[str, Any]) -> None:
    """Refuse names that no sampling parameter has, naming the nearest one.

    Raises:
        RequestError: an unknown name.
    """
    known = [*_ENGINE_FIELDS, *_TEXT_FIELDS, *_OTHER_FIELDS, *unsupported_fields.NAMES]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            raise RequestError(f"{name}: is no sampling parameter{hint}")


def _text_options(text: Mapping[str, Any], fields: Mapping[str, Any]) -> TextOptions:
    for name, value in text.items():
        if _TEXT_FIELDS[name] is bool and not isinstance(value, bool):
            raise RequestError(f"{name}: must be true or false, got {value!r}")
    reasoning_format = fields.get("reasoning_format")
    if reasoning_format not in (None, "none", "auto", "deepseek"):
        raise RequestError(
            f"reasoning_format: must be none, auto or deepseek, got {reasoning_format!r}"
        )
    return TextOptions(
        stop=_stops(text.get("stop", [])),
        include_stop_str_in_output=text.get("include_stop_str_in_output", False)
        or text.get("no_stop_trim", False),
        skip_special_tokens=text.get("skip_special_tokens", True),
        separate_reasoning=text.get("separate_reasoning", reasoning_format != "none"),
        include_reasoning=text.get("include_reasoning", True),
        return_token_ids=text.get("return_token_ids", False)
        or text.get("return_prompt_token_ids", False),
    )


def _logprobs(fields: Mapping[str, Any], *, is_chat: bool) -> int | None:
    """How many likeliest tokens to report beside each one; None for no report."""
    value, top = (_number(fields, name) for name in ("logprobs", "top_logprobs"))
    if is_chat and value not in (None, False, True):
        raise RequestError(
            f"logprobs: must be true or false, got {value!r}; top_logprobs says how many"
        )
    if value is False or value is None:
        if top:
            raise RequestError(f"top_logprobs: needs logprobs to be true, got {top!r}")
        return None
    name = "top_logprobs" if value is True else "logprobs"
    count: object = (top or 0) if value is True else value
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_LOGPROBS:
        raise RequestError(f"{name}: must be between 0 and {MAX_LOGPROBS}, got {count!r}")
    return count


def _number(fields: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - any JSON value
    value = fields.get(name)
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return _typed(name, value, bool)
    return _typed(name, value, int)


def _logit_bias(value: Any) -> dict[int, float]:  # noqa: ANN401 - any JSON value
    biases = _typed("logit_bias", value, dict)
    if biases is None:
        return {}
    if not isinstance(biases, Mapping):
        raise RequestError(f"logit_bias: must be an object, got {value!r}")
    try:
        return {int(token_id): bias for token_id, bias in biases.items()}
    except ValueError:
        raise RequestError(
            f"logit_bias: keys must be token ids, got {next(iter(biases))!r}"
        ) from None


def _bad_words(value: Any, encode: Encode | None) -> list[list[int]]:  # noqa: ANN401 - any JSON value
    """Token ids of each word as it begins a text and, where that is another token, behind a space.

    The rules are vLLM's: the form behind a space counts only where it is as long and begins with
    another token.
    """
    words = _typed("bad_words", value, list)
    if not words:
        return []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise RequestError(f"bad_words: must be a list of strings, got {value!r}")
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(f"bad_words: has {len(words)} words; the limit is {MAX_BAD_WORDS}")
    if encode is None:
        raise RequestError("bad_words: there is no tokenizer here; leave it out")
    found: list[list[int]] = []
    for word in words:
        first = encode(word.lstrip())
        if not first:
            raise RequestError(f"bad_words: {word!r} has no tokens; remove it")
        found.append(first)
        spaced = encode(" " + word.lstrip())
        if spaced and spaced[0] != first[0] and len(spaced) == len(first):
            found.append(spaced)
    return found


def _cache_salt(salt: object, extra: object) -> str:
    """SGLang's extra_key parts the prefix cache as cache_salt does; both together do, too."""
    for name, value in (("cache_salt", salt), ("extra_key", extra)):
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{name}: must be a string, got {value!r}")
    return f"{salt}" if not extra else f"{salt}\0{extra}"


def _check_best_of(value: Any, n: int) -> None:  # noqa: ANN401 - any JSON value
    best_of = _typed("best_of", value, int)
    if best_of is not None and best_of != n:
        raise RequestError(
            f"best_of: the ensemble gives every answer that it generates; send n: {best_of!r} and "
            "choose by cumulative_logprob"
        )


def _typed(name: str, value: Any, kind: type) -> Any:  # noqa: ANN401 - any JSON value
    if not isinstance(value, str) or (name == "stop"):
        return value
    try:
        if kind is bool:
            return {"true": True, "false": False}[value.strip().lower()]
        if kind in (list, dict):
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
