# SPDX-License-Identifier: Apache-2.0
"""Converts the fields of a request to SamplingParams and RequestOptions.

Each known field either has an effect or is refused. No known field is ignored silently.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereid_backend.core.grammar import GrammarSpec, ThinkingSpec
from nereid_backend.core.sampling_params import MAX_LOGPROBS, SamplingParams
from nereid_backend.errors import ModelError, RequestError
from nereid_backend.request_field_checks import CheckedSamplingParams, shown
from nereid_backend.serving.tokenizer.request_fields import (
    CACHE_RETENTIONS,
    ENGINE_FIELDS,
    RequestFields,
    select_and_parse,
)
from nereid_backend.serving.tokenizer.unsupported_fields import refuse_unsupported

Encode = Callable[[str], list[int]]

# The sampling parameters that have the same name in generation_config.json and in a request.
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Fields of generation_config.json that change the output of transformers, but not the output of
# Nereid. A field maps to the number with which it has no effect, or to None.
_IGNORED: dict[str, float | None] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "token_healing": 0,  # equals false
    "top_h": None,
    "typical_p": 1,
    "watermarking_config": None,
}


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of a request that the engine does not need.

    They determine the text of the responses and the time limits of the request.

    Attributes:
        stop: strings at which generation ends.
        include_stop_str_in_output: whether the text contains the stop string at which generation
            ended.
        skip_special_tokens: whether special tokens are removed from the text.
        separate_reasoning: whether responses contain reasoning in a separate field. If False, the
            reasoning and its markers stay in the content.
        include_reasoning: whether responses contain reasoning at all.
        return_token_ids: whether responses contain the token ids of the prompt and of the output.
        timeout_s: the time limit of the request in seconds. 0 means no limit, and None means the
            server's default.
        queue_timeout_s: the time limit for waiting in the queue in seconds. 0 means no limit, and
            None means the server's default.
    """

    stop: tuple[str, ...]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    separate_reasoning: bool
    include_reasoning: bool
    return_token_ids: bool
    timeout_s: float | None
    queue_timeout_s: float | None


def read_generation_defaults(model: Path) -> dict[str, Any]:
    """Read generation_config.json of a checkpoint, and return the sampling defaults.

    `do_sample: false` sets the temperature to 0 (greedy decoding), even if the file contains a
    temperature. If `do_sample` is missing, it counts as true. Example: `{"do_sample": false,
    "top_p": 0.9, "max_new_tokens": 9}` returns `{"temperature": 0.0, "top_p": 0.9, "max_tokens":
    9}`.

    Raises:
        ModelError: the file is damaged, or a default has a wrong value.
    """
    path = model / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        defaults = _read_defaults(path)
        CheckedSamplingParams(**defaults)
    except (OSError, ValueError, RequestError) as error:
        # The class CheckedSamplingParams checks requests, so its messages say "the request has".
        problem = str(error).rstrip(".").replace("the request has", "the file has")
        raise ModelError(f"{path}: {problem}. Correct or delete the file.") from error
    return defaults


def _read_defaults(path: Path) -> dict[str, Any]:
    """Return the sampling defaults in the file generation_config.json.

    Raises:
        OSError, ValueError: the file cannot be read, or is not a JSON object.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"the file must contain a JSON object, but it contains {shown(config)}")
    defaults = {name: config[name] for name in _DEFAULTED if config.get(name) is not None}
    if config.get("max_new_tokens") is not None:
        defaults["max_tokens"] = config["max_new_tokens"]
    if config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def ignored_defaults(model: Path) -> list[str]:
    """Return the names of fields of generation_config.json that change nothing in Nereid.

    Example: `{"top_p": 0.9, "num_beams": 4, "no_repeat_ngram_size": 0}` returns `["num_beams"]`.
    `read_generation_defaults` must have read the file before.
    """
    path = model / "generation_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return [
        name
        for name, neutral in _IGNORED.items()
        if config.get(name) not in (None, neutral, [], {})
    ]


def read_sampling(
    fields: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    encode: Encode | None = None,
    is_chat: bool = False,
    grammar: GrammarSpec | None = None,
    thinking: ThinkingSpec | None = None,
) -> tuple[SamplingParams, RequestOptions]:
    """Return the sampling parameters and the options of a request.

    Args:
        fields: the request's fields. Unknown names are skipped here, because the function
            refuse_unknown checks the names.
        defaults: the checkpoint's sampling defaults. They replace missing fields.
        encode: converts text to token ids. Only bad_words needs it.
        is_chat: whether the request is a chat. The field logprobs of a chat must be a boolean.
        grammar: the grammar that the output must match; None for any text.
        thinking: the limit on the reasoning; None for no limit.

    Raises:
        RequestError: a field has a wrong value or is not supported.
    """
    refuse_unsupported(fields)
    engine_fields = _engine_fields(fields, defaults)
    # The API and the engine have different names or types for the fields in `api_fields`.
    api_fields = RequestFields.check(fields)
    # The constructor also validates the values in `engine_fields`.
    params = CheckedSamplingParams(
        **engine_fields,
        cache_salt=_cache_salt(api_fields),
        # The time to live (TTL) is the time after which cached prefixes expire.
        prompt_cache_ttl=CACHE_RETENTIONS[api_fields.prompt_cache_retention or "in_memory"],
        logprobs=_read_logprobs(api_fields, is_chat=is_chat),
        logit_bias=_read_logit_bias(api_fields.logit_bias),
        bad_words_token_ids=_read_bad_words(api_fields.bad_words, encode),
        grammar=grammar,
        thinking=thinking,
    )
    _check_best_of(api_fields.best_of, params.n)
    return params, _options(api_fields)


def _engine_fields(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have the same name and type in a request and in SamplingParams.

    `defaults` replace missing fields. Example: the fields `{"top_k": 5}` and the defaults
    `{"top_k": 9, "top_p": 0.5}` return `{"top_k": 5, "top_p": 0.5}`.
    """
    engine_fields = {**defaults, **select_and_parse(fields, ENGINE_FIELDS)}
    if engine_fields.get("allowed_token_ids") == []:
        # Some clients send [] if all tokens are allowed, but the engine refuses an empty list.
        del engine_fields["allowed_token_ids"]
    return engine_fields


def _cache_salt(fields: RequestFields) -> str:
    r"""Return the salt of the prefix cache. Only requests with the same salt share cached blocks.

    Example: the cache_salt "me" and the extra_key "tenant" give the salt "me\0tenant".
    """
    if not fields.extra_key:
        return fields.cache_salt
    return f"{fields.cache_salt}\0{fields.extra_key}"


def _check_best_of(best_of: int | None, n: int) -> None:
    """Raise a RequestError if `best_of` is set and differs from the number of choices `n`."""
    if best_of not in (None, n):
        raise RequestError(
            f"best_of: the value must equal n ({n}), but the request has {best_of}. This server "
            f"returns every choice that it generates. Send n={best_of} and select the choices with "
            "the highest cumulative_logprob."
        )


def _options(fields: RequestFields) -> RequestOptions:
    """Return the options of a request.

    Some options have two names from different APIs, such as include_stop_str_in_output (vLLM) and
    no_stop_trim (SGLang). Such an option is on if the request turns on at least one of the two
    fields.

    Raises:
        RequestError: a stop string is empty.
    """
    if "" in fields.stop:
        raise RequestError(
            "stop: an empty string would end generation before the first token. Remove it."
        )
    separate_reasoning = fields.separate_reasoning
    if separate_reasoning is None:
        # In llama.cpp's API, `reasoning_format: "none"` means that reasoning stays in the content.
        separate_reasoning = fields.reasoning_format != "none"
    return RequestOptions(
        stop=tuple(fields.stop),
        include_stop_str_in_output=fields.include_stop_str_in_output or fields.no_stop_trim,
        skip_special_tokens=fields.skip_special_tokens,
        separate_reasoning=separate_reasoning,
        include_reasoning=fields.include_reasoning,
        # If return_token_ids or return_prompt_token_ids is set, the response contains the token ids
        # of the prompt and of the output.
        return_token_ids=fields.return_token_ids or fields.return_prompt_token_ids,
        timeout_s=fields.timeout,
        queue_timeout_s=fields.queue_timeout,
    )


def _read_logprobs(fields: RequestFields, *, is_chat: bool) -> int | None:
    """Return the number of most likely tokens that the response must list at each position.

    Examples: `logprobs: true, top_logprobs: 5` returns 5, `logprobs: true` returns 0 (only the
    chosen token), and the number `logprobs: 3` of a completion request returns 3. Return None if
    the request asks for no log-probabilities.
    """
    # In Python, True and False are integers, too. The booleans are therefore handled first.
    if fields.logprobs is True:
        return fields.top_logprobs
    if fields.logprobs is None or fields.logprobs is False:
        if fields.top_logprobs:
            raise RequestError(
                "top_logprobs: this field requires logprobs=true. Send logprobs=true or leave "
                "top_logprobs out."
            )
        return None
    if is_chat:
        raise RequestError(
            "logprobs: the value must be true or false, but the request has "
            f"{shown(fields.logprobs)}. Send the number of tokens as top_logprobs."
        )
    return _check_num_logprobs(fields.logprobs)


def _check_num_logprobs(logprobs: object) -> int:
    """Check the field `logprobs` of a completion request, and return the value of this field.

    Raises:
        RequestError: the value is not an integer from 0 to MAX_LOGPROBS.
    """
    if not isinstance(logprobs, int) or not 0 <= logprobs <= MAX_LOGPROBS:
        raise RequestError(
            f"logprobs: the value must be an integer from 0 to {MAX_LOGPROBS}, but the request has "
            f"{shown(logprobs)}."
        )
    return logprobs


def _read_logit_bias(biases: Mapping[str | int, Any]) -> dict[int, Any]:
    """Convert the keys of `biases` to integers. Example: `{"5": -1.5}` returns `{5: -1.5}`."""
    try:
        return {int(token_id): bias for token_id, bias in biases.items()}
    except ValueError:
        raise RequestError(
            f"logit_bias: each key must be a token id, but the request has {shown(list(biases))}."
        ) from None


def _read_bad_words(words: Sequence[str], encode: Encode | None) -> list[list[int]]:
    """Convert bad words to sequences of token ids that must not be generated.

    Example: with the vocabulary {"no": 1, " no": 2}, the word "no" returns [[1], [2]].
    """
    if not words:
        return []
    if encode is None:
        raise RequestError(
            "bad_words: this server has no tokenizer to encode the words. Leave the field out."
        )
    return [sequence for word in words for sequence in _sequences_of_word(word, encode)]


def _sequences_of_word(word: str, encode: Encode) -> list[list[int]]:
    """Return the token ids of a word as one or two sequences: without and with a leading space.

    A word can begin a text ("no") or follow a space (" no"). Most tokenizers have different tokens
    for these two cases, so the result has two sequences. The second sequence is left out if both
    sequences have different lengths or the same first token (the rule of vLLM). For example, if the
    space is a token of its own, the first sequence also matches the word after a space.

    Raises:
        RequestError: the word has no tokens.
    """
    at_start = encode(word.lstrip())
    if not at_start:
        raise RequestError(f"bad_words: the word {shown(word)} has no tokens. Remove it.")
    after_space = encode(" " + word.lstrip())
    has_same_length = len(after_space) == len(at_start)
    if has_same_length and after_space[0] != at_start[0]:
        return [at_start, after_space]
    return [at_start]
