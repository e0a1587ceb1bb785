# SPDX-License-Identifier: Apache-2.0
"""Collects the output of all choices of one request."""

import time
from collections.abc import Iterable, Sequence

from nereid_backend.serving.postprocessor.choice import Choice, ChoiceOutput
from nereid_backend.serving.wire import StepState, StreamContext


class Choices:
    """The postprocessor's state of one request.

    Attributes:
        context: the data of the request that the postprocessor needs.
        opened_at: the time of the first step.
        last_response_at: the time of the last response. Before the first response, it is the time
            of the first step. If keepalive_ms is set, an empty response is sent when this time is
            too long ago.
        last_cancel_check_at: the time of the last check whether the client has disconnected. The
            value is 0.0 before the first check, so that the first step is checked.
        is_cancelled: whether the client has disconnected.
        parsing_s: the seconds that decoding and parsing have taken so far, for tracing.

    All times are by time.monotonic().
    """

    def __init__(
        self,
        context: StreamContext,
        slots: Sequence[int],
        choices: Iterable[Choice],
    ) -> None:
        """Initialise the state of a request for which no tokens have arrived yet.

        Args:
            context: the data of the request that the postprocessor needs.
            slots: for each choice, the number of its slot in the shared memory (see feedback.py),
                ordered by the index of the choice.
            choices: the choices, ordered by index.
        """
        self.context = context
        self._slots = slots
        self._choices = list(choices)
        # Both values are times of `time.monotonic()`. Before the first response, `last_response_at`
        # is the time at which the stream was opened.
        self.opened_at = time.monotonic()
        self.last_response_at = self.opened_at
        # Because of the value 0, the first check for a disconnected client takes place immediately.
        self.last_cancel_check_at = 0.0
        self.is_cancelled = False
        # The time in seconds that was spent so far on decoding and parsing the output.
        self.parsing_s = 0.0

    def add(self, state: StepState) -> None:
        """Add the new tokens in `state` to the choices to which these tokens belong."""
        start_time = time.monotonic()
        for delta in state.deltas:
            self._choices[delta.index].add(delta)
        self.parsing_s += time.monotonic() - start_time

    def stopped_slots(self) -> list[int]:
        """Return the memory slots of unfinished choices that have reached a stop string."""
        return [
            slot
            for slot, choice in zip(self._slots, self._choices, strict=True)
            if choice.stop_string is not None and not choice.is_finished
        ]

    def take_outputs(self, *, is_last: bool) -> list[ChoiceOutput]:
        """Return the new outputs of all choices, ordered by index.

        If the request is not streaming, return [] until the last step.
        """
        if not self.context.stream and not is_last:
            return []
        outputs = [choice.take_output() for choice in self._choices]
        return [output for output in outputs if output is not None]
