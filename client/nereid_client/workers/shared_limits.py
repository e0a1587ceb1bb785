"""Stores the running requests and the usage of each client in a database that all workers share.

When a request arrives, a worker checks the limits and counts the request in one transaction. The
limits are therefore as exact with several workers as with one worker.
"""

from contextlib import AbstractContextManager, closing

from nereid_client.database import Database
from nereid_client.middleware.shared_budget import SharedBudget
from nereid_client.middleware.usage import NOTHING_USED, StoredUsage, Usages

_SCHEMA = """
CREATE TABLE IF NOT EXISTS running (
    worker INTEGER NOT NULL, client TEXT NOT NULL, amount INTEGER NOT NULL,
    PRIMARY KEY (worker, client)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS usages (key TEXT PRIMARY KEY, amount REAL NOT NULL, time REAL NOT NULL)
WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reserved (data BLOB);
"""
# The space for the counts of about a thousand clients, and for the write-ahead log.
_RESERVED_BYTES = 512 * 1024


def open_database(path: str) -> Database:
    """Open the database. Create its tables if they do not exist yet.

    Disk space is reserved, because each request changes the database. Without the reserved space,
    all requests would fail while the disk is full.
    """
    database = Database(path, _SCHEMA)
    database.reserve_space(_RESERVED_BYTES)
    return database


def forget_worker(path: str, worker: int) -> None:
    """Delete the running requests of a worker that has ended."""
    with closing(open_database(path)) as database:
        database.execute("DELETE FROM running WHERE worker = ?", (worker,))


class RequestsOfWorkers(SharedBudget):
    """Counts the requests that are running in all workers, in total and for each client.

    Args:
        limit: the largest number of requests that run in all workers together.
        database: the database that all workers share.
        worker: the number of this worker.
    """

    def __init__(self, limit: int, database: Database, worker: int) -> None:
        super().__init__(limit)
        self._database = database
        self._worker = worker

    @property
    def used(self) -> int:
        """The number of requests that are running in all workers together."""
        return int(self._database.row("SELECT TOTAL(amount) FROM running")[0])

    def used_by(self, client: str) -> int:
        """Return how many requests of a client are running in all workers together."""
        query = "SELECT TOTAL(amount) FROM running WHERE client = ?"
        return int(self._database.row(query, (client,))[0])

    def transaction(self) -> AbstractContextManager[None]:
        """Run the `with` block in a transaction. No other worker changes the counts meanwhile."""
        return self._database.transaction()

    def add(self, client: str, amount: int) -> None:
        """Record that `amount` requests of a client have started."""
        self._database.execute(
            "INSERT INTO running VALUES (?, ?, ?) "
            "ON CONFLICT (worker, client) DO UPDATE SET amount = amount + excluded.amount",
            (self._worker, client, amount),
        )

    def remove(self, client: str, amount: int) -> None:
        """Reduce the number of a client's running requests by `amount`, because they have ended."""
        with self.transaction():
            self.add(client, -amount)
            self._database.execute("DELETE FROM running WHERE amount = 0")


class UsagesOfWorkers(Usages):
    """Stores how much of its limits each client has used. All workers share these amounts.

    Args:
        database: the database that all workers share.
    """

    def __init__(self, database: Database) -> None:
        super().__init__()
        self._database = database

    def _transaction(self) -> AbstractContextManager[None]:
        return self._database.transaction()

    def _read(self, key: str) -> StoredUsage:
        row = self._database.row("SELECT amount, time FROM usages WHERE key = ?", (key,))
        return NOTHING_USED if row is None else StoredUsage(*row)

    def _write(self, key: str, amount: float, now: float) -> None:
        self._database.execute("INSERT OR REPLACE INTO usages VALUES (?, ?, ?)", (key, amount, now))
