# SPDX-License-Identifier: Apache-2.0
"""Processes several requests at once, so that a long prompt does not delay short prompts.

    execute (the server's thread)  --> loop (one thread): short requests, all responses
                                           |     ^
                                           v     |
                                       threads for long requests

Only the loop's thread sends responses, because a stub of Triton server 2.51 crashes if several
threads send. The tokenizers library releases Python's global lock, so the loop can continue while
another thread tokenises a long prompt.
"""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from nereid_backend.errors import CapacityError
from nereid_backend.serving import tensors

_NUM_THREADS = 2
_MAX_LONG = 64
# The interval at which the loop looks for long requests whose clients have disconnected.
_POLL_S = 0.25


@dataclass(eq=False)
class _Job:
    """A request, and its response once the response has been built."""

    request: Any
    sender: Any
    reply: Any = None


class RequestWorkers:
    """The threads of one model."""

    def __init__(self, respond: Callable[[Any], Any], is_long: Callable[[Any], bool]) -> None:
        """Start the loop.

        Args:
            respond: returns the response of a request and never raises. Several threads call it.
            is_long: returns whether a request may take long.
        """
        self._respond = respond
        self._is_long = is_long
        self._entries: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._long: dict[_Job, Future[None]] = {}
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "long-request")
        self._thread = threading.Thread(target=self._loop, name="tokenizer-loop", daemon=True)
        self._thread.start()

    def add(self, request: Any) -> None:  # noqa: ANN401 - the server's own type
        """Queue a request. The loop sends its response."""
        self._entries.put(_Job(request, request.get_response_sender()))

    def stop(self) -> None:
        """Answer the queued requests, then end the threads."""
        self._entries.put(None)
        self._thread.join()
        self._pool.shutdown(cancel_futures=True)

    def _loop(self) -> None:
        """Process the queued requests until `stop` is called."""
        while True:
            try:
                job = self._entries.get(timeout=_POLL_S if self._long else None)
            except queue.Empty:
                self._drop_abandoned()
                continue
            if job is None:
                return
            self._handle(job)

    def _handle(self, job: _Job) -> None:
        """Process a new request, or send the response to a long request whose work is finished."""
        is_finished_long_job = job.reply is not None
        if is_finished_long_job:
            del self._long[job]
        elif not self._is_long(job.request):
            job.reply = self._respond(job.request)
        elif len(self._long) >= _MAX_LONG:
            job.reply = tensors.error_response(
                CapacityError(
                    f"the tokenizer has {_MAX_LONG} long prompts, which is the limit. Try again "
                    "later."
                )
            )
        else:
            self._long[job] = self._pool.submit(self._work, job)
            return
        _send(job)

    def _work(self, job: _Job) -> None:
        """Process a long request in a thread of the pool."""
        job.reply = self._respond(job.request)
        self._entries.put(job)

    def _drop_abandoned(self) -> None:
        """Cancel long requests that wait for a thread, if their clients have disconnected."""
        for job, future in list(self._long.items()):
            if not future.running() and job.sender.is_cancelled() and future.cancel():
                del self._long[job]
                job.reply = tensors.error_response(CapacityError("the request was cancelled."))
                _send(job)


def _send(job: _Job) -> None:
    """Send the response of a request.

    If sending fails, the process exits and must be restarted. Triton server accepts no second
    response, so the request would otherwise never end.
    """
    try:
        tensors.send(job.sender, job.reply, final=True)
    except Exception:  # noqa: BLE001 - the process ends here
        tensors.log.exception(
            "a response could not be sent, so the process exits and must be restarted"
        )
        os._exit(1)
