# SPDX-License-Identifier: Apache-2.0
"""The worker process of a pooling model. Code that may crash, such as torch, runs in it.

The following messages are sent in addition to those of every child process (process_entry.py):

    stub -> worker    ["add", id, field, [[name, value], ...], options, query]  ["abort", id]
    worker -> stub    ["done", id, time of the first computation, *outcome]
                      ["alive"], every 0.25 s during work, because a long job sends nothing else
"""

import time
from collections.abc import Callable
from typing import Any, NoReturn

from nereid_backend.fast_imports import importing
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.serving.pooling.job_progress import Engine, WorkerJobs
from nereid_backend.serving.pooling.jobs import Job
from nereid_backend.serving.process.process_entry import Send, serve

_ALIVE_INTERVAL_S = 0.25

MakeEngine = Callable[[PoolingConfig, Callable[[str], None]], Engine]


class WorkerService:
    """Passes jobs to an engine, and sends the results of the jobs to the Triton model.

    Args:
        engine: the engine.
        send: sends a message to the stub.
    """

    def __init__(self, engine: Engine, send: Send) -> None:
        self.info = engine.info
        self._jobs = WorkerJobs(engine, send)
        self._send = send
        self._alive_due = 0.0

    def start(self) -> None:
        """Do nothing, because a loaded engine needs no further preparation."""

    def has_work(self) -> bool:
        """Return whether at least one job is incomplete."""
        return self._jobs.has_work

    def handle(self, kind: str, values: list[Any]) -> None:
        """Handle a message of the kind "add" or "abort" from the stub."""
        request_id, *row = values
        if kind == "abort":
            self._jobs.abort(request_id)
        else:
            self._jobs.add(request_id, Job(*row))

    def advance(self) -> None:
        """Compute one batch, and send the result of each job that is now complete."""
        self._jobs.advance()
        now = time.monotonic()
        if now >= self._alive_due:
            self._send(["alive"])
            self._alive_due = now + _ALIVE_INTERVAL_S


def serve_worker(make: MakeEngine) -> NoReturn:
    """Run this process as a worker process, then exit.

    Args:
        make: builds the engine. The arguments are the engine's settings and a function that reports
            slow operations.
    """

    def load(
        settings: dict[str, Any], send: Send, progress: Callable[[str], None]
    ) -> WorkerService:
        """Build the engine with the settings that `serve` has received from the parent process."""
        engine = make(PoolingConfig(**settings), progress)
        return WorkerService(engine, send)

    serve(load)


if __name__ == "__main__":
    with importing():
        from nereid_backend.pooling.pooling_engine import PoolingEngine

    def load_engine(config: PoolingConfig, progress: Callable[[str], None]) -> PoolingEngine:
        """Load the engine, and start the process that decodes images.

        The process is started before the worker has work, because the start takes some seconds. A
        working worker that sends no message for hang_timeout_s is killed.
        """
        engine = PoolingEngine(config, progress=progress)
        engine.start_image_process()
        return engine

    serve_worker(load_engine)
