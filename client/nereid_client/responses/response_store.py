"""Stores responses in memory. The store limits the number, the size and the age of responses.

A response is stored as the JSON that is sent to clients, so its size in bytes is known.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nereid_client.errors import ApiError
from nereid_client.middleware.client_keys import current_client

Json = dict[str, Any]

_OVERHEAD_BYTES = 64  # the approximate size of a Python object without its content

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """The limits of a store.

    Attributes:
        count: the number of responses, including running ones. 0 turns the store off.
        num_bytes: the bytes of all responses, their conversations and their events.
        age_s: the seconds from the end of a response until it is deleted.
    """

    count: int
    num_bytes: int
    age_s: float


def current_client_name() -> str:
    """Return the name of the client that sent the current request."""
    return current_client.get().name


@dataclass(frozen=True)
class StoredResponse:
    """A response that has ended.

    Attributes:
        id: the id of the response.
        response: the response object as JSON.
        context: the JSON list of all items that the model read, including those of the earlier
            responses.
        items: the ids of the output items.
        events: the events of its stream in order. None if the stream cannot be read again.
        is_background: whether the response was generated in the background.
        owner: the name of the client that created the response.
        num_bytes: the number of bytes that the response needs in the store.
    """

    id: str
    response: bytes
    context: bytes
    items: tuple[str, ...]
    events: Sequence[bytes] | None = None
    is_background: bool = False
    owner: str = field(default_factory=current_client_name)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        size = len(self.response) + len(self.context) + size_of(self.events or ())
        size += _OVERHEAD_BYTES * (4 + len(self.items))
        object.__setattr__(self, "num_bytes", size)

    @property
    def output(self) -> list[Json]:
        """The output items."""
        items: list[Json] = json.loads(self.response)["output"]
        return items


class Running(Protocol):
    """A response that is being generated in the background."""

    @property
    def owner(self) -> str:
        """The name of the client that created the response."""
        ...

    @property
    def id(self) -> str:
        """The id of the response."""
        ...


class Store:
    """The stored responses, and the responses that run in the background.

    If the store is full, the oldest responses that have ended are deleted. A running response is
    never deleted. If running responses fill the store, a new background response is rejected.

    Args:
        limits: the limits of the store.
        now: returns a time in seconds that never goes back.

    Attributes:
        num_bytes: the bytes of all responses in the store.
    """

    def __init__(self, limits: Limits, now: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._now = now
        # Maps the id of a response to a pair: the time at which the response expires, and the
        # response. The responses are in the order in which they ended.
        self._finished: dict[str, tuple[float, StoredResponse]] = {}
        self._items: dict[str, str] = {}  # id of an output item -> id of its response
        # Maps the id of each running response to the response and its present size in bytes.
        self._running: dict[str, tuple[Running, int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._finished) + len(self._running)

    @property
    def is_on(self) -> bool:
        """Whether responses are stored at all."""
        return self._limits.count > 0

    @property
    def running(self) -> list[Running]:
        """The responses that run in the background."""
        return [run for run, _ in self._running.values()]

    def begin(self, run: Running, num_bytes: int) -> None:
        """Add a response that starts to run in the background.

        Args:
            run: the response.
            num_bytes: the bytes that the response needs at its start.

        Raises: ApiError: 400 if the response alone is too large, 429 if the store is full.
        """
        if num_bytes > self._limits.num_bytes:
            raise ApiError(
                400,
                f"background=true requires a conversation of at most {self._limits.num_bytes} "
                f"bytes (max_stored_response_bytes), but this conversation has {num_bytes}. Send "
                "the request with background=false.",
                param="background",
                limit="max_stored_response_bytes",
            )
        is_full = len(self._running) >= self._limits.count
        if is_full or not self._free_space(num_bytes, count=1):
            raise ApiError(
                429,
                f"{len(self._running)} responses run in the background and fill the response store "
                "(max_stored_responses, max_stored_response_bytes). Try again in a moment, or send "
                "the request with background=false.",
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
                limit="max_stored_responses" if is_full else "max_stored_response_bytes",
            )
        self._running[run.id] = (run, num_bytes)
        self.num_bytes += num_bytes

    def reserve(self, run: Running, num_bytes: int) -> None:
        """Reserve `num_bytes` more bytes for a running response.

        Raises: ApiError 503 if the store is full.
        """
        if not self._free_space(num_bytes):
            raise ApiError(
                503,
                f"The response store is full. Its limit is {self._limits.num_bytes} bytes "
                "(max_stored_response_bytes). Send the request with background=false.",
                limit="max_stored_response_bytes",
            )
        _, reserved_bytes = self._running[run.id]
        self._running[run.id] = (run, reserved_bytes + num_bytes)
        self.num_bytes += num_bytes

    def end(self, run: Running) -> None:
        """Remove a response from the running responses. The caller can then store it with `add`."""
        _, num_bytes = self._running.pop(run.id)
        self.num_bytes -= num_bytes

    def add(self, record: StoredResponse) -> bool:
        """Store a response that has ended, and delete the oldest ones if necessary.

        Returns: False if the response does not fit into the store.
        """
        if not self.is_on or not self._free_space(record.num_bytes, count=1):
            _log.warning(
                "Response %s is not stored: it has %d bytes and does not fit into the response "
                "store (max_stored_responses, max_stored_response_bytes)",
                record.id,
                record.num_bytes,
            )
            return False
        self._finished[record.id] = (self._now() + self._limits.age_s, record)
        self._items |= dict.fromkeys(record.items, record.id)
        self.num_bytes += record.num_bytes
        self._start_timer()
        return True

    def find(self, response_id: str) -> Running | StoredResponse | None:
        """Return the response with this id, or None if the current client has no such response."""
        self._delete_expired()
        found: Running | StoredResponse | None
        if response_id in self._running:
            found = self._running[response_id][0]
        else:
            _, found = self._finished.get(response_id, (0, None))
        return found if found is None or found.owner == current_client_name() else None

    def find_item(self, item_id: str) -> Json | None:
        """Return the output item with this id, or None if no stored response has it."""
        record = self.find(self._items.get(item_id, ""))
        if not isinstance(record, StoredResponse):
            return None
        return next(item for item in record.output if item["id"] == item_id)

    def delete(self, response_id: str) -> None:
        """Delete a stored response."""
        _, record = self._finished.pop(response_id)
        self.num_bytes -= record.num_bytes
        for item in record.items:
            self._items.pop(item, None)

    def close(self) -> None:
        """Delete all stored responses."""
        for response_id in list(self._finished):
            self.delete(response_id)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _free_space(self, num_bytes: int, count: int = 0) -> bool:
        """Delete the oldest responses until the store has enough free space.

        Args:
            num_bytes: the bytes that must be free.
            count: the number of responses that will be added.

        Returns: False if the store cannot have enough free space, because running responses
            are never deleted.
        """
        self._delete_expired()
        running_bytes = sum(size for _, size in self._running.values())
        if (
            running_bytes + num_bytes > self._limits.num_bytes
            or len(self._running) + count > self._limits.count
        ):
            return False
        while (
            self.num_bytes + num_bytes > self._limits.num_bytes
            or len(self) + count > self._limits.count
        ):
            self.delete(next(iter(self._finished)))
        return True

    def _delete_expired(self) -> None:
        now = self._now()
        while self._finished:
            response_id, (expires, _) = next(iter(self._finished.items()))
            if expires > now:
                return
            self.delete(response_id)

    def _start_timer(self) -> None:
        """Start a timer that deletes the oldest response when that response expires.

        Without the timer, an expired response would stay in memory until the next request.
        """
        if self._timer is None and self._finished:
            expires, _ = next(iter(self._finished.values()))
            delay_s = max(expires - self._now(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._delete_expired()
        self._start_timer()


def size_of(events: Sequence[bytes]) -> int:
    """Return the approximate number of bytes that events need in memory."""
    return sum(map(len, events)) + _OVERHEAD_BYTES * len(events)
