from nereid_backend.serving.delivery import Delivery
from nereid_backend.serving.feedback import FeedbackReader, FeedbackWriter
from nereid_backend.serving.streams import Stream


class Line:
    """The way to the postprocessor: streams send, and the test says what is consumed."""

    def __init__(self):
        self.reader, self.writer, self.probes = FeedbackReader(8), FeedbackWriter(), []
        self.writer.attach(self.reader.path)
        self.delivery = Delivery(self.reader, self.probes.append)
        self.streams = []

    def stream(self):
        serial = len(self.streams) + 1
        made = Stream(str(serial), None, self.reader.acquire(), serial, None, 0.0)
        self.streams.append(made)
        return made

    def send(self, stream, now=0.0):
        stream.take_step(now)
        self.delivery.record(stream, now)

    def consume(self, stream, step):
        self.writer.report(stream.slot, stream.serial, step)

    def consume_probe(self):
        state = self.probes[-1]
        self.writer.report(state.slot, state.serial, state.step)

    def dropped(self):
        self.delivery.observe(self.streams)
        return [stream.request_id for stream in self.streams if self.delivery.was_dropped(stream)]


def test_a_later_step_of_another_stream_shows_that_an_earlier_one_was_dropped():
    line = Line()
    gone, alive = line.stream(), line.stream()
    line.send(gone)
    line.send(alive)
    assert line.dropped() == []
    line.consume(alive, 1)
    assert line.dropped() == ["1"]


def test_an_earlier_step_of_another_stream_shows_nothing():
    line = Line()
    early, late = line.stream(), line.stream()
    line.send(early)
    line.send(late)
    line.consume(early, 1)
    assert line.dropped() == []


def test_a_step_that_is_consumed_between_two_looks_is_not_taken_for_dropped():
    line = Line()
    first, second = line.stream(), line.stream()
    line.send(first)
    line.send(second)
    line.consume(second, 1)
    line.delivery.observe(line.streams)
    line.consume(first, 1)
    assert not line.delivery.was_dropped(first)


def test_a_lone_stream_is_judged_by_a_probe():
    line = Line()
    lone = line.stream()
    line.send(lone, now=10.0)
    line.delivery.probe(line.streams, now=10.05)
    assert line.probes == []
    line.delivery.probe(line.streams, now=10.5)
    assert len(line.probes) == 1
    line.delivery.probe(line.streams, now=10.6)
    assert len(line.probes) == 1, "one probe at a time"
    assert line.dropped() == []
    line.consume_probe()
    assert line.dropped() == ["1"]


def test_a_slow_postprocessor_is_not_taken_for_a_client_that_has_gone():
    line = Line()
    slow = line.stream()
    line.send(slow, now=10.0)
    line.delivery.probe(line.streams, now=12.0)
    line.consume(slow, 1)
    line.consume_probe()
    assert line.dropped() == []


def test_no_probe_is_sent_while_nothing_is_on_its_way():
    line = Line()
    done = line.stream()
    line.send(done, now=10.0)
    line.consume(done, 1)
    line.delivery.observe(line.streams)
    line.delivery.probe(line.streams, now=20.0)
    assert line.probes == []
