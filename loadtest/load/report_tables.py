"""The figures of a load test as tables for the console and as CSV files."""

import collections
import csv
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path

import numpy as np

from loadtest.bench.markdown_table import table
from loadtest.load.records import Record
from loadtest.server.gauges import Sample

COLUMNS = (
    "scenario", "requests", "req/s", "tokens/s", "TTFT p50", "p95", "p99", "ITL p50", "p95", "p99",
    "per token", "e2e p50", "p95", "p99", "cancelled", "failed",
)  # fmt: skip
LEGEND = (
    "All times are in milliseconds. TTFT is the time from sending a request to the first chunk of "
    "its stream that contains text. ITL is the time between two such chunks; a chunk may contain "
    "several tokens. The column `per token` shows the median over requests of the mean time per "
    "token. e2e is the time from sending a request to the last byte of its complete answer. "
    "Tokens/s counts the tokens of answers as the server reported them. Failed requests are not "
    "included in the times."
)


@dataclass
class Phase:
    """One part of a load test.

    Attributes:
        name: the name of the phase in the tables.
        description: a phrase that describes the server or the models.
        seconds: the number of seconds during which requests arrived.
        records: the records of all requests.
        samples: the server's metrics during the run.
        broken: sentences about other failures: a leak, a process that did not end, or a load
            generator that failed.
    """

    name: str
    description: str
    seconds: float
    records: list[Record] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def start(self) -> float:
        """The time of the first request, from time.time; 0 without requests."""
        return min((one.started for one in self.records), default=0.0)

    @property
    def failures(self) -> list[str]:
        """The descriptions of everything that went wrong."""
        request_failures = [
            f"{one.scenario} over {one.endpoint}: {fault}"
            for one in self.records
            for fault in one.faults
        ]
        return [f"{self.name}: {failure}" for failure in (*self.broken, *request_failures)]


def row(name: str, records: Sequence[Record], seconds: float) -> list[str]:
    """Return one row of the table for some requests. The columns are COLUMNS."""
    fine = [one for one in records if one.is_fine]
    streams = [one for one in fine if one.is_stream]
    first_times = [one.ttft_s for one in streams if one.ttft_s is not None]
    gaps = [gap for one in streams for gap in one.gaps_s]
    token_gaps = [one.token_gap_s for one in streams if one.token_gap_s is not None]
    complete_times = [one.e2e_s for one in fine if one.outcome == "ok"]
    return [
        name,
        str(len(records)),
        f"{len(records) / seconds:.1f}",
        f"{sum(one.num_tokens for one in fine) / seconds:.0f}",
        *_quantiles(first_times),
        *_quantiles(gaps),
        _quantiles(token_gaps)[0],
        *_quantiles(complete_times),
        str(sum(one.outcome == "cancelled" for one in records)),
        str(len(records) - len(fine)),
    ]


def rows(phase: Phase) -> list[list[str]]:
    """Return one row for each scenario and one for all requests."""
    by_scenario = collections.defaultdict(list)
    for one in phase.records:
        by_scenario[one.scenario].append(one)
    groups = [*sorted(by_scenario.items()), ("all", phase.records)]
    return [row(name, records, phase.seconds) for name, records in groups]


def outcomes(phase: Phase) -> list[tuple[str, int]]:
    """Return the number of requests for each outcome. Expected outcomes are first."""
    counted = collections.Counter(one.outcome for one in phase.records)
    good = ("ok", "cancelled", "rejected")
    return sorted(counted.items(), key=lambda item: (item[0] not in good, -item[1]))


def text(phases: Iterable[Phase]) -> str:
    """Return the report for the console, as Markdown."""
    parts = []
    for phase in phases:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes(phase))
        late = np.percentile([one.late_s for one in phase.records] or [0.0], 99)
        parts += [
            f"## {phase.name}: {phase.description}, {phase.seconds:.0f} s",
            f"{counts}. The load generator sent requests up to {late * 1000:.0f} ms late (p99).",
            table(COLUMNS, rows(phase)),
        ]
    return "\n\n".join([*parts, LEGEND])


def write_csv(folder: Path, phases: Sequence[Phase]) -> None:
    """Write requests.csv, scenarios.csv and gauges.csv into a folder."""
    scenario_rows = [[phase.name, *cells] for phase in phases for cells in rows(phase)]
    _write_csv(folder / "scenarios.csv", ["phase", *unique_columns()], scenario_rows)
    request_rows = [[phase.name, *astuple(one)] for phase in phases for one in phase.records]
    columns = [field.name for field in fields(Record)]
    _write_csv(folder / "requests.csv", ["phase", *columns], request_rows)
    samples = [(phase.name, sample) for phase in phases for sample in phase.samples]
    names = sorted({name for _, sample in samples for name in sample.gauges})
    sample_rows = [
        [phase_name, f"{sample.at:.3f}", *(sample.gauges.get(name, "") for name in names)]
        for phase_name, sample in samples
    ]
    _write_csv(folder / "gauges.csv", ["phase", "at", *names], sample_rows)


def _write_csv(path: Path, head: Sequence[str], body: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *body])


def unique_columns() -> list[str]:
    """Return COLUMNS with the name of the quantity before each percentile, such as "TTFT p95"."""
    columns, quantity = [], ""
    for column in COLUMNS:
        if column.endswith(" p50"):
            quantity = column.removesuffix(" p50")
        columns.append(f"{quantity} {column}" if column in ("p95", "p99") else column)
    return columns


def _quantiles(values: Sequence[float]) -> list[str]:
    """Return the 50th, 95th and 99th percentile in milliseconds, as text."""
    if not len(values):
        return ["-"] * 3
    return [_ms(seconds) for seconds in np.percentile(values, (50, 95, 99))]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}" if seconds < 0.01 else f"{seconds * 1000:.0f}"
