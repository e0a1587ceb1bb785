"""Starts several frontend processes (workers) on one port, and restarts workers that have ended."""

import ctypes
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from nereid_client.console import complain
from nereid_client.locked_file import open_locked
from nereid_client.middleware.client_keys import read_key_file
from nereid_client.responses import response_store
from nereid_client.settings import Settings, SettingsError
from nereid_client.signal_flag import SignalFlag
from nereid_client.supervise.child_processes import describe_exit_code
from nereid_client.supervise.restart_policy import RestartPolicy, Restarts
from nereid_client.workers import shared_limits
from nereid_client.workers.listening_sockets import bound_socket, with_duplicates
from nereid_client.workers.worker_place import WorkerPlace

_CHECK_EVERY_S = 0.05
# If a worker does not end within this number of seconds after SIGTERM, it is killed. A worker needs
# up to 5 s to finish its responses, and `nereid serve` kills the pool after 8 s, so the value is
# between these times.
_STOP_TIMEOUT_S = 7.0
_RESTARTS = RestartPolicy(max_restarts=5, backoff_s=1.0)
_FOLDER_PREFIX = "nereid-frontend-"  # the process id of the pool is appended
_LOCK_FILE = "lock"  # the name of a file in this folder, which the pool locks until it ends
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def check_settings_of_several_workers(settings: Settings) -> None:
    """Check that all settings can be used with several workers.

    The key file is checked here, too, so that a wrong file causes one error before the workers
    start. Otherwise, each worker would fail with this error.

    Raises: SettingsError if a setting requires a single worker, or if the key file is wrong.
    """
    count = settings.frontend_workers
    if settings.models_file:
        raise SettingsError(
            f"frontend_workers is {count}, but it must be 1 with a file that describes several "
            "models (models_file, --config), because a worker does not know which models the "
            "other workers use."
        )
    if settings.max_total_body_bytes < count * settings.max_body_bytes:
        raise SettingsError(
            f"max_total_body_bytes must be at least {count * settings.max_body_bytes}, which is "
            f"frontend_workers ({count}) times max_body_bytes, but it is "
            f"{settings.max_total_body_bytes}. Each worker may use an equal part of "
            "max_total_body_bytes."
        )
    if settings.api_key_file:  # each worker reads the keys again
        read_key_file(Path(settings.api_key_file))


@dataclass
class _Worker:
    """The state of one worker.

    Attributes:
        place: the number of the worker, and the folder that all workers share.
        process: the process that was started last for this worker.
        restarts: counts the restarts, and determines the wait before the next restart.
        restart_at: the time of time.monotonic() at which the worker is restarted. None if no
            restart is planned.
    """

    place: WorkerPlace
    process: subprocess.Popen[bytes]
    restarts: Restarts = field(default_factory=lambda: Restarts(_RESTARTS))
    restart_at: float | None = None

    @property
    def name(self) -> str:
        return f"frontend worker {self.place.number}"


class WorkerPool:
    """Starts, restarts and stops the workers of a frontend."""

    def __init__(self, settings: Settings, command: Sequence[str]) -> None:
        self._settings = settings
        self._command = command
        self._workers: list[_Worker] = []
        self._stop = SignalFlag()
        self._is_draining = False

    def run(self) -> int:
        """Run the workers until SIGINT or SIGTERM. Return the exit code of the frontend.

        - 0: the frontend has received SIGINT or SIGTERM.
        - 1: the port is in use.
        - The exit code of a worker, but at least 1: the worker could not start, or has ended too
          often. The code is 1 if a signal has killed this worker.

        After SIGUSR1, the workers accept no new requests.

        Raises: SettingsError if a setting does not allow several workers.
        """
        check_settings_of_several_workers(self._settings)
        host, port = self._settings.host, self._settings.port
        try:
            reserved = _reserve_port(host, port)
        except OSError as error:
            complain(f"nereid_client: {host}:{port} cannot be used ({error.strerror or error})")
            return 1
        # The socket stays open until the end. Otherwise, another program could take the port while
        # no worker is listening on it.
        with reserved:
            actual_port = reserved.getsockname()[1]  # differs from `port` if `port` is 0
            return self._run_on_port(actual_port)

    def _run_on_port(self, port: int) -> int:
        """Run the workers with a new folder that they share, and delete the folder at the end."""
        _delete_abandoned_folders()
        with _locked_folder() as folder:
            self._handle_signals()
            try:
                return self._run_in_folder(folder, port)
            finally:
                self._end_all()

    def _run_in_folder(self, folder: Path, port: int) -> int:
        """Run the workers. Stop after a signal, or after a failure that a restart cannot repair."""
        (folder / "metrics").mkdir()
        count = self._settings.frontend_workers
        places = [WorkerPlace(number, count, str(folder), port) for number in range(count)]
        _create_databases(places[0])
        for place in places:
            self._workers.append(_Worker(place, self._start(place)))
        self._drain_if_signalled()
        while not self._stop.wait(_CHECK_EVERY_S):
            exit_code = self._handle_ended_workers()
            if exit_code is not None:
                return exit_code
        return 0

    def _start(self, place: WorkerPlace) -> subprocess.Popen[bytes]:
        """Start the process of a worker. It reads `place` from its environment variables."""
        return subprocess.Popen(
            self._command, env={**os.environ, **place.environment}, preexec_fn=_prepare_worker
        )

    def _handle_ended_workers(self) -> int | None:
        """Restart the workers that have ended. After SIGUSR1, only clean up after these workers.

        Returns: the exit code of the frontend if a worker must not be restarted, else None.
        """
        for worker in self._workers:
            if self._is_draining:
                _clean_up_if_ended(worker)
                continue
            exit_code = self._restart_or_give_up(worker)
            if exit_code is not None:
                return exit_code
        return None

    def _restart_or_give_up(self, worker: _Worker) -> int | None:
        """If a worker has ended, plan its restart. If its restart is due, start the worker again.

        Returns: the exit code of the frontend if the worker must not be restarted, else None.
        """
        now = time.monotonic()
        if worker.restart_at is None:
            code = worker.process.poll()
            if code is None:  # the worker is running
                return None
            return self._plan_restart_or_give_up(worker, code, now)
        if now >= worker.restart_at:
            self._start_again(worker, now)
        return None

    def _start_again(self, worker: _Worker, now: float) -> None:
        """Start a worker that has ended. If the operating system refuses, plan another attempt."""
        try:
            worker.process = self._start(worker.place)
        except OSError as error:  # too little memory, or too many processes
            complain(f"nereid: the {worker.name} cannot be started ({error.strerror})")
            worker.restart_at = now + _RESTARTS.backoff_s
            return
        worker.restart_at = None
        self._drain_if_signalled()

    def _plan_restart_or_give_up(self, worker: _Worker, code: int, now: float) -> int | None:
        """Clean up after a worker that ended with the exit code `code`, and plan its restart.

        A worker that failed during its start, or too often in a row, is not restarted.

        Returns: the exit code of the frontend if the worker must not be restarted, else None.
        """
        has_started = _remove_socket(worker.place)  # a worker creates its socket when it is ready
        _delete_requests_and_responses(worker.place)
        # A worker that has failed during its start is not restarted, because a new worker would
        # also fail. `record_failure` returns None if the worker has been restarted too often in a
        # row.
        wait_s = worker.restarts.record_failure() if has_started else None
        ended = describe_exit_code(code)
        if wait_s is None:
            complain(f"nereid: the {worker.name} {ended} and is not started again")
            return max(code, 1)  # `code` is negative if a signal has killed the worker
        when = "now" if wait_s == 0 else f"in {wait_s:g} s"
        restart = worker.restarts.describe()
        complain(f"nereid: the {worker.name} {ended}; it is started again {when} ({restart})")
        worker.restart_at = now + wait_s
        return None

    def _end_all(self) -> None:
        """Stop all workers. Kill the workers that do not end in time."""
        processes = [worker.process for worker in self._workers]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
            process.kill()
            process.wait()

    def _drain_if_signalled(self) -> None:
        """Send SIGUSR1 to all workers if this process has received SIGUSR1.

        Call this method after the start of a worker. The signal may have arrived after the start of
        the process, but before the process was stored in `_workers`.
        """
        if self._is_draining:
            for worker in self._workers:
                worker.process.send_signal(signal.SIGUSR1)  # a second one has no further effect

    def _handle_signals(self) -> None:
        """Stop the workers after SIGINT or SIGTERM, and pass SIGUSR1 on to all workers."""

        def stop(number: int, frame: object) -> None:  # noqa: ARG001 - signal's signature
            self._stop.set()

        def drain(number: int, frame: object) -> None:  # noqa: ARG001 - signal's signature
            self._is_draining = True
            self._drain_if_signalled()

        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGUSR1, drain)


def _parent_folder() -> Path:
    """Return the folder in which a worker pool creates the folder that all workers share.

    The shared files are in memory if possible, because a full disk would end the workers: the
    kernel kills a process that writes to a memory-mapped file on a full disk. prometheus_client
    maps the files of the metrics.
    """
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


@contextmanager
def _locked_folder() -> Iterator[Path]:
    """Create a folder that no other worker pool deletes, and delete it at the end of the block.

    The folder has a hidden name until its lock file is locked. Otherwise, another pool could delete
    the folder, because a folder whose file is not locked seems to be abandoned.
    """
    prefix = f"{_FOLDER_PREFIX}{os.getpid()}-"
    hidden = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=_parent_folder()))
    with open_locked(hidden / _LOCK_FILE):
        folder = hidden.rename(hidden.with_name(hidden.name.removeprefix(".")))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _delete_abandoned_folders() -> None:
    """Delete each folder of a killed worker pool. The folder can contain stored responses."""
    for folder in _parent_folder().glob(f"{_FOLDER_PREFIX}*-*"):
        if _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Return whether the worker pool that created a folder has ended.

    The pool locks a file in the folder. Its process id alone is not sufficient, because the pool
    may run in another container, whose processes have other ids.
    """
    pid = folder.name.removeprefix(_FOLDER_PREFIX).partition("-")[0]
    # The file is missing if an older version of Nereid, which locked no file, has created the
    # folder.
    if not (folder / _LOCK_FILE).exists():
        return not Path("/proc", pid).exists()
    try:
        open_locked(folder / _LOCK_FILE).close()
    except OSError:  # the running pool has locked the file
        return False
    return True


def _reserve_port(host: str, port: int) -> socket.socket:
    """Return a socket that reserves a port. The sockets of the workers can share this port.

    Raises: OSError if any other program uses the port.
    """
    # The first socket is not shared, so this line raises an error if any other program uses the
    # port. A shared socket would raise no error if that program were a second frontend.
    bound_socket(host, port, is_shared=False).close()
    return bound_socket(host, port)


def _remove_socket(place: WorkerPlace) -> bool:
    """Delete the Unix socket of a worker that has ended.

    Returns: whether the worker had a socket, which a worker creates when it is ready.
    """
    path = Path(place.socket_path(place.number))
    has_socket = path.exists()
    path.unlink(missing_ok=True)
    return has_socket


def _clean_up_if_ended(worker: _Worker) -> None:
    """If a worker has ended, delete its socket, its running requests and its responses.

    `nereid serve` waits until the database contains no running requests. Therefore, the requests of
    a worker that has ended must be deleted from the database.
    """
    has_ended = worker.process.poll() is not None
    # A missing socket means that the clean-up is complete, or that the worker was never ready.
    if has_ended and _remove_socket(worker.place):
        _delete_requests_and_responses(worker.place)


def _create_databases(place: WorkerPlace) -> None:
    """Create the databases that all workers share. Each worker has the paths in its `place`.

    If the databases were missing, several workers could create them at the same time.
    """
    _delete_requests_and_responses(place)  # opening a missing database creates it


def _delete_requests_and_responses(place: WorkerPlace) -> None:
    """Delete the running requests and responses of an ended worker from the databases.

    If the disk is full, the responses may stay in the database and count as running.
    """
    shared_limits.forget_worker(place.requests_path, place.number)
    try:
        response_store.delete_running(place.responses_path, place.number)
    except sqlite3.Error as error:
        complain(f"nereid: the responses of an ended frontend worker cannot be deleted ({error})")


def worker_sockets(place: WorkerPlace, host: str) -> list[socket.socket]:
    """Return the TCP sockets of a worker on the shared port, and the worker's Unix socket."""
    local = socket.socket(socket.AF_UNIX)
    local.bind(place.socket_path(place.number))
    return [*with_duplicates(bound_socket(host, place.port)), local]


def _prepare_worker() -> None:
    """Configure the signals of a new worker process before the worker's program starts.

    The kernel will send SIGTERM to this process when its parent process ends. SIGUSR1 is blocked
    until the worker can handle the signal, because the signal would end a starting worker.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
