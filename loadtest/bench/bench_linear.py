"""Compare the kernels for linear layers on this CPU, for a model with 596 million parameters.

    python -m loadtest.bench.bench_linear --rows 1 16 512 --threads 2

Each figure of the table is the time of the first contestant divided by the time of the contestant
in the same round: 2.00 means twice as fast. A contestant is an instruction set with a data type of
the weights, for example "avx2 int4", or torch's own product. "oneDNN bfloat16" is torch's product
with packed weights. The contestants alternate, so that other programs on the machine slow down all
of them. The clock is the wall time, or with
--cpu-time the CPU time of the process, which suits a busy machine and one thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from nereid_backend.attention.cpu.cpu_library import forced_instruction_set
from nereid_backend.attention.cpu.instruction_sets import supported_instruction_sets
from nereid_backend.linear import grouped_linear, native_linear
from nereid_backend.linear.quantise_weights import quantise_linears
from torch import Tensor, nn
from torch.nn import functional

from loadtest import command_line
from loadtest.bench.markdown_table import table

# The numbers of inputs and outputs of each linear layer in one block of the model.
SIZES = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))
# The layers of several blocks do not fit into the processor's cache, not even with 4 bits.
NUM_BLOCKS = 4
# oneDNN chooses the layout that is best for inputs with this number of rows.
_PACKED_ROWS = 256
Contestant = tuple[str, str, Callable[[dict[int, Tensor]], None]]


def native_product(dtype: torch.dtype) -> Callable[[dict[int, Tensor]], None]:
    """Return a function that computes all layers with the kernel of native_linear.py."""
    layers = [
        (inputs, outputs, native_linear.pack((torch.randn(outputs, inputs) / 32).to(dtype)))
        for inputs, outputs in SIZES * NUM_BLOCKS
    ]

    def run(rows: dict[int, Tensor]) -> None:
        for inputs, outputs, packed in layers:
            native_linear.linear(rows[inputs].to(dtype), packed, None, outputs)

    return run


def integer_product(bits: int) -> Callable[[dict[int, Tensor]], None]:
    """Return a function that computes all layers with integer weights."""
    layers = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in SIZES * NUM_BLOCKS))
    quantise_linears(layers, bits)

    def run(rows: dict[int, Tensor]) -> None:
        for layer in layers:
            layer(rows[layer.in_features])

    return run


def torch_product(dtype: torch.dtype) -> Callable[[dict[int, Tensor]], None]:
    """Return a function that computes all layers with torch."""
    weights = [
        (torch.randn(outputs, inputs) / 32).to(dtype) for inputs, outputs in SIZES * NUM_BLOCKS
    ]

    def run(rows: dict[int, Tensor]) -> None:
        for weight in weights:
            functional.linear(rows[weight.shape[1]].to(dtype), weight)

    return run


def packed_torch_product() -> Callable[[dict[int, Tensor]], None]:
    """Return a function that computes all layers with oneDNN and packed bfloat16 weights."""
    weights = [
        (torch.randn(outputs, inputs) / 32).bfloat16() for inputs, outputs in SIZES * NUM_BLOCKS
    ]
    layers = [
        (weight.shape[1], torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS))
        for weight in weights
    ]

    def run(rows: dict[int, Tensor]) -> None:
        for inputs, packed in layers:
            torch.ops.mkldnn._linear_pointwise(rows[inputs], packed, None, "none", [], "")

    return run


def contestants() -> list[Contestant]:
    """Return the name, the instruction set and the function of each contestant."""
    products = {
        "bfloat16": native_product(torch.bfloat16),
        "float32": native_product(torch.float32),
        "int8": integer_product(8),
        "int4": integer_product(4),
    }
    supported = [one.name for one in supported_instruction_sets()]
    best = supported[0]
    # Without the matrix tiles of AMX, the best instruction set is avx512_bf16.
    names = [name for name in supported if name in (best, "avx512_bf16", "avx2")]
    native = [(f"{name} {kind}", name, run) for name in names for kind, run in products.items()]
    return [
        *native,
        ("torch bfloat16", best, torch_product(torch.bfloat16)),
        ("oneDNN bfloat16", best, packed_torch_product()),
    ]


def measure(args: argparse.Namespace, num_rows: int, runs: list[Contestant]) -> list[str]:
    """Return the row of the table for one number of rows."""
    rows = {inputs: torch.randn(num_rows, inputs).bfloat16() for inputs, _ in SIZES}
    clock = time.process_time if args.cpu_time else time.perf_counter
    ratios: list[list[float]] = [[] for _ in runs]
    firsts = []
    for _ in range(args.rounds):
        times = []
        for _, instruction_set, run in runs:
            with forced_instruction_set(instruction_set):
                assert native_linear.is_available()
                assert grouped_linear.is_available()
                run(rows)
                best = float("inf")
                for _ in range(args.repeat):
                    start = clock()
                    run(rows)
                    best = min(best, clock() - start)
            times.append(best)
        firsts.append(times[0])
        for of_run, spent in zip(ratios, times, strict=True):
            of_run.append(times[0] / spent)
    figures = [f"{statistics.median(of_run):.2f}" for of_run in ratios]
    return [str(num_rows), f"{statistics.median(firsts) * 1e3:.1f}", *figures]


@torch.inference_mode()
def main() -> None:
    """Measure all numbers of rows, and print the table."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 512], help="numbers of rows")
    add("--threads", type=int, default=2, help="number of threads")
    add("--rounds", type=int, default=3, help="number of rounds, of which the median counts")
    add("--repeat", type=int, default=5, help="calls in a round, of which the fastest counts")
    add("--cpu-time", action="store_true", help="measure the CPU time of the process")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    runs = contestants()
    head = ["rows", f"{runs[0][0]}, ms", *(name for name, _, _ in runs)]
    print(table(head, [measure(args, num_rows, runs) for num_rows in args.rows]))


if __name__ == "__main__":
    main()
