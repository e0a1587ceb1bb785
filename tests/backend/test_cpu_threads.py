import os
import re
import subprocess
import sys

import pytest
import torch
from backend.torch_threads import use_threads
from hypothesis import given
from hypothesis import strategies as st
from nereid_backend.cpu_threads import CpuThreads, cpu_time_of_others, suitable_threads


@pytest.mark.parametrize(
    ("max_threads", "num_cpus", "used_by_others", "num_threads"),
    [
        (2, 2, 0.0, 2),
        (2, 2, 0.3, 2),
        (2, 2, 0.6, 1),
        (2, 2, 2.0, 1),
        # One CPU remains free for the other process.
        (15, 16, 1.0, 15),
        (16, 16, 1.0, 15),
        # Two engines with 15 threads each share the CPUs.
        (15, 16, 8.0, 8),
        # The measured CPU time can be negative by a rounding error.
        (4, 4, -0.01, 4),
    ],
)
def test_other_processes_reduce_the_number_of_threads(
    max_threads, num_cpus, used_by_others, num_threads
):
    assert suitable_threads(max_threads, num_cpus, used_by_others) == num_threads


@given(
    max_threads=st.integers(1, 64),
    num_cpus=st.integers(1, 64),
    loads=st.tuples(st.floats(0, 64), st.floats(0, 64)),
)
def test_more_load_never_means_more_threads(max_threads, num_cpus, loads):
    fewer, more = (suitable_threads(max_threads, num_cpus, load) for load in sorted(loads))
    assert 1 <= more <= fewer <= max_threads


@pytest.fixture
def _two_threads():
    with use_threads(2):
        yield


class Load:
    """A `CpuThreads` object with a fake clock and a fake CPU time of the other processes."""

    def __init__(self):
        self.now = self.others = 0.0
        self.threads = CpuThreads(2, 2, lambda: self.others, clock=lambda: self.now)

    def pass_time(self, seconds, *, others):
        """Advance the clock, while other processes use `others` CPUs on average."""
        self.now += seconds
        self.others += others * seconds

    def threads_after_steps(self, seconds, *, others):
        """Return the number of threads after steps that take `seconds` in total."""
        self.threads.adjust()
        self.pass_time(seconds, others=others)
        self.threads.adjust()
        return torch.get_num_threads()

    def pause(self, seconds, *, others):
        """Advance the clock without a step."""
        self.threads.pause()
        self.pass_time(seconds, others=others)


@pytest.mark.usefixtures("_two_threads")
def test_the_number_of_threads_follows_the_load_of_the_last_second():
    load = Load()
    loads = [(0.5, 1.0), (0.6, 1.0), (1.0, 0.9), (1.0, 0.1)]
    num_threads = [load.threads_after_steps(seconds, others=others) for seconds, others in loads]
    assert num_threads == [2, 1, 1, 2]


@pytest.mark.usefixtures("_two_threads")
def test_the_load_during_pauses_has_no_effect():
    # This happens if an embedding model and an LLM compute alternately. Each of them pauses while
    # the other computes, so neither delays the other.
    load = Load()
    for _ in range(9):
        assert load.threads_after_steps(0.9, others=0.0) == 2
        load.pause(0.9, others=2.0)


@pytest.mark.usefixtures("_two_threads")
def test_short_steps_between_pauses_are_measured_together():
    load = Load()
    num_threads = []
    for _ in range(6):
        num_threads.append(load.threads_after_steps(0.25, others=1.0))
        load.pause(0.25, others=0.0)
    assert num_threads == [2, 2, 2, 1, 1, 1]


@pytest.mark.usefixtures("_two_threads")
def test_after_a_long_pause_the_largest_number_of_threads_is_used_again():
    load = Load()
    assert load.threads_after_steps(1.5, others=1.0) == 1
    load.pause(30, others=1.0)
    assert load.threads_after_steps(0.1, others=1.0) == 2


@pytest.mark.usefixtures("_two_threads")
def test_the_load_during_a_long_step_counts():
    assert Load().threads_after_steps(20, others=1.0) == 1


@pytest.mark.usefixtures("_two_threads")
def test_without_a_measurement_the_number_of_threads_does_not_change():
    load = Load()
    load.threads = CpuThreads(2, 2, lambda: None, clock=lambda: load.now)
    assert load.threads_after_steps(1.5, others=1.0) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_cpu_time_of_another_process_is_measured():
    cpus = frozenset(os.sched_getaffinity(0))
    time_before = cpu_time_of_others(cpus)
    program = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert cpu_time_of_others(cpus) - time_before > 0.4
    assert cpu_time_of_others(frozenset()) <= 0  # The set of CPUs is empty.


@pytest.mark.skipif(sys.platform != "linux", reason="torch uses another OpenMP library")
@pytest.mark.parametrize(("variables", "value"), [({}, "2000"), ({"GOMP_SPINCOUNT": "5"}, "5")])
def test_waiting_threads_sleep_soon_unless_the_operator_decides_otherwise(variables, value):
    environment = {name: text for name, text in os.environ.items() if "GOMP" not in name}
    # The OpenMP library prints its settings when torch loads the library.
    environment |= {"OMP_DISPLAY_ENV": "verbose", **variables}
    command = [sys.executable, "-c", "import nereid_backend, torch"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    setting = re.search(r"GOMP_SPINCOUNT = '(\d+)'", result.stderr)
    assert setting is not None, result.stderr
    assert setting[1] == value
