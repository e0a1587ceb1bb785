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

_DISK_BYTES = 400_000  # less than all prompts need, so that files are also deleted
_NUM_PROMPTS = 40


def prompts() -> list[list[int]]:
    """Return prompts, many of which share a long prefix with other prompts."""
    rng = random.Random(1)
    stems = [[rng.randrange(3, VOCAB_SIZE) for _ in range(90)] for _ in range(4)]
    return [
        [*rng.choice(stems)[: rng.randint(20, 90)], *(rng.randrange(3, 300) for _ in range(6))]
        for _ in range(_NUM_PROMPTS)
    ]


def answers_of(folder: Path, numbers: list[int], **settings) -> list[tuple[list[int], int]]:
    """Return the answer to each prompt in `numbers`, and the number of its cached tokens."""
    engine = open_engine(folder, max_model_len=128, **settings)
    answers = []
    for number in numbers:
        (output,) = engine.generate([prompts()[number]], PARAMS)
        answers.append((output.outputs[0].token_ids, output.num_cached_tokens))
    engine.close()
    return answers


def run_child(folder: Path, disk: str, seed: int, writer: int) -> None:
    """Answer random prompts in this process until it is killed. Write the answers to a pipe."""
    rng = random.Random(seed)
    engine = open_engine(
        folder, max_model_len=128, prefix_cache_disk=disk, prefix_cache_disk_bytes=_DISK_BYTES
    )
    while True:
        numbers = rng.choices(range(_NUM_PROMPTS), k=3)
        outputs = engine.generate([prompts()[number] for number in numbers], PARAMS)
        engine.check()
        for number, output in zip(numbers, outputs, strict=True):
            row = [number, output.outputs[0].token_ids, output.num_cached_tokens]
            os.write(writer, (json.dumps(row) + "\n").encode())


def answers_before_kill(folder: Path, disk: str, seed: int, delay_s: float) -> list[list]:
    """Run a child process, kill it `delay_s` after its first answer, and return its answers.

    An answer consists of the number of the prompt, the tokens and the number of cached tokens.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        run_child(folder, disk, seed, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        first_line = stream.readline()  # The time for loading varies, so wait for an answer first.
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        lines = [first_line.rstrip(), *stream.read().split(b"\n")]
    os.waitpid(child, 0)
    return [json.loads(line) for line in lines if line.endswith(b"]")]


def soak(folder: Path, seconds: float) -> tuple[int, int, int, int]:
    """Return the numbers of answers, wrong answers, killed processes and cached tokens."""
    numbers = list(range(_NUM_PROMPTS))
    expected = [tokens for tokens, _ in answers_of(folder, numbers, enable_prefix_caching=False)]
    rng = random.Random(2)
    num_answers = num_wrong = num_killed = num_cached = 0
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as disk:
        while time.monotonic() < deadline:
            answers = answers_before_kill(folder, disk, num_killed, rng.uniform(0, 1.5))
            num_killed += 1
            num_answers += len(answers)
            num_wrong += sum(tokens != expected[number] for number, tokens, _ in answers)
            num_cached += sum(num_tokens for _, _, num_tokens in answers)
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
