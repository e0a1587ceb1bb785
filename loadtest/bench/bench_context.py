"""Measure how the time of a prompt and of a token depends on the length of the context.

    python -m loadtest.bench.bench_context
    python -m loadtest.bench.bench_context --lengths 4096 16384 65536

The model is a small Llama with random weights, so that attention takes most of the time of a long
prompt. While the long prompt is computed, another request generates tokens. It must get a token in
each step, so that a prompt delays it by at most one chunk. Times are CPU times of the process.

Theory: a prompt of n tokens takes a * n + b * n * n seconds, a token after n tokens takes c + d * n
seconds, and the KV cache of a sequence grows with n. The last columns of the table compare each
measurement with these laws, which are fitted to the shortest and to the longest prompt.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from nereid_backend import Engine, EngineConfig, SamplingParams
from transformers import LlamaConfig, LlamaForCausalLM

from loadtest import command_line
from loadtest.bench.markdown_table import table
from loadtest.bench.random_prompts import random_prompt

_VOCAB_SIZE = 512
_NUM_LATER_TOKENS = 32
# The tokens for which the KV cache and the positions have space besides the prompt.
_SPARE_TOKENS = 512
# The names of the request with the long prompt, and of the request that generates tokens meanwhile.
_LONG, _OTHER = "long", "other"


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result for one length of the prompt.

    Attributes:
        num_tokens: the length of the prompt.
        prefill_s: the CPU seconds of all steps that compute the prompt.
        chunk_s: the CPU seconds of the longest of these steps.
        decode_s: the CPU seconds of each later token.
        num_blocks: the number of blocks that the prompt uses.
        num_missed: the number of steps of the prompt in which the other request got no token.
    """

    num_tokens: int
    prefill_s: float
    chunk_s: float
    decode_s: float
    num_blocks: int
    num_missed: int


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all lengths, and print a table."""
    args = arguments().parse_args(argv)
    max_length = max(args.lengths)
    measurements = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), args.layers, max_length)
        engine = open_engine(folder, max_length, args.threads)
        measure(engine, 1024)  # The first prompt loads code.
        for length in sorted(args.lengths):
            measurements.append(measure(engine, length))
            print(measurements[-1], file=sys.stderr)
        block_bytes = engine.info.kv_cache_bytes / (engine.info.num_blocks + 1)
        engine.close()
    print(report(measurements, block_bytes))


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    lengths = [4096, 8192, 16384, 32768, 65536, 128000]
    add("--lengths", type=int, nargs="+", default=lengths, help="tokens of the prompts")
    add("--layers", type=int, default=2, help="layers of the model")
    add("--threads", type=int, default=1, help="number of threads")
    return parser


def save_model(folder: Path, num_layers: int, max_length: int) -> None:
    """Save a Llama with random weights, 4 query heads and 2 key-value heads of 32 dimensions."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_length + _SPARE_TOKENS,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def open_engine(folder: str, max_length: int, num_threads: int) -> Engine:
    """Return an engine for two sequences, with a KV cache that is large enough for both."""
    config = EngineConfig(
        folder,
        dtype="float32",
        max_model_len=max_length + _SPARE_TOKENS,
        max_num_seqs=2,
        num_threads=num_threads,
        compile_forward=False,
        num_speculative_tokens=0,
        enable_prefix_caching=False,
        kv_cache_memory="1GiB",
    )
    return Engine(config, progress=lambda _: None)


def measure(engine: Engine, length: int) -> Measurement:
    """Compute a prompt and some tokens after it, while another request generates tokens."""
    prompt = random_prompt(random.Random(length), _VOCAB_SIZE, length)
    other = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)
    engine.add_request(_OTHER, prompt[:16], other)
    engine.step()
    blocks_before = engine.stats().kv_cache_blocks_used
    params = SamplingParams(max_tokens=_NUM_LATER_TOKENS, ignore_eos=True, temperature=0)
    engine.add_request(_LONG, prompt, params)
    steps = prefill_steps(engine)
    num_blocks = engine.stats().kv_cache_blocks_used - blocks_before
    engine.abort(_OTHER)
    engine.step()
    return Measurement(
        num_tokens=length,
        prefill_s=sum(step.seconds for step in steps),
        chunk_s=max(step.seconds for step in steps),
        decode_s=mean_step_s(engine),
        num_blocks=num_blocks,
        num_missed=sum(_OTHER not in step.answered for step in steps),
    )


class Step(NamedTuple):
    """The CPU seconds of a step, and the names of the requests that got tokens in the step."""

    seconds: float
    answered: set[str]


def prefill_steps(engine: Engine) -> list[Step]:
    """Run the engine until the long prompt has its first token, and return the steps."""
    steps: list[Step] = []
    while not steps or _LONG not in steps[-1].answered:
        begin = time.process_time()
        updates = engine.step()
        seconds = time.process_time() - begin
        steps.append(Step(seconds, {update.request_id for update in updates}))
    return steps


def mean_step_s(engine: Engine) -> float:
    """Run the engine until all requests have ended, and return the mean CPU seconds of a step."""
    begin = time.process_time()
    num_steps = 0
    while engine.has_work():
        engine.step()
        num_steps += 1
    return (time.process_time() - begin) / num_steps


def report(measurements: Sequence[Measurement], block_bytes: float) -> str:
    """Return a table with the measurements and their ratios to the theory."""
    prefill_law = Line.through_ends(
        [(one.num_tokens, one.prefill_s / one.num_tokens) for one in measurements]
    )
    decode_law = Line.through_ends([(one.num_tokens, one.decode_s) for one in measurements])
    rows = [
        [
            f"{one.num_tokens:,}",
            f"{one.num_tokens / one.prefill_s:,.0f}",
            f"{one.chunk_s * 1000:.0f}",
            str(one.num_missed),
            f"{one.decode_s * 1000:.2f}",
            f"{one.num_blocks * block_bytes / 2**20:.1f}",
            f"{one.prefill_s / (one.num_tokens * prefill_law.at(one.num_tokens)):.2f}",
            f"{one.decode_s / decode_law.at(one.num_tokens):.2f}",
        ]
        for one in measurements
    ]
    head = ["prompt", "prefill tokens/s", "longest step, ms", "steps without the other request"]
    head += ["ms per later token", "KV cache, MiB", "prefill / theory", "token / theory"]
    return table(head, rows)


class Line(NamedTuple):
    """The straight line `intercept + slope * x`."""

    intercept: float
    slope: float

    @classmethod
    def through_ends(cls, points: Sequence[tuple[int, float]]) -> "Line":
        """Return the line through the first and the last point, or a flat line for one point."""
        (x0, y0), (x1, y1) = points[0], points[-1]
        slope = (y1 - y0) / (x1 - x0) if x1 != x0 else 0.0
        return cls(y0 - slope * x0, slope)

    def at(self, x: float) -> float:
        """Return the value of the line at `x`."""
        return self.intercept + self.slope * x


if __name__ == "__main__":
    main()
