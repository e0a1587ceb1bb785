"""Simulate conversations on many nodes, with random routing and with prefix routing.

    python -m loadtest.simulators.scale_simulator
    python -m loadtest.simulators.scale_simulator --plot docs/explanation/scale.png

Each conversation has several turns, and the prompt of a turn contains all earlier turns. With
prefix routing, all turns of a conversation reach the same node, so one node shows the behaviour of
any number of nodes. With random routing, a turn reaches the node with its prefix less often if
there are more nodes. The nodes are equal and independent, so the simulation runs one of them.
loadtest.simulators.scheduler_simulator describes the cost model of a node.
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.scheduler import Scheduler

from loadtest import command_line
from loadtest.bench.markdown_table import table
from loadtest.simulators.scheduler_simulator import Arrival, Cost, Outcome, percentiles, simulate

_TURNS = 6
_TURN_TOKENS = 500
_OUTPUT_TOKENS = 150
_PAUSE_S = 20.0
_NUM_BLOCKS = 32_768
_BLOCK_SIZE = 16


def conversations(rate: float, duration_s: float, num_nodes: int, seed: int = 0) -> list[Arrival]:
    """Return the requests that one of `num_nodes` nodes gets with random routing.

    Args:
        rate: the requests per second of each node, on average.
        duration_s: the time in which conversations start.
        num_nodes: the number of nodes. With one node, the result is the same as with prefix
            routing.
        seed: the seed of the random numbers.
    """
    rng = random.Random(seed)
    arrivals, clock = [], 0.0
    while clock < duration_s:
        # The node gets a share of the turns of the conversations of all nodes.
        clock += rng.expovariate(rate * num_nodes / _TURNS)
        name = str(rng.random())
        for turn in range(_TURNS):
            if rng.randrange(num_nodes):
                continue
            length = _TURN_TOKENS * (turn + 1)
            at_s = clock + turn * _PAUSE_S * rng.uniform(0.5, 1.5)
            arrivals.append(
                Arrival(at_s, length, _OUTPUT_TOKENS, prefix=name, prefix_tokens=length)
            )
    return arrivals


def run_node(rate: float, duration_s: float, num_nodes: int) -> Outcome:
    """Simulate one node."""
    scheduler = Scheduler(
        BlockPool(_NUM_BLOCKS),
        block_size=_BLOCK_SIZE,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
    )
    return simulate(conversations(rate, duration_s, num_nodes), scheduler, Cost())


def first_token_s(outcome: Outcome) -> tuple[float, float]:
    """Return the 50th and the 99th percentile of the time to the first token, in seconds."""
    waits = [
        record.first_token_s - record.arrival.arrival_s
        for record in outcome.records
        if record.first_token_s is not None
    ]
    median, _, high, _ = percentiles(waits)
    return median, high


def plot(points: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """Draw one curve for each name in `points`, and write a PNG file.

    A point is a pair: the requests per second, and the time to the first token in seconds.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, curve in points.items():
        axes.plot(*zip(*curve, strict=True), marker="o", label=name)
    axes.set(
        xlabel="requests per second and node",
        ylabel="time to the first token, p99 (s)",
        yscale="log",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100, bbox_inches="tight")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the simulations, print a table, and draw a chart on request."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    add("--rates", type=float, nargs="+", default=[4, 6, 8, 10, 12], help="requests/s of a node")
    add("--nodes", type=int, nargs="+", default=[1, 10, 1000], help="numbers of nodes")
    add("--duration", type=float, default=120, help="seconds in which conversations start")
    add("--plot", type=Path, help="write a chart to this PNG file")
    args = parser.parse_args(argv)
    rows: list[list[str]] = []
    points: dict[str, list[tuple[float, float]]] = {}
    for num_nodes in args.nodes:
        is_one = num_nodes == 1
        name = "prefix routing, any number" if is_one else f"random routing, {num_nodes} nodes"
        for rate in args.rates:
            outcome = run_node(rate, args.duration, num_nodes)
            median, high = first_token_s(outcome)
            points.setdefault(name, []).append((rate, high))
            hits = f"{outcome.hit_rate:.0%}"
            rows.append([name, f"{rate:g}", hits, f"{median:.2f}", f"{high:.2f}"])
    columns = ["routing", "requests/s and node", "prefix hits", "TTFT p50 (s)", "TTFT p99 (s)"]
    sys.stdout.write(table(columns, rows) + "\n")
    if args.plot:
        plot(points, args.plot)


if __name__ == "__main__":
    main()
