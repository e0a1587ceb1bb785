import contextlib
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
    first_slot = reader.acquire()
    assert reader.acquire(3) is None
    other_slots = reader.acquire(2)
    assert len({*first_slot, *other_slots}) == 3
    reader.release(other_slots)
    assert reader.acquire(2) == other_slots
    reader.close()


def test_nothing_is_left_in_the_file_system():
    files_before = set(os.listdir("/dev/shm"))
    reader, _ = connected()
    assert set(os.listdir("/dev/shm")) == files_before
    reader.close()
    with pytest.raises(RequestError, match="address of the executor's shared memory"):
        FeedbackWriter().attach(reader.address)


def test_a_writer_maps_only_the_memory_of_an_executor(tmp_path):
    reader = FeedbackReader(num_slots=4)
    process_id, descriptor, name = reader.address.split("/")
    # A file on disk that has the name of the executor's memory must not be mapped.
    other_file = tmp_path / name
    other_file.write_bytes(bytes(4096))
    with open(other_file, "r+b") as opened:
        for wrong_address in (
            str(other_file),
            f"{process_id}/{opened.fileno()}/{name}",
            f"{process_id}/{descriptor}/nereid-feedback-{'0' * 32}",
            f"{process_id}/{descriptor}/../{name}",
            f"{process_id}/99999/{name}",
            f"4000000000/{descriptor}/{name}",
            f"/proc/{process_id}/fd/{descriptor}",
            "/dev/shm/nothing",
            "\0",
            "",
        ):
            writer = FeedbackWriter()
            with pytest.raises(RequestError):
                writer.attach(wrong_address)
    assert other_file.read_bytes() == bytes(4096)
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
    executor, writer = connected()
    other_executor = FeedbackReader(num_slots=4)
    with contextlib.closing(executor), contextlib.closing(other_executor):
        message = executor.sign(b"state")
        assert writer.attach_and_verify(message) == b"state"

        # A message consists of the address of the executor, a signature and the signed content.
        address, other_address = executor.address.encode(), other_executor.address.encode()
        signed_by_other = address + other_executor.sign(b"state").removeprefix(other_address)
        damaged = [message + b"!", message[:-1], address, b"", b"\xff" * 300]
        for wrong_message in [*damaged, signed_by_other]:
            with pytest.raises(RequestError):
                writer.attach_and_verify(wrong_message)
