"""Tests of `RequestTurns`, which makes clients take turns in starting requests."""

import asyncio
import itertools

import pytest
from nereid_client.request_turns import RequestTurns

pytestmark = pytest.mark.anyio


async def _iterations(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def _wait_in_turn(turns: RequestTurns, name: str, started: list[str]) -> asyncio.Task[None]:
    """Start a task that waits for its turn, and then appends `name` to `started`.

    The first letter of `name` is the name of the client.
    """

    async def request() -> None:
        await turns.wait(name[0])
        started.append(name)

    return asyncio.create_task(request())


async def test_requests_start_at_once_while_none_waits() -> None:
    turns = RequestTurns()
    for _ in range(20):
        wait = turns.wait("a")
        with pytest.raises(StopIteration):  # the coroutine ends without waiting
            wait.send(None)
        await _iterations(2)


async def test_a_late_client_starts_before_the_waiting_requests_of_an_early_one() -> None:
    turns, started = RequestTurns(), []
    tasks = [_wait_in_turn(turns, f"a{number}", started) for number in range(100)]
    await _iterations(3)
    num_started_before = len(started)
    assert num_started_before < 30

    tasks.append(_wait_in_turn(turns, "b", started))
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert started.index("b") <= num_started_before + 12  # at most three iterations later
    started.remove("b")
    assert started == [f"a{number}" for number in range(100)]


async def test_the_event_loop_handles_other_callbacks_between_starts() -> None:
    turns, started = RequestTurns(), []
    tasks = [_wait_in_turn(turns, "a", started) for _ in range(100)]
    counts = []
    while not all(task.done() for task in tasks):
        counts.append(len(started))
        await asyncio.sleep(0)
    assert len(counts) > 20
    assert max(later - earlier for earlier, later in itertools.pairwise(counts)) <= 4


async def test_a_cancelled_request_delays_no_other() -> None:
    turns, started = RequestTurns(), []
    tasks = [_wait_in_turn(turns, f"a{number}", started) for number in range(50)]
    await asyncio.sleep(0)
    for task in tasks[10:40]:
        task.cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert started == [f"a{number}" for number in (*range(10), *range(40, 50))]
    await asyncio.wait_for(_wait_in_turn(turns, "b", started), 5)
