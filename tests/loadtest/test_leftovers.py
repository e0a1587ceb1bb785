"""Tests that the check for leaks finds each kind of leak in a real process."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from loadtest.client.ask import Ask
from loadtest.client.traffic import Asker
from loadtest.faults import leftovers
from loadtest.faults.server_watch import Watch
from loadtest.server import processes
from loadtest.server.served import free_ports

SERVER = Path(__file__).with_name("leaky_server.py")


@pytest.fixture
def served():
    """A fake of `Served` with the attributes that the check for leaks reads, and with one port."""
    (port,) = free_ports(1)
    with subprocess.Popen([sys.executable, SERVER, str(port)]) as process:
        ports = dict.fromkeys(("http_port", "grpc_port", "metrics_port", "openai_port"), port)
        made = SimpleNamespace(process=process, output="", **ports)
        deadline = time.monotonic() + 120
        while not processes.gauges(made) and time.monotonic() < deadline:
            time.sleep(0.02)
        yield made
        process.kill()


def check_around(served, paths, num_rests=1):
    """Send requests in rounds, and return what the check for leaks finds after each round.

    The check also runs before the first round and must find nothing.
    """

    async def run():
        url = f"http://127.0.0.1:{served.openai_port}"
        asker = Asker(url, url)
        looks = leftovers.IdleChecks(served, asker)
        assert await looks.check("before") == []
        found = []
        for _ in range(num_rests):
            await asyncio.gather(*(asker.ask(Ask("openai", path, {})) for path in paths))
            found.append(await looks.check("behind"))
        await asker.close()
        return found

    return asyncio.run(run())


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(leftovers, "_CLOSED_LIMIT_S", 1.2)
    monkeypatch.setattr(leftovers, "_IDLE_LIMIT_S", 0.5)


def test_connections_that_clients_keep_alive_are_not_a_leak(served):
    assert check_around(served, ["/none"] * 20) == [[]]


@pytest.mark.usefixtures("impatient")
def test_files_left_open_are_reported_with_their_kind(served):
    ((broken,),) = check_around(served, ["/open"])
    assert "supervisor has" in broken
    assert "the additional files are: 10 x /dev/null" in broken


@pytest.mark.usefixtures("impatient")
def test_memory_that_grows_after_the_first_traffic_is_reported(served):
    assert check_around(served, ["/grow"], num_rests=1) == [[]]
    _, (broken,) = check_around(served, ["/grow"], num_rests=2)
    assert "supervisor uses" in broken


@pytest.mark.usefixtures("impatient")
def test_a_zombie_process_is_reported(served):
    ((broken,),) = check_around(served, ["/zombie"])
    assert "is a zombie process" in broken


@pytest.mark.usefixtures("impatient")
def test_a_request_that_never_ends_is_reported(served):
    ((broken,),) = check_around(served, ["/work"])
    assert "not idle after 0.5 s" in broken
    assert "num_requests 1" in broken
    assert "requests in the frontend: 1" in broken


def test_a_counter_by_reason_has_the_reason_in_its_name(served):
    assert processes.gauges(served)["request_success_total stop"] == 3


def test_an_outage_lasts_from_its_line_until_everything_answers_again(served):
    watch = Watch(served)
    watch.look()
    served.output = "nereid: tritonserver crashed (Signal (11)); it is started again now (1 of 9)\n"
    watch.look()
    (outage,) = watch.outages
    assert outage.reason == "tritonserver crashed (Signal (11))"
    assert outage.ended == float("inf")
    served.output += "nereid: everything answers again after 6.5 s\n"
    watch.look()
    assert watch.outages == [outage]
    assert outage.explains(outage.began, outage.ended)
    assert not outage.explains(outage.ended + 60, outage.ended + 61)
