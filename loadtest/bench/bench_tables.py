"""The tables of the engine comparison."""

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Comparison:
    """The results of all engines with one model and one context.

    Attributes:
        title: the title of the table.
        num_parameters: the number of parameters of the model.
        dtype: the dtype of the weights, "float32" or "bfloat16".
        reports: the report of each engine (see loadtest/peers/workload.py).
        limits: the limits of the machine.
    """

    title: str
    num_parameters: int
    dtype: str
    reports: dict[str, Report]
    limits: MachineLimits

    def prefill_limit(self) -> float:
        """Return the tokens/s at which the machine could compute a prompt."""
        return self.limits.matmul_flops / (2 * self.num_parameters)

    def decode_limit(self, batch_size: int) -> float:
        """Return the tokens/s at which the machine could decode a batch.

        Every step reads all weights once. The keys and values that a step also reads are not
        counted.
        """
        weights_bytes = self.num_parameters * _ITEM_BYTES[self.dtype]
        return self.limits.read_bytes_per_s / weights_bytes * batch_size

    def speed_row(self, label: str, kind: str, size: int, limit: float) -> list[str]:
        """Return a row with the tokens/s of each engine.

        The last two cells contain the speed of the fastest Nereid engine, divided by the speed of
        the fastest other engine and by the limit of the machine.

        Args:
            label: the first cell.
            kind: "prefill" or "decode".
            size: the length of the prompt, or the batch size.
            limit: the tokens/s at which the machine could do the same work.
        """
        speeds = {
            name: report.get(kind, {}).get(str(size)) or 0.0
            for name, report in self.reports.items()
        }
        nereid = max((speeds[name] for name in speeds if is_nereid(name)), default=0.0)
        other = max((speeds[name] for name in speeds if not is_nereid(name)), default=0.0)
        cells = [f"{speed:,.0f}" if speed else "-" for speed in speeds.values()]
        ratio = f"{nereid / other:.2f}" if nereid and other else "-"
        share = f"{nereid / limit:.0%}" if nereid else "-"
        return [label, *cells, ratio, share]

    def memory_row(self, label: str, key: str) -> list[str]:
        """Return a row with the MiB of memory that the value `key` of each report contains."""
        sizes = [report.get(key) for report in self.reports.values()]
        cells = ["-" if size is None else f"{size / 2**20:.1f}" for size in sizes]
        return [label, *cells, "", ""]

    def errors(self) -> list[str]:
        """Return the error message of each engine that failed."""
        return [
            f"{name}: {report['error']}"
            for name, report in self.reports.items()
            if "error" in report
        ]


def comparison_table(
    comparison: Comparison, prompt_lengths: Sequence[int], batch_sizes: Sequence[int]
) -> str:
    """Return a Markdown table with one row for each measurement and one column for each engine.

    Args:
        comparison: the results.
        prompt_lengths: the lengths of the prompts in the measurements of prefill.
        batch_sizes: the batch sizes in the measurements of decode.
    """
    rows = [
        comparison.speed_row(f"prefill {length}", "prefill", length, comparison.prefill_limit())
        for length in prompt_lengths
    ]
    for size in batch_sizes:
        limit = comparison.decode_limit(size)
        rows.append(comparison.speed_row(f"decode, batch {size}", "decode", size, limit))
    rows += [comparison.memory_row(label, key) for label, key in _MEMORY_ROWS.items()]
    head = ["", *comparison.reports, "fastest Nereid / fastest other", "share of the limit"]
    title = f"### {comparison.title}: {comparison.num_parameters / 1e6:.0f}M parameters, tokens/s"
    return "\n\n".join([title, table(head, rows), *comparison.errors()]) + "\n"
