"""Background responses, which are generated without an open connection.

A client can retrieve a background response, follow its events and cancel it.
"""

import asyncio
import json
import logging
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from nereid_client.errors import ApiError, FrontendError, to_api_error
from nereid_client.middleware.admission_control import Gate
from nereid_client.middleware.client_keys import current_client
from nereid_client.middleware.request_metrics import RequestMetrics
from nereid_client.responses.response_builder import ResponseBuilder
from nereid_client.responses.response_store import Limits, Store
from nereid_client.responses.stored_response import StoredResponse, size_of
from nereid_client.streaming import sse
from nereid_client.streaming.deltas import Delta, unfinished_error
from nereid_client.workers.worker_place import WorkerPlace

Json = dict[str, Any]

_EVENTS_PER_WRITE = 64

_log = logging.getLogger(__name__)


class BackgroundResponse:
    """A response that is generated in the background.

    Args:
        builder: builds the response.
        input_items: the JSON list of all items in the prompt of the model.
        streams: whether the events are stored, because the client has requested a stream.

    Attributes:
        events: the events so far, in order. None if the client has not requested a stream.
        client: the client that created the response.
    """

    def __init__(self, builder: ResponseBuilder, input_items: bytes, *, streams: bool) -> None:
        self.builder = builder
        self.input_items = input_items
        self.events: list[bytes] | None = [] if streams else None
        self.client = current_client.get()
        self._changed = asyncio.Event()

    @property
    def id(self) -> str:
        """The id of the response."""
        return self.builder.id

    @property
    def owner(self) -> str:
        """The name of the client that created the response."""
        return self.client.name

    @property
    def status(self) -> str:
        """The status of the response, such as "in_progress"."""
        return self.builder.status

    def record(self, events: Sequence[Json]) -> int:
        """Record new events of the response, wake the waiting readers, and return a size in bytes.

        The size is the memory that the response needs for the new text, and for the new events if
        events are stored.

        Mutates: the attribute `events`. If the client has requested a stream, the encoded events
            are appended.
        """
        num_new_bytes = _num_text_bytes(events)
        if self.events is not None:
            encoded = [sse.named_event(event) for event in events]
            self.events += encoded
            num_new_bytes += size_of(encoded)
        self._wake_readers()
        return num_new_bytes

    def _wake_readers(self) -> None:
        """Wake all generators of `follow`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, after: int) -> AsyncGenerator[bytes]:
        """Yield the events with a sequence number greater than `after`, until the response ends.

        Events are numbered from 0, so the sequence number is the index in `events`. Closing this
        generator does not end the response.
        """
        position = after + 1  # the index of the next event
        while True:
            # `changed` and `is_over` must be read before the events. If `record` adds an event
            # later, `record` sets `changed`, and the wait below ends at once. If `is_over` is true,
            # no more events are added, so `new_events` contains all remaining events.
            changed = self._changed
            is_over = self.builder.is_over
            events = self.events or []  # None if the client has not requested a stream
            new_events = events[position:]
            position += len(new_events)
            for part in _in_parts(new_events):
                yield part
            if is_over:
                return
            await changed.wait()


class Responses:
    """All responses that an application stores or generates in the background.

    Attributes:
        store: the stored responses.
    """

    def __init__(
        self,
        limits: Limits,
        gate: Gate,
        limit_s: float,
        metrics: RequestMetrics,
        worker: WorkerPlace | None = None,
    ) -> None:
        """Open the store of the responses.

        Args:
            limits: the limits of the store.
            gate: counts the running responses, so that a stopping server waits until they have
                ended.
            limit_s: the largest duration of a background response, in seconds. 0 means no limit.
            metrics: counts the responses that were ended by a limit.
            worker: the number of this process among several frontend processes, and the path of
                their database. None if there is only one process.
        """
        if worker is None:
            self.store = Store(limits)
        else:
            self.store = Store(limits, path=worker.responses_path, worker=worker.number)
        self._gate = gate
        self._limit_s = limit_s or None  # None means no limit
        self._metrics = metrics
        self._tasks: dict[str, asyncio.Task[None]] = {}  # maps ids of responses to tasks

    def start(self, run: BackgroundResponse, deltas: AsyncGenerator[Delta]) -> None:
        """Start generating a response in the background.

        Raises: ApiError if the store is full.
        """
        num_event_bytes = run.record(run.builder.opening())
        self.store.begin(run, len(run.input_items) + num_event_bytes)
        self._gate.enter(run.client)  # `_end` leaves the gate
        task = asyncio.create_task(self._generate(run, deltas))
        self._tasks[run.id] = task
        task.add_done_callback(lambda task: self._end(run, task))

    async def cancel(self, run: BackgroundResponse) -> None:
        """Cancel a response, and wait until it has ended."""
        task = self._tasks.get(run.id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def close(self) -> None:
        """Cancel all running responses, and close the store."""
        for run in self.store.running:
            assert isinstance(run, BackgroundResponse)
            await self.cancel(run)
        self.store.close()

    def add(self, builder: ResponseBuilder, input_items: bytes) -> bool:
        """Store a response that was not generated in the background.

        Returns: False if the response does not fit into the store.
        """
        return self.store.add(_to_stored_response(builder, input_items))

    async def _generate(self, run: BackgroundResponse, deltas: AsyncGenerator[Delta]) -> None:
        """Generate a response. If the generation fails or exceeds a limit, record the error."""
        try:
            await self._add_all(run, deltas)
        except FrontendError as error:
            api_error = to_api_error(error)
            self._metrics.count_refusal(api_error)
            if not run.builder.is_over:
                run.record(run.builder.fail(api_error))

    def _end(self, run: BackgroundResponse, task: asyncio.Task[None]) -> None:
        """Store the final state of a background response whose asyncio task has ended.

        The response is unfinished if the task was cancelled, possibly before the task started, or
        if the task failed because of a bug.
        """
        bug = None if task.cancelled() else task.exception()
        if bug is not None:
            _log.error("Response %s failed because of a bug", run.id, exc_info=bug)
        if not run.builder.is_over:
            run.record(_last_events(run.builder, bug))
        record = _to_stored_response(run.builder, run.input_items, run.events, is_background=True)
        try:
            self.store.finish(run, record)
        except sqlite3.Error as error:  # for example a full disk
            _log.error("Response %s cannot be stored: %s", run.id, error)
        finally:
            del self._tasks[run.id]
            self._gate.leave(run.client)  # the gate counts the running requests of each client

    async def _add_all(self, run: BackgroundResponse, deltas: AsyncGenerator[Delta]) -> None:
        """Append the deltas to the response, and reserve space in the store for each delta.

        Raises: FrontendError if the store is full, the time limit is reached or the backend fails.
        """
        try:
            async with asyncio.timeout(self._limit_s) as limit, aclosing(deltas):
                async for delta in deltas:
                    num_new_bytes = run.record(run.builder.add(delta))
                    self.store.reserve(run, num_new_bytes)
        except TimeoutError:
            if not limit.expired():  # the error does not come from the time limit
                raise
            raise ApiError(
                504,
                f"The response did not finish within {self._limit_s:g} s, which is the limit "
                "of the server's setting request_timeout_s",
                limit="request_timeout_s",
            ) from None
        if not run.builder.is_over:
            raise unfinished_error()


def _num_text_bytes(events: Sequence[Json]) -> int:
    """Return the number of bytes of the text that events add to a response.

    Example: [{"type": "response.output_text.delta", "delta": "Hello"}] returns 5.
    """
    return sum(len(event.get("delta", "").encode()) for event in events)


def _last_events(builder: ResponseBuilder, bug: BaseException | None) -> list[Json]:
    """End an unfinished response, and return the events that describe the end."""
    if bug is None:
        return builder.cancel()
    error = ApiError(
        500,
        f"The server has a bug: it failed with an unexpected {type(bug).__name__}. The log of the "
        "frontend has the traceback.",
    )
    return builder.fail(error)


async def stored_events(record: StoredResponse, after: int) -> AsyncGenerator[bytes]:
    """Yield the stored events that have a sequence number greater than `after`."""
    for part in _in_parts((record.events or ())[after + 1 :]):
        yield part


def _in_parts(events: Sequence[bytes]) -> list[bytes]:
    """Join events into byte strings. Each byte string contains up to _EVENTS_PER_WRITE events.

    Each byte string is one write to the socket, so fewer byte strings save time.
    """
    return [
        b"".join(events[at : at + _EVENTS_PER_WRITE])
        for at in range(0, len(events), _EVENTS_PER_WRITE)
    ]


def encode(value: object) -> bytes:
    """Encode a value as compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _to_stored_response(
    builder: ResponseBuilder,
    input_items: bytes,
    events: Sequence[bytes] | None = None,
    *,
    is_background: bool = False,
) -> StoredResponse:
    """Convert a response that has ended to the object that the store saves.

    Args:
        builder: the object that has built the response.
        input_items: the JSON list of the items that the model read.
        events: the events of the stream; None if the stream cannot be read again.
        is_background: whether the response was generated in the background.
    """
    response = builder.as_json()
    return StoredResponse(
        id=builder.id,
        response=encode(response),
        input_items=input_items,
        output_ids=tuple(item["id"] for item in response["output"]),
        events=events,
        is_background=is_background,
    )
