"""Compare the speed of decode with and without speculative decoding.

    python -m loadtest.bench.bench_speculation --model demo/chat --draft-model /models/small
    python -m loadtest.bench.bench_speculation --truncate 1          # drafts from the first layer
    python -m loadtest.bench.bench_speculation --grow 12 --rounds 5
    python -m loadtest.bench.bench_speculation --grow 10 --train-draft 1

The target is the model that generates the answers, usually a demo model of this repository. The
prompts are dialogues of the kind on which the demo model was trained. The draft model is one of
these:

- with --draft-model, another checkpoint
- with --truncate, the first layers of the target
- with --train-draft, the first layers of the demo model after some minutes of training
- with --grow, the demo model itself. The target then gets additional layers that do not change the
  logits, so that a step of the target costs as much as a step of a larger model.

The table also has rows for prompts of random tokens. The answers to these prompts rarely repeat a
part of the prompt. In each round, all engines run one after the other. The ratio of two speeds is
computed from the same round, so that other programs on the machine influence both speeds equally.
On a busy machine, the ratios by CPU time are more precise than the ratios by wall time, but only
with one thread.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereid_backend import Engine, EngineConfig, SamplingParams
from nereid_backend.core.outputs import EngineStats
from transformers import AutoTokenizer

from loadtest.bench.draft_models import save_with_layers, trained_draft
from loadtest.bench.engine_steps import timed_steps
from loadtest.bench.markdown_table import print_table
from loadtest.bench.random_prompts import random_prompt
from loadtest.command_line import Option, parse_command_line

# The programs in the folder `demo` import each other without a package name.
sys.path.insert(0, str(Path(__file__).parents[2] / "demo"))
from chat_format import prompt_text
from evaluate import held_out_dialogues
from lessons import SKILLS

_METHODS = ("off", "ngram", "draft")
_NUM_DRAFT_TOKENS = 4
_RANDOM_PROMPT_LENGTH = 200
# At this temperature, all tokens are about equally likely.
_VERY_HIGH_TEMPERATURE = 1000.0

_OPTIONS = {
    "--model": Option(Path("demo/chat"), "folder of the target"),
    "--draft-model": Option(None, "folder of the draft model", value_type=Path),
    "--truncate": Option(0, "layers of the target that are the draft model"),
    "--train-draft": Option(0, "layers of a draft model that is trained"),
    "--grow": Option(0, "layers that are added to the target"),
    "--batch": Option([1, 8], "requests at the same time"),
    "--tokens": Option(100, "tokens of each answer"),
    "--num-prompts": Option(16, "number of prompts"),
    "--rounds": Option(3, "number of rounds"),
    "--threads": Option(1, "number of threads"),
    "--dtype": Option("float32", "dtype of the models", ["float32", "bfloat16"]),
}


@dataclass(frozen=True)
class Measurement:
    """The speed and the drafts of one run. The CPU time is the sum over all threads."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    acceptance: float | None  # the share of draft tokens that were accepted; None without drafts
    mean_draft: float  # the mean number of tokens in a draft


@dataclass(frozen=True)
class Prompts:
    """Prompts with the same temperature, and the methods that are measured with them."""

    kind: str  # the label in the table
    token_ids: list[list[int]]
    temperature: float
    methods: Sequence[str]


def main() -> None:
    """Measure all methods, and print a table."""
    args = parse_command_line(__doc__, _OPTIONS)
    head = ["prompts", "batch", "drafts", "tokens/s", "ratio", "ratio by CPU time", "accepted"]
    with tempfile.TemporaryDirectory() as folder:
        target, draft = models(args, Path(folder))
        methods = [method for method in _METHODS if method != "draft" or draft is not None]
        engines = {method: open_engine(target, draft, method, args) for method in methods}
        all_prompts = (dialogues(args), random_prompts(args))
        print(f"\nMedian of {args.rounds} rounds, {args.tokens} tokens for each answer.\n")
        rows = (
            row
            for batch_size in args.batch
            for prompts in all_prompts
            for row in measured_rows(engines, prompts, batch_size, args)
        )
        print_table([*head, "draft length"], rows)
        for engine in engines.values():
            engine.close()


def models(args: argparse.Namespace, folder: Path) -> tuple[Path, Path | None]:
    """Return the folders of the target model and the draft model. Create missing checkpoints.

    The option --train-draft takes precedence over --truncate, and --truncate over --draft-model.
    """
    target = args.model
    if args.grow:
        target = folder / "target"
        save_with_layers(args.model, target, args.grow, is_addition=True)
    if args.train_draft:
        return target, trained_draft(args.model, args.train_draft, folder)
    if args.truncate:
        draft = folder / "draft"
        save_with_layers(args.model, draft, args.truncate, is_addition=False)
        return target, draft
    return target, args.draft_model or (args.model if args.grow else None)


def dialogues(args: argparse.Namespace) -> Prompts:
    """Return the prompts of dialogues that the training of the demo model did not contain."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = []
    for number, skill in zip(range(args.num_prompts), itertools.cycle(SKILLS), strict=False):
        (dialogue,) = held_out_dialogues(skill, thinking=True, count=1, seed=number)
        text = prompt_text(tokenizer, dialogue)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return Prompts("dialogues", prompts, temperature=0.0, methods=_METHODS)


def random_prompts(args: argparse.Namespace) -> Prompts:
    """Return prompts of random tokens, whose answers are random, too.

    An answer at temperature 0 would soon repeat itself. The draft model is not measured with these
    prompts: the draft model and the target use the same random numbers, so nearly all draft tokens
    would be accepted.
    """
    rng = random.Random(0)
    vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    prompts = [
        random_prompt(rng, vocab_size, _RANDOM_PROMPT_LENGTH) for _ in range(args.num_prompts)
    ]
    return Prompts("random", prompts, _VERY_HIGH_TEMPERATURE, methods=("off", "ngram"))


def open_engine(target: Path, draft: Path | None, method: str, args: argparse.Namespace) -> Engine:
    """Return an engine that generates drafts with `method`, which is one of `_METHODS`."""
    settings: dict[str, dict[str, Any]] = {
        "off": {"num_speculative_tokens": 0},
        "ngram": {"speculative_method": "ngram", "num_speculative_tokens": _NUM_DRAFT_TOKENS},
        "draft": {"draft_model": str(draft), "num_speculative_tokens": _NUM_DRAFT_TOKENS},
    }
    config = EngineConfig(
        str(target),
        dtype=args.dtype,
        num_threads=args.threads,
        compile_forward=False,
        enable_prefix_caching=False,
        kv_cache_memory="512MiB",
        **settings[method],
    )
    return Engine(config, progress=lambda _: None)


def measured_rows(
    engines: dict[str, Engine], prompts: Prompts, batch_size: int, args: argparse.Namespace
) -> list[list[str]]:
    """Measure each method, and return one row of the table for each method."""
    runs: dict[str, list[Measurement]] = {
        method: [] for method in engines if method in prompts.methods
    }
    for _ in range(1 + args.rounds):
        for method, runs_of_method in runs.items():
            runs_of_method.append(run_prompts(engines[method], prompts, batch_size, args.tokens))
    # The first round is ignored, because it warms up the caches.
    measured = {method: runs_of_method[1:] for method, runs_of_method in runs.items()}
    return [
        [prompts.kind, str(batch_size), method, *cells(measurements, measured["off"])]
        for method, measurements in measured.items()
    ]


def cells(measurements: Sequence[Measurement], plain: Sequence[Measurement]) -> list[str]:
    """Return the results of one method as cells. `plain` has the same rounds without drafts."""
    rounds = list(zip(measurements, plain, strict=True))
    speed = statistics.median(run.tokens_per_s for run in measurements)
    ratio = statistics.median(run.tokens_per_s / base.tokens_per_s for run, base in rounds)
    cpu_ratio = statistics.median(
        run.tokens_per_cpu_s / base.tokens_per_cpu_s for run, base in rounds
    )
    last = measurements[-1]
    accepted = "-" if last.acceptance is None else f"{last.acceptance:.0%}"
    return [f"{speed:.0f}", f"{ratio:.3f}", f"{cpu_ratio:.3f}", accepted, f"{last.mean_draft:.1f}"]


def run_prompts(engine: Engine, prompts: Prompts, batch_size: int, max_tokens: int) -> Measurement:
    """Answer all prompts, `batch_size` at the same time, and measure the speed of decode."""
    before = engine.stats()
    seconds = cpu_seconds = 0.0
    num_tokens = 0
    numbers = range(len(prompts.token_ids))
    for start in numbers[::batch_size]:
        for number in numbers[start : start + batch_size]:
            add_request(engine, prompts, number, max_tokens)
        # Only the steps after the prefill of the batch are measured.
        while engine.stats().num_requests_waiting:
            engine.step()
        cpu_begin = time.process_time()
        for step in timed_steps(engine, time.perf_counter):
            seconds += step.seconds
            num_tokens += sum(len(update.new_token_ids) for update in step.updates)
        cpu_seconds += time.process_time() - cpu_begin
    acceptance, mean_draft = draft_figures(before, engine.stats())
    return Measurement(num_tokens / seconds, num_tokens / cpu_seconds, acceptance, mean_draft)


def add_request(engine: Engine, prompts: Prompts, number: int, max_tokens: int) -> None:
    """Add a request to the engine. `number` is the index of the prompt and also the seed."""
    params = SamplingParams(
        temperature=prompts.temperature, max_tokens=max_tokens, ignore_eos=True, seed=number
    )
    engine.add_request(str(number), prompts.token_ids[number], params)


def draft_figures(before: EngineStats, after: EngineStats) -> tuple[float | None, float]:
    """Return the share of accepted draft tokens and the mean length of a draft.

    `before` and `after` are the statistics of the engine before and after a run. If the run had no
    drafts, return None and 0.
    """
    num_drafts = after.num_drafts - before.num_drafts
    num_proposed = after.num_proposed_tokens - before.num_proposed_tokens
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    if not num_proposed:
        return None, 0.0
    return num_accepted / num_proposed, num_proposed / num_drafts


if __name__ == "__main__":
    main()
