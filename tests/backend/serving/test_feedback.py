import os

import pytest
from nereid_backend.errors import RequestError
from nereid_backend.serving.feedback import FeedbackReader, FeedbackWriter, Signal


def connected(num_slots=4):
    """Return a reader and a writer that share memory with `num_slots` slots."""
    reader, writer = FeedbackReader(num_slots), FeedbackWriter()
    writer.attach(reader.address)
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
    with pytest.raises(RequestError, match="address of the executor's shared memory"):
        FeedbackWriter().attach(reader.address)


def test_a_writer_maps_only_the_memory_of_an_executor(tmp_path):
    reader = FeedbackReader(4)
    process, number, name = reader.address.split("/")
    victim = tmp_path / name
    victim.write_bytes(bytes(4096))
    with open(victim, "r+b") as opened:
        for address in (
            str(victim),
            f"{process}/{opened.fileno()}/{name}",
            f"{process}/{number}/nereid-feedback-{'0' * 32}",
            f"{process}/{number}/../{name}",
            f"{process}/99999/{name}",
            f"4000000000/{number}/{name}",
            f"/proc/{process}/fd/{number}",
            "/dev/shm/nothing",
            "\0",
            "",
        ):
            writer = FeedbackWriter()
            with pytest.raises(RequestError):
                writer.attach(address)
    assert victim.read_bytes() == bytes(4096)
    reader.close()


def test_a_refused_address_leaves_the_writer_with_its_memory():
    reader, writer = connected()
    with pytest.raises(RequestError):
        writer.attach("/etc/passwd")
    writer.report(1, serial=3, consumed=2)
    assert reader.consumed(1, 3) == 2
    reader.close()


@pytest.mark.parametrize("slot", [-1, 4, 2**40])
def test_a_slot_outside_the_memory_is_refused(slot):
    reader, writer = connected(num_slots=4)
    with pytest.raises(RequestError, match="has 4 slots"):
        writer.report(slot, serial=1, consumed=1)
    with pytest.raises(RequestError, match="has 4 slots"):
        writer.raise_signal(slot, serial=1, signal=Signal.CANCELLED)
    reader.close()


def test_only_steps_that_the_executor_has_signed_are_accepted():
    reader, writer = connected()
    other = FeedbackReader(4)
    message = reader.sign(b"state")
    assert writer.attach_and_verify(message) == b"state"
    foreign = reader.address.encode() + other.sign(b"state")[len(other.address) :]
    damaged = [message + b"!", message[:-1], reader.address.encode(), b"", b"\xff" * 300, foreign]
    for wrong in damaged:
        with pytest.raises(RequestError):
            writer.attach_and_verify(wrong)
    reader.close()
    other.close()
