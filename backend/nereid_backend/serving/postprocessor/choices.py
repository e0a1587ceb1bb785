# SPDX-License-Identifier: Apache-2.0
"""The output of all choices of one request."""

import time
from collections.abc import Iterable, Sequence

from nereid_backend.serving.postprocessor.choice import Choice, ChoiceOutput
from nereid_backend.serving.wire import StepState, StreamContext


class Choices:
    """The postprocessor's state of one request.

    Args:
        context: the part of the request that the postprocessor needs.
        serial: the number of the request's stream.
        slots: the feedback slot of each choice, ordered by index.
        choices: the choices, ordered by index.

    Attributes:
        context: the part of the request that the postprocessor needs.
        serial: the number of the request's stream.
        cancel_checked: the time of the last check for cancellation, by time.monotonic().
        replied: the time of the last response, by time.monotonic().
        is_cancelled: whether the client has disconnected.
    """

    def __init__(
        self,
        context: StreamContext,
        serial: int,
        slots: Sequence[int],
        choices: Iterable[Choice],
    ) -> None:
        self.context = context
        self.serial = serial
        self.cancel_checked = 0.0
        self.replied = time.monotonic()
        self.is_cancelled = False
        self._slots = slots
        self._choices = list(choices)

    def add(self, token_ids: Sequence[int], state: StepState) -> None:
        """Add one step. Each delta of `state` describes the next `num_tokens` of the token ids."""
        start = 0
        for delta in state.deltas:
            end = start + delta.num_tokens
            self._choices[delta.index].add(token_ids[start:end], delta)
            start = end

    def stopped_slots(self) -> list[int]:
        """Return the slots of the choices that have a stop string but no ending yet."""
        return [
            slot
            for slot, choice in zip(self._slots, self._choices, strict=True)
            if choice.stop_string is not None and not choice.is_finished
        ]

    def take_outputs(self, *, is_last: bool) -> list[ChoiceOutput]:
        """Return the new outputs of all choices, ordered by index.

        Without streaming there are no outputs before the last step.
        """
        if not self.context.stream and not is_last:
            return []
        outputs = [choice.take_output() for choice in self._choices]
        return [output for output in outputs if output is not None]
