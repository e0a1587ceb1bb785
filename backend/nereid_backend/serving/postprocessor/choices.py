# SPDX-License-Identifier: Apache-2.0
"""All answers of one request: steps of the stream in, one response's pieces out."""

import time
from collections.abc import Iterable, Sequence

from nereid_backend.serving.postprocessor.choice import Answer, Piece
from nereid_backend.serving.wire import StepState, StreamContext


class Answers:
    """The postprocessor's state of one request.

    Args:
        context: what it must know of the request.
        serial: number of its stream.
        slots: where a signal about each answer is raised.
        answers: one for each slot, in order.
    """

    def __init__(
        self,
        context: StreamContext,
        serial: int,
        slots: Sequence[int],
        answers: Iterable[Answer],
    ) -> None:
        self.context = context
        self.serial = serial
        self.cancel_checked = 0.0
        self.replied = time.monotonic()
        self.is_cancelled = False
        self._slots = slots
        self._answers = list(answers)

    def take(self, token_ids: Sequence[int], state: StepState) -> None:
        """Take in one step: each part has its own run of the token ids."""
        start = 0
        for part in state.deltas:
            end = start + part.num_tokens
            self._answers[part.index].take(token_ids[start:end], part)
            start = end

    def stopped_slots(self) -> list[int]:
        """Slots of answers that met a stop string and have not ended yet."""
        return [
            slot
            for slot, answer in zip(self._slots, self._answers, strict=True)
            if answer.stop_string is not None and not answer.is_finished
        ]

    def pieces(self, *, is_last: bool) -> list[Piece]:
        """What this step's response says, by index; without streaming, all of it at the end."""
        if not self.context.stream and not is_last:
            return []
        found = [answer.piece() for answer in self._answers]
        return [piece for piece in found if piece is not None]
