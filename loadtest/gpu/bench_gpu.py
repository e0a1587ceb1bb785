"""Check and measure the kernels and the engine on a GPU, in one command that needs no network.

    python -m loadtest.gpu.bench_gpu              # checks, kernels and engine in under 8 minutes
    python -m loadtest.gpu.bench_gpu --tune       # also searches and stores the best tile sizes
    python -m loadtest.gpu.bench_gpu --rehearse   # runs everything on a CPU at tiny sizes

First, every kernel is compared with its reference implementation at real shapes. If a kernel is
wrong or does not run, the top of the report names it and the exit code is 1. Then the program
measures:

    decode attention, compared with the speed of copying memory
    prefill attention, compared with torch's fused attention
    an 8B-shaped model with random weights: a decode step compared with the time to read the
        weights, 256 sequences compared with generate_batch of transformers, and the time to first
        token of a prompt of 4096 tokens compared with one forward pass

The engine is measured with and without CUDA graphs, with asynchronous scheduling, and compiled. If
a part fails, the other parts are still measured. The program writes a JSON and a Markdown file. The
Markdown file begins with the targets and whether they were met, and ends with the parts that were
left out. A rehearsal only tests this program; its figures mean nothing.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import gc
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

if "--rehearse" in sys.argv:
    # This must be set before the package triton is imported.
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from nereid_backend.attention.gpu import gpu_attention
from nereid_backend.attention.gpu.tuning import FOLDER, table_of, write_table
from nereid_backend.attention.layers import LayerSpec, LayerWindow

from loadtest import command_line
from loadtest.bench.bench import LOADTEST, SHAPES
from loadtest.bench.json_programs import Report
from loadtest.gpu.gpu_engine import engine
from loadtest.gpu.gpu_kernels import (
    CANDIDATES,
    REAL_SHAPES,
    REAL_SPECS,
    TINY_SHAPES,
    TINY_SPECS,
    TUNED_DIMS,
    Measured,
    Tuning,
    check,
    copy_rate,
    decode_rate,
    prefill_rate,
    tune,
)
from loadtest.gpu.gpu_report import attempt, markdown, reason_of, targets

# Seconds from the start at which the engine, the checks and the measurements of kernels must end.
# Checks and measurements that do not fit are left out.
_LIMIT_S, _CHECKS_S, _FIGURES_S = 465, 150, 230

# A measurement of a kernel: its name, the layer, the (cached, new) tokens of each sequence, and the
# kind of KV cache.
Case = tuple[str, LayerSpec, list[tuple[int, int]], type[gpu_attention.GpuKVCache]]
_USUAL = LayerSpec(32, 8, 128, 128)
DECODES: list[Case] = [
    ("1 sequence of 131072", _USUAL, [(131071, 1)], gpu_attention.GpuKVCache),
    ("8 of 32768", _USUAL, [(32767, 1)] * 8, gpu_attention.GpuKVCache),
    ("64 of 8192", _USUAL, [(8191, 1)] * 64, gpu_attention.GpuKVCache),
    ("256 of 2048", _USUAL, [(2047, 1)] * 256, gpu_attention.GpuKVCache),
    (
        "1 of 65536 and 63 of 1024",
        _USUAL,
        [(65535, 1), *[(1023, 1)] * 63],
        gpu_attention.GpuKVCache,
    ),
    (
        "keys 192, values 128, 16 heads: 32 of 8192",
        LayerSpec(16, 16, 192, 128),
        [(8191, 1)] * 32,
        gpu_attention.GpuKVCache,
    ),
    ("64 of 8192 as int8", _USUAL, [(8191, 1)] * 64, gpu_attention.GpuInt8KVCache),
    ("64 of 8192 as float8", _USUAL, [(8191, 1)] * 64, gpu_attention.GpuFloat8KVCache),
]
PREFILLS: list[Case] = [
    ("1 prompt of 4096", _USUAL, [(0, 4096)], gpu_attention.GpuKVCache),
    ("1 of 16384", _USUAL, [(0, 16384)], gpu_attention.GpuKVCache),
    ("16 of 512", _USUAL, [(0, 512)] * 16, gpu_attention.GpuKVCache),
    ("2048 after 14336 cached", _USUAL, [(14336, 2048)], gpu_attention.GpuKVCache),
    ("heads of 64, 1 of 8192", LayerSpec(64, 8, 64, 64), [(0, 8192)], gpu_attention.GpuKVCache),
]
TINY_CASES: list[Case] = [
    ("tiny", LayerSpec(2, 1, 16, 16), [(40, 1), (0, 20)], gpu_attention.GpuKVCache)
]
# A layer with a window, which is compared with the same layer without a window.
WINDOW = LayerSpec(64, 8, 64, 64, LayerWindow(size=128), None, True), [(32767, 1)] * 32
TINY_WINDOW = LayerSpec(2, 1, 16, 16, LayerWindow(size=21), None, True), [(90, 1)]


def main() -> int:
    """Check the kernels, measure, and write the report.

    Returns:
        The exit code: 1 if a kernel is wrong or does not run, 2 if there is no GPU.
    """
    args = arguments().parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        print(
            "bench-gpu: torch found no CUDA device. Use --rehearse to run it on a CPU.", flush=True
        )
        return 2
    started = time.monotonic()
    device = torch.device("cpu" if args.rehearse else "cuda:0")
    torch.manual_seed(0)
    report: Report = {"machine": machine(device)}
    left_out: list[str] = []
    report["left_out"] = left_out
    report["checks"] = checks(device, args, started, left_out)
    if args.tune:
        attempt("the search of tile sizes", lambda: tune_here(device, args), left_out)
    report |= kernels(device, args, started, left_out)
    if not args.no_engine:
        attempt("freeing memory", lambda: release(device), left_out)
        report["engine"] = engine(
            device, report["copy_bytes_per_s"], args, started + _LIMIT_S, left_out
        )
    report["targets"] = [
        {**dataclasses.asdict(target), "ratio": target.ratio} for target in targets(report)
    ]
    report["seconds"] = time.monotonic() - started
    text = markdown(report)
    print(text, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.out / "gpu.md").write_text(text)
    print(f"The report is in {args.out}.", flush=True)
    return 1 if any("error" in check for check in report["checks"]) else 0


def release(device: torch.device) -> None:
    """Free the GPU memory that torch caches for this process, because other processes need it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_line.parser(__doc__)
    parser.add_argument(
        "--out", type=Path, default=LOADTEST / "results", help="folder for the report"
    )
    parser.add_argument("--tune", action="store_true", help="search and store the best tile sizes")
    parser.add_argument("--tables", type=Path, default=FOLDER, help="folder that --tune writes to")
    parser.add_argument("--no-engine", action="store_true", help="measure only the kernels")
    parser.add_argument("--shape", choices=SHAPES, help="shape of the model (default: 8b)")
    parser.add_argument("--folder", help="folder for the temporary checkpoint of the model")
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU at tiny sizes")
    return parser


def machine(device: torch.device) -> Report:
    """Return the date, the device, the versions and the command of this run."""
    facts: Report = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "device": "rehearsal",
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "triton": triton_version(),
        "command": " ".join(["python", *sys.argv]),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "tuned": bool(table_of(properties.name)),
        }
    return facts


def triton_version() -> str:
    """Return the version of the Triton language.

    Nightly builds of torch bring it in a package with another name.
    """
    for name in ("triton", "pytorch-triton"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return "none"


def checks(
    device: torch.device, args: argparse.Namespace, started: float, left_out: list[str]
) -> list[Report]:
    """Compare every kernel with its reference, beginning with the kinds that most models use.

    Mutates: left_out receives the comparisons that did not fit into the time limit.
    """
    specs, shapes = (TINY_SPECS, TINY_SHAPES) if args.rehearse else (REAL_SPECS, REAL_SHAPES)
    # Triton's interpreter multiplies bfloat16 incorrectly: it treats the bits as integers.
    used = torch.float16 if args.rehearse else torch.bfloat16
    kinds = [
        ("", used, gpu_attention.GpuKVCache),
        ("int8", used, gpu_attention.GpuInt8KVCache),
        ("float8", used, gpu_attention.GpuFloat8KVCache),
        *[
            ("", dtype, gpu_attention.GpuKVCache)
            for dtype in (torch.float16, torch.float32)
            if dtype != used
        ],
    ]
    found = []
    for label, dtype, kind in kinds:
        label = label or str(dtype).removeprefix("torch.")
        for name, spec in specs.items():
            if time.monotonic() - started > _CHECKS_S:
                left_out.append(f"the comparison of {name}, {label}, with its reference")
                continue
            about: Report = {"name": name, "dtype": label}
            try:
                difference = check(name, spec, shapes, dtype, device, kind)
            except Exception as error:  # noqa: BLE001 - compilers, drivers and memory, too
                found.append({**about, "error": reason_of(error)})
                print(f"wrong: {name}, {label}: {reason_of(error)}", flush=True)
            else:
                found.append({**about, "difference": difference})
                print(f"correct: {name}, {label}, difference {difference:.2g}", flush=True)
    return found


def tune_here(device: torch.device, args: argparse.Namespace) -> None:
    """Search the best tile sizes of the kernels, store them on disk, and use them from now on."""
    if args.rehearse:
        small = {name: [Tuning(16, 16, 4, 2)] for name in CANDIDATES}
        shapes = {"decode": [(20, 1)], "prefill": [(0, 9)]}
        table = tune(device, (16,), small, shapes)
    else:
        shapes = {"decode": [(16384, 1)] * 16, "prefill": [(0, 8192)]}
        table = tune(device, TUNED_DIMS, CANDIDATES, shapes)
    facts = machine(device)
    about = {name: str(facts[name]) for name in ("date", "torch", "triton")}
    path = write_table(facts["device"], table, about, args.tables)
    print(f"The tile sizes are stored in {path}.", flush=True)
    table_of.cache_clear()
    gpu_attention.device_of.cache_clear()


def kernels(
    device: torch.device, args: argparse.Namespace, started: float, left_out: list[str]
) -> Report:
    """Measure the rates of the kernels and their limits.

    Mutates: left_out receives measurements that failed or did not fit into the time limit.
    """

    def measured(name: str, work: Callable[[], Measured]) -> list[Measured]:
        if time.monotonic() - started > _FIGURES_S:
            left_out.append(name)
            return []
        found = attempt(name, work, left_out)
        return [] if found is None else [found]

    num_bytes = 2**20 if args.rehearse else 2**31
    limit = attempt("the rate of a copy", lambda: copy_rate(device, num_bytes), left_out)
    limit = math.nan if limit is None else limit
    decodes, prefills = (TINY_CASES, TINY_CASES) if args.rehearse else (DECODES, PREFILLS)
    window, shapes = TINY_WINDOW if args.rehearse else WINDOW
    full, short = (
        measured(
            f"decode attention, {layer.window}",
            functools.partial(decode_rate, "", layer, shapes, device, limit),
        )
        for layer in (dataclasses.replace(window, window=LayerWindow()), window)
    )
    report: Report = {
        "copy_bytes_per_s": limit,
        "decode": [
            line(found)
            for name, spec, shapes, kind in decodes
            for found in measured(
                f"decode attention, {name}",
                functools.partial(decode_rate, name, spec, shapes, device, limit, kind),
            )
        ],
        "prefill": [
            line(found)
            for name, spec, shapes, _ in prefills
            for found in measured(
                f"prefill attention, {name}",
                functools.partial(prefill_rate, name, spec, shapes, device),
            )
        ],
    }
    if full and short:
        report["window_speedup"] = full[0].milliseconds / short[0].milliseconds
    return report


def line(measured: Measured) -> Report:
    """Return a measurement as JSON, including its share of the limit."""
    return {**dataclasses.asdict(measured), "share": measured.share}


if __name__ == "__main__":
    # SystemExit runs the code that kills started programs and deletes the model on disk.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
