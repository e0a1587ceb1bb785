# SPDX-License-Identifier: Apache-2.0
"""Processes several requests at once, so that a long prompt does not delay short prompts.

    execute (the server's thread)  --> loop (one thread): short requests, all responses
                                           |     ^
                                           v     |
                                       threads for long requests

Clients take turns. Suppose that one client has sent hundreds of requests. A later request of
another client does not wait for all these requests. One client cannot occupy all threads, because
an image can take ten seconds.

Only the loop's thread sends responses, because a stub of Triton server 2.51 crashes if several
threads send. The tokenizers library releases Python's global lock, so the loop can continue while
another thread tokenises a long prompt.
"""

import contextlib
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from nereid_backend.errors import CapacityError, RequestError
from nereid_backend.serving import triton_api
from nereid_backend.serving.executor.shared_limit import SharedLimit

Item = TypeVar("Item", bound=Hashable)

_NUM_THREADS = 3
_MAX_THREADS_OF_CLIENT = 2
_MAX_LONG = 64
# The interval at which the loop looks for long requests whose clients have disconnected.
_POLL_S = 0.25


class _ClientTurns(Generic[Item]):
    """A queue that returns one item of each client in turn.

    Items of the same client keep their order. Example: the client "a" adds the items a1, a2 and a3.
    Then the client "b" adds the item b1. The queue returns a1, b1, a2, a3.
    """

    def __init__(self) -> None:
        # Maps each client to a queue with the items of the client. The first key of the dict is the
        # client whose item is returned next. Clients without items are absent.
        self._items: dict[str, deque[Item]] = {}

    def __bool__(self) -> bool:
        return bool(self._items)

    def __iter__(self) -> Iterator[Item]:
        for items in self._items.values():
            yield from items

    def add(self, client: str, item: Item) -> None:
        """Add an item of a client."""
        self._items.setdefault(client, deque()).append(item)

    @property
    def clients(self) -> Iterable[str]:
        """The clients that have items. The client whose item is returned next comes first."""
        return self._items.keys()

    def take(self, client: str | None = None) -> Item:
        """Remove and return the next item.

        If `client` is None, the item belongs to the client whose turn it is. Otherwise, the item
        belongs to `client`. The queue must contain such an item.
        """
        if client is None:
            client = next(iter(self._items))
        items = self._items.pop(client)
        item = items.popleft()
        if items:
            self._items[client] = items  # The client takes its next turn after all other clients.
        return item

    def remove(self, client: str, item: Item) -> None:
        """Remove an item of `client`. The item must still be in the queue."""
        self._items[client].remove(item)
        if not self._items[client]:
            del self._items[client]


@dataclass(eq=False)
class _Job:
    """A request and the response to the request. The response is None until it has been built."""

    request: Any
    sender: Any
    client: str
    reply: Any = None


class RequestWorkers:
    """Processes the requests of one model in several threads."""

    def __init__(self, respond: Callable[[Any], Any], is_long: Callable[[Any], bool]) -> None:
        """Create an object without threads. `start` starts the loop.

        Args:
            respond: returns the response to a request, and never raises an exception. Several
                threads call this function.
            is_long: returns whether a request may take long to process.
        """
        self._respond = respond
        self._is_long = is_long
        # Only the loop's thread may change the queues of requests and the counters below. To change
        # a queue or a counter, any other thread adds a function to `_calls`, and the loop's thread
        # calls this function.
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_stopping = False
        self._short_requests: _ClientTurns[_Job] = _ClientTurns()
        # The long requests that wait for a thread of the pool.
        self._long_requests: _ClientTurns[_Job] = _ClientTurns()
        # Maps each client to the number of its long requests that threads of the pool are
        # processing. Clients without such requests are absent.
        self._num_running: Counter[str] = Counter()
        # The time of the next check for disconnected clients, by time.monotonic().
        self._next_check = 0.0
        # Limits the number of long requests, whether they wait or run.
        self._long_limit = SharedLimit(_MAX_LONG)
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "long-request")
        self._thread = threading.Thread(target=self._loop, name="tokenizer-loop", daemon=True)

    def start(self) -> None:
        """Start the loop."""
        self._thread.start()

    def add(self, request: Any) -> None:  # noqa: ANN401 - the server's own type
        """Queue a request. The loop sends the response."""
        job = _Job(request, request.get_response_sender(), _client_of(request))
        self._calls.put(partial(self._queue_job, job))

    def stop(self) -> None:
        """Answer the short requests that are still queued. Then end all threads."""
        self._calls.put(self._begin_stop)
        self._thread.join()
        self._pool.shutdown(cancel_futures=True)

    def _loop(self) -> None:
        """Process the queued requests until `stop` is called."""
        # After `stop`, the remaining short requests are still answered.
        while self._short_requests or not self._is_stopping:
            self._make_calls()
            if self._short_requests:
                job = self._short_requests.take()
                job.reply = self._respond(job.request)
                _send(job)

    def _make_calls(self) -> None:
        """Make the calls that other threads have put into the queue `_calls`.

        If no short request is queued, first wait for a call. Otherwise, do not wait, because a
        short request must not be delayed. Every `_POLL_S` seconds, also end the long requests whose
        clients have disconnected.
        """
        may_wait = not self._short_requests and not self._is_stopping
        if may_wait:
            # If long requests are queued, wait only for a limited time.
            timeout_s = _POLL_S if self._long_requests else None
            with contextlib.suppress(queue.Empty):
                make_call = self._calls.get(timeout=timeout_s)
                make_call()
        while not self._calls.empty():
            make_call = self._calls.get_nowait()  # Only this thread takes calls from the queue.
            make_call()
        # Short requests can arrive without a pause, so this check must not depend on a pause.
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + _POLL_S
            self._drop_abandoned()

    def _begin_stop(self) -> None:
        """Let the loop end as soon as no short request is queued."""
        self._is_stopping = True

    def _queue_job(self, job: _Job) -> None:
        """Queue a new request as a short or a long request."""
        if self._is_long(job.request):
            self._add_long(job)
        else:
            self._short_requests.add(job.client, job)

    def _add_long(self, job: _Job) -> None:
        """Queue a long request, or refuse the request if its client has too many long requests."""
        if not self._long_limit.allows(job.client, 1):
            error = CapacityError(
                f"the tokenizer has {self._long_limit.used} long prompts, "
                f"{self._long_limit.used_by(job.client)} of them from this client. The limit for "
                f"all clients is {self._long_limit.limit}. Try again later."
            )
            job.reply = triton_api.error_response(error)
            _send(job)
            return
        self._long_limit.add(job.client, 1)
        self._long_requests.add(job.client, job)
        self._start_long()

    def _start_long(self) -> None:
        """While threads are free, start long requests from the queue.

        The client with the fewest running long requests comes first.
        """
        while self._long_requests and self._num_running.total() < _NUM_THREADS:
            client = min(self._long_requests.clients, key=self._num_running.__getitem__)
            if self._num_running[client] >= _MAX_THREADS_OF_CLIENT:
                return
            self._num_running[client] += 1
            self._pool.submit(self._process_long, self._long_requests.take(client))

    def _process_long(self, job: _Job) -> None:
        """Process a long request in a thread of the pool."""
        job.reply = self._respond(job.request)
        self._calls.put(partial(self._end_running, job))

    def _end_running(self, job: _Job) -> None:
        """Send the response of a long request after a thread of the pool has computed the response.

        Then start the next long request.
        """
        self._num_running -= Counter([job.client])  # also removes a client whose number is 0
        self._end_long(job)

    def _end_long(self, job: _Job) -> None:
        """Send the response of a long request, and start the next long request."""
        self._long_limit.remove(job.client, 1)
        _send(job)
        self._start_long()

    def _drop_abandoned(self) -> None:
        """End queued long requests whose clients have disconnected. Running requests continue."""
        for job in list(self._long_requests):
            if job.sender.is_cancelled():
                self._long_requests.remove(job.client, job)
                job.reply = triton_api.error_response(CapacityError("the request was cancelled."))
                self._end_long(job)


def _client_of(request: Any) -> str:  # noqa: ANN401 - the server's own type
    """Return the request's parameter `client_id`; "" if the parameter is missing."""
    try:
        return str(triton_api.parameters(request).get("client_id", ""))
    except RequestError:
        return ""  # The loop reads the parameters again, and sends the error to the client.


def _send(job: _Job) -> None:
    """Send the response of a request.

    If sending fails, the process exits and must be restarted. Triton server accepts no second
    response, so the request would otherwise never end.
    """
    try:
        triton_api.send(job.sender, job.reply, final=True)
    except Exception:  # noqa: BLE001 - the process ends here
        triton_api.log.exception(
            "a response could not be sent, so the process exits and must be restarted"
        )
        os._exit(1)
