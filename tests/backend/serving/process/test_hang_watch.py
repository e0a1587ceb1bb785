import os

import pytest
from nereid_backend.serving.process.hang_watch import HangWatch, cpu_seconds

LIMIT_S = 60.0


class Scene:
    """A `HangWatch` for a fake process, with a clock that the test advances.

    `load` is the number of CPUs that the process uses.
    """

    def __init__(self, limit_s=LIMIT_S, load=0.0, is_working=True, is_on_cpu=True):
        self.now, self.used_s, self.load = 1000.0, 5.0, load
        self.is_working, self.is_on_cpu = is_working, is_on_cpu
        self.watch = HangWatch(limit_s, lambda: self.used_s, lambda: self.now)

    def hangs_after(self, seconds, step_s=0.25):
        """Return the number of seconds until the watch reports that the process hangs.

        The result is None if the watch does not report this within `seconds`.
        """
        for number in range(1, int(seconds / step_s) + 1):
            self.now += step_s
            self.used_s += self.load * step_s
            self.watch.measure(is_working=self.is_working)
            if self.watch.is_hanging(is_on_cpu=self.is_on_cpu):
                return number * step_s
        return None


def test_a_process_with_work_that_sends_nothing_hangs_after_the_limit():
    assert Scene().hangs_after(100) == pytest.approx(LIMIT_S, abs=0.5)


def test_a_message_restarts_the_limit():
    scene = Scene()
    assert scene.hangs_after(50) is None
    scene.watch.note_message()
    assert scene.hangs_after(100) == pytest.approx(LIMIT_S, abs=0.5)


def test_a_process_without_work_may_be_silent():
    assert Scene(is_working=False).hangs_after(1000) is None


def test_without_a_limit_no_process_hangs():
    assert Scene(limit_s=0).hangs_after(1000) is None


def test_a_process_that_computes_on_the_cpu_has_ten_times_the_limit():
    assert Scene(load=0.5).hangs_after(1000) == pytest.approx(10 * LIMIT_S, abs=0.5)
    assert Scene(load=0.01).hangs_after(1000) == pytest.approx(LIMIT_S, abs=0.5)


def test_a_process_with_a_gpu_has_the_plain_limit_although_it_uses_the_cpu():
    assert Scene(load=1.0, is_on_cpu=False).hangs_after(1000) == pytest.approx(LIMIT_S, abs=0.5)


def test_a_pause_of_this_process_counts_as_half_a_second():
    scene = Scene()
    assert scene.hangs_after(3600, step_s=3600.0) is None
    assert scene.watch.silent_s == 0.5


def test_the_cpu_time_of_a_process_is_read_from_the_system():
    assert 0 < cpu_seconds(os.getpid()) < 10_000
    assert cpu_seconds(2**22 + 1) == 0.0
