# SPDX-License-Identifier: Apache-2.0
"""The output of all choices of one request."""

import time
from collections.abc import Iterable, Sequence

from nereid_backend.serving.postprocessor.choice import Choice, ChoiceOutput
from nereid_backend.serving.wire import StepState, StreamContext


class Choices:
    """The postprocessor's state of one request.

    Attributes:
        context: the part of the request that the postprocessor needs.
        cancel_checked_at: the time of the last check for cancellation, by time.monotonic().
        replied_at: the time of the last response, by time.monotonic().
        is_cancelled: whether the client has disconnected.
        opened_at: the time of the first step, by time.monotonic().
        parsed_s: the time for decoding and parsing the steps so far, in seconds.
    """

    def __init__(
        self,
        context: StreamContext,
        slots: Sequence[int],
        choices: Iterable[Choice],
    ) -> None:
        """Initialise the state of a request before its first step.

        Args:
            context: the part of the request that the postprocessor needs.
            slots: the number of each choice's slot in the shared memory (see feedback.py), ordered
                by index.
            choices: the choices, ordered by index.
        """
        self.context = context
        self.cancel_checked_at = 0.0
        self.opened_at = self.replied_at = time.monotonic()
        self.parsed_s = 0.0
        self.is_cancelled = False
        self._slots = slots
        self._choices = list(choices)

    def add(self, token_ids: Sequence[int], state: StepState) -> None:
        """Add the tokens of one step.

        Example: the token ids [5, 6, 7] and deltas of choice 0 with 1 token and of choice 2 with 2
        tokens add [5] to choice 0 and [6, 7] to choice 2.

        Args:
            token_ids: the tokens of all choices, in the order of `state.deltas`.
            state: the other data of the step.
        """
        began = time.monotonic()
        start = 0
        for delta in state.deltas:
            end = start + delta.num_tokens
            self._choices[delta.index].add(token_ids[start:end], delta)
            start = end
        self.parsed_s += time.monotonic() - began

    def stopped_slots(self) -> list[int]:
        """Return the slots of the choices that have reached a stop string and have not ended."""
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
