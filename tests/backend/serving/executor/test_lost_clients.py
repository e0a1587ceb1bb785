from nereid_backend.serving.executor.lost_clients import LostClientDetector
from nereid_backend.serving.executor.streams import Sequence, Stream
from nereid_backend.serving.feedback import FeedbackReader, FeedbackWriter


class Scene:
    """The streams of a test, and the detector of lost clients.

    The test determines which steps the postprocessor has consumed.
    """

    def __init__(self):
        self.reader, self.writer, self.now = FeedbackReader(8), FeedbackWriter(), 100.0
        self.writer.attach(self.reader.address)
        self.detector = LostClientDetector(self.reader, patience_s=5.0)
        self.streams = []

    def new_stream(self):
        serial = len(self.streams) + 1
        (slot,) = self.reader.acquire()
        sequences = [Sequence(0, slot)]
        self.streams.append(Stream(str(serial), None, serial, sequences, opening=None, last_sent=0))
        return self.streams[-1]

    def send(self, stream):
        stream.take_step(self.now)
        self.detector.record_sent_step(stream)

    def consume(self, stream, step):
        self.writer.report(stream.slot, stream.serial, step)

    def observe(self, after_s=0.1):
        """Let the detector read which steps are consumed, `after_s` seconds after the last time."""
        self.now += after_s
        self.detector.observe(self.streams, self.now)

    def lost_ids(self):
        """Observe, and return the ids of the streams whose clients are lost: "1", "2" and so on."""
        self.observe()
        return [
            stream.request_id for stream in self.streams if self.detector.detect_lost_client(stream)
        ]


def test_a_later_step_of_another_stream_shows_that_an_earlier_one_was_dropped():
    scene = Scene()
    gone, alive = scene.new_stream(), scene.new_stream()
    scene.send(gone)
    scene.send(alive)
    assert scene.lost_ids() == []
    scene.consume(alive, 1)
    for _ in range(10):
        scene.observe()
    assert scene.lost_ids() == ["1"]


def test_a_step_that_is_overtaken_does_not_count_as_dropped():
    scene = Scene()
    older, newer = scene.new_stream(), scene.new_stream()
    for step in range(1, 30):
        scene.send(older)
        scene.send(newer)
        # This happens if a new postprocessor already consumes the steps of `newer`, while the old
        # postprocessor still consumes the steps of `older`.
        scene.consume(newer, step)
        assert scene.lost_ids() == []
        scene.consume(older, step)
    assert scene.lost_ids() == []


def test_a_consumed_earlier_step_of_another_stream_has_no_effect():
    scene = Scene()
    early, late = scene.new_stream(), scene.new_stream()
    scene.send(early)
    scene.send(late)
    scene.consume(early, 1)
    assert scene.lost_ids() == []


def test_a_step_consumed_between_two_observations_does_not_count_as_dropped():
    scene = Scene()
    first, second = scene.new_stream(), scene.new_stream()
    scene.send(first)
    scene.send(second)
    scene.consume(second, 1)
    scene.observe()
    scene.consume(first, 1)
    assert not scene.detector.detect_lost_client(first)


def test_a_step_of_a_single_stream_counts_as_dropped_after_the_patience():
    scene = Scene()
    lone = scene.new_stream()
    scene.send(lone)
    for _ in range(45):  # 4.5 s; the patience is 5 s
        assert scene.lost_ids() == []
    for _ in range(10):
        scene.observe()
    assert scene.detector.detect_lost_client(lone)


def test_a_pause_of_the_whole_machine_does_not_count():
    scene = Scene()
    lone = scene.new_stream()
    scene.send(lone)
    scene.observe()
    scene.observe(after_s=60.0)
    assert not scene.detector.detect_lost_client(lone)


def test_each_consumed_step_restarts_the_patience():
    scene = Scene()
    slow = scene.new_stream()
    for step in range(1, 5):
        scene.send(slow)
        for _ in range(40):  # 4 s; the patience is 5 s
            assert scene.lost_ids() == []
        scene.consume(slow, step)
    assert scene.lost_ids() == []


def test_time_without_an_unconsumed_step_does_not_count():
    scene = Scene()
    idle = scene.new_stream()
    for _ in range(100):
        scene.observe()
    scene.send(idle)
    assert scene.lost_ids() == []
