"""`nereid bench`: a load test of an OpenAI API. A table shows the results while the test runs."""

import http.client
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from nereid_client.cli.api_client import Json, base_url, events_of, first_model, send
from nereid_client.cli.output import DEFAULT_URL, JsonOption, ModelOption, UrlOption, print_json
from nereid_client.console import CliError, complain

_UPDATES_PER_S = 4
_SHORTEST_TEST_S = 1e-9  # prevents a division by zero before the first response
# The keys of the dict that `percentiles` returns.
_STATISTICS = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True)
class Sample:
    """The measurements of one request. Times are in seconds.

    Attributes:
        first_token_s: the time until the first text, or 0 if the response has no text.
        total_s: the time until the end of the response.
        num_tokens: the number of generated tokens.
        error: the reason why the request failed, or "".
    """

    first_token_s: float = 0.0
    total_s: float = 0.0
    num_tokens: int = 0
    error: str = ""

    @property
    def mean_later_token_s(self) -> float:
        """The mean time per token, without the first token. There must be at least two tokens."""
        return (self.total_s - self.first_token_s) / (self.num_tokens - 1)


def bench(  # noqa: PLR0913 - each parameter is an option
    url: UrlOption = DEFAULT_URL,
    model: ModelOption = None,
    requests: Annotated[int, typer.Option(min=1, help="The number of requests.")] = 64,
    concurrency: Annotated[
        int, typer.Option(min=1, max=1024, help="The number of requests at the same time.")
    ] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="The tokens of each response.")] = 128,
    prompt: Annotated[
        str, typer.Option(help="The message. Each request gets a different number before it.")
    ] = "Write a long story about a river.",
    as_json: JsonOption = False,
) -> None:
    """Measure the throughput and the latency of an OpenAI API.

    All requests are streamed chat completions that ignore the end token. The exit code is 1 if a
    request failed.
    """
    server = base_url(url)
    prompts = [f"{number}. {prompt}" for number in range(1, requests + 1)]
    bodies = _request_bodies(model or first_model(server), prompts, max_tokens)
    load = _Load(f"{server}/v1/chat/completions", bodies, concurrency)
    if as_json:
        load.run()
        print_json(load.summary())
    else:
        _run_with_live_table(load)
    if failed := [sample.error for sample in load.samples if sample.error]:
        complain(f"nereid bench: {len(failed)} requests failed. The first error: {failed[0]}")
        raise typer.Exit(1)


def _run_with_live_table(load: "_Load") -> None:
    """Run a load test. Print a table of the results, and update the table after each response."""
    with Live(console=Console(), refresh_per_second=_UPDATES_PER_S) as live:

        def update() -> None:
            live.update(_table(load.summary()))

        load.run(update)
        update()


def _request_bodies(model: str, prompts: Sequence[str], max_tokens: int) -> list[Json]:
    """Return a chat completion request for each prompt. Each answer has `max_tokens` tokens."""
    fields: Json = {
        "model": model,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return [fields | {"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]


class _Load:
    """A load test: several threads send the requests, and measure the responses.

    Attributes:
        samples: the measurements of the requests that have ended.
    """

    def __init__(self, url: str, bodies: Sequence[Json], concurrency: int) -> None:
        self.samples: list[Sample] = []
        self._url = url
        self._bodies = bodies
        self._concurrency = concurrency
        self._start = self._end = time.perf_counter()

    def run(self, on_sample: Callable[[], object] = lambda: None) -> None:
        """Send all requests, and call `on_sample` after each response."""
        self._start = time.perf_counter()
        bodies: SimpleQueue[Json] = SimpleQueue()
        samples: SimpleQueue[Sample] = SimpleQueue()
        for body in self._bodies:
            bodies.put(body)
        # After Ctrl-C, the program must not wait for running requests, so their threads are
        # daemons. The threads of a ThreadPoolExecutor would first finish all requests.
        for _ in range(min(self._concurrency, len(self._bodies))):
            Thread(target=_send_all, args=(self._url, bodies, samples), daemon=True).start()
        for _ in self._bodies:
            self.samples.append(samples.get())
            self._end = time.perf_counter()
            on_sample()

    def summary(self) -> Json:
        """Return the benchmark's results so far: counts, requests per second and latencies."""
        elapsed_s = max(self._end - self._start, _SHORTEST_TEST_S)
        good = [sample for sample in self.samples if not sample.error]
        num_tokens = sum(sample.num_tokens for sample in good)
        with_text = [sample for sample in good if sample.first_token_s]
        first_token_ms = [1000 * sample.first_token_s for sample in with_text]
        # Each value is the mean time per token of one request, without the first token.
        mean_later_token_ms = [
            1000 * sample.mean_later_token_s for sample in with_text if sample.num_tokens > 1
        ]
        return {
            "requests": len(self._bodies),
            "succeeded": len(good),
            "failed": len(self.samples) - len(good),
            "elapsed_s": round(elapsed_s, 3),
            "requests_per_s": round(len(good) / elapsed_s, 3),
            "tokens_per_s": round(num_tokens / elapsed_s, 1),
            "time_to_first_token_ms": percentiles(first_token_ms),
            "time_per_output_token_ms": percentiles(mean_later_token_ms),
        }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the mean and three percentiles, rounded to two decimals. Without values, return {}.

    Example: [1.0, 2.0, 3.0] returns {"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98}.
    """
    if not values:
        return {}
    # Importing numpy takes a tenth of a second. The import is inside this function, so that other
    # commands start without this delay.
    import numpy as np

    numbers = (np.mean(values), *np.percentile(values, (50, 90, 99)))
    return {
        name: round(float(number), 2) for name, number in zip(_STATISTICS, numbers, strict=True)
    }


def _send_all(url: str, bodies: SimpleQueue[Json], samples: SimpleQueue[Sample]) -> None:
    """Send requests until `bodies` is empty, and put the measurements into `samples`."""
    while True:
        try:
            body = bodies.get_nowait()
        except Empty:
            return
        samples.put(_measure(url, body))


def _measure(url: str, body: Json) -> Sample:
    """Send a request, read the streamed response, and return the measurements.

    If the request fails, return a sample with the reason in `error`.
    """
    start = time.perf_counter()
    first_token_s = 0.0
    num_tokens = 0
    try:
        with send(url, body) as response:
            for event in events_of(response):
                has_text = any(_has_text(choice) for choice in event["choices"])
                if has_text and not first_token_s:
                    first_token_s = time.perf_counter() - start
                usage = event.get("usage") or {}
                num_tokens = usage.get("completion_tokens", num_tokens)
    except (CliError, OSError, http.client.HTTPException, ValueError) as error:
        return Sample(error=str(error) or type(error).__name__)
    except (LookupError, TypeError, AttributeError) as error:
        return Sample(error=f"{url} sent a chunk that is not a chat completion ({error!r})")
    return Sample(first_token_s, time.perf_counter() - start, num_tokens)


def _has_text(choice: Json) -> bool:
    """Return whether a streamed choice contains new text of the answer or of the reasoning."""
    delta = choice["delta"]
    return any(delta.get(name) for name in ("content", "reasoning", "reasoning_content"))


def _table(summary: Json) -> Table:
    """Return a table of the benchmark's results so far.

    The rows with latencies have one column for each of `_STATISTICS`, for example the mean. A cell
    is empty until a request has succeeded. The other rows have a single value in the first column.

    Args:
        summary: the results, as returned by `_Load.summary`.
    """
    table = Table("", *_STATISTICS)
    ended = summary["succeeded"] + summary["failed"]
    # Rows with a single value.
    table.add_row("requests", f"{ended} of {summary['requests']}, {summary['failed']} failed")
    table.add_row("requests per second", f"{summary['requests_per_s']:.2f}")
    table.add_row("tokens per second", f"{summary['tokens_per_s']:.1f}")
    # Rows with one value for each statistic.
    for label, key in (
        ("time to first token, ms", "time_to_first_token_ms"),
        ("time per output token, ms", "time_per_output_token_ms"),
    ):
        latencies = summary[key]
        cells = [f"{latencies[name]:.1f}" if name in latencies else "" for name in _STATISTICS]
        table.add_row(label, *cells)
    return table
