"""A small SQLite database, in memory or in a file that several processes share."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_LOCK_TIMEOUT_S = 30.0


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
        except BaseException:
            if is_outermost:
                self._connection.execute("ROLLBACK")
            raise
        else:
            if is_outermost:
                self._connection.execute("COMMIT")
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
