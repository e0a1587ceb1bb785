"""A small SQLite database, in memory or in a file that several processes share."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

_LOCK_TIMEOUT_S = 30.0
_MAX_LOG_PAGES = 64  # a page has 4 KiB


class Database:
    """A connection to an SQLite database.

    The data is not needed after the processes that share the database have ended. Changes are
    therefore not flushed to the disk. Flushing would take most of the time of a transaction.

    Args:
        path: the file, or ":memory:" for a database in the memory of this process.
        schema: SQL statements that create the tables if the tables do not exist.
    """

    def __init__(self, path: str, schema: str) -> None:
        self._connection = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S, isolation_level=None)
        self._depth = 0
        # In the mode WAL (write-ahead log), one process can read while another process writes.
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = OFF")
        self._connection.executescript(f"BEGIN IMMEDIATE; {schema} COMMIT;")

    def reserve_space(self, num_bytes: int) -> None:
        """Reserve disk space, so that small changes succeed even if the disk becomes full later.

        The space is reserved in the database and in its write-ahead log. Do nothing if the disk is
        already full. The schema must contain the table `reserved (data BLOB)`.
        """
        # SQLite appends each change to the write-ahead log. With this setting, SQLite copies the
        # log into the database as soon as the log has this number of pages, and then overwrites the
        # log from its start. Therefore, small changes do not lengthen the log.
        self._connection.execute(f"PRAGMA wal_autocheckpoint = {_MAX_LOG_PAGES}")
        # The inserted row lengthens the log and the database. SQLite shortens neither file after
        # the row is deleted. Two transactions are needed, because SQLite does not write a row that
        # the same transaction deletes.
        with suppress(sqlite3.OperationalError):  # the disk is full
            self.execute("INSERT INTO reserved VALUES (zeroblob(?))", (num_bytes,))
            self.execute("DELETE FROM reserved")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the `with` block in a transaction: other processes see all changes or none of them.

        No other process can change the database inside the block. If the block raises an exception,
        the changes of the block are undone. A transaction inside another transaction becomes a part
        of the outer transaction.
        """
        is_outermost = self._depth == 0
        if is_outermost:
            self._connection.execute("BEGIN IMMEDIATE")
        self._depth += 1
        try:
            yield
            if is_outermost:
                self._connection.execute("COMMIT")
        except BaseException:
            # After some errors, such as a full disk, SQLite has already undone the changes.
            if is_outermost and self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        finally:
            self._depth -= 1

    def execute(self, statement: str, values: Sequence[object] = ()) -> None:
        """Execute a statement that changes the database."""
        self._connection.execute(statement, values)

    def rows(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        """Return all rows that a query selects. A row is a tuple."""
        return self._connection.execute(query, values).fetchall()

    def row(self, query: str, values: Sequence[object] = ()) -> Any:  # noqa: ANN401 - row of any type
        """Return the first row that a query selects, or None."""
        return self._connection.execute(query, values).fetchone()

    def close(self) -> None:
        """Close the connection to the database."""
        self._connection.close()
