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

from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.serving.wire import Ending, Opening, StepState

# Unconsumed steps of one stream; two keep the postprocessor busy while the next is on its way.
MAX_UNCONSUMED_STEPS = 2
_RESPONSES_PER_SECOND_PER_CPU = 250
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
class Stream:
    """One request in the executor, from `execute` to its last step.

    Attributes:
        request_id: the engine's name of it.
        sender: the server's response sender.
        slot, serial: where and as what the postprocessor reports about it.
        opening: for the first step; None once sent.
        pending: tokens that the next step will carry.
        sent: steps sent so far.
        unconsumed: places, among all steps of all streams, of those that the postprocessor has not
            consumed yet, oldest first.
        waited_s: how long the oldest of them has been on its way.
        last_sent: when, by time.monotonic().
        ending: known once the engine has finished the request.
        aborting: the engine was asked to end it.
    """

    request_id: str
    sender: Any
    slot: int
    serial: int
    opening: Opening | None
    last_sent: float
    pending: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    sent: int = 0
    unconsumed: deque[int] = field(default_factory=deque)
    waited_s: float = 0.0
    ending: Ending | None = None
    aborting: bool = False

    def add(self, update: RequestUpdate) -> None:
        """Take in what the engine says of this request."""
        self.pending.extend(update.new_token_ids)
        self.cumulative_logprob = update.cumulative_logprob
        if update.finish_reason is not None:
            self.ending = Ending(update.finish_reason, update.stop_reason)

    def due_at(self, interval_s: float, heartbeat_s: float) -> float:
        """When the next step should be sent, by time.monotonic()."""
        if self.ending is not None or (self.pending and self.sent == 0):
            return 0.0
        if len(self.unconsumed) >= MAX_UNCONSUMED_STEPS:
            # Nothing to do until the postprocessor moves; it is looked at again this soon.
            return self.last_sent + max(interval_s, heartbeat_s / 10)
        return self.last_sent + (interval_s if self.pending else heartbeat_s)

    def may_send(self) -> bool:
        """Whether a step may be sent now: the last one always may."""
        return self.ending is not None or len(self.unconsumed) < MAX_UNCONSUMED_STEPS

    def take_step(self, now: float) -> tuple[np.ndarray[Any, np.dtype[np.int32]], StepState]:
        """The next step, with everything that is pending."""
        token_ids = np.array(self.pending, dtype=np.int32)
        self.pending.clear()
        self.sent += 1
        self.last_sent = now
        opening, self.opening = self.opening, None
        state = StepState(
            slot=self.slot,
            serial=self.serial,
            step=self.sent,
            cumulative_logprob=self.cumulative_logprob,
            opening=opening,
            ending=self.ending,
        )
        return token_ids, state
