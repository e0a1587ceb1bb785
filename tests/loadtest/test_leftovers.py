"""Tests that the check for leaks finds each kind of leak in a real process."""

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.live_frontend import wait_for

from loadtest.client.ask import Ask
from loadtest.client.traffic import Asker
from loadtest.faults import leftovers
from loadtest.faults.server_watch import Watch
from loadtest.server import processes
from loadtest.server.served import free_ports

SERVER = Path(__file__).with_name("leaky_server.py")


@pytest.fixture
def served():
    """A fake of `Served`. It has only the attributes that `IdleChecks` uses, and a single port."""
    (port,) = free_ports(1)
    with subprocess.Popen([sys.executable, SERVER, str(port)]) as process:
        ports = dict.fromkeys(("http_port", "grpc_port", "metrics_port", "openai_port"), port)
        fake = SimpleNamespace(process=process, output="", **ports)
        wait_for(lambda: processes.gauges(fake))
        yield fake
        process.kill()


def faults_after(served, paths, num_rounds=1):
    """Send a request to each path in each round, and return the faults of the check after a round.

    The check also runs before the first round and must find nothing.
    """

    async def run():
        url = f"http://127.0.0.1:{served.openai_port}"
        asker = Asker(url, url)
        checks = leftovers.IdleChecks(served, asker)
        assert await checks.check("before") == []
        faults = []
        for _ in range(num_rounds):
            await asyncio.gather(*(asker.ask(Ask("openai", path, {})) for path in paths))
            faults.append(await checks.check("after"))
        await asker.close()
        return faults

    return asyncio.run(run())


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(leftovers, "_CLOSED_LIMIT_S", 1.2)
    monkeypatch.setattr(leftovers, "_IDLE_LIMIT_S", 0.5)


def test_connections_that_clients_keep_alive_are_not_a_leak(served):
    assert faults_after(served, ["/none"] * 20) == [[]]


@pytest.mark.usefixtures("impatient")
def test_files_left_open_are_reported_with_their_kind(served):
    ((fault,),) = faults_after(served, ["/open"])
    assert "supervisor has" in fault
    assert "the additional files are: 10 x /dev/null" in fault


@pytest.mark.usefixtures("impatient")
def test_memory_that_grows_after_the_first_traffic_is_reported(served):
    assert faults_after(served, ["/grow"], num_rounds=1) == [[]]
    _, (fault,) = faults_after(served, ["/grow"], num_rounds=2)
    assert "supervisor uses" in fault


@pytest.mark.usefixtures("impatient")
def test_a_zombie_process_is_reported(served):
    ((fault,),) = faults_after(served, ["/zombie"])
    assert "is a zombie process" in fault


@pytest.mark.usefixtures("impatient")
def test_a_request_that_never_ends_is_reported(served):
    ((fault,),) = faults_after(served, ["/work"])
    assert "not idle after 0.5 s" in fault
    assert "num_requests 1" in fault
    assert "requests in the frontend: 1" in fault


def test_a_counter_by_reason_has_the_reason_in_its_name(served):
    assert processes.gauges(served)["request_success_total stop"] == 3


def test_an_outage_lasts_from_its_line_until_everything_answers_again(served):
    watch = Watch(served)
    watch.look()
    served.output = "nereid: tritonserver crashed (Signal (11)); it is started again now (1 of 9)\n"
    watch.look()
    (outage,) = watch.outages
    assert outage.reason == "tritonserver crashed (Signal (11))"
    assert not outage.is_over
    served.output += "nereid: everything answers again after 6.5 s\n"
    watch.look()
    assert watch.outages == [outage]
    assert outage.explains(outage.began, outage.ended)
    assert not outage.explains(outage.ended + 60, outage.ended + 61)
