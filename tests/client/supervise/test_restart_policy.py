"""Tests of the limits on restarts, and of the detection of dead or abandoned stub processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes.live_frontend import wait_for
from nereid_client.supervise.child_processes import children_of, is_waiting_for_a_child
from nereid_client.supervise.restart_policy import RestartPolicy, Restarts
from nereid_client.supervise.stub_processes import StubWatch


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_first_restart_is_at_once_and_each_further_one_waits_twice_as_long():
    restarts = Restarts(RestartPolicy(5, 1.5), Clock())
    assert [restarts.record_failure() for _ in range(6)] == [0.0, 1.5, 3.0, 6.0, 12.0, None]


def test_a_wait_has_a_limit():
    restarts = Restarts(RestartPolicy(20, 1.0), Clock())
    assert max(restarts.record_failure() for _ in range(20)) == 60.0


@pytest.mark.parametrize("backoff_s", [0.0, 1.0])
def test_more_than_a_thousand_restarts_in_a_row_are_possible(backoff_s):
    restarts = Restarts(RestartPolicy(2000, backoff_s), Clock())
    waits_s = [restarts.record_failure() for _ in range(2000)]
    assert waits_s[-1] == min(60.0, 60.0 * backoff_s)


def test_no_restarts_means_none():
    assert Restarts(RestartPolicy(0, 1.0), Clock()).record_failure() is None


def test_ten_minutes_without_a_failure_reset_the_number_of_restarts():
    clock = Clock()
    restarts = Restarts(RestartPolicy(1, 1.0), clock)
    assert restarts.record_failure() == 0.0
    clock.now += 599
    assert restarts.record_failure() is None
    clock.now += 600
    assert restarts.record_failure() == 0.0
    assert restarts.describe() == "restart 1 of 1"


def stub(tmp_path, seconds):
    """Start a process that has the name of a Triton stub and sleeps."""
    program = tmp_path / "triton_python_backend_stub"
    if not program.exists():
        program.symlink_to("/bin/sleep")
    return subprocess.Popen([program, str(seconds)])


def wait_for_dead_model(watch, timeout_s):
    """Return the name of the first model that died, or None if no model dies within the time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if model := watch.detect_dead_model():
            return model
        time.sleep(0.05)
    return None


def test_a_stub_that_died_and_was_not_waited_for_is_found(tmp_path):
    process = stub(tmp_path, 60)
    watch = StubWatch(os.getpid())
    assert watch.detect_dead_model() is None
    process.kill()
    try:
        assert wait_for_dead_model(watch, timeout_s=60) == "a model"
    finally:
        process.wait()


@pytest.mark.parametrize(
    ("signal_number", "has_crashed"), [(signal.SIGABRT, True), (signal.SIGKILL, False)]
)
def test_a_stub_that_ended_itself_by_a_signal_has_crashed(tmp_path, signal_number, has_crashed):
    process = stub(tmp_path, 60)
    watch = StubWatch(os.getpid())
    watch.detect_dead_model()  # the first call finds the running stub
    process.send_signal(signal_number)
    try:
        assert wait_for_dead_model(watch, timeout_s=60)
        assert watch.has_stub_crashed == has_crashed
    finally:
        process.wait()


def test_a_stub_with_a_thread_that_has_not_ended_is_not_dead():
    # While the kernel frees the memory of a stub that the server unloads, only the main thread is a
    # zombie. On a busy machine, this takes longer than the time after which the supervisor treats a
    # zombie as ended.
    end_main_thread = (
        "import ctypes, threading, time\n"
        "open('/proc/self/comm', 'w').write('triton_python_backend_stub')\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", end_main_thread])
    main_thread = Path(f"/proc/{process.pid}/task/{process.pid}/status")
    try:
        wait_for(lambda: "State:\tZ" in main_thread.read_text())
        watch = StubWatch(os.getpid())
        assert pids_of_stubs() == [process.pid]
        assert wait_for_dead_model(watch, timeout_s=1) is None
        process.kill()  # ends the other thread
        assert wait_for_dead_model(watch, timeout_s=60) == "a model"
    finally:
        process.kill()
        process.wait()


def num_asleep(process):
    """Return the number of the process's children that are already running their own program."""
    names = [child.name for child in children_of(process.pid)]
    return names.count("triton_python_b") + names.count("sleep")


def is_hang_detected_after_6_s(server):
    """Watch a server for six seconds of a simulated clock. Return whether a hang was detected."""
    clock = Clock()
    watch = StubWatch(server.pid, clock)
    watch.detect_dead_model()
    assert not watch.detect_hang()
    clock.now += 6
    return watch.detect_hang()


def test_a_server_that_waits_for_a_stub_that_goes_on_has_given_it_up(tmp_path):
    stub(tmp_path, 0).wait()  # this call creates the program file
    program = tmp_path / "triton_python_backend_stub"
    # Two shells stand for two servers: the first one waits for its stub to end, and the second one
    # waits for input.
    waiting = subprocess.Popen(["/bin/bash", "-c", f"{program} 60 & wait"])
    working = subprocess.Popen(["/bin/bash", "-c", f"{program} 60 & read -t 60 < <(sleep 60)"])
    try:
        wait_for(lambda: num_asleep(waiting) == 1 and is_waiting_for_a_child(waiting.pid))
        wait_for(lambda: num_asleep(working) == 2 and not is_waiting_for_a_child(working.pid))
        assert is_hang_detected_after_6_s(waiting)
        assert not is_hang_detected_after_6_s(working)
    finally:
        for process in (waiting, working):
            for child in children_of(process.pid):
                os.kill(child.pid, signal.SIGKILL)
            process.kill()
            process.wait()


def test_a_stub_that_was_waited_for_was_meant_to_end(tmp_path):
    process = stub(tmp_path, 60)
    watch = StubWatch(os.getpid())
    watch.detect_dead_model()
    process.kill()
    process.wait()
    assert wait_for_dead_model(watch, timeout_s=1) is None


@pytest.mark.parametrize(
    ("are_models_loaded", "can_unload", "model"),
    [(True, False, "a model"), (False, False, None), (True, True, None)],
)
def test_a_stub_of_a_loaded_model_that_disappears_has_died(
    tmp_path, are_models_loaded, can_unload, model
):
    # Since version 2.65, the Triton server waits for (reaps) a dead stub when a client asks for the
    # state of the server. Then, the supervisor finds no zombie process.
    process = stub(tmp_path, 60)
    clock = Clock()
    watch = StubWatch(os.getpid(), clock, can_unload=can_unload)
    watch.are_models_loaded = are_models_loaded
    wait_for(lambda: watch.detect_dead_model() is None and process.pid in pids_of_stubs())
    clock.now += 6  # the watch searches for new stubs every five seconds
    watch.detect_dead_model()
    process.kill()
    process.wait()
    assert watch.detect_dead_model() is None
    clock.now += 3  # a stub that disappeared two seconds ago counts as dead
    assert watch.detect_dead_model() == model


def pids_of_stubs():
    """Return the process ids of the test's child processes that have the name of a stub."""
    return [child.pid for child in children_of(os.getpid()) if child.name == "triton_python_b"]


def test_other_dead_children_are_not_taken_for_stubs():
    process = subprocess.Popen([sys.executable, "-c", ""])
    watch = StubWatch(os.getpid())
    try:
        assert wait_for_dead_model(watch, timeout_s=1) is None
        assert any(child.pid == process.pid for child in children_of(os.getpid()))
    finally:
        process.wait()
