"""Functions that write tables and sentences for the reports of soak.py and cancel_storm.py."""

import collections
from collections.abc import Mapping, Sequence

import numpy as np

from loadtest.bench.markdown_table import table
from loadtest.faults.leftovers import Rests
from loadtest.faults.memory_slope import MAX_SLOPE_MIB_PER_MINUTE
from loadtest.faults.server_watch import Watch

_LEVELS = (
    ("num_requests_running", 1, ""),
    ("num_requests_waiting", 1, ""),
    ("kv_cache_usage_perc", 100, " %"),
)
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
        sums[key[part], key[-1]] += count
        sums["all", key[-1]] += count
    names = [*sorted({key[part] for key in counts}), "all"]
    columns = sorted({key[-1] for key in counts})
    return table(
        [title, *columns], [[name, *(str(sums[name, one]) for one in columns)] for name in names]
    )


def percentiles(name: str, seconds: Sequence[float]) -> str:
    """Return a sentence with the 50th, 90th and 99th percentile of some times."""
    if not seconds:
        return f"{name}: there are no values."
    half, most, nearly_all = np.percentile(seconds, (50, 90, 99)) * 1000
    values = f"p50 {half:.0f} ms, p90 {most:.0f} ms, p99 {nearly_all:.0f} ms"
    return f"{name}: {values} ({len(seconds)} values)"


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
    counted = ", ".join(
        f"{watch.totals[name]:,.0f} {label}"
        for name, label in _COUNTERS.items()
        if watch.totals[name]
    )
    running, waiting, cache = (
        f"{scale * watch.mean(name):.1f}{unit} (peak {scale * watch.peaks.get(name, 0):.0f}{unit})"
        for name, scale, unit in _LEVELS
    )
    levels = f"{running} sequences ran, {waiting} waited, and {cache} of the KV cache was in use"
    return f"The server's metrics show {counted}. On average, {levels}."


def process_table(rests: Rests, watch: Watch) -> str:
    """Return a table of each process's memory and open files at its first and last idle check."""
    trends = watch.trends()
    rows = []
    for role, last in sorted(rests.last.items()):
        first, trend = rests.first[role], trends.get(role)
        slope = "-" if trend is None or trend.slope is None else f"{trend.slope:+.2f}"
        quarters = ", ".join(f"{mib:.0f}" for mib in trend.quarters_mib) if trend else ""
        files = [str(first.num_fds), str(last.num_fds)]
        rows.append([role, f"{first.rss_mib:.0f}", quarters, slope, *files])
    shared = [f"{mib:.0f}" for mib in (rests.shared_mib[0], rests.shared_mib[-1])]
    rows.append(["/dev/shm", *shared, "-", "", ""])
    head = ["First MiB", "MiB in each quarter", "MiB per minute", "First files", "Last files"]
    return table(["Process", *head], rows)
