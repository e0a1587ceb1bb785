"""Runs all batches in a folder.

Several frontends may use the same folder. Only one of them can lock the file `lock` in the folder,
and only this frontend runs batches. When this frontend ends, another frontend locks the file.
"""

import asyncio
import logging
import time
from contextlib import suppress
from typing import BinaryIO, NamedTuple

from nereid_client.batches.batch_run import BatchRun
from nereid_client.batches.line_requests import LineSender, LineSlots, batch_client
from nereid_client.batches.stored_batches import Batch, BatchStore
from nereid_client.locked_file import open_locked
from nereid_client.middleware.admission_control import Gate
from nereid_client.middleware.client_keys import Client, KeyFile
from nereid_client.middleware.shared_budget import SharedBudget

_CHECK_EVERY_S = 1.0
_CLEAN_UP_EVERY_S = 10.0
_MAX_RUNNING_BATCHES = 16

_log = logging.getLogger(__name__)


class _RunningBatch(NamedTuple):
    run: BatchRun
    task: asyncio.Task[None]


class BatchRunner:
    """Finds the batches that have not ended, and runs them."""

    def __init__(
        self,
        store: BatchStore,
        *,
        sender: LineSender,
        slots: LineSlots,
        gate: Gate,
        key_file: KeyFile | None,
        max_line_bytes: int,
    ) -> None:
        """Start the task that runs the batches.

        Args:
            store: the batches.
            sender: sends the requests of lines.
            slots: limits the number of lines that run at the same time.
            gate: the gate that admits requests to the application. All batches stop when the gate
                admits no new requests, because the application is then about to stop.
            key_file: the clients in the key file. None if there is no key file.
            max_line_bytes: the largest size of a line.
        """
        self._store = store
        self._sender = sender
        self._slots = slots
        self._gate = gate
        self._key_file = key_file
        self._max_line_bytes = max_line_bytes

        # The batches and their clients.
        self._runs: dict[str, _RunningBatch] = {}  # maps the id of each running batch to its task
        # Limits the number of running batches. A client with a name may use only a share of the
        # limit, so that batches of other clients can run, too.
        self._running = SharedBudget(_MAX_RUNNING_BATCHES)
        self._ended: set[str] = set()  # the ids of the batches that this process has ended
        self._clients: dict[str, Client] = {}  # maps the name of a client to its `Client` object

        # The folder of the batches.
        self._lock: BinaryIO | None = None  # the locked file; None if this process has no lock
        self._clean_up_due = 0.0  # the time after which expired files are deleted again

        # The task that starts and cancels the batches.
        self._wake_up = asyncio.Event()
        self._loop_task = asyncio.create_task(self._manage_batches())

    def wake_up(self) -> None:
        """Start new batches and stop cancelled batches at once, instead of at the next check."""
        self._wake_up.set()

    async def close(self) -> None:
        """Stop all batches. The batches continue after the next start of the frontend."""
        self._loop_task.cancel()
        await asyncio.wait({self._loop_task})
        await self._stop_all()
        if self._lock is not None:
            self._lock.close()

    async def _manage_batches(self) -> None:
        """Start and cancel batches, and delete expired batches, until this task is cancelled.

        Each pass of the loop examines the folder of the batches. The next pass begins after
        `_CHECK_EVERY_S` seconds, or when `wake_up` is called.
        """
        while True:
            self._wake_up.clear()
            try:
                if self._gate.is_draining:  # the application is about to stop
                    await self._stop_all()
                elif self._try_to_lock():  # otherwise, another process runs the batches
                    await self._start_and_cancel_batches()
                    await self._clean_up_folder()
            except OSError as error:
                _log.error("Batches cannot run, because their folder has an error: %s", error)
            # In Python 3.11, `asyncio.wait_for` ignores the cancellation of this task if `_wake_up`
            # is set at the same moment. `close` would then wait forever.
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_EVERY_S):
                    await self._wake_up.wait()

    def _try_to_lock(self) -> bool:
        """Lock the folder of the batches, unless another process has locked the folder.

        Returns: whether this process has the lock and therefore runs the batches of the folder.
        """
        folder = self._store.files.folder
        if self._lock is None and folder.exists():
            with suppress(BlockingIOError):
                self._lock = open_locked(folder / "lock")
        return self._lock is not None

    async def _start_and_cancel_batches(self) -> None:
        """Start the batches that are waiting, and cancel the batches that must end."""
        batches = await asyncio.to_thread(self._store.unfinished, frozenset(self._ended))
        for batch in batches:
            if batch.id not in self._runs and self._running.fits(batch.owner, 1):
                self._start(batch)
            if batch.id in self._runs and self._must_be_cancelled(batch):
                self._runs[batch.id].run.cancel()

    def _start(self, batch: Batch) -> None:
        """Start a task that runs a batch. When the task ends, `_on_end` is called."""
        run = BatchRun(
            batch,
            self._store,
            sender=self._sender,
            slots=self._slots,
            client=self._clients.setdefault(batch.owner, batch_client(batch.owner)),
            max_line_bytes=self._max_line_bytes,
        )
        task = asyncio.create_task(run.run())
        self._runs[batch.id] = _RunningBatch(run, task)
        self._running.add(batch.owner, 1)
        task.add_done_callback(lambda task: self._on_end(batch, task))

    def _on_end(self, batch: Batch, task: asyncio.Task[None]) -> None:
        del self._runs[batch.id]
        self._running.remove(batch.owner, 1)
        if batch.has_ended:
            self._ended.add(batch.id)
            _log.info("%s ended with the status %s", batch.id, batch.status)
        elif not task.cancelled() and task.exception() is not None:
            _log.error("%s stopped and will be continued", batch.id, exc_info=task.exception())
        self._wake_up.set()

    def _must_be_cancelled(self, batch: Batch) -> bool:
        """Return whether the batch was cancelled or its client's API key was removed."""
        has_owner_key = self._key_file is not None and self._key_file.has(batch.owner)
        is_key_removed = bool(batch.owner) and not has_owner_key
        return batch.cancelling_at is not None or is_key_removed

    async def _stop_all(self) -> None:
        """Cancel the tasks of all running batches, and wait until the tasks have ended."""
        tasks = {running.task for running in self._runs.values()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _clean_up_folder(self) -> None:
        """Delete expired files and batches. Pause all batches while the folder is too large.

        Do nothing if this method has cleaned up less than `_CLEAN_UP_EVERY_S` seconds ago.
        """
        # The system clock can be set back, so it does not decide when the next clean-up is due.
        started = time.monotonic()
        if started < self._clean_up_due:
            return
        self._clean_up_due = started + _CLEAN_UP_EVERY_S
        now = time.time()
        files = self._store.files
        await asyncio.to_thread(files.delete_expired, now)
        await asyncio.to_thread(self._store.delete_expired, now)
        self._pause_if_full(await asyncio.to_thread(files.num_bytes))

    def _pause_if_full(self, num_bytes: int) -> None:
        """If the folder is too large, pause all batches. Otherwise, let the batches continue."""
        files = self._store.files
        is_full = num_bytes > files.limits.num_bytes
        if is_full and not self._slots.is_paused:
            _log.warning(
                "All batches wait until files are deleted: the folder %s has %d bytes, but the "
                "limit is %d (max_stored_file_bytes)",
                files.folder,
                num_bytes,
                files.limits.num_bytes,
            )
        self._slots.is_paused = is_full
