# SPDX-License-Identifier: Apache-2.0
"""Requests of the scripted engine. A script, and not a model, determines the output."""

import time
from collections.abc import Sequence

from nereid_backend.core.outputs import FinishReason
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.errors import EngineError
from nereid_backend.serving.executor.scripted.script_rules import Rule


class ScriptedSequence:
    """One sequence of a request, and the tokens that the script assigns to the sequence.

    Attributes:
        index: the index of the sequence in its request.
        rule: the rule of the script that matches the prompt.
        num_tokens: the number of tokens so far.
        due: the time of the next update, by time.monotonic(). The time 0 has already passed.
        is_aborted: whether the next update ends the sequence.
    """

    def __init__(self, rule: Rule, index: int, eos_token_ids: tuple[int, ...]) -> None:
        """Create a sequence without tokens.

        Args:
            rule: the rule of the script that matches the prompt.
            index: the index of the sequence in its request.
            eos_token_ids: the end-of-sequence token; empty if the checkpoint has no such token.
        """
        self.index = index
        self.rule = rule
        # A rule contains either one output for all sequences of a request, or one output for each
        # sequence. If there are fewer outputs than sequences, the outputs are used in turn.
        output = rule.token_ids[index % len(rule.token_ids)]
        self._tokens = output + eos_token_ids if rule.ends else output
        self.num_tokens = 0
        # The time at which the next update is due, as a value of time.monotonic(). The first update
        # is due immediately.
        self.due = 0.0
        self.is_aborted = False

    def next_token(self) -> int:
        """Return the next scripted token. After the last token, return the first token again."""
        token_id = self._tokens[self.num_tokens % len(self._tokens)]
        self.num_tokens += 1
        return token_id


class ScriptedRequest:
    """One request.

    Attributes:
        prompt: the token ids of the prompt.
        params: the sampling parameters.
        limit: the largest number of tokens of one sequence.
        stops: the tokens that end a sequence.
        sequences: the sequences that have not ended, by index.
    """

    def __init__(
        self, prompt: list[int], params: SamplingParams, rule: Rule, limit: int, eos: Sequence[int]
    ) -> None:
        """Create a request with the output of `rule`. `eos` contains the stop tokens."""
        self.prompt = prompt
        self.params = params
        self.limit = limit
        self.stops = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos)
        self.sequences = {
            index: ScriptedSequence(rule, index, tuple(eos[:1])) for index in range(params.n)
        }

    @property
    def is_aborted(self) -> bool:
        """Whether all sequences are aborted."""
        return all(sequence.is_aborted for sequence in self.sequences.values())


def cause_fault(sequence: ScriptedSequence) -> None:
    """Simulate the fault that the rule of a sequence specifies. Do nothing if there is no fault.

    The fault "busy 2" uses the CPU for 2 seconds before the first token. Any other fault is an
    error message, which ends the engine process unless the sequence is aborted.

    Raises:
        EngineError: the fault ends the engine process.
    """
    rule = sequence.rule
    if rule.busy_s is not None:
        if sequence.num_tokens == 0:
            _use_cpu(rule.busy_s)
    elif rule.fault and not sequence.is_aborted:
        raise EngineError(rule.fault)


def next_tokens(
    request: ScriptedRequest, sequence: ScriptedSequence
) -> tuple[list[int], FinishReason | None]:
    """Return the next scripted tokens of a sequence, and the reason why the sequence ends.

    The reason is None if the sequence continues. A sequence that is aborted or has an error gets no
    tokens.

    Mutates: the position of `sequence` in its script.
    """
    if sequence.rule.error:
        return [], "error"
    if sequence.is_aborted:
        return [], "abort"
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    while finish_reason is None and len(token_ids) < sequence.rule.tokens_per_step:
        token_ids.append(sequence.next_token())
        finish_reason = _finish_reason(token_ids[-1], sequence.num_tokens, request)
    return token_ids, finish_reason


def _use_cpu(seconds: float) -> None:
    """Use the CPU for some seconds without sending a message."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def _finish_reason(token_id: int, num_tokens: int, request: ScriptedRequest) -> FinishReason | None:
    """Return the reason why a sequence ends after its newest token, or None if it continues."""
    if token_id in request.stops and num_tokens > request.params.min_tokens:
        return "stop"
    return "length" if num_tokens >= request.limit else None
