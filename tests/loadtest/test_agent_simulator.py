import pytest

from loadtest.simulators import agent_simulator
from loadtest.simulators.agent_simulator import Traffic, compare
from loadtest.simulators.scheduler_simulator import Cost


def test_sessions_find_more_cached_tokens_than_lru_and_delay_no_other_request():
    traffic = Traffic(agents=6, turns=5, pause_s=10, singles_per_s=3)
    outcomes = compare(traffic, num_blocks=2500, block_size=16, cost=Cost())
    lru, sessions = outcomes["lru"], outcomes["sessions"]
    assert sessions.hit_rate > lru.hit_rate + 0.03
    assert max(sessions.single_first_token_s) < 2 * max(lru.single_first_token_s)


def test_the_command_prints_a_row_for_each_policy(capsys):
    agent_simulator.main(["--agents", "2", "--turns", "2", "--pause", "1"])
    rows = capsys.readouterr().out.splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:4]] == ["lru", "sessions"]


def test_a_wrong_number_is_refused(capsys):
    with pytest.raises(SystemExit):
        agent_simulator.main(["--agents", "many"])
    assert "invalid int value" in capsys.readouterr().err
