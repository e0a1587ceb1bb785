"""Compare, measure and tune the attention kernels, as parts of the GPU benchmarks.

    python -m loadtest.gpu.kernel_parts compare --share 0 8   # every 8th comparison
    python -m loadtest.gpu.kernel_parts compare --tiny        # few small comparisons
    python -m loadtest.gpu.kernel_parts rates                 # decode and prefill
    python -m loadtest.gpu.kernel_parts tune --dims 128       # the fastest tile sizes

Each result is one line of JSON; see lines.py. With the environment variable NEREID_REHEARSE, all
sizes are tiny and the kernels run in the interpreter of the Triton language.
"""

import argparse
import dataclasses
import math
import os
from pathlib import Path

import torch
from nereid_backend.attention.gpu.gpu_attention import (
    GpuFloat8KVCache,
    GpuInt8KVCache,
    GpuKVCache,
)
from nereid_backend.attention.gpu.tuning import Entry, Table, Tuning, write_table
from nereid_backend.attention.layers import LayerSpec, LayerWindow

from loadtest import command_line
from loadtest.gpu.environment import installed_version
from loadtest.gpu.gpu_kernels import (
    CANDIDATES,
    REAL_SHAPES,
    REAL_SPECS,
    TINY_SHAPES,
    TINY_SPECS,
    LayerStep,
    Measured,
    Shapes,
    check,
    copy_rate,
    decode_rate,
    measured_tunings,
    prefill_rate,
)
from loadtest.gpu.interpreter import correct_interpreter
from loadtest.gpu.lines import Rank, emit

IS_REHEARSAL = bool(os.environ.get("NEREID_REHEARSE"))

# A comparison: the name of the numbers, the dtype of the model and the kind of KV cache.
Kind = tuple[str, torch.dtype, type[GpuKVCache]]
# A measurement: its name, the layer, the (cached, new) tokens of each sequence, and the kind of
# KV cache.
Case = tuple[str, LayerSpec, Shapes, type[GpuKVCache]]

_USUAL = LayerSpec(32, 8, 128, 128)
_MANY: Shapes = [(8191, 1)] * 64
_WINDOW = LayerSpec(64, 8, 64, 64, LayerWindow(size=128), None, True)
DECODES: list[Case] = [
    ("64 sequences of 8192", _USUAL, _MANY, GpuKVCache),
    ("1 of 131072", _USUAL, [(131071, 1)], GpuKVCache),
    ("8 of 32768", _USUAL, [(32767, 1)] * 8, GpuKVCache),
    ("256 of 2048", _USUAL, [(2047, 1)] * 256, GpuKVCache),
    ("1 of 65536 and 63 of 1024", _USUAL, [(65535, 1), *[(1023, 1)] * 63], GpuKVCache),
    ("64 of 8192 as int8", _USUAL, _MANY, GpuInt8KVCache),
    ("64 of 8192 as float8", _USUAL, _MANY, GpuFloat8KVCache),
    ("keys 192, values 128: 32 of 8192", LayerSpec(16, 16, 192, 128), [(8191, 1)] * 32, GpuKVCache),
    ("window of 128: 32 of 32768", _WINDOW, [(32767, 1)] * 32, GpuKVCache),
]
PREFILLS: list[Case] = [
    ("1 prompt of 4096", _USUAL, [(0, 4096)], GpuKVCache),
    ("1 of 16384", _USUAL, [(0, 16384)], GpuKVCache),
    ("16 of 512", _USUAL, [(0, 512)] * 16, GpuKVCache),
    ("2048 after 14336 cached", _USUAL, [(14336, 2048)], GpuKVCache),
    ("heads of 64, 1 of 8192", LayerSpec(64, 8, 64, 64), [(0, 8192)], GpuKVCache),
    ("heads of 256, 1 of 8192", LayerSpec(16, 8, 256, 256), [(0, 8192)], GpuKVCache),
]
_TINY = LayerSpec(2, 1, 16, 16)
_TINY_CASES: list[Case] = [("tiny", _TINY, [(40, 1), (0, 20)], GpuKVCache)]
# Decode attention over long sequences should reach the first share of the rate of a copy. Prefill
# attention should reach the second share of the rate of torch's fused attention.
_DECODE_TARGET, _PREFILL_TARGET = 0.85, 0.7


def main() -> None:
    """Run one part."""
    args = arguments().parse_args()
    if IS_REHEARSAL:
        correct_interpreter()
    torch.manual_seed(0)
    device = torch.device("cpu" if IS_REHEARSAL else "cuda:0")
    if args.part == "compare":
        compare(device, args)
    elif args.part == "rates":
        rates(device)
    else:
        tune(device, args.dims)


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_line.parser(__doc__)
    parser.add_argument("part", choices=["compare", "rates", "tune"])
    parser.add_argument("--share", type=int, nargs=2, default=[0, 1], metavar=("NUMBER", "OF"))
    parser.add_argument("--tiny", action="store_true", help="compare only small steps")
    parser.add_argument("--dims", type=int, nargs="+", default=[128], help="head sizes to tune")
    return parser


def compare(device: torch.device, args: argparse.Namespace) -> None:
    """Compare kernels with their references. Begin with the kinds that most models use."""
    is_tiny = args.tiny or IS_REHEARSAL
    specs, shapes = (TINY_SPECS, TINY_SHAPES) if is_tiny else (REAL_SPECS, REAL_SHAPES)
    cases = [(kind, name, spec) for kind in kinds() for name, spec in specs.items()]
    number, count = args.share
    num_equal = 0
    for (label, dtype, cache), name, spec in cases[number::count]:
        about = f"{name}, {label}"
        try:
            difference = check(name, spec, shapes, dtype, device, cache)
        except Exception as error:  # noqa: BLE001
            # Catch every exception, because a compiler, a driver or a lack of memory can cause any
            # exception. The other comparisons must continue.
            reason = (str(error).strip() or "-").splitlines()[0][:200]
            emit(Rank.WRONG, f"{about}: {type(error).__name__}: {reason}", name=name, kind=label)
        else:
            emit(Rank.DETAIL, f"{about}: differs by {difference:.2g}", difference=difference)
            num_equal += 1
    num_cases = len(cases[number::count])
    emit(Rank.VERDICT, f"{num_equal} of {num_cases} comparisons equal their references")


def kinds() -> list[Kind]:
    """Return the kinds of numbers that are compared."""
    # The interpreter converts integers to bfloat16 incorrectly: it uses the bits of the integers.
    usual = torch.float16 if IS_REHEARSAL else torch.bfloat16
    return [
        ("bfloat16", torch.bfloat16, GpuKVCache),
        ("int8", usual, GpuInt8KVCache),
        ("float8", usual, GpuFloat8KVCache),
        ("float16", torch.float16, GpuKVCache),
        ("float32", torch.float32, GpuKVCache),
    ]


def rates(device: torch.device) -> None:
    """Measure the rates of decode and prefill attention, and compare them with their limits."""
    copied = copy_rate(device, 2**20 if IS_REHEARSAL else 2**31)
    emit(Rank.FIGURE, f"memory is copied at {copied / 1e9:.0f} GB/s", bytes_per_s=copied)
    decodes, prefills = (_TINY_CASES, _TINY_CASES) if IS_REHEARSAL else (DECODES, PREFILLS)
    for name, spec, shapes, kind in decodes:
        report("decode", decode_rate(name, spec, shapes, device, copied, kind), _DECODE_TARGET)
    for name, spec, shapes, _ in prefills:
        report("prefill", prefill_rate(name, spec, shapes, device), _PREFILL_TARGET)


def report(kernel: str, found: Measured, target: float) -> None:
    """Print a measured rate, its share of the limit, and the share that it should reach."""
    unit, scale = ("GB/s", 1e9) if kernel == "decode" else ("TFLOP/s", 1e12)
    limit = "a copy" if kernel == "decode" else "torch's fused attention"
    emit(
        Rank.VERDICT,
        f"{kernel} attention, {found.name}: {found.milliseconds:.3f} ms, "
        f"{found.rate / scale:.0f} {unit}, {found.share:.0%} of {limit} (target {target:.0%})",
        kernel=kernel,
        share=None if math.isnan(found.share) else found.share,
        **dataclasses.asdict(found),
    )


def tune(device: torch.device, dims: list[int]) -> None:
    """Search the fastest tile sizes, and write them into the folder of the results.

    The table is written after each kernel and head size. If the search is interrupted, the results
    so far are not lost.
    """
    table: Table = {"decode": [], "prefill": []}
    for dim in dims:
        for kernel in table:
            if IS_REHEARSAL:
                spec, shapes = (
                    LayerSpec(2, 1, 16, 16),
                    [(20, 1)] if kernel == "decode" else [(0, 9)],
                )
                tunings = [Tuning(16, 16, 4, 2), Tuning(16, 32, 4, 2)]
            else:
                spec = LayerSpec(32, 8, dim, dim)
                shapes = [(16384, 1)] * 16 if kernel == "decode" else [(0, 8192)]
                tunings = CANDIDATES[kernel]
            step = LayerStep(
                spec, shapes, torch.float16 if IS_REHEARSAL else torch.bfloat16, device
            )
            best: tuple[float, Tuning] | None = None
            for tuning, spent in measured_tunings(kernel, step, tunings):
                emit(
                    Rank.DETAIL,
                    f"{kernel}, heads of {dim}, {tuning}: {spent:.3f} ms",
                    kernel=kernel,
                    dim=dim,
                    milliseconds=spent,
                    **dataclasses.asdict(tuning),
                )
                if best is None or spent < best[0]:
                    best = spent, tuning
            if best is None:
                emit(Rank.WRONG, f"{kernel}, heads of {dim}: no tile sizes run correctly")
                continue
            emit(
                Rank.VERDICT,
                f"{kernel}, heads of {dim}: the fastest is {best[1]}, {best[0]:.3f} ms",
            )
            table[kernel].append(Entry(dim, 2, best[1]))
            store(device, table)


def store(device: torch.device, table: Table) -> None:
    """Write a table of tile sizes into the folder of the results."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "rehearsal"
    facts = {package: installed_version(package) or "-" for package in ("torch", "triton")}
    folder = Path(os.environ.get("NEREID_RESULTS", "."))
    dims = "-".join(str(entry.max_dim) for entry in table["decode"])
    folder = folder / f"tuning-{dims}"
    folder.mkdir(parents=True, exist_ok=True)
    write_table(name, table, facts, folder)


if __name__ == "__main__":
    main()
