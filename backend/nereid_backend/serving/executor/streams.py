# SPDX-License-Identifier: Apache-2.0
"""The executor's view of its streams: what is pending for each, and when it may be sent.

One response costs the server and the two stubs a fixed amount, whatever it carries (about 1 ms of
CPU all told). So tokens are merged: a stream sends when its turn has come (Pacer) and when the
postprocessor has consumed what was sent before (feedback), with all tokens that came meanwhile.
"""

import os
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nereid_backend.core.grammar import KINDS
from nereid_backend.core.outputs import RequestUpdate, TokenLogprobs
from nereid_backend.serving.executor.request_timing import Timing
from nereid_backend.serving.wire import Ending, Opening, Part, StepState

# Unconsumed steps of one stream; two keep the postprocessor busy while the next is on its way.
MAX_UNCONSUMED_STEPS = 2
_RESPONSES_PER_SECOND_PER_CPU = 160
_MAX_RESPONSES_PER_SECOND = 4000
# Text that arrives ten times a second still reads as flowing.
_MAX_INTERVAL_S = 0.1


class Pacer:
    """How long a stream waits between two responses, so that all together keep to a rate."""

    def __init__(self, responses_per_second: int) -> None:
        cpus = len(os.sched_getaffinity(0))
        self._rate = responses_per_second or min(
            _MAX_RESPONSES_PER_SECOND, _RESPONSES_PER_SECOND_PER_CPU * cpus
        )

    def interval_s(self, num_streams: int) -> float:
        """Seconds between two responses of one of `num_streams` streams."""
        return min(num_streams / self._rate, _MAX_INTERVAL_S)


@dataclass(slots=True)
class Sequence:
    """One sequence of a request in the executor: what the next step will carry of it.

    Attributes:
        index: which of the request's sequences.
        slot: where the postprocessor raises a signal about it.
        pending: tokens for the next step.
        cumulative_logprobs: one for each of them.
        logprobs, prompt_logprobs: see RequestUpdate; None while there are none to send.
        ending: known once the engine has finished it.
        is_sent: its ending was sent.
        is_aborting: the engine was asked to end it.
        last_token: when tokens came from the engine last, by time.monotonic(); 0 for never.
    """

    index: int
    slot: int
    pending: list[int] = field(default_factory=list)
    cumulative_logprobs: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    ending: Ending | None = None
    is_sent: bool = False
    is_aborting: bool = False
    last_token: float = 0.0

    @property
    def has_news(self) -> bool:
        """Whether the next step has something to say of it."""
        return bool(self.pending) or (self.ending is not None and not self.is_sent)

    def add(self, update: RequestUpdate) -> None:
        """Take in what the engine says of this sequence."""
        self.pending.extend(update.new_token_ids)
        # An update of several tokens gives the sum behind the last of them.
        self.cumulative_logprobs += [update.cumulative_logprob] * len(update.new_token_ids)
        if update.logprobs is not None:
            self.logprobs = (self.logprobs or []) + update.logprobs
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        if update.finish_reason is not None:
            self.ending = Ending(update.finish_reason, update.stop_reason)

    def take_part(self) -> Part:
        """What the next step says of it; call it when there are news."""
        part = Part(
            index=self.index,
            num_tokens=len(self.pending),
            cumulative_logprobs=tuple(self.cumulative_logprobs),
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
            num_cached_tokens=self.num_cached_tokens,
            ending=self.ending,
        )
        self.pending, self.cumulative_logprobs = [], []
        self.logprobs = self.prompt_logprobs = None
        self.is_sent = self.ending is not None
        return part


@dataclass(slots=True)
class Stream:
    """One request in the executor, from `execute` to its last step.

    Attributes:
        request_id: the engine's name of it.
        sender: the server's response sender.
        serial: as what the postprocessor reports about it.
        sequences: its answers; the slot of the first is where consumption is reported.
        opening: for the first step; None once sent.
        grammar_field: the request's field that made the grammar, for messages about it.
        sent: steps sent so far.
        unconsumed: places, among all steps of all streams, of those that the postprocessor has not
            consumed yet, oldest first.
        waited_s: how long the oldest of them has been on its way.
        last_sent: when, by time.monotonic().
        is_aborting: the engine was asked to end all of it.
        timing: its times.
    """

    request_id: str
    sender: Any
    serial: int
    sequences: list[Sequence]
    opening: Opening | None
    last_sent: float
    grammar_field: str = ""
    sent: int = 0
    unconsumed: deque[int] = field(default_factory=deque)
    waited_s: float = 0.0
    is_aborting: bool = False
    timing: Timing = field(default_factory=Timing)

    @property
    def slot(self) -> int:
        """Where the postprocessor reports how far it has consumed this stream."""
        return self.sequences[0].slot

    @property
    def slots(self) -> tuple[int, ...]:
        """One for each sequence."""
        return tuple(sequence.slot for sequence in self.sequences)

    @property
    def has_ended(self) -> bool:
        """Whether the engine has finished every sequence."""
        return all(sequence.ending is not None for sequence in self.sequences)

    @property
    def has_news(self) -> bool:
        """Whether the next step is more than a heartbeat."""
        return any(sequence.has_news for sequence in self.sequences)

    @property
    def num_pending(self) -> int:
        """Tokens that wait for the next step."""
        return sum(len(sequence.pending) for sequence in self.sequences)

    def add(self, update: RequestUpdate) -> None:
        """Take in what the engine says of one of the sequences."""
        self.sequences[update.index].add(update)

    def refusal(self, message: str) -> str:
        """The engine's message about the request, under the name of the request's own field."""
        kind, colon, rest = message.partition(":")
        is_grammars = colon and self.grammar_field and kind in (*KINDS, "grammar")
        return f"{self.grammar_field}:{rest}" if is_grammars else message

    def due_at(self, interval_s: float, heartbeat_s: float) -> float:
        """When the next step should be sent, by time.monotonic()."""
        has_news = self.has_news
        if self.has_ended or (has_news and self.sent == 0):
            return 0.0
        if len(self.unconsumed) >= MAX_UNCONSUMED_STEPS:
            # Nothing to do until the postprocessor moves; it is looked at again this soon.
            return self.last_sent + max(interval_s, heartbeat_s / 10)
        return self.last_sent + (interval_s if has_news else heartbeat_s)

    def may_send(self) -> bool:
        """Whether a step may be sent now: the last one always may."""
        return self.has_ended or len(self.unconsumed) < MAX_UNCONSUMED_STEPS

    def take_step(self, now: float) -> tuple[np.ndarray[Any, np.dtype[np.int32]], StepState]:
        """The next step, with everything that is pending."""
        told = [sequence for sequence in self.sequences if sequence.has_news]
        token_ids = np.array(
            [token_id for sequence in told for token_id in sequence.pending], dtype=np.int32
        )
        self.sent += 1
        self.last_sent = now
        opening, self.opening = self.opening, None
        state = StepState(
            slot=self.slot,
            serial=self.serial,
            step=self.sent,
            parts=tuple(sequence.take_part() for sequence in told),
            is_last=self.has_ended,
            opening=opening,
        )
        return token_ids, state
