"""Answer random chats with a cache on disk while the process is killed, and compare the answers.

    python tests/backend/engine/disk_soak.py --models llama qwen3_next --seconds 60

A child process answers chats that share their beginnings, and is killed at random times. The next
child continues with the files of the earlier children. Every answer must equal the answer of an
engine without a prefix cache.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from logging import ERROR, getLogger
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from backend.exactness import PARAMS, open_engine
from backend.tiny_models import VOCAB_SIZE

from backend import shrink

_DISK_BYTES = 400_000


def prompts() -> list[list[int]]:
    """Return prompts, many of which share a long prefix with other prompts."""
    rng = random.Random(1)
    stems = [[rng.randrange(3, VOCAB_SIZE) for _ in range(90)] for _ in range(4)]
    return [
        [*rng.choice(stems)[: rng.randint(20, 90)], *(rng.randrange(3, 300) for _ in range(6))]
        for _ in range(40)
    ]


def answers_of(folder: Path, numbers: list[int], **settings) -> list[tuple[list[int], int]]:
    """Return the answer to each prompt in `numbers`, and the number of its cached tokens."""
    engine = open_engine(folder, max_model_len=128, **settings)
    found = []
    for number in numbers:
        output = engine.generate([prompts()[number]], PARAMS)[0]
        found.append((output.outputs[0].token_ids, output.num_cached_tokens))
    engine.close()
    return found


def run_child(folder: Path, disk: str, seed: int, writer: int) -> None:
    """Answer random prompts in this process until it is killed. Write the answers to a pipe."""
    rng = random.Random(seed)
    engine = open_engine(
        folder, max_model_len=128, prefix_cache_disk=disk, prefix_cache_disk_bytes=_DISK_BYTES
    )
    while True:
        numbers = rng.choices(range(40), k=3)
        outputs = engine.generate([prompts()[number] for number in numbers], PARAMS)
        engine.check()
        for number, output in zip(numbers, outputs, strict=True):
            row = [number, output.outputs[0].token_ids, output.num_cached_tokens]
            os.write(writer, (json.dumps(row) + "\n").encode())


def soak(folder: Path, seconds: float) -> tuple[int, int, int, int]:
    """Return the numbers of answers, wrong answers, killed processes and cached tokens."""
    expected = [
        tokens for tokens, _ in answers_of(folder, list(range(40)), enable_prefix_caching=False)
    ]
    rng = random.Random(2)
    num_answers = num_wrong = num_killed = num_cached = 0
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as disk:
        while time.monotonic() < end:
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reader)
                run_child(folder, disk, num_killed, writer)
            os.close(writer)
            with os.fdopen(reader, "rb") as stream:
                # The random time begins with the child's first answer, because the time for loading
                # varies.
                first = stream.readline()
                time.sleep(rng.uniform(0, 1.5))
                os.kill(child, signal.SIGKILL)
                rows = [first, *stream.read().split(b"\n")]
            os.waitpid(child, 0)
            num_killed += 1
            for row in rows:
                if row.endswith((b"]", b"]\n")):
                    number, tokens, cached = json.loads(row)
                    num_answers += 1
                    num_wrong += tokens != expected[number]
                    num_cached += cached
    return num_answers, num_wrong, num_killed, num_cached


def main() -> None:
    """Test all models, and exit with 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["llama", "qwen3_next"])
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    getLogger("nereid_backend").setLevel(ERROR)
    torch.set_num_threads(1)
    is_wrong = False
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            counts = soak(shrink.save(name, Path(folder)), args.seconds)
        is_wrong |= counts[1] > 0
        text = "{}: {} answers, {} wrong, {} kills, {} cached tokens\n"
        sys.stdout.write(text.format(name, *counts))
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
