# SPDX-License-Identifier: Apache-2.0
"""Everything to be measured on a GPU, in one command that needs no network.

    python -m loadtest.gpu.bench_gpu   checks, kernels, engine; under 8 minutes
    python -m loadtest.gpu.bench_gpu --tune   first searches cuts of the kernels, and keeps them
    python -m loadtest.gpu.bench_gpu --rehearse   all of it on a CPU at tiny sizes

First every kernel is compared with its plain twin at real shapes; one that differs or does not run
is named at the top of the report, and the exit code is 1. Then: decode attention against the rate
of a copy, prefill attention against torch's fused attention, and an 8B-shaped model with random
weights: a decode step against the time that reading the weights takes, 256 sequences against
transformers' generate_batch, the first token of a prompt of 4096 against one forward pass; all that
with captured graphs, without, with steps that overlap, and compiled. Whatever fails, the rest is
measured. Writes JSON and Markdown: each target, and whether it was met, comes first; what failed or
what there was no time for, last. A rehearsal tests this program; its figures mean nothing.
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
    # Before the package triton is imported: its kernels are then interpreted.
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from nereid_backend.attention.gpu import gpu_attention
from nereid_backend.attention.gpu.tuning import FOLDER, table_of, write_table
from nereid_backend.attention.layers import LayerSpec, Span

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

# The command's own limit, which the engine's part fills. The kernels' checks compile each of them,
# and give up what is left of them at their share; the kernels' figures at theirs.
_LIMIT_S, _CHECKS_S, _FIGURES_S = 465, 150, 230

# Figures of kernels: a name, the kind of layer, (cached, new) tokens, how these are kept.
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
    ("2048 behind 14336 cached", _USUAL, [(14336, 2048)], gpu_attention.GpuKVCache),
    ("heads of 64, 1 of 8192", LayerSpec(64, 8, 64, 64), [(0, 8192)], gpu_attention.GpuKVCache),
]
TINY_CASES: list[Case] = [
    ("tiny", LayerSpec(2, 1, 16, 16), [(40, 1), (0, 20)], gpu_attention.GpuKVCache)
]
# A layer with a window, which is compared with the same one without.
WINDOW = LayerSpec(64, 8, 64, 64, Span(window=128), None, True), [(32767, 1)] * 32
TINY_WINDOW = LayerSpec(2, 1, 16, 16, Span(window=21), None, True), [(90, 1)]


def main() -> int:
    """Check, measure, write.

    Returns:
        The exit code: 1 a kernel is wrong or does not run, 2 there is no GPU.
    """
    args = arguments().parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        print("bench-gpu: torch sees no CUDA device here; --rehearse runs it without", flush=True)
        return 2
    started = time.monotonic()
    device = torch.device("cpu" if args.rehearse else "cuda:0")
    torch.manual_seed(0)
    report: Report = {"machine": machine(device)}
    left_out: list[str] = []
    report["left_out"] = left_out
    report["checks"] = checks(device, args, started, left_out)
    if args.tune:
        attempt("the search of cuts", lambda: tune_here(device, args), left_out)
    report |= kernels(device, args, started, left_out)
    if not args.no_engine:
        attempt("giving memory back", lambda: release(device), left_out)
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
    print(f"written to {args.out}", flush=True)
    return 1 if any("error" in check for check in report["checks"]) else 0


def release(device: torch.device) -> None:
    """Give back the memory that torch keeps for this process: other processes come now."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=LOADTEST / "results", help="folder for the report"
    )
    parser.add_argument("--tune", action="store_true", help="search cuts and keep them")
    parser.add_argument("--tables", type=Path, default=FOLDER, help="folder that --tune writes to")
    parser.add_argument("--no-engine", action="store_true", help="the kernels alone")
    parser.add_argument("--shape", choices=SHAPES, help="of the engine's model; default: 8b")
    parser.add_argument("--folder", help="where the model's checkpoint goes meanwhile")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on this processor")
    return parser


def machine(device: torch.device) -> Report:
    """Where and with what it ran."""
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
    """Of the Triton language; torch's builds that are no releases name its package otherwise."""
    for name in ("triton", "pytorch-triton"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return "none"


def checks(
    device: torch.device, args: argparse.Namespace, started: float, left_out: list[str]
) -> list[Report]:
    """Compare every kernel with its twin, the kinds that serve most models first; see `check`.

    Mutates: left_out gets what there was no time for.
    """
    specs, shapes = (TINY_SPECS, TINY_SHAPES) if args.rehearse else (REAL_SPECS, REAL_SHAPES)
    # The interpreter multiplies bfloat16 as if its bits were integers.
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
                left_out.append(f"the comparison of {name}, {label}, with its twin")
                continue
            about: Report = {"name": name, "dtype": label}
            try:
                difference = check(name, spec, shapes, dtype, device, kind)
            except Exception as error:  # noqa: BLE001 - compilers, drivers and memory, too
                found.append({**about, "error": reason_of(error)})
                print(f"WRONG: {name}, {label}: {reason_of(error)}", flush=True)
            else:
                found.append({**about, "difference": difference})
                print(f"right: {name}, {label}, within {difference:.2g}", flush=True)
    return found


def tune_here(device: torch.device, args: argparse.Namespace) -> None:
    """Search cuts of the kernels, keep them on disk, and use them from here on."""
    if args.rehearse:
        small = {name: [Tuning(16, 16, 4, 2)] for name in CANDIDATES}
        shapes = {"decode": [(20, 1)], "prefill": [(0, 9)]}
        table = tune(device, (16,), small, shapes)
    else:
        shapes = {"decode": [(16384, 1)] * 16, "prefill": [(0, 8192)]}
        table = tune(device, TUNED_DIMS, CANDIDATES, shapes)
    facts = machine(device)
    about = {name: str(facts[name]) for name in ("date", "torch", "triton")}
    print(f"written: {write_table(facts['device'], table, about, args.tables)}", flush=True)
    table_of.cache_clear()
    gpu_attention.device_of.cache_clear()


def kernels(
    device: torch.device, args: argparse.Namespace, started: float, left_out: list[str]
) -> Report:
    """Rates of the kernels, each beside its limit.

    Mutates: left_out gets what failed, and what there was no time for.
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
            f"decode attention, {layer.span}",
            functools.partial(decode_rate, "", layer, shapes, device, limit),
        )
        for layer in (dataclasses.replace(window, span=Span()), window)
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
    """As JSON, the share included."""
    return {**dataclasses.asdict(measured), "share": measured.share}


if __name__ == "__main__":
    # So that a program that it has started ends with it, and the model on disk goes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
