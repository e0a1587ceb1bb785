# SPDX-License-Identifier: Apache-2.0
"""The sampling parameters and stop conditions of one request."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nereid_backend.core.grammar import GrammarSpec, ThinkingSpec

# The largest allowed value of the parameters logprobs and prompt_logprobs.
MAX_LOGPROBS = 20
# The largest allowed value of the parameter `n`, the number of outputs of a request.
MAX_SEQUENCES = 64
# The largest allowed length of the parameter prompt_cache_key, in characters.
MAX_CACHE_KEY_LENGTH = 256
# The default of prompt_cache_ttl in seconds, for requests with a prompt_cache_key.
_DEFAULT_CACHE_TTL_S = 300.0
# Integer parameters must be smaller than 2**64, because messages between processes store integers
# in 64 bits.
_TOO_LARGE = 2**64
# The smallest client weight. The scheduler divides by the weight, and torch lets the CPU replace
# smaller numbers by 0.
_MIN_WEIGHT = sys.float_info.min


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request, with the same names as in vLLM's `SamplingParams`.

    This class declares the type, the default and the allowed range of each parameter. The ranges
    are stored as metadata, whose keys are argument names of pydantic's `Field`. The core imports
    only the standard library, so this class does not validate values. The subclass
    `CheckedSamplingParams` validates them.

    Attributes:
        temperature: 0 selects the likeliest token (greedy sampling); larger values are more random.
        top_p: sample from the smallest set of likeliest tokens whose probabilities sum to at least
            `top_p`; 1 turns the filter off.
        top_k: sample from the `top_k` likeliest tokens; 0 or -1 turns the filter off.
        min_p: remove tokens whose probability is less than `min_p` times the probability of the
            likeliest token; 0 turns the filter off.
        seed: the seed of the random numbers. A request with the same seed and prompt gets the same
            tokens, whatever other requests run at the same time. None selects a random seed.
        max_tokens: the largest number of new tokens; None allows up to the model's maximum length.
        min_tokens: the number of new tokens before which stop tokens cannot be sampled.
        stop_token_ids: token ids that end a sequence, in addition to those of the checkpoint.
        ignore_eos: if True, the checkpoint's end-of-sequence tokens do not end a sequence.
        n: the number of sequences to generate for the prompt. Each sequence has its own random
            numbers.
        presence_penalty: subtracted once from the logit of every token that the output contains.
        frequency_penalty: subtracted from the logit of a token once for each time that the output
            contains the token.
        repetition_penalty: a number by which positive logits are divided and negative logits are
            multiplied, for every token that the prompt or the output contains. 1 turns the penalty
            off (CTRL, Keskar et al. 2019).
        logit_bias: a mapping from token ids to numbers that are added to the logits of these
            tokens. CheckedSamplingParams stores the mapping as sorted pairs.
        allowed_token_ids: the only token ids that can be sampled; None allows every token.
        bad_words_token_ids: sequences of token ids that must not occur in the output.
        logprobs: report the log-probability of each sampled token and of this number of likeliest
            tokens, under the model's own distribution; None reports no log-probabilities.
        prompt_logprobs: report log-probabilities of the prompt tokens from the second on, and of
            this number of likeliest tokens at each position; None reports no log-probabilities.
        grammar: the grammar that the output must match; None allows any text.
        thinking: the delimiters and the token budget of the reasoning; None if unknown.
        priority: requests with a lower number are scheduled first.
        cache_salt: a text. Two requests share cached prefixes only if their texts are equal.
        prompt_cache_key: a text that names the session of the request. The cached prefixes of a
            session are evicted after other cached prefixes.
        prompt_cache_ttl: the time in seconds for which the session's cached prefixes are evicted
            last, from the end of the request on. None means 300 with a prompt_cache_key, and 0
            without one.
        lora_name: the name of a LoRA adapter; empty for the model without an adapter.
        client_id: the client that sent the request. Clients with waiting requests take turns.
        client_weight: the share of the client. A client with the weight 2 gets twice as many tokens
            as a client with the weight 1 while both have waiting requests.
    """

    temperature: float = field(default=1.0, metadata={"ge": 0})
    top_p: float = field(default=1.0, metadata={"gt": 0, "le": 1})
    top_k: int = field(default=0, metadata={"ge": -1, "lt": _TOO_LARGE})
    min_p: float = field(default=0.0, metadata={"ge": 0, "le": 1})
    seed: int | None = field(default=None, metadata={"ge": -(2**63), "lt": _TOO_LARGE})
    max_tokens: int | None = field(default=None, metadata={"ge": 1, "lt": _TOO_LARGE})
    min_tokens: int = field(default=0, metadata={"ge": 0, "lt": _TOO_LARGE})
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = field(default=1, metadata={"ge": 1, "le": MAX_SEQUENCES})
    presence_penalty: float = field(default=0.0, metadata={"ge": -2, "le": 2})
    frequency_penalty: float = field(default=0.0, metadata={"ge": -2, "le": 2})
    repetition_penalty: float = field(default=1.0, metadata={"gt": 0})
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] | None = field(default=None, metadata={"min_length": 1})
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    logprobs: int | None = field(default=None, metadata={"ge": 0, "le": MAX_LOGPROBS})
    prompt_logprobs: int | None = field(default=None, metadata={"ge": 0, "le": MAX_LOGPROBS})
    grammar: GrammarSpec | None = None
    thinking: ThinkingSpec | None = None
    priority: int = field(default=0, metadata={"ge": -(2**31), "lt": _TOO_LARGE})
    cache_salt: str = ""
    prompt_cache_key: str = field(default="", metadata={"max_length": MAX_CACHE_KEY_LENGTH})
    prompt_cache_ttl: float | None = field(default=None, metadata={"ge": 0, "le": 86400})
    lora_name: str = ""
    client_id: str = ""
    client_weight: float = field(default=1.0, metadata={"ge": _MIN_WEIGHT, "le": 1000})

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always selected."""
        return self.temperature == 0

    @property
    def retention_s(self) -> float:
        """The time in seconds for which the cached prefixes of the request are retained."""
        if self.prompt_cache_ttl is not None:
            return self.prompt_cache_ttl
        return _DEFAULT_CACHE_TTL_S if self.prompt_cache_key else 0.0
