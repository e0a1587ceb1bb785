# SPDX-License-Identifier: Apache-2.0
"""A test tool: an engine process that writes scripted output instead of running a model.

Set NEREID_ENGINE=scripted and NEREID_SCRIPT=/path.json to run the real Triton server, the real
stubs and the real frontend with this engine process. The script is a JSON list of rules. The first
rule whose text `when` occurs in the prompt of a request determines the output:

    {"when": "weather",            a text in the rendered prompt
     "text": "<think>..",          the output. Instead of "text", the rule can contain tokens:
                                   "token_ids": [5, 6]. For a request with n sequences, the value
                                   can be a list of n outputs, one output for each sequence
     "tokens_per_step": 1,         the number of tokens that one step adds
     "delay_ms": 0,                the duration of one step
     "num_cached_tokens": 0,       the reported number of tokens found in the prefix cache
     "error": "", "is_refused": false,     the request ends with this error
     "ends": true,                 whether the end-of-sequence token follows the output; if false,
                                   the output repeats
     "fault": ""}                  the engine process ends with this message, as if the GPU were
                                   lost. The value "busy 2.5" has another effect: the process uses
                                   the CPU for 2.5 seconds and sends no message during this time

At most max_num_seqs sequences run, and further requests wait in the order of their arrival. Stop
tokens, min_tokens, ignore_eos, max_tokens, n and aborts have the same effect as in the real engine.
Sampling parameters and grammars have no effect. Every token has the log-probability -0.5 and rank
1. The next most likely tokens are the tokens with the next higher ids.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from nereid_backend.config import EngineConfig
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.core.outputs import (
    EngineInfo,
    EngineStats,
    RequestUpdate,
    TokenLogprobs,
)
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.engine.prefix_sessions import PrefixSessions
from nereid_backend.errors import RequestError
from nereid_backend.serving.executor.engine_process import serve_engine
from nereid_backend.serving.executor.scripted.script_rules import Rule, read_script
from nereid_backend.serving.executor.scripted.scripted_requests import (
    ScriptedRequest,
    ScriptedSequence,
    cause_fault,
    next_tokens,
)

SCRIPT_VARIABLE = "NEREID_SCRIPT"

_DEFAULT_MAX_MODEL_LEN = 4096
# The number of cache blocks that the scripted engine reports, although it has no KV cache.
_NUM_BLOCKS = 1024
_LOGPROB = -0.5
_IDLE_SLEEP_S = 0.005


class ScriptedEngine:
    """An engine with the methods of StepEngine.

    Attributes:
        info: the description of the engine. The fields that describe a model are fictitious.
        sessions: the prefix sessions. There are none, because the scripted engine has no prefix
            cache.
        started, compiled: the events of the last step; see `StepEngine`.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[str], None]) -> None:
        """Load the script and the checkpoint's tokenizer.

        Raises:
            ConfigError: the script is missing or wrong.
        """
        # The package tokenizers is used directly, because importing transformers would take ten
        # times as long as all other imports together.
        self._tokenizer = Tokenizer.from_file(str(Path(config.model) / "tokenizer.json"))
        self._rules = self._read_rules(progress)
        self.info = _info(config, self._tokenizer)
        # The running and the waiting requests, by request id.
        self._requests: dict[str, ScriptedRequest] = {}
        self._queue: dict[str, ScriptedRequest] = {}
        # The id of each request that has left the queue in the last step, and the time.
        self.started: list[tuple[str, float]] = []
        # A tuple for each compiled grammar: the id of the request, and the start and the end of the
        # compilation. The list stays empty, because the scripted engine compiles no grammars.
        self.compiled: list[tuple[str, float, float]] = []
        # The scripted engine accepts every adapter, and ignores which adapter a request selects.
        self._adapters = dict(config.lora_adapters)
        unused_pool = BlockPool(1)  # The class PrefixSessions needs a pool even without a cache.
        self.sessions = PrefixSessions(None, unused_pool, config.block_size)

    def _read_rules(self, progress: Callable[[str], None]) -> list[Rule]:
        """Return the rules of the script at the path in the environment variable NEREID_SCRIPT."""
        path = Path(os.environ.get(SCRIPT_VARIABLE, ""))
        rules = read_script(path, self._encode)
        progress(f"engine: the scripted test tool runs {len(rules)} rules from {path}")
        return rules

    def _encode(self, text: str) -> list[int]:
        """Convert a text to token ids without adding special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def warm_up(self) -> None:
        """Do nothing, because the scripted engine ignores grammars."""

    def stats(self) -> EngineStats:
        """Return the current load.

        Each running request counts as one block. So a test can detect that a request was not
        removed.
        """
        num_running = len(self._requests)
        return EngineStats(num_running, len(self._queue), num_running, self.info.num_blocks)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        images: ImageInputs | None = None,
    ) -> None:
        """Add a request to the waiting queue.

        Raises:
            RequestError: the prompt is too long, the prompt contains images, or no rule matches the
                prompt.
        """
        if images is not None:
            raise RequestError("image: the scripted engine does not accept images.")
        prompt = list(prompt_token_ids)
        max_tokens = self.info.max_model_len - len(prompt)
        if max_tokens < 1:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but the limit is {self.info.max_model_len} "
                "(max_model_len)"
            )
        rule = self._find_rule(self._tokenizer.decode(prompt, skip_special_tokens=False))
        if params.max_tokens is not None:
            max_tokens = min(max_tokens, params.max_tokens)
        self._queue[request_id] = ScriptedRequest(
            prompt, params, rule, max_tokens, self.info.eos_token_ids
        )

    def _find_rule(self, prompt_text: str) -> Rule:
        """Return the first rule whose `when` text occurs in the prompt."""
        for rule in self._rules:
            if rule.when in prompt_text:
                return rule
        raise RequestError(
            f"script: the prompt, which ends in {prompt_text[-80:]!r}, does not contain the text "
            "`when` of any rule."
        )

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a whole request, or only the sequence with the index `index`.

        The next step reports the end.
        """
        request = self._requests.get(request_id) or self._queue.get(request_id)
        for sequence in () if request is None else request.sequences.values():
            if index in (None, sequence.index):
                sequence.is_aborted = True

    @property
    def lora_names(self) -> list[str]:
        """The names of the adapters."""
        return list(self._adapters)

    def load_lora(self, name: str, path: str) -> None:
        """Record an adapter without reading its files."""
        self._adapters[name] = path

    def unload_lora(self, name: str) -> None:
        """Remove an adapter.

        Raises:
            RequestError: no adapter has this name.
        """
        if name not in self._adapters:
            raise RequestError(f"lora_name: no adapter has the name {name!r}.")
        del self._adapters[name]

    def reload(self, path: str = "", progress: Callable[[str], None] | None = None) -> None:
        """Accept every checkpoint, because the scripted engine has no weights."""

    def has_work(self) -> bool:
        """Return whether a request runs or waits."""
        return bool(self._requests or self._queue)

    def is_swapping(self) -> bool:
        """Return False, because the scripted engine runs no model and compiles nothing."""
        return False

    def step(self) -> list[RequestUpdate]:
        """Return one RequestUpdate for each sequence whose next tokens are due now."""
        now = time.monotonic()
        self._start_waiting(now)
        updates = []
        for request_id, request in self._requests.items():
            # When a sequence has ended, `_next_update` deletes it from `request.sequences`.
            # Therefore iterate over a copy of the values.
            for sequence in list(request.sequences.values()):
                # An aborted sequence ends immediately.
                if sequence.is_aborted or sequence.due <= now:
                    updates.append(self._next_update(request_id, request, sequence, now))
        self._requests = {
            request_id: request
            for request_id, request in self._requests.items()
            if request.sequences
        }
        if not updates and self._requests:
            # No tokens are due yet. Sleep, so that the caller's loop does not use a whole CPU.
            time.sleep(_IDLE_SLEEP_S)
        return updates

    def _start_waiting(self, now: float) -> None:
        """Start requests from the waiting queue while fewer than max_num_seqs sequences run.

        A request that does not fit is skipped, so that later requests with fewer sequences can
        start. An aborted request starts in any case, so that the next step can report its end.
        """
        self.started = []
        max_num_seqs = self.info.max_num_seqs
        num_free = max_num_seqs - sum(len(request.sequences) for request in self._requests.values())
        for request_id, request in list(self._queue.items()):
            if request.is_aborted:
                self._requests[request_id] = self._queue.pop(request_id)
                continue
            # A request may have more sequences than max_num_seqs. Such a request starts only if no
            # other request runs. It then uses the whole capacity.
            num_needed = min(len(request.sequences), max_num_seqs)
            if num_needed <= num_free:
                num_free -= num_needed
                self._requests[request_id] = self._queue.pop(request_id)
                self.started.append((request_id, now))

    def _next_update(
        self, request_id: str, request: ScriptedRequest, sequence: ScriptedSequence, now: float
    ) -> RequestUpdate:
        """Return an update that contains the next tokens of a sequence.

        If the sequence ends, remove the sequence from the request.

        Args:
            request_id: the id of the request.
            request: the request.
            sequence: one sequence of the request.
            now: the current time. The next update is due after the delay of the script's rule.

        Raises:
            EngineError: the rule has a fault.
        """
        rule = sequence.rule
        num_top = request.params.logprobs
        # If the rule of the script requests a fault, simulate the fault. The fault "busy 2" only
        # uses the CPU for 2 seconds. Any other fault raises an EngineError.
        cause_fault(sequence)
        # Only the first update of a sequence contains log-probabilities of the prompt. Call this
        # method before `next_tokens`, because an update is the first if the sequence has no tokens.
        prompt_logprobs = self._prompt_logprobs(request, sequence)
        token_ids, finish_reason = next_tokens(request, sequence)
        sequence.due = now + rule.delay_ms / 1000
        if finish_reason is not None:
            del request.sequences[sequence.index]
        return RequestUpdate(
            request_id=request_id,
            new_token_ids=token_ids,
            finish_reason=finish_reason,
            stop_reason=token_ids[-1] if finish_reason == "stop" else None,
            cumulative_logprob=_LOGPROB * sequence.num_tokens,
            error=rule.error or None,
            index=sequence.index,
            logprobs=None if num_top is None else self._scripted_logprobs(token_ids, num_top),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=rule.num_cached_tokens,
            is_refused=rule.is_refused,
        )

    def _prompt_logprobs(
        self, request: ScriptedRequest, sequence: ScriptedSequence
    ) -> list[TokenLogprobs | None] | None:
        """Return the log-probabilities of the prompt tokens, for the next update of a sequence.

        Return None if the request does not ask for them, or if an update has already contained
        them: only the first update of the first sequence contains them. The first token of a prompt
        has no log-probability.
        """
        num_top = request.params.prompt_logprobs
        is_first_update = sequence.index == 0 and sequence.num_tokens == 0
        if num_top is None or not is_first_update:
            return None
        return [None, *self._scripted_logprobs(request.prompt[1:], num_top)]

    def _scripted_logprobs(self, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Return fictitious log-probabilities of each token and of the `num_top` likeliest tokens.

        Example: for the token 7 and num_top=2, the likeliest tokens are 7 and 8, with the
        log-probabilities -0.5 and -1.5. The result for the token 7 is TokenLogprobs([7, 7, 8],
        [-0.5, -0.5, -1.5], 1): first the token itself, then the likeliest tokens. The last field is
        the rank of the token.
        """
        size = self.info.vocab_size
        return [
            TokenLogprobs(
                [token_id, *((token_id + rank) % size for rank in range(num_top))],
                [_LOGPROB, *(_LOGPROB - rank for rank in range(num_top))],
                1,
            )
            for token_id in token_ids
        ]


def _eos_token(model: str) -> str:
    """Return the end-of-sequence token of a checkpoint; "" if there is no such token.

    tokenizer_config.json contains the token as a text ("</s>") or as an object ({"content":
    "</s>"}).
    """
    config = json.loads((Path(model) / "tokenizer_config.json").read_text(encoding="utf-8"))
    token = config.get("eos_token") or ""
    return str(token["content"] if isinstance(token, dict) else token)


def _info(config: EngineConfig, tokenizer: Tokenizer) -> EngineInfo:
    """Return the description of the scripted engine.

    Fields that describe a model, such as its weights, have fictitious values.
    """
    eos_id = tokenizer.token_to_id(_eos_token(config.model))
    return EngineInfo(
        model=config.model,
        architecture="scripted",
        path="scripted",
        attention="none",
        dtype="float32",
        device="cpu",
        max_model_len=config.max_model_len or _DEFAULT_MAX_MODEL_LEN,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_seqs,
        block_size=config.block_size,
        num_blocks=_NUM_BLOCKS,
        kv_cache_bytes=0,
        weights_bytes=0,
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_ids=() if eos_id is None else (eos_id,),
        num_threads=1,
        self_check_difference=0.0,
        load_seconds=0.0,
    )


if __name__ == "__main__":
    serve_engine(ScriptedEngine)
