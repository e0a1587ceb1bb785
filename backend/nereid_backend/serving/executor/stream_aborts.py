# SPDX-License-Identifier: Apache-2.0
"""Asks the engine to end a sequence when no more tokens of the sequence are needed."""

from collections.abc import Callable

from nereid_backend.serving.executor.lost_clients import LostClientDetector
from nereid_backend.serving.executor.request_statistics import RequestStatistics
from nereid_backend.serving.executor.streams import Sequence, Stream
from nereid_backend.serving.feedback import FeedbackReader, Signal
from nereid_backend.serving.process.supervised_process import SupervisedProcess


class StreamAborts:
    """Aborts streams. A stream is the state of one request in the executor.

    The engine sends a last update for each sequence that was aborted.

    Args:
        feedback: the memory in which the postprocessor signals stop strings and disconnected
            clients.
        lost_clients: detects disconnected clients that the postprocessor does not signal.
        statistics: counts the requests with disconnected clients.
        owner: returns the engine process of a request. The argument is the request id.
    """

    def __init__(
        self,
        feedback: FeedbackReader,
        lost_clients: LostClientDetector,
        statistics: RequestStatistics,
        owner: Callable[[str], SupervisedProcess],
    ) -> None:
        self._feedback = feedback
        self._lost_clients = lost_clients
        self._statistics = statistics
        self._owner = owner

    def abort(self, stream: Stream) -> None:
        """Ask the engine to end all sequences of a stream."""
        send_abort(self._owner(stream.request_id), stream.request_id)

    def abort_unwanted(self, stream: Stream) -> None:
        """Abort a stream if its client has disconnected.

        Otherwise, abort the sequences that have reached a stop string. The postprocessor finds stop
        strings and disconnected clients, and writes a signal into the slot of the sequence in the
        shared memory. The serial number of the stream distinguishes its signals from those of
        earlier streams in the same slot.
        """
        if stream.is_aborting or stream.has_ended:
            return
        signals = [
            self._feedback.signal(sequence.slot, stream.serial) for sequence in stream.sequences
        ]
        if Signal.CANCELLED in signals or self._lost_clients.detect_lost_client(stream):
            stream.is_aborting = True
            self._statistics.counts["requests_disconnected_total"] += 1
            self.abort(stream)
            return
        for sequence, signal in zip(stream.sequences, signals, strict=True):
            if signal is Signal.STOP_STRING and not sequence.is_aborting:
                self._abort_sequence(stream, sequence)

    def _abort_sequence(self, stream: Stream, sequence: Sequence) -> None:
        """Abort a sequence that has reached a stop string, if the sequence has not ended yet."""
        sequence.is_aborting = True
        if sequence.ending is not None:
            return
        is_only_sequence = len(stream.sequences) == 1
        process = self._owner(stream.request_id)
        send_abort(process, stream.request_id, None if is_only_sequence else sequence.index)


def send_abort(process: SupervisedProcess, request_id: str, index: int | None = None) -> None:
    """Ask an engine process to end a whole request, or only the sequence with the index `index`."""
    process.child.send(["abort", request_id, index])
