"""Measure chats with images: time to the first token, tokens/s, and the effect on other requests.

    python -m loadtest.bench.bench_images [--model PATH] [--concurrency 8] [--rounds 3]

Each request is a streaming chat completion with a fixed number of tokens. Three workloads take
turns: texts, texts with a new image each, and texts with one known image. The image encoder runs
only for new images. The text is padded with random words, so that all three workloads have prompts
of about the same number of tokens.

The program then measures texts beside another workload: half of the running requests are texts, and
the other half are texts, too, or chats with new images. The ratio of the tokens/s of the first half
is the effect of images on other requests.
"""

import asyncio
import base64
import io
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from loadtest import command_line
from loadtest.bench.markdown_table import table
from loadtest.client.light_client import posted
from loadtest.server.served import ALONE, Served

SEE = Path(__file__).resolve().parents[2] / "demo" / "see"
_WORDS = ("red", "circle", "seven", "square", "left", "star", "blue", "many", "where", "cross")
_SIDE = 96  # the width and the height of an image in pixels
_NUM_WORDS = 24

Message = dict[str, Any]
MakeMessage = Callable[[], Message]
Event = dict[str, Any]


@dataclass(frozen=True)
class Figures:
    """The figures of one workload in one round.

    Attributes:
        tokens_per_s: the generated tokens of all requests in one second.
        first_s: the median time to the first token in seconds.
    """

    tokens_per_s: float
    first_s: float


class Workloads:
    """Makes messages. Each message is new, so the prefix cache does not contain its text."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._known = self._image_part()

    def text(self) -> Message:
        """Return a message with a text only."""
        return {"role": "user", "content": self._words(2 * _NUM_WORDS)}

    def new_image(self) -> Message:
        """Return a message with an image that no other message contains."""
        return self._with(self._image_part())

    def known_image(self) -> Message:
        """Return a message with an image that each such message contains."""
        return self._with(self._known)

    def _with(self, image: Message) -> Message:
        text = {"type": "text", "text": self._words(_NUM_WORDS)}
        return {"role": "user", "content": [image, text]}

    def _words(self, count: int) -> str:
        return " ".join(self._rng.choice(_WORDS) for _ in range(count))

    def _image_part(self) -> Message:
        """Return a content part with a drawing of random rectangles."""
        image = Image.new("RGB", (_SIDE, _SIDE), self._colour())
        draw = ImageDraw.Draw(image)
        for _ in range(4):
            left, top = self._rng.randrange(_SIDE // 2), self._rng.randrange(_SIDE // 2)
            draw.rectangle((left, top, left + _SIDE // 3, top + _SIDE // 3), fill=self._colour())
        file = io.BytesIO()
        image.save(file, "PNG")
        content = base64.b64encode(file.getvalue()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}

    def _colour(self) -> tuple[int, int, int]:
        return (self._rng.randrange(256), self._rng.randrange(256), self._rng.randrange(256))


class Client:
    """Sends streaming chat completions to one server, and measures the answers."""

    def __init__(self, served: Served, num_tokens: int) -> None:
        """Store the arguments. Each answer has `num_tokens` tokens."""
        self._port = served.openai_port
        self._num_tokens = num_tokens

    async def run(
        self, make: Callable[[], Message], num_requests: int, concurrency: int
    ) -> Figures:
        """Send requests, at most `concurrency` at a time, and return the figures."""
        limit = asyncio.Semaphore(concurrency)

        async def one(message: Message) -> float:
            async with limit:
                return await self._ask(message)

        started = time.perf_counter()
        first = await asyncio.gather(*(one(make()) for _ in range(num_requests)))
        seconds = time.perf_counter() - started
        return Figures(num_requests * self._num_tokens / seconds, statistics.median(first))

    async def run_beside(
        self, make_other: MakeMessage, make: MakeMessage, concurrency: int
    ) -> Figures:
        """Return the figures of a workload, while as many other requests run.

        Args:
            make_other: makes a message of the other requests, whose figures are not returned.
            make: makes a message of the measured requests.
            concurrency: the number of measured requests, and of other requests, at a time.
        """

        async def repeat() -> None:
            while True:
                await self._ask(make_other())

        others = [asyncio.create_task(repeat()) for _ in range(concurrency)]
        try:
            return await self.run(make, 4 * concurrency, concurrency)
        finally:
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _ask(self, message: Message) -> float:
        """Send one request, read the whole answer, and return the time to its first token."""
        body = {
            "messages": [message],
            "max_tokens": self._num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started, first = time.perf_counter(), 0.0
        async with posted(self._port, "/v1/chat/completions", body) as answer:
            if answer.status != 200:
                raise RuntimeError(await answer.text())
            async for event in self._checked(answer.events()):
                if not first and event["choices"] and event["choices"][0]["delta"].get("content"):
                    first = time.perf_counter() - started
        return first

    async def _checked(self, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
        """Yield the events of an answer.

        Raises: RuntimeError if the answer is an error or has the wrong number of tokens.
        """
        num_tokens = 0
        async for event in events:
            if "error" in event:
                raise RuntimeError(event["error"])
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
            yield event
        if num_tokens != self._num_tokens:
            raise RuntimeError(f"the answer has {num_tokens} tokens instead of {self._num_tokens}")


def main() -> None:
    """Measure the workloads, and print two tables."""
    flags = command_line.parser(__doc__)
    add = flags.add_argument
    add("--model", type=Path, default=SEE, help="folder of the checkpoint (default: demo/see)")
    add("--concurrency", type=int, default=8, help="requests at a time")
    add("--rounds", type=int, default=3, help="number of rounds, of which the median counts")
    add("--output-tokens", type=int, default=64, help="tokens of each answer")
    args = flags.parse_args()
    workloads = Workloads(0)
    kinds = {
        "text": workloads.text,
        "text and a new image": workloads.new_image,
        "text and a known image": workloads.known_image,
    }
    figures: dict[str, list[Figures]] = {name: [] for name in kinds}
    alone: list[Figures] = []
    beside: dict[str, list[Figures]] = {"text": [], "text and a new image": []}
    with Served(args.model, arguments=ALONE) as served:
        client = Client(served, args.output_tokens)
        # The first requests load code and fill caches.
        for make in kinds.values():
            asyncio.run(client.run(make, args.concurrency, args.concurrency))
        for _ in range(args.rounds):
            for name, make in kinds.items():
                run = client.run(make, 4 * args.concurrency, args.concurrency)
                figures[name].append(asyncio.run(run))
            half = max(1, args.concurrency // 2)
            alone.append(asyncio.run(client.run(workloads.text, 4 * half, half)))
            for name, rounds in beside.items():
                run = client.run_beside(kinds[name], workloads.text, half)
                rounds.append(asyncio.run(run))
    print(f"{args.concurrency} requests at a time, {args.output_tokens} tokens each")
    print(_table("requests", figures, figures["text"]))
    print(f"\n{half} texts at a time, and as many other requests")
    print(_table("other requests", {"none": alone, **beside}, beside["text"]))


def _table(head: str, figures: dict[str, list[Figures]], reference: list[Figures]) -> str:
    """Return a table with the medians of the rounds.

    The ratio compares the tokens/s of each round with the same round of `reference`.
    """
    rows = []
    for name, rounds in figures.items():
        ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(rounds, reference, strict=True)]
        rate = statistics.median(each.tokens_per_s for each in rounds)
        first_s = statistics.median(each.first_s for each in rounds)
        ratio = f"{statistics.median(ratios):.2f}"
        rows.append([name, f"{rate:.0f}", ratio, f"{first_s * 1000:.0f}"])
    return table([head, "tokens/s", "ratio", "first token, ms"], rows)


if __name__ == "__main__":
    main()
