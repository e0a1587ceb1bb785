import os

from nereid_backend.serving.feedback import FeedbackReader, FeedbackWriter, Signal


def connected(num_slots=4):
    reader, writer = FeedbackReader(num_slots), FeedbackWriter()
    writer.attach(reader.path)
    return reader, writer


def test_the_reader_sees_what_the_writer_reports():
    reader, writer = connected()
    writer.report(2, serial=7, consumed=3)
    writer.raise_signal(2, serial=7, signal=Signal.STOP_STRING)
    assert reader.consumed(2, 7) == 3
    assert reader.signal(2, 7) is Signal.STOP_STRING
    assert reader.consumed(1, 7) == 0
    reader.close()


def test_a_late_report_for_an_earlier_stream_is_ignored():
    reader, writer = connected()
    writer.report(0, serial=1, consumed=90)
    writer.raise_signal(0, serial=1, signal=Signal.CANCELLED)
    assert reader.consumed(0, serial=2) == 0
    assert reader.signal(0, serial=2) is Signal.NONE
    reader.close()


def test_released_slots_are_reused_in_the_order_of_their_release():
    reader, _ = connected(num_slots=2)
    first, second = reader.acquire(), reader.acquire()
    assert reader.acquire() is None
    reader.release(second)
    reader.release(first)
    assert reader.acquire() == second


def test_several_slots_are_acquired_together_or_not_at_all():
    reader, _ = connected(num_slots=3)
    one = reader.acquire()
    assert reader.acquire(3) is None
    two = reader.acquire(2)
    assert len({*one, *two}) == 3
    reader.release(two)
    assert reader.acquire(2) == two
    reader.close()


def test_nothing_is_left_in_the_file_system():
    before = set(os.listdir("/dev/shm"))
    reader, _ = connected()
    assert set(os.listdir("/dev/shm")) == before
    reader.close()
    assert not os.path.exists(reader.path)
