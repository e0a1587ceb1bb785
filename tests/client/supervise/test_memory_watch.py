"""Tests of `MemoryWatch`, which restarts a process that uses too much memory.

The restart comes before the kernel would kill a process because the memory is exhausted.
"""

import pytest
from nereid_client.supervise.memory_watch import (
    Memory,
    MemoryWatch,
    ProcessMemory,
    read_memory,
    read_processes,
)

GIB = 2**30


class Machine:
    """A simulated machine with 24 GiB of memory.

    A test sets the sizes of the processes, the available memory, and the time.
    """

    def __init__(self):
        self.sizes = {1: GIB, 2: GIB}
        self.available = 10 * GIB
        self.now = 0.0
        self.killed = []
        self.messages = []
        self.watch = MemoryWatch(
            0,
            self.messages.append,
            processes=lambda: [
                ProcessMemory(pid, f"process {pid}", size) for pid, size in self.sizes.items()
            ],
            memory=lambda: Memory(24 * GIB, self.available),
            kill=self.killed.append,
            clock=lambda: self.now,
        )

    def run(self, seconds):
        for _ in range(seconds):
            self.now += 1
            self.watch.check()


@pytest.fixture
def machine():
    return Machine()


def test_processes_within_their_budgets_are_left_alone(machine):
    machine.run(20)
    assert (machine.killed, machine.messages) == ([], [])


def test_a_process_over_its_budget_is_reported_at_once_and_restarted_after_five_seconds(machine):
    machine.sizes[2] = 20 * GIB
    machine.run(3)
    assert machine.killed == []
    assert len(machine.messages) == 1
    assert "20480 MiB" in machine.messages[0]
    assert "--max-process-memory" in machine.messages[0]
    machine.run(3)
    assert machine.killed == [2]
    assert "is restarted, because it has exceeded its budget" in machine.messages[1]


def test_a_short_peak_is_tolerated(machine):
    machine.sizes[2] = 20 * GIB
    machine.run(3)
    machine.sizes[2] = GIB
    machine.run(3)
    machine.sizes[2] = 20 * GIB
    machine.run(3)
    assert machine.killed == []


def test_the_largest_process_is_restarted_when_the_memory_is_nearly_exhausted(machine):
    machine.sizes[1] = 9 * GIB
    machine.available = GIB // 2
    machine.run(1)
    assert machine.killed == [1]
    assert "only 512 MiB of memory are available" in machine.messages[0]
    machine.run(3)
    assert machine.killed == [1]  # no second restart: the kernel needs time to free the memory


def test_the_limit_of_a_container_counts_instead_of_the_memory_of_the_machine(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\n")
    assert read_memory(tmp_path, tmp_path) == Memory(1024_000, 921_600)
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    assert read_memory(tmp_path, tmp_path) == Memory(500_000, 150_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert read_memory(tmp_path, tmp_path).total == 1024_000


def test_the_memory_of_this_machine_can_be_read():
    memory = read_memory()
    assert 0 < memory.available <= memory.total
    assert isinstance(read_processes(), list)
