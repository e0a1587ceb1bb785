# SPDX-License-Identifier: Apache-2.0
"""The stub's side of a worker process: jobs go to it, outcomes come back."""

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
class Done:
    """A job has come to its end."""

    request_id: str
    outcome: Outcome


class WorkerClient(ChildProcess):
    """One worker process at a time; `start` may be called again after its death.

    `submit` and `abort` may be called from any thread; the rest belongs to one. That there is no
    process shows in `receive` and nowhere else.

    Attributes:
        info: what was loaded, the fields of PoolingInfo.
    """

    def __init__(self, config: PoolingConfig, progress: Callable[[str], None]) -> None:
        super().__init__(_ROLE, dataclasses.asdict(config), progress)

    def submit(self, request_id: str, job: Job) -> None:
        """Hand a job to the worker."""
        with contextlib.suppress(EngineDiedError):
            self.send(["add", request_id, *job.row()])

    def abort(self, request_id: str) -> None:
        """Tell the worker that nobody wants a job any more; it says nothing more about it."""
        with contextlib.suppress(EngineDiedError):
            self.send(["abort", request_id])

    def receive(self, timeout_s: float) -> list[Done | Refusal]:
        """What the worker has said, waiting at most `timeout_s`.

        Raises:
            EngineDiedError: the process has gone.
        """
        answers: list[Done | Refusal] = []
        for kind, *rest in self.messages(timeout_s):
            if kind == "done":
                request_id, *row = rest
                answers.append(Done(request_id, Outcome.from_row(row)))
            elif kind == "refused":
                answers.append(Refusal.from_row(rest))
        return answers
