"""Compare the kernels for linear layers on this CPU, for a model with 596 million parameters.

    python -m loadtest.bench.bench_linear --rows 1 16 512 --threads 2

Nereid's kernels are named after an instruction set and a data type of the weights, for example
"avx2 int4". "torch bfloat16" is torch's matrix product, and "oneDNN bfloat16" is torch's product
with packed weights. The table shows how many times faster each kernel is than the first kernel in
the same round. In each round, the kernels run one after the other, so that other programs on the
machine slow down all kernels. The program measures wall time. With --cpu-time, it measures the CPU
time of the process, which is more precise on a busy machine but requires a single thread.
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

from loadtest.bench.markdown_table import print_table
from loadtest.bench.timing import call_times
from loadtest.command_line import Option, parse_command_line

# The numbers of inputs and outputs of each linear layer in one block of the model.
SIZES = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))
# The layers of this number of blocks do not fit into the processor's cache, even with 4 bits.
NUM_BLOCKS = 4
# oneDNN packs weights in the layout that is fastest for inputs with this number of rows.
_PACKED_ROWS = 256

_OPTIONS = {
    "--rows": Option([1, 4, 16, 64, 512], "numbers of rows"),
    "--threads": Option(2, "number of threads"),
    "--rounds": Option(3, "number of rounds, of which the median counts"),
    "--repeat": Option(5, "calls in a round, of which the fastest counts"),
    "--cpu-time": Option(False, "measure the CPU time of the process"),
}

# A function that computes a layer. Its argument contains an input matrix for each number of columns
# that a layer can have. Example: {1024: a matrix with 1024 columns, 4096: one with 4096 columns}.
Layer = Callable[[dict[int, Tensor]], object]


class Contestant(NamedTuple):
    """A compared kernel: its layers, and the instruction set with which they are computed."""

    name: str
    instruction_set: str
    layers: list[Layer]

    def run(self, rows: dict[int, Tensor]) -> None:
        """Compute all layers."""
        for layer in self.layers:
            layer(rows)


def layers(make_layer: Callable[[Tensor], Layer], dtype: torch.dtype) -> list[Layer]:
    """Return the layers of all blocks. `make_layer` gets a random weight, [outputs, inputs]."""
    return [
        make_layer((torch.randn(outputs, inputs) / math.sqrt(1024)).to(dtype))
        for inputs, outputs in SIZES * NUM_BLOCKS
    ]


def native_layer(weight: Tensor) -> Layer:
    """Return a layer that the kernel of native_linear.py computes."""
    outputs, inputs = weight.shape
    dtype, packed = weight.dtype, native_linear.pack(weight)
    return lambda rows: native_linear.linear(rows[inputs].to(dtype), packed, None, outputs)


def integer_layer(weight: Tensor, bits: int) -> Layer:
    """Return a layer with integer weights."""
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=False)
    layer.weight.copy_(weight)
    holder = nn.Sequential(layer)
    quantise_linears(holder, bits)
    return lambda rows: holder(rows[inputs])


def torch_layer(weight: Tensor) -> Layer:
    """Return a layer that torch computes."""
    return lambda rows: functional.linear(rows[weight.shape[1]].to(weight.dtype), weight)


def packed_torch_layer(weight: Tensor) -> Layer:
    """Return a layer that oneDNN computes with packed weights."""
    inputs, packed = weight.shape[1], torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda rows: multiply(rows[inputs], packed, None, "none", [], "")


def contestants() -> list[Contestant]:
    """Return all kernels that this processor supports."""
    native = {
        "bfloat16": layers(native_layer, torch.bfloat16),
        "float32": layers(native_layer, torch.float32),
        "int8": layers(partial(integer_layer, bits=8), torch.float32),
        "int4": layers(partial(integer_layer, bits=4), torch.float32),
    }
    supported = [each.name for each in supported_instruction_sets()]
    best = supported[0]
    # Processors without the matrix tiles of AMX can at best use avx512_bf16.
    compared = [name for name in supported if name in (best, "avx512_bf16", "avx2")]
    return [
        *(
            Contestant(f"{name} {dtype}", name, native_layers)
            for name in compared
            for dtype, native_layers in native.items()
        ),
        Contestant("torch bfloat16", best, layers(torch_layer, torch.bfloat16)),
        Contestant("oneDNN bfloat16", best, layers(packed_torch_layer, torch.bfloat16)),
    ]


def measure_row(
    num_rows: int, contestants: list[Contestant], args: argparse.Namespace
) -> list[str]:
    """Measure all kernels with inputs of `num_rows` rows, and return the row of the table."""
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
    """Return the seconds of the fastest of `args.repeat` calls. A first call is not measured."""
    clock = time.process_time if args.cpu_time else time.perf_counter
    with forced_instruction_set(contestant.instruction_set):
        # If the native kernels were not available, torch would compute the layers.
        assert native_linear.is_available()
        assert grouped_linear.is_available()
        contestant.run(rows)
        return min(call_times(partial(contestant.run, rows), args.repeat, clock))


@torch.inference_mode()
def main() -> None:
    """Measure all numbers of rows, and print the table."""
    args = parse_command_line(__doc__, _OPTIONS)
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    compared = contestants()
    head = ["rows", f"{compared[0].name}, ms", *(contestant.name for contestant in compared)]
    print_table(head, (measure_row(num_rows, compared, args) for num_rows in args.rows))


if __name__ == "__main__":
    main()
