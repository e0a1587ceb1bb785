"""Responses that run on their own: started, followed from anywhere, cancelled, and waited for."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from nereid_client.errors import ApiError, FrontendError, to_api_error
from nereid_client.middleware.admission_control import Gate
from nereid_client.responses.response_builder import Answer
from nereid_client.responses.response_store import Limits, Record, Store, size_of
from nereid_client.streaming import sse
from nereid_client.streaming.deltas import Delta, unfinished

Json = dict[str, Any]

_EVENTS_AT_ONCE = 64

_log = logging.getLogger(__name__)


class Background:
    """A response in the background.

    Attributes:
        answer: as far as it has come.
        context: the JSON list of items that it reads.
        events: its stream so far, by sequence number; None when nobody asked for one.
    """

    def __init__(self, answer: Answer, context: bytes, *, streams: bool) -> None:
        self.answer = answer
        self.context = context
        self.events: list[bytes] | None = [] if streams else None
        self._news = asyncio.Event()

    @property
    def id(self) -> str:
        """The response's."""
        return self.answer.id

    def tell(self, events: Sequence[Json]) -> int:
        """These have happened; how many bytes they take to remember."""
        size = sum(len(event.get("delta", "").encode()) for event in events)
        if self.events is not None:
            encoded = [named_event(event) for event in events]
            self.events += encoded
            size += size_of(encoded)
        news, self._news = self._news, asyncio.Event()
        news.set()
        return size

    async def follow(self, after: int) -> AsyncGenerator[bytes]:
        """Its events behind this sequence number, as they come, to its end.

        Closing this generator changes nothing for the response.
        """
        at = after + 1
        while True:
            news, is_over = self._news, self.answer.is_over
            so_far = (self.events or [])[at:]
            at += len(so_far)
            for part in _in_parts(so_far):
                yield part
            if is_over:
                return
            if news is self._news:
                await news.wait()


class Responses:
    """All responses of a frontend that are kept or run in the background.

    Attributes:
        store: the kept ones.
    """

    def __init__(self, limits: Limits, gate: Gate, limit_s: float) -> None:
        """Nothing runs.

        Args:
            limits: of the store.
            gate: counts what runs, so that a server that stops waits for it.
            limit_s: a response in the background may take so long; 0 is no limit.
        """
        self.store = Store(limits)
        self._gate = gate
        self._limit_s = limit_s or None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, run: Background, deltas: AsyncGenerator[Delta]) -> None:
        """Let a response run.

        Raises: ApiError when the store has no room for it.
        """
        self.store.begin(run, len(run.context) + run.tell(run.answer.opening()))
        self._gate.num_requests += 1
        task = asyncio.create_task(self._drive(run, deltas))
        self._tasks[run.id] = task
        task.add_done_callback(lambda task: self._end(run, task))

    async def cancel(self, run: Background) -> None:
        """End it; its generation is given up. Returns once it is over."""
        task = self._tasks.get(run.id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def close(self) -> None:
        """End everything that runs, and forget everything."""
        for run in self.store.running:
            assert isinstance(run, Background)
            await self.cancel(run)
        self.store.close()

    def keep(self, answer: Answer, context: bytes) -> bool:
        """Keep a response that did not run in the background; false when it does not fit."""
        return self.store.keep(_record(answer, context))

    async def _drive(self, run: Background, deltas: AsyncGenerator[Delta]) -> None:
        try:
            await self._write(run, deltas)
        except FrontendError as error:
            if not run.answer.is_over:
                run.tell(run.answer.fail(to_api_error(error)))

    def _end(self, run: Background, task: asyncio.Task[None]) -> None:
        """Its task has ended: a task that is cancelled early has not even begun."""
        bug = None if task.cancelled() else task.exception()
        if bug is not None:
            _log.error("response %s failed", run.id, exc_info=bug)
        if not run.answer.is_over and bug is not None:
            error = ApiError(500, f"internal error ({type(bug).__name__})")
            run.tell(run.answer.fail(error))
        elif not run.answer.is_over:
            run.tell(run.answer.cancel())
        self.store.end(run)
        self.store.keep(_record(run.answer, run.context, run.events, is_background=True))
        del self._tasks[run.id]
        self._gate.num_requests -= 1

    async def _write(self, run: Background, deltas: AsyncGenerator[Delta]) -> None:
        """Take the answer to its end.

        Raises: FrontendError.
        """
        try:
            async with asyncio.timeout(self._limit_s) as limit, aclosing(deltas):
                async for delta in deltas:
                    self.store.grow(run, run.tell(run.answer.take(delta)))
        except TimeoutError:
            if not limit.expired():
                raise
            raise ApiError(
                504,
                f"the response was not finished within {self._limit_s:g} s "
                "(request_timeout_s of the server)",
            ) from None
        if not run.answer.is_over:
            raise unfinished()


def named_event(event: Json) -> bytes:
    """A server-sent event with its type as its name, which OpenAI's streams have."""
    return f"event: {event['type']}\n".encode() + sse.event(event)


async def told_again(record: Record, after: int) -> AsyncGenerator[bytes]:
    """The events of a response that is over, behind this sequence number."""
    for part in _in_parts((record.events or ())[after + 1 :]):
        yield part


def _in_parts(events: Sequence[bytes]) -> list[bytes]:
    """Several in a piece."""
    return [
        b"".join(events[at : at + _EVENTS_AT_ONCE]) for at in range(0, len(events), _EVENTS_AT_ONCE)
    ]


def encode(value: object) -> bytes:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _record(
    answer: Answer,
    context: bytes,
    events: Sequence[bytes] | None = None,
    *,
    is_background: bool = False,
) -> Record:
    response = answer.as_json()
    items = tuple(item["id"] for item in response["output"])
    return Record(answer.id, encode(response), context, items, events, is_background)
