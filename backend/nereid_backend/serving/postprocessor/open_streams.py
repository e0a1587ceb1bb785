# SPDX-License-Identifier: Apache-2.0
"""Stores the open streams of the postprocessor. The key of a stream is its memory slot."""

from nereid_backend.serving.feedback import FeedbackWriter
from nereid_backend.serving.postprocessor.choices import Choices
from nereid_backend.serving.wire import StepState


class OpenStreams:
    """Stores the open streams of one executor by slot, and sends signals to the executor.

    The executor assigns two numbers to each stream: a serial number that is larger than all earlier
    serial numbers, and a slot that no other stream uses at that time (see feedback.py). Several
    streams use a slot one after another. This class stores the serial number of the last stream of
    each slot. Each step contains the slot and the serial number of its stream:

        If the serial number of the step is    the step belongs to
        larger than the stored number          a new stream, which now uses the slot
        equal to the stored number             the current stream of the slot, which may have ended
        smaller than the stored number         an earlier stream of the slot, so the step is late

    Attributes:
        feedback: sends reports and signals through the shared memory of the executor.
    """

    def __init__(self) -> None:
        self.feedback = FeedbackWriter()
        self._streams: dict[int, Choices] = {}
        # The serial number of the last stream of each slot.
        self._serials: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of open streams."""
        return len(self._streams)

    def is_late(self, state: StepState) -> bool:
        """Return whether the memory slot of `state` is already used by a newer stream."""
        return state.serial < self._serials.get(state.slot, 0)

    def is_new(self, state: StepState) -> bool:
        """Return whether `state` belongs to a new stream.

        A stream is new until `assign_slot` is called for the stream.
        """
        return state.serial > self._serials.get(state.slot, 0)

    def assign_slot(self, state: StepState) -> None:
        """Record that the stream of `state` now uses the memory slot `state.slot`.

        If the previous stream of the slot is still open, because it had no last step, remove the
        previous stream. The new stream is opened later by `open`.
        """
        self._serials[state.slot] = state.serial
        self._streams.pop(state.slot, None)

    def open(self, state: StepState, choices: Choices) -> None:
        """Store the choices of a new stream. `assign_slot` must be called for the stream first."""
        self._streams[state.slot] = choices

    def choices_of(self, state: StepState) -> Choices | None:
        """Return the choices of the stream of `state`; None if the stream is not open."""
        return self._streams.get(state.slot)

    def remove(self, state: StepState) -> None:
        """Remove the stream to which `state` belongs. Do nothing if this stream is not open."""
        self._streams.pop(state.slot, None)
