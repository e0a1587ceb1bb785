# SPDX-License-Identifier: Apache-2.0
"""The streams of the executor. A stream collects generated tokens until they are sent.

Each response costs the server and the two stubs about 1 ms of CPU time. The cost does not depend on
the number of tokens in the response. Tokens are therefore merged. A stream sends a step when its
interval has passed (Pacer) and at most one earlier step is unconsumed. The step contains all tokens
that have arrived since the previous step.
"""

import os
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from nereid_backend.core.grammar import KINDS
from nereid_backend.core.outputs import RequestUpdate, TokenLogprobs
from nereid_backend.serving.executor.request_timing import RequestTiming
from nereid_backend.serving.wire import Ending, Opening, SequenceDelta, StepState

# The largest number of unprocessed messages of one stream. The executor has sent these messages,
# but the postprocessor has not processed them yet. With the value 2, the server can transport one
# message while the postprocessor processes another message.
MAX_UNCONSUMED_STEPS = 2
_CHECKS_PER_HEARTBEAT = 10
_RESPONSES_PER_SECOND_PER_CPU = 160
_MAX_RESPONSES_PER_SECOND = 4000
# Heartbeats (responses without output) may be at most this fraction of all responses. Without this
# limit, the heartbeats of 200 waiting streams would use most of the time of two CPUs.
_HEARTBEAT_SHARE = 0.5
# The longest time between two output messages of one stream. Text that arrives ten times a second
# looks continuous to a reader.
_MAX_INTERVAL_S = 0.1


class Pacer:
    """Determines the time between two output messages of one stream.

    The time grows with the number of streams, so that the total number of responses per second is
    limited.

    Args:
        responses_per_second: the rate of all streams together. 0 means 160 for each CPU, but at
            most 4000 in total.
    """

    def __init__(self, responses_per_second: int) -> None:
        cpus = len(os.sched_getaffinity(0))
        self._rate = responses_per_second or min(
            _MAX_RESPONSES_PER_SECOND, _RESPONSES_PER_SECOND_PER_CPU * cpus
        )

    def interval_s(self, num_streams: int) -> float:
        """Return the number of seconds between two output messages of one stream.

        `num_streams` is the number of streams.
        """
        return min(num_streams / self._rate, _MAX_INTERVAL_S)

    def heartbeat_s(self, num_streams: int, heartbeat_s: float) -> float:
        """Return the number of seconds between two heartbeats of a stream.

        Heartbeats get at most half of the rate. Example: with 320 responses per second and the
        setting 0.25 s, each of 200 streams sends a heartbeat every 1.25 s.

        Args:
            num_streams: the number of streams.
            heartbeat_s: the interval in seconds if there are few streams (the setting
                heartbeat_ms).
        """
        return max(heartbeat_s, num_streams / (self._rate * _HEARTBEAT_SHARE))


@dataclass(slots=True)
class Sequence:
    """One sequence of a request in the executor, and the unsent output of the sequence.

    Attributes:
        index: the index of the sequence in its request.
        slot: the number of a slot in the shared memory. In this slot, the postprocessor stores
            signals about the sequence (see feedback.py).
        pending: the token ids for the next step.
        cumulative_logprobs: one sum for each pending token: the log-probabilities of this token and
            of all earlier tokens of the sequence.
        logprobs, prompt_logprobs: the unsent log-probabilities (see RequestUpdate); None if there
            are no unsent log-probabilities.
        num_cached_tokens: the number of prompt tokens that were found in the prefix cache.
        num_tokens: the number of generated tokens so far.
        ending: the reason why the sequence ended; None while it runs.
        is_sent: whether the ending has been sent.
        is_aborting: whether the executor has asked the engine to end the sequence, because a stop
            string was found.
        last_token: the time at which the engine last sent tokens, by time.monotonic(). 0 means that
            the engine has sent no tokens yet.
    """

    index: int
    slot: int
    pending: list[int] = field(default_factory=list)
    cumulative_logprobs: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    num_tokens: int = 0
    ending: Ending | None = None
    is_sent: bool = False
    is_aborting: bool = False
    last_token: float = 0.0

    @property
    def has_output(self) -> bool:
        """Whether tokens of this sequence, or the end of this sequence, must still be sent."""
        return bool(self.pending) or (self.ending is not None and not self.is_sent)

    def add(self, update: RequestUpdate) -> None:
        """Add an update from the engine to the pending output of this sequence."""
        self.pending.extend(update.new_token_ids)
        # An update can contain several tokens, but only one cumulative log-probability: the sum up
        # to the last token. Store this sum for each token of the update, although it is only an
        # approximation for the earlier tokens. The approximation is used if a stop string ends the
        # output at an earlier token.
        self.cumulative_logprobs += [update.cumulative_logprob] * len(update.new_token_ids)
        if update.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += update.logprobs
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        # Only the first update of a sequence contains this number. Later updates contain 0.
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        if update.finish_reason is not None:
            self.ending = Ending(update.finish_reason, update.stop_reason)

    def take_delta(self) -> SequenceDelta:
        """Remove the unsent output from this sequence, and return the output.

        The pending output consists of the tokens that arrived since the last call, and of the end
        of the sequence. The caller must call this method only if `has_output` is true.
        """
        delta = SequenceDelta(
            index=self.index,
            token_ids=tuple(self.pending),
            cumulative_logprobs=tuple(self.cumulative_logprobs),
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
            num_cached_tokens=self.num_cached_tokens,
            ending=self.ending,
        )
        self.pending = []
        self.cumulative_logprobs = []
        self.logprobs = None
        self.prompt_logprobs = None
        self.is_sent = self.ending is not None
        return delta


@dataclass(slots=True)
class Stream:
    """One request in the executor, from its arrival to its last step.

    Attributes:
        request_id: the request's id in the engine.
        sender: the server's response sender.
        serial: the number that identifies the stream in the feedback of the postprocessor.
        sequences: the sequences of the request, ordered by index.
        opening: the data for the first step; None after the first step has been sent.
        last_sent: the time at which the last step was sent, by time.monotonic().
        grammar_field: the request's field from which the grammar was built, for error messages.
        num_sent_steps: the number of steps sent so far.
        unconsumed_steps: the numbers of the sent steps that the postprocessor has not consumed yet.
            The oldest step is first. The steps of all streams have one common numbering.
        stalled_s: the number of seconds for which there have been unconsumed steps, but the
            postprocessor has consumed none of them.
        next_check: the time at which the loop checks again whether the next step is due, by
            time.monotonic().
        is_aborting: whether the executor has asked the engine to end the whole request.
        timing: the request's arrival, start and deadlines.
    """

    request_id: str
    sender: Any
    serial: int
    sequences: list[Sequence]
    opening: Opening | None
    last_sent: float
    grammar_field: str = ""
    num_sent_steps: int = 0
    unconsumed_steps: deque[int] = field(default_factory=deque)
    stalled_s: float = 0.0
    next_check: float = 0.0
    is_aborting: bool = False
    timing: RequestTiming = field(default_factory=RequestTiming)

    @property
    def slot(self) -> int:
        """The memory slot in which the postprocessor counts this stream's processed messages."""
        return self.sequences[0].slot

    @property
    def slots(self) -> tuple[int, ...]:
        """The numbers of the sequences' memory slots, ordered by the index of the sequence."""
        return tuple(sequence.slot for sequence in self.sequences)

    @property
    def has_ended(self) -> bool:
        """Whether every sequence has ended."""
        return all(sequence.ending is not None for sequence in self.sequences)

    @property
    def has_finished_sequence(self) -> bool:
        """Whether the engine has finished at least one sequence that was not aborted."""
        endings = [sequence.ending for sequence in self.sequences if sequence.ending is not None]
        return any(ending.finish_reason != "abort" for ending in endings)

    @property
    def has_output(self) -> bool:
        """Whether a sequence has output that has not been sent to the postprocessor yet."""
        return any(sequence.has_output for sequence in self.sequences)

    @property
    def num_pending(self) -> int:
        """The number of generated tokens that have not been sent to the postprocessor yet."""
        return sum(len(sequence.pending) for sequence in self.sequences)

    def add(self, update: RequestUpdate) -> None:
        """Add `update` to the sequence whose index in the request is `update.index`."""
        self.sequences[update.index].add(update)

    def refusal(self, message: str) -> str:
        """In an error message, replace the engine's field name by the name that the client used.

        In errors about grammars, the engine names the type of the grammar. Example: if the client
        sent the grammar in the field `response_format`, "json_schema: the value ..." becomes
        "response_format: the value ...".
        """
        field, colon, rest = message.partition(":")
        is_about_grammar = bool(colon) and field in (*KINDS, "grammar")
        if is_about_grammar and self.grammar_field:
            return f"{self.grammar_field}:{rest}"
        return message

    def due_at(self, interval_s: float, heartbeat_s: float) -> float:
        """Return the time at which the stream's next step is due, as a value of time.monotonic().

        A step is a message to the postprocessor.
        - The last step, and a first step that has output, are due immediately.
        - If `may_send` is false, no step is due until the postprocessor has processed earlier
          steps. The result is the time at which the caller must call this method again.
        - Any other step with output is due `interval_s` seconds after the previous step.
        - A step without output (a heartbeat) is due `heartbeat_s` seconds after the previous step.
        """
        has_output = self.has_output
        is_first_step = self.num_sent_steps == 0
        if self.has_ended or (has_output and is_first_step):
            return 0.0  # A time in the past means that the step is due immediately.
        if not self.may_send():
            # The postprocessor must first process earlier steps, so check again later. If there are
            # few streams, `interval_s` is very short, and checking once per interval would waste
            # CPU time. Therefore check at most ten times in the time between two heartbeats.
            wait_s = max(interval_s, heartbeat_s / _CHECKS_PER_HEARTBEAT)
        elif has_output:
            wait_s = interval_s
        else:
            wait_s = heartbeat_s
        return self.last_sent + wait_s

    def may_send(self) -> bool:
        """Return whether the stream may now send another message to the postprocessor.

        The last message may always be sent.
        """
        return self.has_ended or len(self.unconsumed_steps) < MAX_UNCONSUMED_STEPS

    def take_step(self, now: float) -> StepState:
        """Move the unsent output of all sequences into a new StepState, and return this object.

        A StepState is the next message to the postprocessor. Its slot and its serial number
        identify the stream, and `step` numbers the messages of the stream from 1. Only the first
        message has an `opening`, which contains the data of the request.

        Args:
            now: the current time, as a value of time.monotonic().
        """
        with_output = [sequence for sequence in self.sequences if sequence.has_output]
        self.num_sent_steps += 1
        self.last_sent = now
        opening = self.opening
        self.opening = None
        return StepState(
            slot=self.slot,
            serial=self.serial,
            step=self.num_sent_steps,
            deltas=tuple(sequence.take_delta() for sequence in with_output),
            is_last=self.has_ended,
            opening=opening,
        )
