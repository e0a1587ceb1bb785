# SPDX-License-Identifier: Apache-2.0
"""Reads SamplingParams, stop strings and timeouts from a request's fields.

The field names are those of vLLM's SamplingParams and of the OpenAI API, which mostly agree. Each
known field either has an effect or is refused; none is ignored silently.
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
from nereid_backend.serving.tokenizer.error_values import shown

Encode = Callable[[str], list[int]]

# Fields of SamplingParams, and the type that a text value is converted to. Values can be text,
# because genai-perf and Triton's request parameters send numbers as strings.
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
# Fields that functions of this module, request_grammar.py and thinking_effort.py read by name.
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
FIELD_NAMES = (*_ENGINE_FIELDS, *_TEXT_FIELDS, *_OTHER_FIELDS)

_REASONING_FORMATS = ("none", "auto", "deepseek")
_BOOLEAN_TEXTS = {"true": True, "false": False}
_TYPE_NAMES = {
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
    """The options with which the postprocessor converts generated tokens to text.

    Attributes:
        stop: strings at which generation ends.
        include_stop_str_in_output: whether the text keeps the stop string that ended it.
        skip_special_tokens: whether special tokens are removed from the text.
        separate_reasoning: whether reasoning is a field of its own. If False, reasoning stays in
            the content, with its markers.
        include_reasoning: whether responses contain reasoning at all.
        return_token_ids: whether responses contain the token ids of the prompt and of the output.
    """

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    separate_reasoning: bool = True
    include_reasoning: bool = True
    return_token_ids: bool = False


def read_generation_defaults(model: Path) -> dict[str, Any]:
    """Return the sampling defaults of a checkpoint from its generation_config.json.

    `do_sample: false` sets temperature to 0, which is greedy decoding. A file without `do_sample`
    leaves the API's default temperature of 1. Example: `{"do_sample": false, "max_new_tokens": 9}`
    returns `{"temperature": 0.0, "max_tokens": 9}`.
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
    """Return the sampling parameters and the text options of a request.

    Args:
        fields: the request's fields. Names that this module does not know are skipped here; see
            refuse_unknown.
        defaults: the checkpoint's sampling defaults, used for fields that the request lacks.
        encode: converts text to token ids. Only bad_words needs it.
        is_chat: whether logprobs is a boolean with a separate top_logprobs, as in the chat API.
            Otherwise logprobs is a number, as in the completions API.
        parts: fields of SamplingParams that the caller has built: grammar and thinking.

    Raises:
        RequestError: a field has a wrong value or is not supported.
    """
    unsupported_fields.refuse_unsupported(fields)
    engine_values = {**defaults, **_read_fields(fields, _ENGINE_FIELDS)}
    text_values = _read_fields(fields, _TEXT_FIELDS)
    if engine_values.get("allowed_token_ids") == []:
        del engine_values["allowed_token_ids"]
    engine_values["logprobs"] = _read_logprobs(fields, is_chat=is_chat)
    engine_values["logit_bias"] = _read_logit_bias(fields.get("logit_bias"))
    engine_values["bad_words_token_ids"] = _read_bad_words(fields.get("bad_words"), encode)
    engine_values["cache_salt"] = _join_cache_salt(
        engine_values.get("cache_salt", ""), fields.get("extra_key")
    )
    params = SamplingParams(**engine_values | parts)
    _check_best_of(fields.get("best_of"), params.n)
    return params, _read_text_options(text_values, fields)


def read_timeouts(fields: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return a request's `timeout` and `queue_timeout` in seconds; None for a missing field.

    Raises:
        RequestError: a value is not a number of seconds.
    """
    timeout = _read_seconds("timeout", fields.get("timeout"))
    queue_timeout = _read_seconds("queue_timeout", fields.get("queue_timeout"))
    return timeout, queue_timeout


def refuse_unknown(fields: Mapping[str, Any]) -> None:
    """Refuse a field that is not a sampling parameter, and suggest the most similar known name.

    Raises:
        RequestError: `fields` has an unknown name.
    """
    known = [*FIELD_NAMES, *unsupported_fields.NAMES]
    for name in fields:
        if name not in known:
            similar = difflib.get_close_matches(name, known, n=1)
            hint = f' Did you mean "{similar[0]}"?' if similar else ""
            raise RequestError(f"{name}: this name is not a known sampling parameter.{hint}")


def _read_fields(fields: Mapping[str, Any], types: Mapping[str, type]) -> dict[str, Any]:
    """Return the values of the fields named in `types`; text is converted to the field's type."""
    return {
        name: _convert(name, fields[name], kind)
        for name, kind in types.items()
        if fields.get(name) is not None
    }


def _convert(name: str, value: Any, kind: type) -> Any:  # noqa: ANN401 - any JSON value
    """Convert a text value to `kind`. Return any other value unchanged.

    Example: `_convert("top_k", "5", int)` returns 5. `stop` stays text, because one stop string
    may be sent without a list.
    """
    if not isinstance(value, str) or name == "stop":
        return value
    try:
        if kind is bool:
            return _BOOLEAN_TEXTS[value.strip().lower()]
        if kind in (list, dict):
            return json.loads(value)
        return kind(value)
    except (ValueError, KeyError):
        raise RequestError(
            f"{name}: the value must be {_TYPE_NAMES[kind]}, but the request has {shown(value)}."
        ) from None


def _read_seconds(name: str, value: Any) -> float | None:  # noqa: ANN401 - any JSON value
    seconds = _convert(name, value, float)
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise RequestError(
            f"{name}: the value must be a number of seconds, but the request has {shown(value)}."
        )
    if not 0 <= seconds < math.inf:
        raise RequestError(
            f"{name}: the value must be a finite number of at least 0 seconds (0 means no limit), "
            f"but the request has {shown(value)}."
        )
    return float(seconds)


def _read_text_options(values: Mapping[str, Any], fields: Mapping[str, Any]) -> TextOptions:
    for name, value in values.items():
        if _TEXT_FIELDS[name] is bool and not isinstance(value, bool):
            raise RequestError(
                f"{name}: the value must be true or false, but the request has {shown(value)}."
            )
    reasoning_format = fields.get("reasoning_format")
    if reasoning_format is not None and reasoning_format not in _REASONING_FORMATS:
        raise RequestError(
            f"reasoning_format: the value must be one of {', '.join(_REASONING_FORMATS)}, but the "
            f"request has {shown(reasoning_format)}."
        )
    # SGLang's no_stop_trim means the same as vLLM's include_stop_str_in_output.
    keeps_stop_string = values.get("include_stop_str_in_output") or values.get("no_stop_trim")
    returns_ids = values.get("return_token_ids") or values.get("return_prompt_token_ids")
    return TextOptions(
        stop=_read_stop_strings(values.get("stop", [])),
        include_stop_str_in_output=bool(keeps_stop_string),
        skip_special_tokens=values.get("skip_special_tokens", True),
        separate_reasoning=values.get("separate_reasoning", reasoning_format != "none"),
        include_reasoning=values.get("include_reasoning", True),
        return_token_ids=bool(returns_ids),
    )


def _read_logprobs(fields: Mapping[str, Any], *, is_chat: bool) -> int | None:
    """Return how many of the most likely tokens to report at each position; None for no report.

    Examples: `logprobs: true, top_logprobs: 5` returns 5, `logprobs: true` returns 0 (only the
    chosen token), and the number `logprobs: 3` of a completion request returns 3.
    """
    logprobs = _read_number_or_flag(fields, "logprobs")
    top_logprobs = _read_number_or_flag(fields, "top_logprobs")
    if is_chat and logprobs not in (None, False, True):
        raise RequestError(
            f"logprobs: the value must be true or false, but the request has {shown(logprobs)}. "
            "Send the number of tokens as top_logprobs."
        )
    if logprobs is False or logprobs is None:
        if top_logprobs:
            raise RequestError(
                "top_logprobs: this field requires logprobs=true. Send logprobs=true or leave "
                "top_logprobs out."
            )
        return None
    name = "top_logprobs" if logprobs is True else "logprobs"
    count: object = (top_logprobs or 0) if logprobs is True else logprobs
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_LOGPROBS:
        raise RequestError(
            f"{name}: the value must be an integer from 0 to {MAX_LOGPROBS}, but the request has "
            f"{shown(count)}."
        )
    return count


def _read_number_or_flag(fields: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - any JSON value
    value = fields.get(name)
    is_flag = isinstance(value, str) and value.strip().lower() in _BOOLEAN_TEXTS
    return _convert(name, value, bool if is_flag else int)


def _read_logit_bias(value: Any) -> dict[int, float]:  # noqa: ANN401 - any JSON value
    """Return the bias of each token id. JSON keys are text: `{"5": -1.5}` returns `{5: -1.5}`."""
    biases = _convert("logit_bias", value, dict)
    if biases is None:
        return {}
    if not isinstance(biases, Mapping):
        raise RequestError(
            "logit_bias: the value must be an object that maps token ids to numbers, but the "
            f"request has {shown(value)}."
        )
    try:
        return {int(token_id): bias for token_id, bias in biases.items()}
    except ValueError:
        raise RequestError(
            f"logit_bias: each key must be a token id, but the request has {shown(list(biases))}."
        ) from None


def _read_bad_words(value: Any, encode: Encode | None) -> list[list[int]]:  # noqa: ANN401 - any JSON value
    """Return the token id sequences that must not be generated.

    A word can begin a text ("no") or follow a space (" no"), and tokenizers usually have different
    tokens for the two. As in vLLM, the form after a space is added only if it has as many tokens
    and begins with a different one. Example: with the vocabulary {"no": [1], " no": [2]}, the word
    "no" returns [[1], [2]].
    """
    words = _convert("bad_words", value, list)
    if not words:
        return []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise RequestError(
            f"bad_words: the value must be a list of strings, but the request has {shown(value)}."
        )
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words: the list must have at most {MAX_BAD_WORDS} words, but the request has "
            f"{len(words)}."
        )
    if encode is None:
        raise RequestError(
            "bad_words: this server has no tokenizer to encode the words. Leave the field out."
        )
    sequences: list[list[int]] = []
    for word in words:
        at_start = encode(word.lstrip())
        if not at_start:
            raise RequestError(f"bad_words: the word {shown(word)} has no tokens. Remove it.")
        sequences.append(at_start)
        after_space = encode(" " + word.lstrip())
        if after_space and after_space[0] != at_start[0] and len(after_space) == len(at_start):
            sequences.append(after_space)
    return sequences


def _join_cache_salt(salt: object, extra_key: object) -> str:
    r"""Return one salt of the prefix cache for vLLM's cache_salt and SGLang's extra_key.

    Example: the salt "me" and the extra key "tenant" return "me\0tenant".
    """
    for name, value in (("cache_salt", salt), ("extra_key", extra_key)):
        if value is not None and not isinstance(value, str):
            raise RequestError(
                f"{name}: the value must be a string, but the request has {shown(value)}."
            )
    return f"{salt}" if not extra_key else f"{salt}\0{extra_key}"


def _check_best_of(value: Any, n: int) -> None:  # noqa: ANN401 - any JSON value
    best_of = _convert("best_of", value, int)
    if best_of is not None and best_of != n:
        raise RequestError(
            f"best_of: this server returns every choice that it generates, so best_of must equal n "
            f"({n}), but the request has {shown(best_of)}. Send n={shown(best_of)} and select the "
            "choices with the highest cumulative_logprob."
        )


def _read_stop_strings(value: Any) -> tuple[str, ...]:  # noqa: ANN401 - any JSON value
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError(
            "stop: the value must be a string or a list of strings, but the request has "
            f"{shown(value)}."
        )
    if any(stop == "" for stop in stops):
        raise RequestError(
            "stop: an empty string would end generation before the first token. Remove it."
        )
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(
            f"stop: the list must have at most {MAX_STOP_STRINGS} strings, but the request has "
            f"{len(stops)}."
        )
    return tuple(stops)
