"""Functions that send streaming requests to a server and measure their speed."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.client.light_client import posted


class Stream:
    """The times at which one request was sent and at which its responses arrived."""

    def __init__(self) -> None:
        """Store the current time as the time at which the request is sent."""
        self._sent = time.perf_counter()
        self._first = self._last = 0.0
        self.num_responses = 0
        self.num_tokens = 0

    def record(self, num_tokens: int) -> None:
        """Record a response that has just arrived.

        Args:
            num_tokens: the number of tokens in this and all earlier responses of the request.
        """
        self._last = time.perf_counter()
        if self.num_responses == 0:
            self._first = self._last
        self.num_responses += 1
        self.num_tokens = num_tokens

    @property
    def time_to_first_token(self) -> float:
        """The seconds from the request to the first response."""
        return self._first - self._sent

    @property
    def inter_token_latency(self) -> float:
        """The seconds from the first to the last response, divided by the tokens after the first.

        The tokens are counted instead of the responses, because the server can merge several tokens
        into one response.
        """
        return (self._last - self._first) / max(1, self.num_tokens - 1)


@dataclass(frozen=True)
class Speed:
    """The speed of all streams of one round. The times are medians of the streams in seconds."""

    num_responses: int
    tokens_per_s: float
    tokens_per_response: float
    time_to_first_token: float
    inter_token_latency: float

    @classmethod
    def of(cls, streams: Sequence[Stream], seconds: float) -> "Speed":
        """Return the speed of a round that consists of `streams` and took `seconds` seconds."""
        num_tokens = sum(stream.num_tokens for stream in streams)
        num_responses = sum(stream.num_responses for stream in streams)
        return cls(
            num_responses=num_responses,
            tokens_per_s=num_tokens / seconds,
            tokens_per_response=num_tokens / num_responses,
            time_to_first_token=statistics.median(s.time_to_first_token for s in streams),
            inter_token_latency=statistics.median(s.inter_token_latency for s in streams),
        )


async def read_stream(port: int, path: str, body: Mapping[str, Any]) -> Stream:
    """Send a greedy streaming request to the OpenAI API, and read its whole response.

    Args:
        port: the port of the API.
        path: the path of the endpoint, such as "/v1/completions".
        body: the fields of the request that this function does not set, such as "prompt". The field
            "max_tokens" is required, and the response has exactly this number of tokens.

    Raises:
        RuntimeError: the response is an error or has another number of tokens.
    """
    options = {
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    stream = Stream()
    async with posted(port, path, {**body, **options}) as answer:
        if answer.status != 200:
            raise RuntimeError(await answer.text())
        async for event in answer.events():
            if "error" in event:
                raise RuntimeError(event["error"])
            # Two events contain no tokens: the first event of a chat, which has no usage, and the
            # last event of a response, which has no choices.
            if event["usage"] and event["choices"]:
                stream.record(event["usage"]["completion_tokens"])
    if stream.num_tokens != body["max_tokens"]:
        raise RuntimeError(f"{stream.num_tokens} instead of {body['max_tokens']} tokens")
    return stream


async def run_streams(reads: Sequence[Callable[[], Awaitable[Stream]]], concurrency: int) -> Speed:
    """Run functions that read streams, at most `concurrency` at a time, and return their speed."""
    limit = asyncio.Semaphore(concurrency)

    async def run_one(read: Callable[[], Awaitable[Stream]]) -> Stream:
        async with limit:
            return await read()

    started = time.perf_counter()
    streams = await asyncio.gather(*map(run_one, reads))
    return Speed.of(streams, time.perf_counter() - started)
