"""The tables of the engine comparison."""

import argparse
from collections.abc import Mapping

from loadtest.bench.contestants import is_nereid
from loadtest.bench.machine import MachineLimits
from loadtest.bench.markdown_table import table
from loadtest.peers.json_programs import Report

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
# The label of each row about memory, and the key of the number of bytes in a report.
_MEMORY_ROWS = {
    "peak memory, MiB": "peak_bytes",
    "weights, MiB": "weights_bytes",
    "KV cache of 1,000 tokens, MiB": "cache_bytes_per_1000_tokens",
}


def comparison_table(
    reports: Mapping[str, Report],
    num_parameters: int,
    limits: MachineLimits,
    args: argparse.Namespace,
) -> str:
    """Return a Markdown table with one row for each measurement and one column for each engine.

    Error messages of engines that failed are below the table.
    """
    rows = []
    for length in args.prefill:
        limit = limits.matmul_flops / (2 * num_parameters)
        rows.append(speed_row(f"prefill {length}", reports, "prefill", length, limit))
    for size in args.decode:
        # Every step reads all weights once. The keys and values that a step also reads are not
        # counted.
        weights_bytes = num_parameters * _ITEM_BYTES[args.dtype]
        limit = limits.read_bytes_per_s / weights_bytes * size
        rows.append(speed_row(f"decode, batch {size}", reports, "decode", size, limit))
    rows += [memory_row(label, reports, key) for label, key in _MEMORY_ROWS.items()]
    head = ["", *reports, "fastest Nereid / fastest other", "share of the limit"]
    errors = [f"{name}: {report['error']}" for name, report in reports.items() if "error" in report]
    return "\n\n".join([table(head, rows), *errors]) + "\n"


def speed_row(
    label: str, reports: Mapping[str, Report], kind: str, size: int, limit: float
) -> list[str]:
    """Return a row with the tokens/s of each engine.

    The last two cells contain the speed of the fastest Nereid engine, divided by the speed of the
    fastest other engine and by `limit`, the speed at which the machine could do the same work.

    Args:
        label: the first cell.
        reports: the report of each engine.
        kind: "prefill" or "decode".
        size: the length of the prompt, or the batch size.
        limit: tokens/s.
    """
    speeds = {name: report.get(kind, {}).get(str(size), 0.0) for name, report in reports.items()}
    nereid = max((speeds[name] for name in speeds if is_nereid(name)), default=0.0)
    other = max((speeds[name] for name in speeds if not is_nereid(name)), default=0.0)
    cells = [f"{speed:,.0f}" if speed else "-" for speed in speeds.values()]
    ratio = f"{nereid / other:.2f}" if nereid and other else "-"
    share = f"{nereid / limit:.0%}" if nereid else "-"
    return [label, *cells, ratio, share]


def memory_row(label: str, reports: Mapping[str, Report], key: str) -> list[str]:
    """Return a row with the MiB of memory that the value `key` of each report contains."""
    sizes = [report.get(key) for report in reports.values()]
    cells = ["-" if size is None else f"{size / 2**20:.1f}" for size in sizes]
    return [label, *cells, "", ""]
