"""Responses that can be asked for again: in memory, bounded in number, bytes and age.

Everything lies here as the JSON it is given out as, so what is counted is what is used.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nereid_client.errors import ApiError

Json = dict[str, Any]

_OVERHEAD_BYTES = 64  # of one object of Python's, roughly

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """How much is kept.

    Attributes:
        count: responses, running ones included; 0 keeps none.
        num_bytes: of all of them, with the conversations they continue and their events.
        age_s: seconds from a response's end until it is forgotten.
    """

    count: int
    num_bytes: int
    age_s: float


@dataclass(frozen=True)
class Record:
    """A response that is over.

    Attributes:
        id: the response's.
        response: the response object.
        context: the list of items that it read, earlier responses' among them.
        items: ids of its output's items.
        events: what its stream consisted of, by sequence number; None when it is not to be read
            again.
        is_background: whether it ran on its own.
    """

    id: str
    response: bytes
    context: bytes
    items: tuple[str, ...]
    events: Sequence[bytes] | None = None
    is_background: bool = False
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        size = len(self.response) + len(self.context) + size_of(self.events or ())
        size += _OVERHEAD_BYTES * (4 + len(self.items))
        object.__setattr__(self, "num_bytes", size)

    @property
    def output(self) -> list[Json]:
        """The items that it wrote."""
        items: list[Json] = json.loads(self.response)["output"]
        return items


class Running(Protocol):
    """A response in the background, as the store sees it."""

    @property
    def id(self) -> str:
        """The response's."""
        ...


class Store:
    """What is kept, oldest first to go; what runs is never dropped, but may be refused room.

    Attributes:
        num_bytes: of everything here.
    """

    def __init__(self, limits: Limits, now: Callable[[], float] = time.monotonic) -> None:
        """Empty. `now` gives seconds."""
        self._limits = limits
        self._now = now
        self._finished: dict[str, tuple[float, Record]] = {}  # in the order of their ends
        self._items: dict[str, str] = {}  # id of an output item -> of its response
        self._running: dict[str, tuple[Running, int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._finished) + len(self._running)

    @property
    def is_on(self) -> bool:
        """Whether anything is kept at all."""
        return self._limits.count > 0

    @property
    def running(self) -> list[Running]:
        """The responses in the background that are not over."""
        return [run for run, _ in self._running.values()]

    def begin(self, run: Running, num_bytes: int) -> None:
        """Take in a response that runs.

        Args:
            run: it.
            num_bytes: what it holds from the beginning.

        Raises: ApiError 400 when it alone is too large, 429 when there is no room now.
        """
        if num_bytes > self._limits.num_bytes:
            raise ApiError(
                400,
                f"background: the conversation has {num_bytes} bytes; the limit is "
                f"{self._limits.num_bytes} (max_stored_response_bytes); send it without background",
                param="background",
            )
        is_full = len(self._running) >= self._limits.count
        if is_full or not self._make_room(num_bytes, count=1):
            raise ApiError(
                429,
                f"{len(self._running)} responses run in the background and fill the store "
                "(max_stored_responses, max_stored_response_bytes); try again in a moment, or "
                "without background",
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )
        self._running[run.id] = (run, num_bytes)
        self.num_bytes += num_bytes

    def grow(self, run: Running, num_bytes: int) -> None:
        """A running response holds so many bytes more.

        Raises: ApiError 503 when there is no room.
        """
        if not self._make_room(num_bytes):
            raise ApiError(
                503,
                f"the stored responses fill {self._limits.num_bytes} bytes "
                "(max_stored_response_bytes), and this one does not fit any more; try without "
                "background",
            )
        kept, before = self._running[run.id]
        self._running[run.id] = (kept, before + num_bytes)
        self.num_bytes += num_bytes

    def end(self, run: Running) -> None:
        """A running response is over; what it becomes is kept with `keep`."""
        _, num_bytes = self._running.pop(run.id)
        self.num_bytes -= num_bytes

    def keep(self, record: Record) -> bool:
        """Keep a response that is over, at the cost of the oldest; false when it does not fit."""
        if not self.is_on or not self._make_room(record.num_bytes, count=1):
            _log.warning(
                "response %s has %d bytes and is not kept (max_stored_responses, "
                "max_stored_response_bytes)",
                record.id,
                record.num_bytes,
            )
            return False
        self._finished[record.id] = (self._now() + self._limits.age_s, record)
        self._items |= dict.fromkeys(record.items, record.id)
        self.num_bytes += record.num_bytes
        self._schedule()
        return True

    def find(self, response_id: str) -> Running | Record | None:
        """A response by its id; None when there is none, or no more."""
        self._forget_old()
        if response_id in self._running:
            return self._running[response_id][0]
        _, record = self._finished.get(response_id, (0, None))
        return record

    def find_item(self, item_id: str) -> Json | None:
        """An item that a response wrote which is over."""
        record = self.find(self._items.get(item_id, ""))
        if not isinstance(record, Record):
            return None
        return next(item for item in record.output if item["id"] == item_id)

    def drop(self, response_id: str) -> None:
        """Forget a response that is over."""
        _, record = self._finished.pop(response_id)
        self.num_bytes -= record.num_bytes
        for item in record.items:
            self._items.pop(item, None)

    def close(self) -> None:
        """Forget everything that is over."""
        for response_id in list(self._finished):
            self.drop(response_id)
        self._stop_timer()

    def _make_room(self, num_bytes: int, count: int = 0) -> bool:
        """Drop the oldest until so much more fits; false when it can't."""
        self._forget_old()
        if num_bytes > self._limits.num_bytes or len(self._running) + count > self._limits.count:
            return False
        running = sum(held for _, held in self._running.values())
        if running + num_bytes > self._limits.num_bytes:
            return False
        for response_id in list(self._over(num_bytes, count)):
            self.drop(response_id)
        return True

    def _over(self, num_bytes: int, count: int) -> Iterator[str]:
        """The oldest, as many as are in the way."""
        total, number = self.num_bytes + num_bytes, len(self) + count
        for response_id, (_, record) in self._finished.items():
            if total <= self._limits.num_bytes and number <= self._limits.count:
                return
            total -= record.num_bytes
            number -= 1
            yield response_id

    def _forget_old(self) -> None:
        now = self._now()
        while self._finished:
            response_id, (until, _) = next(iter(self._finished.items()))
            if until > now:
                return
            self.drop(response_id)

    def _schedule(self) -> None:
        """See to it that the oldest goes at its time, also where nobody asks."""
        if self._timer is None and self._finished:
            until, _ = next(iter(self._finished.values()))
            self._timer = asyncio.get_running_loop().call_later(
                max(until - self._now(), 0.0), self._on_time
            )

    def _on_time(self) -> None:
        self._timer = None
        self._forget_old()
        self._schedule()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def size_of(events: Sequence[bytes]) -> int:
    """What events take in memory, roughly."""
    return sum(map(len, events)) + _OVERHEAD_BYTES * len(events)
