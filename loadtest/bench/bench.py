"""Compare the speed of Nereid's engine with transformers, llama.cpp and OpenVINO on this machine.

    python -m loadtest.bench.bench --shapes demo 0.1b --dtype bfloat16 --decode 1 4 16
    python -m loadtest.bench.bench --contestants nereid generate          # without llama.cpp
    python -m loadtest.bench.bench --contestants nereid "int8 weights" "int8 cache" "int8"
    python -m loadtest.bench.bench --contestants nereid --decode 1 4 16 64 --context 32 512 2048
    python -m loadtest.bench.bench --shapes 0.6b --contestants "int4 compiled" "llama.cpp Q4_K_M"

By default, the program compares five engines with the same random weights and the same number of
threads: Nereid, Nereid with compile_forward, `generate` of transformers (static batches),
`generate_batch` of transformers (continuous batching), and llama.cpp. `make bench-peers` installs
llama.cpp and OpenVINO. The names "int8 ..." and "int4 ..." mean Nereid with weights of 8 or 4 bits,
an 8-bit KV cache, or both. "llama.cpp Q4_0" and similar names mean llama.cpp with quantized
weights, and "OpenVINO int4" and similar names mean OpenVINO.

Each engine runs in a process of its own. The program also measures two limits of the machine: the
memory bandwidth and the speed of matrix products. In each of several rounds, the engines run one
after the other. The table shows the medians of the rounds, because the load of the machine varies.
"""

import argparse
import datetime
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from loadtest.bench.contestants import CONTESTANTS, is_nereid, run_contestant
from loadtest.bench.machine import MachineLimits, measure_limits, processor_name
from loadtest.bench.markdown_table import table
from loadtest.bench.random_models import SHAPES, make_checkpoint
from loadtest.command_line import Option, exit_on_sigterm, parse_command_line
from loadtest.peers.json_programs import Report
from loadtest.peers.workload import Workload

_DEFAULT_CONTESTANTS = ["nereid", "nereid compiled", "generate", "generate_batch", "llama.cpp"]

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
# Maps the label of each table row about memory to the key of the number of bytes in a report.
_MEMORY_ROWS = {
    "peak memory, MiB": "peak_bytes",
    "weights, MiB": "weights_bytes",
    "KV cache of 1,000 tokens, MiB": "cache_bytes_per_1000_tokens",
}

_OPTIONS = {
    "--shapes": Option(["demo", "0.1b"], "shapes of the model", SHAPES),
    "--contestants": Option(_DEFAULT_CONTESTANTS, "engines to compare", list(CONTESTANTS)),
    "--dtype": Option("bfloat16", "dtype of the weights", ["float32", "bfloat16"]),
    "--prefill": Option([512], "prompt lengths of the prefill rows"),
    "--decode": Option([1, 4, 16], "batch sizes of the decode rows"),
    "--context": Option([512], "prompt lengths of the decode rows"),
    "--answer": Option(128, "number of generated tokens in the decode rows"),
    "--repeat": Option(3, "number of measurements in each process"),
    "--rounds": Option(2, "number of processes of each engine"),
    "--threads": Option(len(os.sched_getaffinity(0)), "number of threads (default: %(default)s)"),
    "--folder": Option(None, "keep the checkpoints and converted files here for the next run"),
}


def main() -> None:
    """Measure all model shapes and context lengths, and print Markdown tables."""
    args = parse_command_line(__doc__, _OPTIONS)
    torch.set_num_threads(args.threads)
    limits = measure_limits(getattr(torch, args.dtype))
    print(introduction(args, limits), flush=True)
    with tempfile.TemporaryDirectory(prefix="nereid-bench-") as temporary:
        for shape in args.shapes:
            path = Path(args.folder or temporary) / f"{shape}-{args.dtype}"
            num_parameters = make_checkpoint(path, shape, args.dtype)
            for context in args.context:
                reports = run_rounds(path, shape, context, args)
                size = f"{num_parameters / 1e6:.0f}M parameters"
                print(f"### {shape}, context {context}: {size}, tokens/s\n")
                print(comparison_table(reports, num_parameters, limits, args), flush=True)


def introduction(args: argparse.Namespace, limits: MachineLimits) -> str:
    """Return the lines above the tables, which describe the machine, its limits and the tables."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return (
        f"{today}, {processor_name()}, {args.threads} threads, {args.dtype}, "
        f"torch {torch.__version__}, transformers {version('transformers')}\n"
        f"Limits of this machine: it reads memory at {limits.read_bytes_per_s / 1e9:.0f} GB/s "
        f"and computes matrix products at {limits.matmul_flops / 1e9:.0f} GFLOP/s.\n"
        "The last column shows which share of these limits the fastest Nereid engine reaches.\n"
    )


def run_rounds(path: Path, shape: str, context: int, args: argparse.Namespace) -> dict[str, Report]:
    """Return the median results of each engine, or {"error": ...} for an engine that failed.

    `path` is the folder of the checkpoint, and `shape` is the key of the model's sizes in SHAPES.
    In the measurements of decode, each prompt has `context` tokens.
    """
    workload = Workload(
        dtype=args.dtype,
        threads=args.threads,
        vocab_size=SHAPES[shape].vocab_size,
        prefill=args.prefill,
        decode=args.decode,
        context=context,
        answer=args.answer,
        repeat=args.repeat,
    )
    reports: dict[str, list[Report]] = {name: [] for name in args.contestants}
    for number in range(1, args.rounds + 1):
        for name, reports_of_engine in reports.items():
            if any("error" in report for report in reports_of_engine):
                continue
            started = time.perf_counter()
            reports_of_engine.append(run_contestant(name, path, workload))
            progress = f"{shape}: {name}, round {number}: {time.perf_counter() - started:.0f} s"
            print(progress, file=sys.stderr, flush=True)
    return {name: median_report(of_engine) for name, of_engine in reports.items()}


def median_report(reports: Sequence[Report]) -> Report:
    """Return a report with the median of each number, or the first report of an error.

    All reports have the same keys. Example: `median_report([{"load_s": 1}, {"load_s": 3}])` returns
    `{"load_s": 2}`.
    """
    for report in reports:
        if "error" in report:
            return report
    medians: Report = {}
    for key, value in reports[0].items():
        values = [report[key] for report in reports]
        is_nested = isinstance(value, dict)
        medians[key] = median_report(values) if is_nested else statistics.median(values)
    return medians


def comparison_table(
    reports: Mapping[str, Report],
    num_parameters: int,
    limits: MachineLimits,
    args: argparse.Namespace,
) -> str:
    """Return a Markdown table with one row for each measurement and one column for each engine.

    The error messages of engines that failed are below the table.
    """
    rows = []
    # The computation of a token needs one multiplication and one addition for each parameter.
    prefill_limit = limits.matmul_flops / (2 * num_parameters)
    for length in args.prefill:
        rows.append(speed_row(f"prefill {length}", reports, "prefill", length, prefill_limit))
    # Every decode step reads all weights once. The limit ignores the keys and values, which every
    # step also reads.
    steps_per_s = limits.read_bytes_per_s / (num_parameters * _ITEM_BYTES[args.dtype])
    for size in args.decode:
        limit = steps_per_s * size
        rows.append(speed_row(f"decode, batch {size}", reports, "decode", size, limit))
    rows += [memory_row(label, reports, key) for label, key in _MEMORY_ROWS.items()]
    head = ["", *reports, "fastest Nereid / fastest other", "share of the limit"]
    errors = [f"{name}: {report['error']}" for name, report in reports.items() if "error" in report]
    return "\n\n".join([table(head, rows), *errors]) + "\n"


def speed_row(
    label: str, reports: Mapping[str, Report], kind: str, size: int, limit: float
) -> list[str]:
    """Return a row with the tokens/s of each engine.

    The last two cells contain two ratios. The first ratio is the speed of the fastest Nereid engine
    divided by the speed of the fastest other engine. The second ratio is the speed of the fastest
    Nereid engine divided by `limit`, the highest speed in tokens/s that the machine allows. `kind`
    is "prefill" or "decode", and `size` is the length of the prompt or the batch size.
    """
    speeds = {name: report.get(kind, {}).get(str(size), 0.0) for name, report in reports.items()}
    nereid = max((speeds[name] for name in speeds if is_nereid(name)), default=0.0)
    other = max((speeds[name] for name in speeds if not is_nereid(name)), default=0.0)
    cells = [f"{speed:,.0f}" if speed else "-" for speed in speeds.values()]
    ratio = f"{nereid / other:.2f}" if nereid and other else "-"
    share = f"{nereid / limit:.0%}" if nereid else "-"
    return [label, *cells, ratio, share]


def memory_row(label: str, reports: Mapping[str, Report], key: str) -> list[str]:
    """Return a row with the value `key` of each report, converted from bytes to MiB."""
    sizes = [report.get(key) for report in reports.values()]
    cells = ["-" if size is None else f"{size / 2**20:.1f}" for size in sizes]
    return [label, *cells, "", ""]


if __name__ == "__main__":
    exit_on_sigterm()
    main()
