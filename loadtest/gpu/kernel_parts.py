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
import itertools
import math
import os
from pathlib import Path
from typing import NamedTuple

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
    Case,
    LayerStep,
    Measured,
    check,
    copy_rate,
    decode_rate,
    decodes,
    measured_tunings,
    prefill_rate,
)
from loadtest.gpu.interpreter import correct_interpreter
from loadtest.gpu.lines import Rank, emit

IS_REHEARSAL = bool(os.environ.get("NEREID_REHEARSE"))
# The interpreter converts integers to bfloat16 incorrectly: it uses the bits of the integers.
_USUAL_DTYPE = torch.float16 if IS_REHEARSAL else torch.bfloat16
_TINY_CANDIDATES = [Tuning(16, 16, 4, 2), Tuning(16, 32, 4, 2)]

# Layers of many models: 32 query heads with 8 key heads of 128, and a window of 128 with sinks.
_USUAL = LayerSpec(32, 8, 128, 128)
_WINDOW = LayerSpec(64, 8, 64, 64, LayerWindow(size=128), has_sinks=True)
_TINY = LayerSpec(2, 1, 16, 16)
DECODES = [
    Case("64 sequences of 8192", _USUAL, decodes(8192, 64)),
    Case("1 of 131072", _USUAL, decodes(131072)),
    Case("8 of 32768", _USUAL, decodes(32768, 8)),
    Case("256 of 2048", _USUAL, decodes(2048, 256)),
    Case("1 of 65536 and 63 of 1024", _USUAL, decodes(65536) + decodes(1024, 63)),
    Case("64 of 8192 as int8", _USUAL, decodes(8192, 64), GpuInt8KVCache),
    Case("64 of 8192 as float8", _USUAL, decodes(8192, 64), GpuFloat8KVCache),
    Case("keys 192, values 128: 32 of 8192", LayerSpec(16, 16, 192, 128), decodes(8192, 32)),
    Case("window of 128: 32 of 32768", _WINDOW, decodes(32768, 32)),
]
PREFILLS = [
    Case("1 prompt of 4096", _USUAL, [(0, 4096)]),
    Case("1 of 16384", _USUAL, [(0, 16384)]),
    Case("16 of 512", _USUAL, [(0, 512)] * 16),
    Case("2048 after 14336 cached", _USUAL, [(14336, 2048)]),
    Case("heads of 64, 1 of 8192", LayerSpec(64, 8, 64, 64), [(0, 8192)]),
    Case("heads of 256, 1 of 8192", LayerSpec(16, 8, 256, 256), [(0, 8192)]),
]
_TINY_CASES = [Case("tiny", _TINY, [(40, 1), (0, 20)])]
# The targets are ratios. Decode attention over long sequences should read memory at 0.85 of the
# rate of a copy. Prefill attention should reach 0.7 of the speed of torch's fused attention.
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
    number, count = args.share
    comparisons = list(itertools.product(kinds(), specs.items()))[number::count]
    num_equal = 0
    for kind, (name, spec) in comparisons:
        about = f"{name}, {kind.name}"
        try:
            difference = check(Case(name, spec, shapes, kind.cache), kind.dtype, device)
        except Exception as error:  # noqa: BLE001
            # Catch every exception, because a compiler, a driver or a lack of memory can cause any
            # exception. The other comparisons must continue.
            reason = (str(error).strip() or "-").splitlines()[0][:200]
            text = f"{about}: {type(error).__name__}: {reason}"
            emit(Rank.WRONG, text, name=name, kind=kind.name)
        else:
            emit(Rank.DETAIL, f"{about}: differs by {difference:.2g}", difference=difference)
            num_equal += 1
    emit(Rank.VERDICT, f"{num_equal} of {len(comparisons)} comparisons equal their references")


class Kind(NamedTuple):
    """A kind of numbers: its name, the dtype of the model, and the kind of the KV cache."""

    name: str
    dtype: torch.dtype
    cache: type[GpuKVCache]


def kinds() -> list[Kind]:
    """Return the kinds of numbers that are compared."""
    return [
        Kind("bfloat16", torch.bfloat16, GpuKVCache),
        Kind("int8", _USUAL_DTYPE, GpuInt8KVCache),
        Kind("float8", _USUAL_DTYPE, GpuFloat8KVCache),
        Kind("float16", torch.float16, GpuKVCache),
        Kind("float32", torch.float32, GpuKVCache),
    ]


def rates(device: torch.device) -> None:
    """Measure the rates of decode and prefill attention, and compare them with their limits."""
    copied = copy_rate(device, 2**20 if IS_REHEARSAL else 2**31)
    emit(Rank.FIGURE, f"memory is copied at {copied / 1e9:.0f} GB/s", bytes_per_s=copied)
    for case in _TINY_CASES if IS_REHEARSAL else DECODES:
        report("decode", decode_rate(case, device, copied), _DECODE_TARGET)
    for case in _TINY_CASES if IS_REHEARSAL else PREFILLS:
        report("prefill", prefill_rate(case, device), _PREFILL_TARGET)


def report(kernel: str, measured: Measured, target: float) -> None:
    """Print a measured rate, its share of the limit, and the share that it should reach."""
    unit, scale = ("GB/s", 1e9) if kernel == "decode" else ("TFLOP/s", 1e12)
    limit = "a copy" if kernel == "decode" else "torch's fused attention"
    share = measured.rate / measured.limit
    emit(
        Rank.VERDICT,
        f"{kernel} attention, {measured.name}: {measured.milliseconds:.3f} ms, "
        f"{measured.rate / scale:.0f} {unit}, {share:.0%} of {limit} (target {target:.0%})",
        kernel=kernel,
        share=None if math.isnan(share) else share,
        **dataclasses.asdict(measured),
    )


def tune(device: torch.device, dims: list[int]) -> None:
    """Search the fastest tile sizes, and write them into the folder of the results.

    The table is written after each kernel and head size. If the search is interrupted, the results
    so far are not lost.
    """
    table: Table = {"decode": [], "prefill": []}
    for dim, kernel in itertools.product(dims, table):
        if fastest := _fastest_tuning(kernel, dim, device):
            table[kernel].append(Entry(dim, _USUAL_DTYPE.itemsize, fastest))
            store(device, table)


def _fastest_tuning(kernel: str, dim: int, device: torch.device) -> Tuning | None:
    """Measure a kernel with each candidate, and return the fastest one that runs correctly."""
    about = f"{kernel}, heads of {dim}"
    step = LayerStep(_tuned_case(kernel, dim), _USUAL_DTYPE, device)
    times: dict[Tuning, float] = {}
    candidates = _TINY_CANDIDATES if IS_REHEARSAL else CANDIDATES[kernel]
    for tuning, spent in measured_tunings(kernel, step, candidates):
        times[tuning] = spent
        emit(
            Rank.DETAIL,
            f"{about}, {tuning}: {spent:.3f} ms",
            kernel=kernel,
            dim=dim,
            milliseconds=spent,
            **dataclasses.asdict(tuning),
        )
    if not times:
        emit(Rank.WRONG, f"{about}: no tile sizes run correctly")
        return None
    fastest = min(times, key=times.__getitem__)
    emit(Rank.VERDICT, f"{about}: the fastest is {fastest}, {times[fastest]:.3f} ms")
    return fastest


def _tuned_case(kernel: str, dim: int) -> Case:
    """Return the step with which the tile sizes of a kernel are measured."""
    if IS_REHEARSAL:
        return Case(kernel, _TINY, decodes(21) if kernel == "decode" else [(0, 9)])
    shapes = decodes(16385, 16) if kernel == "decode" else [(0, 8192)]
    return Case(kernel, LayerSpec(32, 8, dim, dim), shapes)


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
