"""Compare the kernels for linear layers on this CPU, for a model with 596 million parameters.

    python -m loadtest.bench.bench_linear --rows 1 16 512 --threads 2

A contestant is an instruction set with a data type of the weights, for example "avx2 int4", or
torch's own product. "oneDNN bfloat16" is torch's product with packed weights. The table shows how
many times faster each contestant is than the first one in the same round. The contestants
alternate, so that other programs on the machine slow down all of them. The clock is the wall time,
or with --cpu-time the CPU time of the process, which suits a busy machine and one thread.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from nereid_backend.attention.cpu.cpu_library import forced_instruction_set
from nereid_backend.attention.cpu.instruction_sets import supported_instruction_sets
from nereid_backend.linear import grouped_linear, native_linear
from nereid_backend.linear.quantise_weights import quantise_linears
from torch import Tensor, nn
from torch.nn import functional

from loadtest import command_line
from loadtest.bench.markdown_table import print_table
from loadtest.bench.timing import call_times

# The numbers of inputs and outputs of each linear layer in one block of the model.
SIZES = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))
# The layers of several blocks do not fit into the processor's cache, not even with 4 bits.
NUM_BLOCKS = 4
# oneDNN chooses the layout that is best for inputs with this number of rows.
_PACKED_ROWS = 256
# Computes all layers. The argument maps a number of inputs to a matrix with so many columns.
RunLayers = Callable[[dict[int, Tensor]], None]


class Contestant(NamedTuple):
    """One way to compute the layers, on one instruction set."""

    name: str
    instruction_set: str
    run_layers: RunLayers


def random_weights(dtype: torch.dtype) -> list[Tensor]:
    """Return the weights of all layers, each [outputs, inputs]."""
    return [
        (torch.randn(outputs, inputs) / math.sqrt(1024)).to(dtype)
        for inputs, outputs in SIZES * NUM_BLOCKS
    ]


def native_product(dtype: torch.dtype) -> RunLayers:
    """Return a function that computes all layers with the kernel of native_linear.py."""
    layers = [(*weight.shape, native_linear.pack(weight)) for weight in random_weights(dtype)]

    def run_layers(rows: dict[int, Tensor]) -> None:
        for num_outputs, num_inputs, packed in layers:
            native_linear.linear(rows[num_inputs].to(dtype), packed, None, num_outputs)

    return run_layers


def integer_product(bits: int) -> RunLayers:
    """Return a function that computes all layers with integer weights."""
    layers = nn.ModuleList(nn.Linear(*sizes, bias=False) for sizes in SIZES * NUM_BLOCKS)
    quantise_linears(layers, bits)
    all_inputs = [num_inputs for num_inputs, _ in SIZES * NUM_BLOCKS]

    def run_layers(rows: dict[int, Tensor]) -> None:
        for num_inputs, layer in zip(all_inputs, layers, strict=True):
            layer(rows[num_inputs])

    return run_layers


def torch_product(dtype: torch.dtype) -> RunLayers:
    """Return a function that computes all layers with torch."""
    weights = random_weights(dtype)

    def run_layers(rows: dict[int, Tensor]) -> None:
        for weight in weights:
            functional.linear(rows[weight.shape[1]].to(dtype), weight)

    return run_layers


def packed_torch_product() -> RunLayers:
    """Return a function that computes all layers with oneDNN and packed bfloat16 weights."""
    layers = [
        (weight.shape[1], torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS))
        for weight in random_weights(torch.bfloat16)
    ]

    def run_layers(rows: dict[int, Tensor]) -> None:
        for num_inputs, packed in layers:
            torch.ops.mkldnn._linear_pointwise(rows[num_inputs], packed, None, "none", [], "")

    return run_layers


def contestants() -> list[Contestant]:
    """Return all contestants that this processor supports."""
    products = {
        "bfloat16": native_product(torch.bfloat16),
        "float32": native_product(torch.float32),
        "int8": integer_product(bits=8),
        "int4": integer_product(bits=4),
    }
    supported = [one.name for one in supported_instruction_sets()]
    best = supported[0]
    # Without the matrix tiles of AMX, the best instruction set is avx512_bf16.
    compared = [name for name in supported if name in (best, "avx512_bf16", "avx2")]
    return [
        *(
            Contestant(f"{name} {dtype}", name, product)
            for name in compared
            for dtype, product in products.items()
        ),
        Contestant("torch bfloat16", best, torch_product(torch.bfloat16)),
        Contestant("oneDNN bfloat16", best, packed_torch_product()),
    ]


def measure_row(
    num_rows: int, contestants: list[Contestant], args: argparse.Namespace
) -> list[str]:
    """Return the row of the table for inputs with `num_rows` rows."""
    rows = {num_inputs: torch.randn(num_rows, num_inputs).bfloat16() for num_inputs, _ in SIZES}
    rounds = [
        [shortest_time(contestant, rows, args) for contestant in contestants]
        for _ in range(args.rounds)
    ]
    first_ms = statistics.median(times[0] for times in rounds) * 1e3
    ratios = [[times[0] / spent for spent in times] for times in rounds]
    medians = [statistics.median(of_contestant) for of_contestant in zip(*ratios, strict=True)]
    return [str(num_rows), f"{first_ms:.1f}", *(f"{ratio:.2f}" for ratio in medians)]


def shortest_time(
    contestant: Contestant, rows: dict[int, Tensor], args: argparse.Namespace
) -> float:
    """Return the seconds of the fastest of several calls, after one call that is not measured."""
    clock = time.process_time if args.cpu_time else time.perf_counter
    with forced_instruction_set(contestant.instruction_set):
        # Without the kernels, torch would compute the layers.
        assert native_linear.is_available()
        assert grouped_linear.is_available()
        contestant.run_layers(rows)
        return min(call_times(partial(contestant.run_layers, rows), args.repeat, clock))


@torch.inference_mode()
def main() -> None:
    """Measure all numbers of rows, and print the table."""
    args = arguments().parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    compared = contestants()
    head = ["rows", f"{compared[0].name}, ms", *(contestant.name for contestant in compared)]
    print_table(head, (measure_row(num_rows, compared, args) for num_rows in args.rows))


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 512], help="numbers of rows")
    add("--threads", type=int, default=2, help="number of threads")
    add("--rounds", type=int, default=3, help="number of rounds, of which the median counts")
    add("--repeat", type=int, default=5, help="calls in a round, of which the fastest counts")
    add("--cpu-time", action="store_true", help="measure the CPU time of the process")
    return parser


if __name__ == "__main__":
    main()
