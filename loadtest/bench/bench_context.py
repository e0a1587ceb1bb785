"""Measure how the time to compute a prompt or one token depends on the length of the context.

    python -m loadtest.bench.bench_context
    python -m loadtest.bench.bench_context --lengths 4096 16384 65536

The model is a small Llama with random weights, so that attention takes most of the time of a long
prompt. While the long prompt is computed, another request generates tokens. The other request
should get a token in each step, so that a prompt delays this request by at most one chunk. Times
are CPU times of the process.

Theory: a prompt of n tokens takes a * n + b * n * n seconds, a token after n tokens takes c + d * n
seconds, and the KV cache of a sequence grows with n. The last two columns of the table show the
measured times divided by the times of these formulas. The coefficients a, b, c and d are fitted to
the shortest and to the longest prompt.
"""

import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from nereid_backend import Engine, EngineConfig, SamplingParams
from transformers import LlamaConfig, LlamaForCausalLM

from loadtest.bench.engine_steps import timed_steps
from loadtest.bench.markdown_table import table
from loadtest.bench.random_prompts import random_prompt
from loadtest.command_line import Option, parse_command_line

_VOCAB_SIZE = 512
_NUM_LATER_TOKENS = 32
# The difference between the maximum length of a sequence and the longest prompt, in tokens.
_SPARE_TOKENS = 512
# The ids of the request with the long prompt, and of the request that generates tokens meanwhile.
_LONG, _OTHER = "long", "other"

_OPTIONS = {
    "--lengths": Option([4096, 8192, 16384, 32768, 65536, 128000], "tokens of the prompts"),
    "--layers": Option(2, "layers of the model"),
    "--threads": Option(1, "number of threads"),
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result for one length of the prompt. Times are CPU seconds."""

    num_tokens: int  # the length of the prompt
    prefill_s: float  # the time of all steps that compute the prompt
    chunk_s: float  # the time of the longest of these steps
    decode_s: float  # the mean time of each later token
    num_blocks: int  # the blocks that the prompt uses
    num_missed: int  # the steps that computed the prompt without a token for the other request


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all lengths, and print a table."""
    args = parse_command_line(__doc__, _OPTIONS, argv)
    max_length = max(args.lengths)
    measurements = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), args.layers, max_length)
        with contextlib.closing(open_engine(folder, max_length, args.threads)) as engine:
            measure(engine, 1024)  # The first prompt loads code, so its result is ignored.
            for length in sorted(args.lengths):
                measurements.append(measure(engine, length))
                print(measurements[-1], file=sys.stderr)
            # The cache also contains the null block, which `num_blocks` does not include.
            block_bytes = engine.info.kv_cache_bytes / (engine.info.num_blocks + 1)
    print(report(measurements, block_bytes))


def save_model(folder: Path, num_layers: int, max_length: int) -> None:
    """Save a Llama with random weights, 4 query heads and 2 key-value heads of dimension 32."""
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
    """Return an engine for two sequences, whose KV cache is large enough for both sequences."""
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
    """Measure a prompt of `length` tokens, and some generated tokens after this prompt.

    While the prompt is computed, another request generates tokens.
    """
    prompt = random_prompt(random.Random(length), _VOCAB_SIZE, length)
    other = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)
    engine.add_request(_OTHER, prompt[:16], other)
    engine.step()
    blocks_before = engine.stats().kv_cache_blocks_used
    params = SamplingParams(max_tokens=_NUM_LATER_TOKENS, ignore_eos=True, temperature=0)
    engine.add_request(_LONG, prompt, params)
    prefill = []
    for step in timed_steps(engine, time.process_time):
        prefill.append(step)
        if step.has_token_of(_LONG):
            break
    num_blocks = engine.stats().kv_cache_blocks_used - blocks_before
    engine.abort(_OTHER)
    engine.step()
    decode = timed_steps(engine, time.process_time)
    return Measurement(
        num_tokens=length,
        prefill_s=sum(step.seconds for step in prefill),
        chunk_s=max(step.seconds for step in prefill),
        decode_s=statistics.mean(step.seconds for step in decode),
        num_blocks=num_blocks,
        num_missed=sum(not step.has_token_of(_OTHER) for step in prefill),
    )


def report(measurements: Sequence[Measurement], block_bytes: float) -> str:
    """Return a table with the measurements, and the ratios of measured times to the theory."""
    lengths = [one.num_tokens for one in measurements]
    prefill_law = fitted_line(lengths, [one.prefill_s / one.num_tokens for one in measurements])
    decode_law = fitted_line(lengths, [one.decode_s for one in measurements])
    rows = [
        [
            f"{one.num_tokens:,}",
            f"{one.num_tokens / one.prefill_s:,.0f}",
            f"{one.chunk_s * 1000:.0f}",
            str(one.num_missed),
            f"{one.decode_s * 1000:.2f}",
            f"{one.num_blocks * block_bytes / 2**20:.1f}",
            f"{one.prefill_s / (one.num_tokens * prefill_law(one.num_tokens)):.2f}",
            f"{one.decode_s / decode_law(one.num_tokens):.2f}",
        ]
        for one in measurements
    ]
    head = ["prompt", "prefill tokens/s", "longest step, ms", "steps without the other request"]
    head += ["ms per later token", "KV cache, MiB", "prefill / theory", "token / theory"]
    return table(head, rows)


def fitted_line(x: Sequence[float], y: Sequence[float]) -> Callable[[float], float]:
    """Return the linear function through the first and the last of the points (`x`, `y`)."""
    slope = (y[-1] - y[0]) / (x[-1] - x[0]) if x[-1] != x[0] else 0.0
    return lambda value: y[0] + slope * (value - x[0])


if __name__ == "__main__":
    main()
