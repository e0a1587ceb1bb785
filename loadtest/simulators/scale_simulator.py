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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.scheduler import Scheduler

from loadtest import command_line
from loadtest.bench.markdown_table import table
from loadtest.simulators.scheduler_simulator import (
    Arrival,
    Cost,
    Outcome,
    Percentiles,
    percentiles,
    simulate,
)

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
    arrivals: list[Arrival] = []
    start_s = 0.0
    while start_s < duration_s:
        # All nodes together get `rate * num_nodes` turns per second.
        start_s += rng.expovariate(rate * num_nodes / _TURNS)
        arrivals += _turns_on_one_node(rng, start_s, num_nodes)
    return arrivals


def _turns_on_one_node(rng: random.Random, start_s: float, num_nodes: int) -> Iterator[Arrival]:
    """Yield the turns of one conversation that random routing sends to one of the nodes."""
    name = str(rng.random())
    for turn in range(_TURNS):
        if rng.randrange(num_nodes) != 0:  # another node gets this turn
            continue
        length = _TURN_TOKENS * (turn + 1)
        arrival_s = start_s + turn * _PAUSE_S * rng.uniform(0.5, 1.5)
        yield Arrival(arrival_s, length, _OUTPUT_TOKENS, prefix=name, prefix_tokens=length)


def run_node(rate: float, duration_s: float, num_nodes: int) -> Outcome:
    """Simulate one of `num_nodes` nodes."""
    scheduler = Scheduler(
        BlockPool(_NUM_BLOCKS),
        block_size=_BLOCK_SIZE,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
    )
    return simulate(conversations(rate, duration_s, num_nodes), scheduler, Cost())


class Measurement(NamedTuple):
    """The results of one node. `routing` also contains the number of nodes."""

    routing: str
    requests_per_s: float
    hit_rate: float
    first_token_s: Percentiles

    def row(self) -> list[str]:
        """Return the row of the table."""
        times = [f"{self.first_token_s.p50:.2f}", f"{self.first_token_s.p99:.2f}"]
        return [self.routing, f"{self.requests_per_s:g}", f"{self.hit_rate:.0%}", *times]


def measure(rate: float, duration_s: float, num_nodes: int) -> Measurement:
    """Simulate one node, and return its results."""
    # A single node behaves as each of many nodes with prefix routing.
    is_single = num_nodes == 1
    routing = "prefix routing, any number" if is_single else f"random routing, {num_nodes} nodes"
    outcome = run_node(rate, duration_s, num_nodes)
    delays_s = [record.first_token_delay_s for record in outcome.records]
    return Measurement(routing, rate, outcome.hit_rate, percentiles(delays_s))


def plot(measurements: Sequence[Measurement], path: Path) -> None:
    """Draw one curve for each routing, and write a PNG file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for routing in dict.fromkeys(one.routing for one in measurements):
        curve = [one for one in measurements if one.routing == routing]
        rates = [one.requests_per_s for one in curve]
        axes.plot(rates, [one.first_token_s.p99 for one in curve], marker="o", label=routing)
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
    measurements = [
        measure(rate, args.duration, num_nodes) for num_nodes in args.nodes for rate in args.rates
    ]
    columns = ["routing", "requests/s and node", "prefix hits", "TTFT p50 (s)", "TTFT p99 (s)"]
    sys.stdout.write(table(columns, [one.row() for one in measurements]) + "\n")
    if args.plot:
        plot(measurements, args.plot)


if __name__ == "__main__":
    main()
