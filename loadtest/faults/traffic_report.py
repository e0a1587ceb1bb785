"""Functions that write tables and sentences for the reports of soak.py and cancel_storm.py."""

import collections
from collections.abc import Mapping, Sequence

import numpy as np

from loadtest.bench.markdown_table import table
from loadtest.faults.leftovers import IdleChecks
from loadtest.faults.memory_slope import MAX_SLOPE_MIB_PER_MINUTE
from loadtest.faults.server_watch import Watch

_COUNTERS = {
    "prompt_tokens_total": "prompt tokens",
    "prefix_cache_hits_total": "prompt tokens found in the prefix cache",
    "generation_tokens_total": "generated tokens",
    "request_success_total stop": "answers that ended by themselves",
    "request_success_total length": "answers that ended at their token limit",
    "request_success_total abort": "answers that their clients cancelled",
    "request_success_total error": "answers that ended with an error",
    "requests_refused_total": "rejected requests",
    "num_preemptions_total": "preemptions",
    "merged_responses_total": "merged updates",
}


def outcomes(counts: Mapping[tuple[str, ...], int]) -> str:
    """Return the number of requests for each outcome. The outcome is the last part of a key.

    Example: `{("chat", "ok"): 2, ("tools", "ok"): 1}` returns `"3 ok"`.
    """
    sums = collections.Counter[str]()
    for key, count in counts.items():
        sums[key[-1]] += count
    return ", ".join(f"{count} {outcome}" for outcome, count in sums.most_common())


def count_table(title: str, counts: Mapping[tuple[str, ...], int], part: int) -> str:
    """Return a table with one row for each group of requests, and one row for all requests.

    Args:
        title: the head of the first column.
        counts: the number of requests by key. The last part of a key is the outcome.
        part: the index of the part of a key by which requests are grouped. The first column
            contains this part.
    """
    sums = collections.Counter[tuple[str, str]]()
    for key, count in counts.items():
        group, outcome = key[part], key[-1]
        sums[group, outcome] += count
        sums["all", outcome] += count
    groups = [*sorted({key[part] for key in counts}), "all"]
    kinds = sorted({key[-1] for key in counts})
    rows = [[group, *(str(sums[group, outcome]) for outcome in kinds)] for group in groups]
    return table([title, *kinds], rows)


def percentiles(name: str, seconds: Sequence[float]) -> str:
    """Return a sentence with the 50th, 90th and 99th percentile of some times."""
    if not seconds:
        return f"{name}: there are no values."
    p50_ms, p90_ms, p99_ms = np.percentile(seconds, (50, 90, 99)) * 1000
    values = f"p50 {p50_ms:.0f} ms, p90 {p90_ms:.0f} ms, p99 {p99_ms:.0f} ms"
    return f"{name}: {values} ({len(seconds)} values)"


def verdict(broken: Sequence[str], max_lines: int) -> list[str]:
    """Return the number of failed checks, and the first descriptions, as paragraphs."""
    summary = f"{len(broken)} checks failed" if broken else "no check failed"
    return [f"**{summary}**", *(f"- {description}" for description in broken[:max_lines])]


def growing(watch: Watch) -> list[str]:
    """Return one sentence for each process whose memory keeps growing."""
    return [
        f"the memory of {role} grows by {trend.slope:.2f} MiB per minute; the limit is "
        f"{MAX_SLOPE_MIB_PER_MINUTE:g}"
        for role, trend in watch.trends().items()
        if not trend.is_flat
    ]


def server_side(watch: Watch) -> str:
    """Return sentences with the counts and levels from the server's own metrics."""
    totals = ", ".join(
        f"{watch.totals[name]:,.0f} {label}"
        for name, label in _COUNTERS.items()
        if watch.totals[name]
    )
    running = _level(watch, "num_requests_running")
    waiting = _level(watch, "num_requests_waiting")
    cache = _level(watch, "kv_cache_usage_perc", scale=100, unit=" %")
    levels = f"{running} sequences ran, {waiting} waited, and {cache} of the KV cache was in use"
    return f"The server's metrics show {totals}. On average, {levels}."


def _level(watch: Watch, gauge: str, *, scale: float = 1, unit: str = "") -> str:
    """Return the mean and the peak of a gauge, such as "2.5 (peak 8)"."""
    mean, peak = scale * watch.mean(gauge), scale * watch.peaks.get(gauge, 0)
    return f"{mean:.1f}{unit} (peak {peak:.0f}{unit})"


def process_table(checks: IdleChecks, watch: Watch) -> str:
    """Return a table of each process's memory and open files at its first and last idle check."""
    rows = []
    trends = watch.trends()
    for role, last in sorted(checks.last.items()):
        first, trend = checks.first[role], trends.get(role)
        slope = "-" if trend is None or trend.slope is None else f"{trend.slope:+.2f}"
        quarters = ", ".join(f"{mib:.0f}" for mib in trend.quarters_mib) if trend else ""
        files = [str(first.num_fds), str(last.num_fds)]
        rows.append([role, f"{first.rss_mib:.0f}", quarters, slope, *files])
    first_mib, last_mib = checks.shared_mib[0], checks.shared_mib[-1]
    rows.append(["/dev/shm", f"{first_mib:.0f}", f"{last_mib:.0f}", "-", "", ""])
    head = ["First MiB", "MiB in each quarter", "MiB per minute", "First files", "Last files"]
    return table(["Process", *head], rows)
