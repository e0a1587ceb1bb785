"""A store of responses, with limits on their number, their total size and their age.

A response is stored as the JSON that is sent to clients, so its size in bytes is known.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from nereid_client.database import Database
from nereid_client.errors import ApiError
from nereid_client.responses.stored_response import (
    Running,
    RunningElsewhere,
    StoredResponse,
    current_client_name,
)

Json = dict[str, Any]

# The column `number` gives the order in which the responses have ended. While a response runs, the
# column `worker` contains the number of the process that generates the response. After the end of
# the response, the column `worker` is NULL. The triggers keep the table `totals` up to date,
# because it would take too long to count all rows.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT UNIQUE NOT NULL,
    owner TEXT NOT NULL,
    worker INTEGER,
    num_bytes INTEGER NOT NULL,
    expires_at REAL,
    is_background INTEGER,
    response BLOB,
    input_items BLOB,
    events BLOB
);
CREATE INDEX IF NOT EXISTS responses_by_expiry ON responses (expires_at);
CREATE INDEX IF NOT EXISTS responses_by_worker ON responses (worker, number);
CREATE INDEX IF NOT EXISTS responses_by_owner ON responses (worker, owner, number);
CREATE TABLE IF NOT EXISTS items (id TEXT PRIMARY KEY, response_id TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS items_by_response ON items (response_id);
CREATE TABLE IF NOT EXISTS totals (
    is_running INTEGER NOT NULL,
    owner TEXT NOT NULL,
    count INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    PRIMARY KEY (is_running, owner)
);
CREATE TRIGGER IF NOT EXISTS response_added AFTER INSERT ON responses BEGIN
    INSERT INTO totals VALUES (new.worker IS NOT NULL, new.owner, 1, new.num_bytes)
    ON CONFLICT DO UPDATE SET count = count + 1, num_bytes = num_bytes + new.num_bytes;
END;
CREATE TRIGGER IF NOT EXISTS response_grown AFTER UPDATE OF num_bytes ON responses BEGIN
    UPDATE totals SET num_bytes = num_bytes + new.num_bytes - old.num_bytes
    WHERE is_running = (new.worker IS NOT NULL) AND owner = new.owner;
END;
CREATE TRIGGER IF NOT EXISTS response_deleted AFTER DELETE ON responses BEGIN
    UPDATE totals SET count = count - 1, num_bytes = num_bytes - old.num_bytes
    WHERE is_running = (old.worker IS NOT NULL) AND owner = old.owner;
    DELETE FROM items WHERE response_id = old.id;
END;
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """The limits of a response store.

    Attributes:
        count: the largest number of responses, including running responses. 0 turns the store off.
        num_bytes: the largest size of all responses, their conversations and their events.
        age_s: the number of seconds for which a response stays in the store after its end.
    """

    count: int
    num_bytes: int
    age_s: float


class Store:
    """Stores responses, and registers the responses that run in the background.

    If the store is full, ended responses are deleted, starting with the oldest response of the
    client whose responses use the most space. Therefore, a client that stores many responses does
    not cause the deletion of other clients' responses. A running response is never deleted. If
    running responses fill the store, a new background response is rejected.

    The responses are in an SQLite database, which several frontend processes can share.
    """

    def __init__(
        self,
        limits: Limits,
        now: Callable[[], float] = time.monotonic,
        path: str = ":memory:",
        worker: int = 0,
    ) -> None:
        """Open the database.

        Args:
            limits: the limits of the store.
            now: returns a time in seconds that never goes back. All processes must use the same
                clock.
            path: the file of the database. By default, the database is in memory.
            worker: the number of this frontend process.
        """
        self._limits = limits
        self._now = now
        self._worker = worker
        self._running: dict[str, Running] = {}  # maps ids to running responses of this process
        self._timer: asyncio.TimerHandle | None = None  # the timer that deletes expired responses
        self._database = Database(path, _SCHEMA)

    def __len__(self) -> int:
        """Return the number of responses in the store. Running responses are included."""
        return self._totals()[0]

    @property
    def num_bytes(self) -> int:
        """The total size of all responses in the store, in bytes."""
        return self._totals()[1]

    @property
    def is_on(self) -> bool:
        """Whether this store accepts responses."""
        return self._limits.count > 0

    @property
    def running(self) -> list[Running]:
        """The background responses that this process is generating."""
        return list(self._running.values())

    def begin(self, run: Running, num_bytes: int) -> None:
        """Add a background response whose generation is about to start.

        Args:
            run: the response.
            num_bytes: the bytes that the response needs at its start.

        Raises: ApiError: 400 if the response alone is too large, 429 if the store is full, 507 if
            the database cannot be changed.
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
        with self._changes():
            if not self._delete_oldest_until_free(num_bytes, num_responses=1):
                raise self._full_error()
            self._database.execute(
                "INSERT INTO responses (id, owner, worker, num_bytes) VALUES (?, ?, ?, ?)",
                (run.id, run.owner, self._worker, num_bytes),
            )
        self._running[run.id] = run

    def _full_error(self) -> ApiError:
        """Return the error for a background response that is rejected because the store is full."""
        # Only running responses can fill the store, because all other responses can be deleted. The
        # store is full, so the running responses have reached one of its two limits: the limit on
        # their number, or the limit on bytes.
        num_running, _ = self._totals(only_running=True)
        has_reached_count = num_running >= self._limits.count
        return ApiError(
            429,
            f"{num_running} responses run in the background and fill the response store "
            "(max_stored_responses, max_stored_response_bytes). Try again in a moment, or send the "
            "request with background=false.",
            code="rate_limit_exceeded",
            headers={"Retry-After": "1"},
            limit="max_stored_responses" if has_reached_count else "max_stored_response_bytes",
        )

    def reserve(self, run: Running, num_bytes: int) -> None:
        """Reserve `num_bytes` additional bytes in the store for a running response.

        Raises: ApiError: 503 if the store is full, 507 if the database cannot be changed.
        """
        with self._changes():
            if not self._delete_oldest_until_free(num_bytes):
                raise ApiError(
                    503,
                    f"The response store is full. Its limit is {self._limits.num_bytes} bytes "
                    "(max_stored_response_bytes). Send the request with background=false.",
                    limit="max_stored_response_bytes",
                )
            self._database.execute(
                "UPDATE responses SET num_bytes = num_bytes + ? WHERE id = ?", (num_bytes, run.id)
            )

    def finish(self, run: Running, record: StoredResponse) -> bool:
        """Replace a running response by its final state.

        Both changes are in one transaction, so no process finds the response missing in between. If
        the final state does not fit into the store, the running response is removed nevertheless,
        and `find` returns None.

        Returns: whether the final state is stored.

        Raises: sqlite3.Error if the database cannot be changed, for example because the disk is
            full. `find` then still returns the running response.
        """
        with self._database.transaction():
            self._delete(run.id)
            is_stored = self._add(record)
        del self._running[run.id]
        return is_stored

    def add(self, record: StoredResponse) -> bool:
        """Store a response that has ended. Delete the oldest responses if the store is full.

        Routes call this method only if the store is turned on.

        Returns: False if the response does not fit into the store, or if the database cannot be
            changed, for example because the disk is full.
        """
        try:
            return self._add(record)
        except sqlite3.Error as error:
            _log.error("Response %s is not stored: %s", record.id, error)
            return False

    def _add(self, record: StoredResponse) -> bool:
        """Store a response that has ended; see `add`.

        Raises: sqlite3.Error if the database cannot be changed.
        """
        with self._database.transaction():
            fits = self._delete_oldest_until_free(record.num_bytes, num_responses=1)
            if fits:
                self._insert(record)
        if not fits:
            _log.warning(
                "Response %s is not stored: it has %d bytes and does not fit into the response "
                "store (max_stored_responses, max_stored_response_bytes)",
                record.id,
                record.num_bytes,
            )
            return False
        self._start_timer()
        return True

    def find(self, response_id: str) -> Running | RunningElsewhere | StoredResponse | None:
        """Return the response with this id, or None if the current client has no such response."""
        row = self._database.row(
            "SELECT owner, worker, is_background, response, input_items, events FROM responses "
            "WHERE id = ? AND (worker IS NOT NULL OR expires_at > ?)",
            (response_id, self._now()),
        )
        if row is None:
            return None
        owner, worker, is_background, response, input_items, events = row
        if owner != current_client_name():
            return None
        is_running = worker is not None  # the number of the process that generates the response
        if is_running:
            # `_running` contains all running responses of this process, so any other running
            # response belongs to another process.
            return self._running.get(response_id) or RunningElsewhere(worker)
        return StoredResponse(
            id=response_id,
            response=response,
            input_items=input_items,
            output_ids=self._output_ids(response_id),
            events=None if events is None else _split_events(events),
            is_background=bool(is_background),
            owner=owner,
        )

    def _output_ids(self, response_id: str) -> tuple[str, ...]:
        """Return the ids of the output items of a stored response."""
        rows = self._database.rows("SELECT id FROM items WHERE response_id = ?", (response_id,))
        return tuple(item_id for (item_id,) in rows)

    def find_items(self, item_id: str) -> dict[str, Json]:
        """Return all output items of the stored response that contains the item `item_id`.

        A request often refers to several items of one response. Because all items are returned, the
        caller need not parse the response again for each of them.

        Returns: a mapping from ids to items. The mapping is empty if no stored response contains
            the item.
        """
        row = self._database.row("SELECT response_id FROM items WHERE id = ?", (item_id,))
        record = self.find(row[0]) if row is not None else None
        if not isinstance(record, StoredResponse):
            return {}
        return {item["id"]: item for item in record.output}

    def delete(self, response_id: str) -> None:
        """Delete a stored response.

        Raises: ApiError 507 if the database cannot be changed.
        """
        with self._changes():
            self._delete(response_id)

    def _delete(self, response_id: str) -> None:
        self._database.execute("DELETE FROM responses WHERE id = ?", (response_id,))

    def close(self) -> None:
        """Close the database. A database in memory is deleted."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._database.close()

    @contextmanager
    def _changes(self) -> Iterator[None]:
        """Run the `with` block in a transaction. Convert a database error to an ApiError."""
        try:
            with self._database.transaction():
                yield
        except sqlite3.Error as error:
            raise ApiError(
                507,
                f"The server cannot change its store of responses ({error}). If the disk is full, "
                "free some space, or send the request with background=false.",
                code="storage_error",
            ) from None

    def _insert(self, record: StoredResponse) -> None:
        """Add a response that has ended, and the ids of its items, to the database."""
        self._database.execute(
            "INSERT INTO responses (id, owner, num_bytes, expires_at, is_background, response, "
            "input_items, events) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                record.id,
                record.owner,
                record.num_bytes,
                self._now() + self._limits.age_s,
                record.is_background,
                record.response,
                record.input_items,
                None if record.events is None else b"".join(record.events),
            ),
        )
        for item_id in record.output_ids:
            self._database.execute(
                "INSERT OR REPLACE INTO items VALUES (?, ?)", (item_id, record.id)
            )

    def _totals(self, *, only_running: bool = False) -> tuple[int, int]:
        """Return the number of responses in the store, and their total size in bytes."""
        condition = "WHERE is_running" if only_running else ""
        count, num_bytes = self._database.rows(
            f"SELECT TOTAL(count), TOTAL(num_bytes) FROM totals {condition}"
        )[0]
        return int(count), int(num_bytes)

    def _delete_oldest_until_free(self, num_bytes: int, num_responses: int = 0) -> bool:
        """Delete ended responses until the store has enough free space.

        Expired responses are deleted first. Each further step deletes the oldest response of one
        client. If the store has too many responses, this is the client with the most responses.
        Otherwise, the responses have too many bytes, and this is the client whose responses have
        the most bytes.

        Args:
            num_bytes: the number of bytes that must be free.
            num_responses: the number of responses that the store must be able to add.

        Returns: whether the store now has enough free space. If not, running responses, which are
            never deleted, need too much of the store.
        """
        num_running, running_bytes = self._totals(only_running=True)
        fits_beside_running = self._fits(num_running + num_responses, running_bytes + num_bytes)
        if not fits_beside_running:
            return False
        self._delete_expired()
        # The rows of ended responses have NULL in the column `worker`. After all of these rows are
        # deleted, the new response fits beside the running responses, so the loop ends.
        while not self._fits(len(self) + num_responses, self.num_bytes + num_bytes):
            has_too_many = len(self) + num_responses > self._limits.count
            size = "count" if has_too_many else "num_bytes"
            self._database.execute(
                "DELETE FROM responses WHERE number = (SELECT MIN(number) FROM responses WHERE "
                "worker IS NULL AND owner = (SELECT owner FROM totals WHERE NOT is_running AND "
                f"count > 0 ORDER BY {size} DESC LIMIT 1))"
            )
        return True

    def _fits(self, count: int, num_bytes: int) -> bool:
        """Return whether the limits allow `count` responses with `num_bytes` bytes in total."""
        return count <= self._limits.count and num_bytes <= self._limits.num_bytes

    def _delete_expired(self) -> None:
        self._database.execute("DELETE FROM responses WHERE expires_at <= ?", (self._now(),))

    def _start_timer(self) -> None:
        """Start a timer that deletes the oldest response when that response expires.

        Without the timer, an expired response would stay in memory until the next request.
        """
        if self._timer is not None:
            return
        ((expires,),) = self._database.rows("SELECT MIN(expires_at) FROM responses")
        if expires is not None:
            delay_s = max(expires - self._now(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        """Delete the expired responses, and start a timer for the response that expires next."""
        self._timer = None
        self._delete_expired()
        self._start_timer()


def delete_running(path: str, worker: int) -> None:
    """Delete the unfinished responses of a frontend process that has ended.

    Args:
        path: the file of the database.
        worker: the number of the process.
    """
    with closing(Database(path, _SCHEMA)) as database:
        database.execute("DELETE FROM responses WHERE worker = ?", (worker,))


def _split_events(events: bytes) -> list[bytes]:
    r"""Split the text of a stream into its server-sent events. Each event ends with b"\n\n"."""
    return [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
