"""The report of a run: a table of the groups of attacks, and the list of all faults."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadtest.hostile.attack import Attack, Outcome
from loadtest.hostile.observers import MemoryWatch, Neighbour

_MAX_GROWTH_MIB = 1000.0
# An attack may have caused a fault if it ran at most this number of seconds before or after it.
_WINDOW_S = 1.0
_REPORTED_GROWTH_MIB = 20.0
_MAX_FIRST_TOKEN_S = 2.0
# The limit is at least this multiple of the waiting time without attacks, because requests take
# longer on a busy machine.
_TIMES_THE_QUIET_WAIT = 4.0


@dataclass(frozen=True)
class Limits:
    """The time limits of a run. They follow from a measurement without attacks on this machine.

    Attributes:
        quiet_waits: the sorted seconds until the first token without attacks.
        load: the number of processes that wanted to run at the start, averaged over a minute.
    """

    quiet_waits: Sequence[float]
    load: float

    @classmethod
    def measure(cls, waits: Sequence[float]) -> "Limits":
        """Return the limits that follow from the waiting times of a client without attacks."""
        return cls(sorted(waits), os.getloadavg()[0])

    @property
    def first_token_s(self) -> float:
        """The longest allowed time to a first token.

        It is the larger of two times: 2 s, and four times the 99th percentile of `quiet_waits`.
        """
        return max(_MAX_FIRST_TOKEN_S, _TIMES_THE_QUIET_WAIT * percentile(self.quiet_waits, 0.99))

    @property
    def slowness(self) -> float:
        """The number by which the time limits of the attacks are multiplied."""
        return self.first_token_s / _MAX_FIRST_TOKEN_S


@dataclass(frozen=True)
class Result:
    """An attack with its outcome, and the times at which it started and ended."""

    attack: Attack
    outcome: Outcome
    started: float
    ended: float

    @property
    def seconds(self) -> float:
        """The duration of the attack."""
        return self.ended - self.started

    @property
    def fault(self) -> str | None:
        """The reason why the outcome is a defect; None if it is no defect."""
        return self.attack.fault(self.outcome)


@dataclass(frozen=True)
class Run:
    """The results of a run.

    Attributes:
        results: the attacks with their outcomes.
        neighbour: the well-behaved client.
        memory: the memory of the processes.
        gone: the processes that ended or were restarted.
        visits: the connections to the canary.
        started: the time of the first attack.
        limits: the time limits.
    """

    results: Sequence[Result]
    neighbour: Neighbour
    memory: MemoryWatch
    gone: Sequence[str]
    visits: Sequence[str]
    started: float
    limits: Limits


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile of sorted values; 0 if there are no values."""
    return values[min(int(len(values) * share), len(values) - 1)] if values else 0.0


def report(run: Run) -> tuple[str, bool]:
    """Return the report of a run, and whether the run passed."""
    faults = list(_faults(run))
    paragraphs = [
        "\n".join(_table(run)),
        "\n".join([*_conditions(run), *_memory(run)]),
        "\n".join(faults or ["No faults."]),
    ]
    return "\n" + "\n\n".join(paragraphs), not faults


def _faults(run: Run) -> Iterator[str]:
    """Yield a description of each fault."""
    yield from _faults_of_attacks(run)
    yield from _faults_of_neighbour(run)
    if run.memory.total.growth_mib > _MAX_GROWTH_MIB:
        names = _running(run, run.memory.peak_at - _WINDOW_S, run.memory.peak_at)
        yield f"the memory grew by {run.memory.total.growth_mib:.0f} MiB: {names}"
    if run.gone:
        yield f"these processes ended or were restarted: {', '.join(run.gone)}"
    if run.visits:
        yield f"the server connected to an address that a request contained: {run.visits}"


def _faults_of_attacks(run: Run) -> Iterator[str]:
    """Yield a description of each attack whose outcome is a defect."""
    for result in run.results:
        if result.fault:
            attack = result.attack
            yield (
                f"{attack.kind}: {attack.name}: {result.fault}; {result.seconds:.1f} s; "
                f"{result.outcome.text[:200]!r}"
            )


def _faults_of_neighbour(run: Run) -> Iterator[str]:
    """Yield a description of each request of the neighbour that failed or waited too long."""
    for wait in run.neighbour.waits:
        if wait.seconds > run.limits.first_token_s:
            names = _running(run, wait.started, wait.started + wait.seconds)
            at_s = wait.started - run.started
            yield f"the neighbour waited {wait.seconds:.1f} s at {at_s:.0f} s: {names}"
    for error in run.neighbour.errors:
        names = _running(run, error.started - _WINDOW_S, error.started + _WINDOW_S)
        yield f"the neighbour failed: {error.text[:300]}: {names}"


def _running(run: Run, begin: float, end: float) -> str:
    """Return the names of the first attacks that ran at some moment between two times."""
    names = [one.attack.name for one in run.results if one.started <= end and one.ended >= begin]
    return "; ".join(names[:8])


def _conditions(run: Run) -> Iterator[str]:
    """Yield the state of the machine, the time limits, and the waits of the well-behaved client."""
    limits = run.limits
    yield (
        f"load of the machine: {limits.load:.1f} at the start, {os.getloadavg()[0]:.1f} at the "
        f"end, {os.cpu_count()} CPUs"
    )
    yield (
        f"first token without attacks: {_waits_line(limits.quiet_waits)}; the limit is "
        f"{limits.first_token_s:.1f} s, and all other time limits are multiplied by "
        f"{limits.slowness:.1f}"
    )
    waits = sorted(wait.seconds for wait in run.neighbour.waits)
    yield f"first token of the neighbour: {_waits_line(waits)}"


def _waits_line(waits: Sequence[float]) -> str:
    """Return percentiles of sorted waiting times."""
    return (
        f"{percentile(waits, 0.5):.2f} s (median), {percentile(waits, 0.99):.2f} s (99 %), "
        f"{percentile(waits, 1):.2f} s (slowest of {len(waits)})"
    )


def _memory(run: Run) -> Iterator[str]:
    """Yield the memory of all processes together, and of each process whose memory has grown."""
    first, peak = run.memory.total
    yield f"memory of all processes: {first:.0f} MiB at the start, {peak:.0f} MiB at the peak"
    for role, memory in sorted(run.memory.by_role.items()):
        if memory.growth_mib > _REPORTED_GROWTH_MIB:
            yield f"    {role}: {memory.first_mib:.0f} MiB, {memory.peak_mib:.0f} MiB at the peak"


def _table(run: Run) -> Iterator[str]:
    """Yield the lines of a table with one row for each kind of attack."""
    kinds: dict[str, list[Result]] = defaultdict(list)
    for result in run.results:
        kinds[result.attack.kind].append(result)
    yield f"{'kind':14} {'attacks':>7} {'faults':>6} {'slowest':>8} {'neighbour':>9}  statuses"
    for kind, results in kinds.items():
        counts = Counter(str(result.outcome.status) for result in results)
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(counts.items()))
        num_faults = sum(result.fault is not None for result in results)
        slowest_s = max(result.seconds for result in results)
        numbers = f"{len(results):7} {num_faults:6} {slowest_s:6.1f} s"
        yield f"{kind:14} {numbers} {_longest_wait_s(run, results):7.2f} s  {statuses}"


def _longest_wait_s(run: Run, results: Sequence[Result]) -> float:
    """Return the longest wait of the well-behaved client while attacks of one kind ran."""
    begin = min(result.started for result in results) - 1
    end = max(result.ended for result in results)
    waits = (wait.seconds for wait in run.neighbour.waits if begin < wait.started < end)
    return max(waits, default=0.0)
