"""The Markdown report of bench_gpu.py: failures, targets and figures."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from loadtest.bench.json_programs import Report

# The name of the engine with default settings, whose figures are compared with the targets.
DEFAULT = "as it is"
# The measurements of decode attention to which the target applies.
_LONG = ("1 sequence of 131072", "8 of 32768", "64 of 8192")


class BenchError(Exception):
    """A part could not be measured on this machine; the message gives the reason."""


def attempt(name: str, work: Callable[[], Any], left_out: list[str]) -> Any:  # noqa: ANN401
    """Call `work` and return its result, or None if it raises any exception.

    Mutates: left_out receives the reason of a failure.
    """
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - compilers, drivers and memory fail in any way
        left_out.append(f"{name}: {reason_of(error)}")
        print(f"failed: {left_out[-1]}", flush=True)
        return None


def reason_of(error: Exception) -> str:
    """Return the first line of an error message, with the type of the error."""
    text = (str(error).strip() or "-").splitlines()[0][:200]
    return text if isinstance(error, BenchError) else f"{type(error).__name__}: {text}"


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A target of performance.

    Attributes:
        name: what the target measures.
        found: the measured value, or None if it was not measured.
        wanted: the target value.
        is_least: whether the measured value must be at least the target, instead of at most.
    """

    name: str
    found: float | None
    wanted: float
    is_least: bool = True

    @property
    def ratio(self) -> float | None:
        """The degree to which the target is met: 1 or more if it is, None if not measured."""
        if self.found is None or math.isnan(self.found):
            return None
        return self.found / self.wanted if self.is_least else self.wanted / self.found

    @property
    def verdict(self) -> str:
        """The text for the report: met, missed or not measured."""
        if self.ratio is None:
            return "not measured"
        return f"{'met' if self.ratio >= 1 else 'missed'}, {self.ratio:.2f} of it"


def targets(report: Report) -> list[Target]:
    """Return all targets with their measured values."""
    long = [case["share"] for case in report["decode"] if case["name"] in _LONG]
    prefills = [case["share"] for case in report["prefill"]]
    found = report.get("engine") or {}
    ours = found.get("nereid", {}).get(DEFAULT, {})
    many = str(found.get("sequences", "all"))
    theirs = found.get("generate_batch", {}).get("decode", {}).get(many)
    step = first = ratio = None
    if "decode" in ours:
        step = found["limit_ms"] * ours["decode"]["1"] / 1e3
        prompt = found["prompt"]
        first = prompt / ours["prefill"][str(prompt)] * 1e3 / found["forward_ms"]
        ratio = ours["decode"][many] / theirs if theirs else None
    return [
        Target("decode attention, long, share of a copy's rate", min(long, default=None), 0.85),
        Target("prefill attention, share of torch's fused", min(prefills, default=None), 0.7),
        Target("decode step of one sequence, share of reading the weights", step, 0.8),
        Target(f"{many} sequences, times generate_batch", ratio, 3.0),
        Target("first token, times one forward pass", first, 1.5, is_least=False),
    ]


def markdown(report: Report) -> str:
    """Return the report as Markdown."""
    facts = report["machine"]
    wrong = [check for check in report["checks"] if "error" in check]
    worst = max((c["difference"] for c in report["checks"] if "error" not in c), default=0.0)
    verdict = f"the largest difference is {worst:.2g}"
    if wrong:
        verdict = (
            f"**{len(wrong)} WRONG, and the figures of these kernels mean nothing**; among the "
            f"others, {verdict}"
        )
    lines = [
        f"# {facts['device']}, {facts['date']}",
        "",
        f"`{facts['command']}`; torch {facts['torch']}, triton {facts['triton']}, transformers "
        f"{facts['transformers']}; {report['seconds']:.0f} s.",
        "",
        f"{len(report['checks'])} comparisons of the kernels with their references: {verdict}. "
        f"Memory is copied at {report['copy_bytes_per_s'] / 1e9:.0f} GB/s.",
        "",
        *[f"- WRONG: {check['name']}, {check['dtype']}: {check['error']}" for check in wrong],
        *[""] * bool(wrong),
        "| target | value | measured | result |",
        "|---|---|---|---|",
        *[target_line(target) for target in targets(report)],
        "",
        "| decode attention | ms | GB/s | share of the copy's rate |",
        "|---|---|---|---|",
        *[
            f"| {e['name']} | {e['milliseconds']:.3f} | {e['rate'] / 1e9:.0f} | {e['share']:.0%} |"
            for e in report["decode"]
        ],
        "",
        "| prefill attention | ms | TFLOP/s | torch's fused TFLOP/s | share of torch's fused |",
        "|---|---|---|---|---|",
        *[
            f"| {e['name']} | {e['milliseconds']:.3f} | {e['rate'] / 1e12:.0f} "
            f"| {e['limit'] / 1e12:.0f} | {e['share']:.0%} |"
            for e in report["prefill"]
        ],
        "",
    ]
    if "window_speedup" in report:
        lines += [
            "With a window of 128 tokens, decode attention over 32768 tokens is "
            f"{report['window_speedup']:.0f} times as fast as without a window.",
            "",
        ]
    lines += engine_lines(report.get("engine"))
    if report["left_out"]:
        lines += ["", "Left out:", "", *[f"- {text}" for text in report["left_out"]]]
    return "\n".join(lines) + "\n"


def target_line(target: Target) -> str:
    """Return one row of the table of targets."""
    sign = "at least" if target.is_least else "at most"
    found = "" if target.found is None else f"{target.found:.2f}"
    return f"| {target.name} | {sign} {target.wanted:g} | {found} | {target.verdict} |"


def engine_lines(found: Report | None) -> list[str]:
    """Return the lines of the report about the engine."""
    if found is None:
        return []
    one, many = "1", str(found["sequences"])
    lines = [
        f"The engine runs a model of the {found['shape']} shape with "
        f"{found['weights_bytes'] / 1e9:.1f} GB of random weights. Reading the weights at the rate "
        f"of a copy takes {found['limit_ms']:.2f} ms, and one forward pass over {found['prompt']} "
        f"tokens takes {found['forward_ms']:.1f} ms. For {one} and for {many} sequences, the table "
        "shows the milliseconds of a whole decode step, of launching its forward pass, and of the "
        "step without waiting for the GPU. Replays are steps that ran as a CUDA graph.",
        "",
        f"| settings | load, s | first token, ms | {many}: tokens/s "
        f"| {one}: step | launch | host | {many}: step | launch | host | replays |",
        "|---" * 11 + "|",
    ]
    for name, ours in found["nereid"].items():
        if "error" in ours:
            continue
        first = found["prompt"] / ours["prefill"][str(found["prompt"])] * 1e3
        cells = [f"{ours['load_s']:.0f}", f"{first:.1f}", f"{ours['decode'][many]:.0f}"]
        for batch in (one, many):
            times = ours["steps"].get(batch, {})
            cells += [
                f"{times[key]:.2f}" if times else "" for key in ("step_ms", "forward_ms", "host_ms")
            ]
        lines.append(f"| {name} | " + " | ".join([*cells, str(ours["replays"])]) + " |")
    theirs = found["generate_batch"]
    if "decode" in theirs:
        lines += [
            "",
            f"generate_batch: {theirs['decode'][many]:.0f} tokens/s with {many} sequences.",
        ]
    return lines
