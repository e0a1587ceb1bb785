from nereid_backend.serving.executor.lost_clients import LostClientDetector
from nereid_backend.serving.executor.streams import Sequence, Stream
from nereid_backend.serving.feedback import FeedbackReader, FeedbackWriter


class Line:
    """The streams of a test, and the detector of lost clients.

    The test determines which steps the postprocessor has consumed.
    """

    def __init__(self):
        self.reader, self.writer, self.now = FeedbackReader(8), FeedbackWriter(), 100.0
        self.writer.attach(self.reader.address)
        self.delivery = LostClientDetector(self.reader, patience_s=5.0)
        self.streams = []

    def stream(self):
        serial = len(self.streams) + 1
        (slot,) = self.reader.acquire()
        made = Stream(str(serial), None, serial, [Sequence(0, slot)], None, 0.0)
        self.streams.append(made)
        return made

    def send(self, stream):
        stream.take_step(self.now)
        self.delivery.record_sent_step(stream)

    def consume(self, stream, step):
        self.writer.report(stream.slot, stream.serial, step)

    def look(self, every_s=0.1):
        self.now += every_s
        self.delivery.observe(self.streams, self.now)

    def dropped(self):
        self.look()
        return [
            stream.request_id for stream in self.streams if self.delivery.detect_lost_client(stream)
        ]


def test_a_later_step_of_another_stream_shows_that_an_earlier_one_was_dropped():
    line = Line()
    gone, alive = line.stream(), line.stream()
    line.send(gone)
    line.send(alive)
    assert line.dropped() == []
    line.consume(alive, 1)
    for _ in range(10):
        line.look()
    assert line.dropped() == ["1"]


def test_a_step_that_is_overtaken_does_not_count_as_dropped():
    line = Line()
    older, newer = line.stream(), line.stream()
    for step in range(1, 30):
        line.send(older)
        line.send(newer)
        # This happens if a new postprocessor already consumes the steps of `newer`, while the old
        # postprocessor still consumes the steps of `older`.
        line.consume(newer, step)
        assert line.dropped() == []
        line.consume(older, step)
    assert line.dropped() == []


def test_a_consumed_earlier_step_of_another_stream_has_no_effect():
    line = Line()
    early, late = line.stream(), line.stream()
    line.send(early)
    line.send(late)
    line.consume(early, 1)
    assert line.dropped() == []


def test_a_step_consumed_between_two_observations_does_not_count_as_dropped():
    line = Line()
    first, second = line.stream(), line.stream()
    line.send(first)
    line.send(second)
    line.consume(second, 1)
    line.look()
    line.consume(first, 1)
    assert not line.delivery.detect_lost_client(first)


def test_a_step_of_a_single_stream_counts_as_dropped_after_the_patience():
    line = Line()
    lone = line.stream()
    line.send(lone)
    for _ in range(45):
        assert line.dropped() == []
    for _ in range(10):
        line.look()
    assert line.delivery.detect_lost_client(lone)


def test_a_pause_of_the_whole_machine_does_not_count():
    line = Line()
    lone = line.stream()
    line.send(lone)
    line.look()
    line.look(every_s=60.0)
    assert not line.delivery.detect_lost_client(lone)


def test_each_consumed_step_restarts_the_patience():
    line = Line()
    slow = line.stream()
    for step in range(1, 5):
        line.send(slow)
        for _ in range(40):
            assert line.dropped() == []
        line.consume(slow, step)
    assert line.dropped() == []


def test_time_without_an_unconsumed_step_does_not_count():
    line = Line()
    idle = line.stream()
    for _ in range(100):
        line.look()
    line.send(idle)
    assert line.dropped() == []
