"""The report of a run: a table of the groups of attacks, and the list of all faults."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadtest.hostile.attack import Attack, Outcome
from loadtest.hostile.observers import MemoryWatch, Neighbour

_MAX_GROWTH_MIB = 1000.0
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
    def fault(self) -> str | None:
        """The reason why the outcome is a defect; None if it is no defect."""
        return self.attack.fault(self.outcome)


@dataclass(frozen=True)
class Observations:
    """What was observed in a run.

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


def report(seen: Observations) -> tuple[str, bool]:
    """Return the table of a run, and whether the run passed."""
    lines = ["", *_table(seen), "", *_conditions(seen)]
    first, most = seen.memory.total
    lines.append(
        f"memory of all processes: {first:.0f} MiB at the start, {most:.0f} MiB at the peak"
    )
    for role, (begin, peak) in sorted(seen.memory.peaks.items()):
        if peak - begin > 20:
            lines.append(f"    {role}: {begin:.0f} MiB, {peak:.0f} MiB at the peak")
    faults = list(_faults(seen))
    return "\n".join([*lines, "", *(faults or ["No faults."])]), not faults


def _faults(seen: Observations) -> Iterator[str]:
    for result in seen.results:
        if result.fault:
            attack = result.attack
            yield (
                f"{attack.kind}: {attack.name}: {result.fault}; "
                f"{result.ended - result.started:.1f} s; {result.outcome.text[:200]!r}"
            )
    for at, wait_s in seen.neighbour.waits:
        if wait_s > seen.limits.first_token_s:
            names = _running(seen, at, at + wait_s)
            yield f"the neighbour waited {wait_s:.1f} s at {at - seen.started:.0f} s: {names}"
    for at, text in seen.neighbour.errors:
        yield f"the neighbour failed: {text[:300]}: {_running(seen, at - 1, at + 1)}"
    first, most = seen.memory.total
    if most - first > _MAX_GROWTH_MIB:
        peak_at = seen.memory.peak_at
        names = _running(seen, peak_at - 1, peak_at)
        yield f"the memory grew by {most - first:.0f} MiB: {names}"
    if seen.gone:
        yield f"these processes ended or were restarted: {', '.join(seen.gone)}"
    if seen.visits:
        yield f"the server used an address in a request: {seen.visits}"


def _conditions(seen: Observations) -> Iterator[str]:
    """Yield the state of the machine, the time limits, and the waits of the well-behaved client."""
    limits = seen.limits
    yield (
        f"load of the machine: {limits.load:.1f} at the start, {os.getloadavg()[0]:.1f} at the "
        f"end, {os.cpu_count()} CPUs"
    )
    yield (
        f"first token without attacks: {_waits_line(limits.quiet_waits)}; the limit is "
        f"{limits.first_token_s:.1f} s, and all other time limits are multiplied by "
        f"{limits.slowness:.1f}"
    )
    waits = sorted(wait_s for _, wait_s in seen.neighbour.waits)
    yield f"first token of the neighbour: {_waits_line(waits)}"


def _waits_line(waits: Sequence[float]) -> str:
    return (
        f"{percentile(waits, 0.5):.2f} s (median), {percentile(waits, 0.99):.2f} s (99 %), "
        f"{percentile(waits, 1):.2f} s (slowest of {len(waits)})"
    )


def _table(seen: Observations) -> Iterator[str]:
    kinds: dict[str, list[Result]] = defaultdict(list)
    for result in seen.results:
        kinds[result.attack.kind].append(result)
    yield f"{'kind':14} {'attacks':>7} {'faults':>6} {'slowest':>8} {'neighbour':>9}  statuses"
    for kind, found in kinds.items():
        slowest = max(result.ended - result.started for result in found)
        begin, end = min(r.started for r in found), max(r.ended for r in found)
        waits = [wait_s for at, wait_s in seen.neighbour.waits if begin - 1 < at < end]
        counts = Counter(str(result.outcome.status) for result in found)
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(counts.items()))
        num_faults = sum(result.fault is not None for result in found)
        wait_s = max(waits, default=0)
        yield (
            f"{kind:14} {len(found):7} {num_faults:6} {slowest:6.1f} s {wait_s:7.2f} s  {statuses}"
        )


def _running(seen: Observations, begin: float, end: float) -> str:
    names = [r.attack.name for r in seen.results if r.started <= end and r.ended >= begin]
    return "; ".join(names[:8])
