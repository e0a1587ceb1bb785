# SPDX-License-Identifier: Apache-2.0
"""The stub's connection to its worker process: it sends jobs and receives outcomes."""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.serving.pooling.jobs import Job, Outcome
from nereid_backend.serving.process.process_handle import (
    ChildProcess,
    EngineDiedError,
    Refusal,
    Role,
)

_ROLE = Role(
    "worker", "nereid_backend.serving.pooling.pooling_worker", "start_timeout_s", "hang_timeout_s"
)


@dataclass(frozen=True, slots=True)
class JobDone:
    """A job has finished."""

    request_id: str
    outcome: Outcome


class WorkerClient(ChildProcess):
    """The worker process. `start` may be called again after the process has died.

    Several threads may call `submit` and `abort`. Only one thread may call the other methods. Only
    `receive` raises an error if the process is not running.

    Attributes:
        info: the fields of PoolingInfo, which describe the loaded model.
    """

    def __init__(self, config: PoolingConfig, progress: Callable[[str], None]) -> None:
        super().__init__(_ROLE, dataclasses.asdict(config), progress)

    def submit(self, request_id: str, job: Job) -> None:
        """Send a job to the worker."""
        with contextlib.suppress(EngineDiedError):
            self.send(["add", request_id, *job.row()])

    def abort(self, request_id: str) -> None:
        """Ask the worker to drop a job. No further message about the job follows."""
        with contextlib.suppress(EngineDiedError):
            self.send(["abort", request_id])

    def receive(self, timeout_s: float) -> list[JobDone | Refusal]:
        """Return the worker's messages. Wait at most `timeout_s` seconds for the first one.

        Raises:
            EngineDiedError: the process has ended.
        """
        received: list[JobDone | Refusal] = []
        for kind, *rest in self.messages(timeout_s):
            if kind == "done":
                request_id, *row = rest
                received.append(JobDone(request_id, Outcome.from_row(row)))
            elif kind == "refused":
                received.append(Refusal.from_row(rest))
        return received
