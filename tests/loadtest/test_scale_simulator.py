"""Tests of the simulator of conversations on many nodes."""

from collections import defaultdict

import pytest

from loadtest.simulators import scale_simulator
from loadtest.simulators.scale_simulator import conversations, run_node


def test_a_node_gets_whole_conversations_with_prefix_routing():
    arrivals = conversations(rate=2, duration_s=60, num_nodes=1)
    assert len(arrivals) / 60 == pytest.approx(2, rel=0.3)
    lengths = defaultdict(list)
    for turn in arrivals:
        lengths[turn.prefix].append(turn.prompt_tokens)
    assert all(turns == [500, 1000, 1500, 2000, 2500, 3000] for turns in lengths.values())


def test_a_node_gets_the_same_rate_with_random_routing():
    arrivals = conversations(rate=2, duration_s=60, num_nodes=100)
    assert len(arrivals) / 60 == pytest.approx(2, rel=0.3)


def test_random_routing_misses_the_prefixes():
    outcomes = {number: run_node(rate=2, duration_s=5, num_nodes=number) for number in (1, 1000)}
    assert outcomes[1].hit_rate > 0.5
    assert outcomes[1000].hit_rate < 0.1


def test_the_command_prints_a_table(capsys):
    scale_simulator.main(["--rates", "2", "--nodes", "1", "10", "--duration", "3"])
    assert capsys.readouterr().out.count("routing") == 3


@pytest.mark.long
def test_the_command_draws_a_chart(tmp_path):
    chart = tmp_path / "chart.png"
    scale_simulator.main(["--rates", "2", "--nodes", "1", "--duration", "3", f"--plot={chart}"])
    assert chart.read_bytes().startswith(b"\x89PNG")
