# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of the ranks 1, 2, ... and sends messages to these processes.

Rank 0 is the engine process. It runs the scheduler and the sampler. The other ranks only compute
forward passes (rank_process.py). The ranks send these messages:

    rank 0 -> rank n    (config, rank), then ("build", sizes), ("step", message), ("clear", blocks),
                        ("budget", step_bytes), ("stop",)
    rank n -> rank 0    "started"; if the rank fails, also "failed: " and the reason

If a rank ends, the other ranks cannot continue, because each layer needs the results of all ranks.
Every later step then raises a LostRankError.
"""

import contextlib
import multiprocessing.connection
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from nereid_backend.config import EngineConfig
from nereid_backend.errors import ConfigError, EngineError, LostRankError
from nereid_backend.parallel.process_group import STARTED, Rank, describe_failure

_MODULE = "nereid_backend.parallel.rank_process"
_EXIT_TIMEOUT_S = 5.0
# After an error, rank 0 waits at most `_NOTICE_TIMEOUT_S` seconds for a report that another rank
# has failed.
_NOTICE_TIMEOUT_S = 2.0
# If the process of a rank ends unexpectedly, the other ranks fail within this number of seconds.
_FOLLOWING_ERRORS_S = 0.2


class Ranks:
    """The processes of all ranks except rank 0. Rank 0 starts and ends these processes.

    Attributes:
        rank: rank 0, which is this process.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        """Start the other ranks, and wait until all ranks form a group.

        A rank is one of the processes that compute the model together. This process is rank 0.

        Args:
            config: the settings. tensor_parallel_size is the number of ranks.
            device: the device of rank 0.

        Raises:
            ConfigError: if this process already belongs to a group of torch.distributed.
            EngineError: if a process cannot be started.
        """
        if dist.is_initialized():
            raise ConfigError(
                "tensor_parallel_size: this process already uses torch.distributed. Close the "
                "other engine before you create an engine with tensor parallelism."
            )
        size = config.tensor_parallel_size
        folder = tempfile.mkdtemp(prefix="nereid-ranks-")
        self.rank = Rank(0, size, device.type, os.path.join(folder, "store"))
        # The processes of the ranks 1, 2, ... and the connections to these processes.
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        # `_wait_for_failure` stores a description of another rank's failure here, and then sets the
        # event `_has_failed`. The description is empty if no other rank has failed.
        self._failure = ""
        self._has_failed = threading.Event()
        # Whether `close` was called. The ranks then end intentionally, so `_wait_for_failure`
        # reports no failure.
        self._is_closing = False
        try:
            self._start_all(config)
        except BaseException:
            self.close()
            raise

    def _start_all(self, config: EngineConfig) -> None:
        """Start the processes of the other ranks, and wait until all ranks form a group."""
        for number in range(1, self.rank.size):
            rank = Rank(number, self.rank.size, self.rank.device_type, self.rank.store)
            self._start_process(config, rank)
        for number, connection in enumerate(self._connections, 1):
            self._await_start(number, connection)
        threading.Thread(target=self._wait_for_failure, daemon=True, name="rank-watch").start()
        self.rank.join()

    def send(self, *message: object) -> None:
        """Send a message to all other ranks.

        If a rank has ended, no error is raised here. The next step raises a LostRankError.
        """
        packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(packed)

    @property
    def has_lost_rank(self) -> bool:
        """Whether another rank has failed or ended."""
        return bool(self._failure)

    def check(self) -> None:
        """Raise a LostRankError if a rank has ended."""
        if self._failure:
            raise LostRankError(self._failure)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Convert an error of the forward pass in the `with` block to a LostRankError.

        A rank is one of the processes that compute the model together. This process is rank 0. If
        another rank has failed first, the error contains the reason of that failure.

        Raises:
            LostRankError: if the forward pass fails. The group cannot be used after this error,
                because the ranks may have stopped at different layers.
        """
        self.check()  # raises a LostRankError if another rank has already ended
        try:
            yield
        except Exception as error:
            own_failure = f"rank 0 of the model failed: {type(error).__name__}: {error}"
            raise LostRankError(self._failure_of_other_rank() or own_failure) from error

    @contextmanager
    def loading(self) -> Iterator[None]:
        """If another rank causes an error while the `with` block loads the model, report that rank.

        A rank is one of the processes that compute the model together. This process is rank 0.

        Raises:
            EngineError: if rank 0 fails because another rank has failed. All other errors of rank 0
                are raised unchanged.
        """
        try:
            yield
        except Exception as error:
            failure = self._failure_of_other_rank()
            # All ranks read the same checkpoint, so a damaged checkpoint causes the same error on
            # each rank. In this case, the error of rank 0 is raised, because its class is more
            # specific than EngineError.
            if failure and not _is_same_error(failure, error):
                raise EngineError(failure) from error
            raise

    def _failure_of_other_rank(self) -> str:
        """Return the description of another rank's failure. Must be called after rank 0 has failed.

        Return "" if no other rank has failed. If another rank has caused the failure of rank 0, the
        thread of `_wait_for_failure` soon detects this, so this method waits up to
        `_NOTICE_TIMEOUT_S` seconds.
        """
        self._has_failed.wait(_NOTICE_TIMEOUT_S)
        return self._failure

    def close(self) -> None:
        """End the processes of the other ranks, and remove this process from the group.

        A process that does not end within 5 seconds is killed. Also delete the file (`Rank.store`)
        through which the processes have found each other.
        """
        self._is_closing = True
        self.send("stop")
        for process in self._processes:
            try:
                process.wait(_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_EXIT_TIMEOUT_S)
        for connection in self._connections:
            connection.close()
        self._leave_group()
        self.rank.remove_store()

    def _leave_group(self) -> None:
        """Remove this process from the group of torch.distributed, if it belongs to a group."""
        if not dist.is_initialized():
            return
        if self._failure:
            _abort_group()  # `destroy_process_group` would wait for the failed rank
        else:
            dist.destroy_process_group()

    def _start_process(self, config: EngineConfig, rank: Rank) -> None:
        """Start the process of a rank, and send the settings to the new process.

        The two processes exchange messages through a pair of connected sockets.
        """
        parent_end, child_end = socket.socketpair()
        # sys.executable can be empty if Python is embedded in another program.
        python = sys.executable or shutil.which("python3") or "python3"
        label = f"rank {rank.number}"  # not read by the process; identifies it in the output of ps
        process = subprocess.Popen(
            [python, "-m", _MODULE, str(child_end.fileno()), label],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
        )
        child_end.close()  # The new process has its own copy of this socket.
        connection = Connection(parent_end.detach())
        self._processes.append(process)
        self._connections.append(connection)
        connection.send((config, rank))

    def _await_start(self, number: int, connection: Connection) -> None:
        """Wait until the process of a rank has started.

        Raise an EngineError if the process ends before it has sent the message "started".
        """
        try:
            message = connection.recv()
        except EOFError:
            message = self._describe_death(number)
        if message != STARTED:
            raise EngineError(f"rank {number} of the model {message}")

    def _wait_for_failure(self) -> None:
        """Wait until another rank fails or ends, and store a description in `_failure`.

        A separate thread runs this method. It returns without a description if `close` was called.
        """
        # After its start, a rank sends a message only if it fails. If a rank ends, its connection
        # is closed. `wait` returns in both cases. If `close` closes the connections while `wait` is
        # running, `wait` raises an OSError.
        with contextlib.suppress(OSError):
            multiprocessing.connection.wait(self._connections)
            if not self._is_closing:
                self._record_failure()

    def _record_failure(self) -> None:
        """Store a description of the failure of another rank in `_failure`, and set `_has_failed`.

        On GPUs, end the communication with the other ranks, too.
        """
        # If the process of a rank ends unexpectedly, the other ranks lose their connections to this
        # process, and fail shortly afterwards. The error message of such a rank can arrive before
        # the end of the process is noticed. Wait until the end is noticed, because `_take_failures`
        # then describes the dead rank, which is the cause, and not the ranks that failed after it.
        time.sleep(_FOLLOWING_ERRORS_S)
        self._failure = self._take_failures()
        # This process may end at any time after `_has_failed` is set, so first remove the folder of
        # the store.
        self.rank.remove_store()
        self._has_failed.set()
        if self.rank.device_type == "cuda":
            # NCCL would wait forever for a rank that has ended, so the process group is aborted.
            # gloo raises an error instead of waiting.
            _abort_group()

    def _take_failures(self) -> str:
        """Receive the error messages of the ranks, and return a description of the failure.

        A failed rank has sent an error message before its process ended. A dead rank has ended
        without a message, for example after a signal, and has caused the failures of other ranks.
        Therefore, only the dead ranks are described, if there are any. Examples: "rank 1 of the
        model failed: out of memory" and "rank 2 of the model ended (signal 9)".
        """
        failures: list[str] = []
        deaths: list[str] = []
        for number, connection in enumerate(self._connections, 1):
            has_ended_or_failed = connection.poll()
            if not has_ended_or_failed:
                continue
            try:
                failures.append(f"rank {number} of the model {connection.recv()}")
            except (EOFError, OSError):  # There is no message.
                deaths.append(f"rank {number} of the model {self._describe_death(number)}")
        return "; ".join(deaths or failures)

    def _describe_death(self, number: int) -> str:
        """Describe how the process of a rank has ended. Example: "ended (signal 9)"."""
        try:
            code = self._processes[number - 1].wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"ended (signal {-code})" if code < 0 else f"ended (exit code {code})"


def _abort_group() -> None:
    """Remove this process from its group of torch.distributed without waiting for other ranks."""
    distributed_c10d._abort_process_group()


def _is_same_error(failure: str, error: Exception) -> bool:
    """Return whether another rank has failed with the same error as rank 0.

    Example: the failure "rank 1 of the model failed: ValueError: a tensor is missing" and the error
    ValueError("a tensor is missing") return True.

    Args:
        failure: the description of the failure of the other rank.
        error: the error of rank 0.
    """
    # `describe_failure` has also written the failure of the other rank.
    return failure.endswith(describe_failure(error))
