"""Measure chats with images: time to the first token, tokens/s, and the effect on other requests.

    python -m loadtest.bench.bench_images [--model PATH] [--concurrency 8] [--rounds 3]

Each request is a streaming chat completion with a fixed number of tokens. Three workloads are
measured one after the other: messages with text only, messages with a text and a new image, and
messages with a text and the same image. The image encoder runs only for new images. Messages
without an image have a longer text, so that all prompts have about the same number of tokens.

The program then measures the effect of images on other requests. Half of the running requests are
measured and have text only. The other half have text only, too, or a new image. The effect is the
ratio of the tokens/s of the measured half in these two cases.
"""

import asyncio
import base64
import io
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from loadtest.bench.markdown_table import table
from loadtest.bench.streams import Speed, Stream, read_stream, run_streams
from loadtest.command_line import Option, parse_command_line
from loadtest.server.served import ALONE, Served

SEE = Path(__file__).resolve().parents[2] / "demo" / "see"
_WORDS = ("red", "circle", "seven", "square", "left", "star", "blue", "many", "where", "cross")
_SIDE = 96  # the width and the height of an image in pixels
_NUM_WORDS = 24
_REQUESTS_PER_STREAM = 4

Message = dict[str, Any]
MakeMessage = Callable[[], Message]
# Maps the name of a workload to the speed in each round.
Speeds = Mapping[str, list[Speed]]

_OPTIONS = {
    "--model": Option(SEE, "folder of the checkpoint (default: demo/see)"),
    "--concurrency": Option(8, "requests at a time"),
    "--rounds": Option(3, "number of rounds, of which the median counts"),
    "--output-tokens": Option(64, "tokens of each answer"),
}


class Workloads:
    """Makes the messages of the three workloads.

    Each message has a new random text, which the prefix cache does not contain. The text of a
    message with an image is shorter by about as many tokens as an image has.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._known_image = self._image_part()

    def text(self) -> Message:
        """Return a message with a text only."""
        return {"role": "user", "content": self._words(2 * _NUM_WORDS)}

    def new_image(self) -> Message:
        """Return a message with an image that no other message contains."""
        return self._message_with(self._image_part())

    def known_image(self) -> Message:
        """Return a message with an image that is the same in all calls of this method."""
        return self._message_with(self._known_image)

    def _message_with(self, image_part: Message) -> Message:
        text_part = {"type": "text", "text": self._words(_NUM_WORDS)}
        return {"role": "user", "content": [image_part, text_part]}

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
    """Sends chat completions to one server."""

    def __init__(self, port: int, num_tokens: int) -> None:
        """Store the port of the server's OpenAI API, and the number of tokens of each answer."""
        self._port = port
        self._num_tokens = num_tokens

    async def run(self, make: MakeMessage, num_requests: int, concurrency: int) -> Speed:
        """Send `num_requests` requests, at most `concurrency` at a time, and return their speed."""
        asks = [partial(self._ask, make()) for _ in range(num_requests)]
        return await run_streams(asks, concurrency)

    async def run_beside(
        self, make_other: MakeMessage, make: MakeMessage, concurrency: int
    ) -> Speed:
        """Measure the speed of requests while the same number of other requests runs.

        Args:
            make_other: makes a message of the other requests, which are not measured.
            make: makes a message of the measured requests.
            concurrency: the number of measured requests, and of other requests, at a time.
        """

        async def repeat() -> None:
            while True:
                await self._ask(make_other())

        others = [asyncio.create_task(repeat()) for _ in range(concurrency)]
        try:
            return await self.run(make, _REQUESTS_PER_STREAM * concurrency, concurrency)
        finally:
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _ask(self, message: Message) -> Stream:
        body = {"messages": [message], "max_tokens": self._num_tokens}
        return await read_stream(self._port, "/v1/chat/completions", body)


async def measure(client: Client, concurrency: int, num_rounds: int) -> tuple[Speeds, Speeds]:
    """Measure all workloads.

    Returns:
        The speeds of each workload alone, and the speeds of text-only requests while other requests
        run. The second mapping has a key for each kind of other requests: "none", "text" and "text
        and a new image".
    """
    workloads = Workloads(seed=0)
    makers = {
        "text": workloads.text,
        "text and a new image": workloads.new_image,
        "text and a known image": workloads.known_image,
    }
    # Half of the streams always send text, and their speed is measured. The other half sends no
    # requests, text, or text with new images.
    num_text_streams = max(1, concurrency // 2)
    speeds_alone, text_speeds = defaultdict(list), defaultdict(list)
    for make in makers.values():
        # The first requests load code, so their speed is ignored.
        await client.run(make, concurrency, concurrency)
    for _ in range(num_rounds):
        for name, make in makers.items():
            speed = await client.run(make, _REQUESTS_PER_STREAM * concurrency, concurrency)
            speeds_alone[name].append(speed)
        num_requests = _REQUESTS_PER_STREAM * num_text_streams
        speed = await client.run(workloads.text, num_requests, num_text_streams)
        text_speeds["none"].append(speed)
        for name in ("text", "text and a new image"):
            speed = await client.run_beside(makers[name], workloads.text, num_text_streams)
            text_speeds[name].append(speed)
    return speeds_alone, text_speeds


def main() -> None:
    """Measure the workloads, and print two tables."""
    args = parse_command_line(__doc__, _OPTIONS)
    with Served(args.model, arguments=ALONE) as served:
        client = Client(served.openai_port, args.output_tokens)
        speeds_alone, text_speeds = asyncio.run(measure(client, args.concurrency, args.rounds))
    print(f"{args.concurrency} requests at a time, {args.output_tokens} tokens each")
    print(_table("requests", speeds_alone))
    print(f"\n{max(1, args.concurrency // 2)} texts at a time, and as many other requests")
    print(_table("other requests", text_speeds))


def _table(head: str, speeds: Speeds) -> str:
    """Return a table with the medians of the rounds.

    The column "ratio" shows the median of the rounds' ratios. The ratio of a round is the tokens/s
    divided by the tokens/s of "text" in the same round.
    """
    rows = []
    for name, rounds in speeds.items():
        pairs = zip(rounds, speeds["text"], strict=True)
        ratio = statistics.median(each.tokens_per_s / text.tokens_per_s for each, text in pairs)
        rate = statistics.median(each.tokens_per_s for each in rounds)
        first_s = statistics.median(each.time_to_first_token for each in rounds)
        rows.append([name, f"{rate:.0f}", f"{ratio:.2f}", f"{first_s * 1000:.0f}"])
    return table([head, "tokens/s", "ratio", "first token, ms"], rows)


if __name__ == "__main__":
    main()
