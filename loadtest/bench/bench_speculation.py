"""Compare the speed of decode with and without speculative decoding.

    python -m loadtest.bench.bench_speculation --model demo/chat --draft-model /models/small
    python -m loadtest.bench.bench_speculation --truncate 1          # drafts from the first layer
    python -m loadtest.bench.bench_speculation --grow 12 --rounds 5
    python -m loadtest.bench.bench_speculation --grow 10 --train-draft 1

The target is the large model, which is a demo model of this repository. The prompts are dialogues
of the kind on which the demo model was trained. The draft model is one of these:

- with --draft-model, another checkpoint
- with --truncate, the first layers of the target
- with --train-draft, the first layers of the demo model after some minutes of training
- with --grow, the demo model itself. The target then gets additional layers that do not change the
  logits, so that a step of the target costs as much as a step of a larger model.

The table also has rows for prompts of random tokens. The answers to these prompts contain few
copies of the prompts. In each round, all engines run one after the other. The ratio of two speeds
is computed from the same round, so that other programs on the machine influence both speeds
equally. On a busy machine, the ratios of the speeds by CPU time are more exact, but only with one
thread.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from nereid_backend import Engine, EngineConfig, SamplingParams
from nereid_backend.core.outputs import EngineStats
from transformers import AutoTokenizer

from loadtest import command_line
from loadtest.bench.created_models.grown_models import save_with_layers
from loadtest.bench.created_models.trained_draft import trained_draft
from loadtest.bench.markdown_table import table

# The programs in the folder `demo` import each other by their short names.
sys.path.insert(0, str(Path(__file__).parents[2] / "demo"))
from chat_format import prompt_text
from evaluate import held_out_dialogues
from lessons import SKILLS

_METHODS = ("off", "ngram", "draft")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The speed of one run, and its drafts.

    Attributes:
        tokens_per_s: the number of tokens per second.
        tokens_per_cpu_s: the number of tokens per second of CPU time. The CPU time is the sum over
            all threads.
        acceptance: the share of draft tokens that were accepted; None without drafts.
        mean_draft: the mean number of tokens in a draft.
    """

    tokens_per_s: float
    tokens_per_cpu_s: float
    acceptance: float | None
    mean_draft: float


def main() -> None:
    """Measure all methods, and print a table."""
    args = arguments().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target, draft = models(args, Path(folder))
        prompts = {"dialogues": dialogues(args), "random": random_prompts(args)}
        engines = {
            method: open_engine(target, draft, method, args)
            for method in _METHODS
            if method != "draft" or draft is not None
        }
        rows = []
        for batch_size in args.batch:
            for kind, kind_prompts in prompts.items():
                rows += measure(engines, kind, kind_prompts, batch_size, args)
        for engine in engines.values():
            engine.close()
    names = ["prompts", "batch", "drafts", "tokens/s", "ratio", "ratio by CPU time", "accepted"]
    print(f"\nMedian of {args.rounds} rounds, {args.tokens} tokens for each answer.\n")
    print(table([*names, "draft length"], rows))


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    add("--model", type=Path, default=Path("demo/chat"), help="folder of the target")
    add("--draft-model", type=Path, help="folder of the draft model")
    add("--truncate", type=int, default=0, help="layers of the target that are the draft model")
    add("--train-draft", type=int, default=0, help="layers of a draft model that is trained")
    add("--grow", type=int, default=0, help="layers that are added to the target")
    add("--num-drafts", type=int, default=4, help="largest number of draft tokens in a step")
    add("--batch", type=int, nargs="+", default=[1, 8], help="requests at the same time")
    add("--temperature", type=float, default=0.0, help="temperature of all requests")
    add("--tokens", type=int, default=100, help="tokens of each answer")
    add("--num-prompts", type=int, default=16, help="number of prompts")
    add("--rounds", type=int, default=3, help="number of rounds")
    add("--threads", type=int, default=1, help="number of threads")
    add("--dtype", default="float32", choices=["float32", "bfloat16"], help="dtype of the models")
    add("--stops", action="store_true", help="answers end with the end-of-sequence token")
    return parser


def models(args: argparse.Namespace, folder: Path) -> tuple[Path, Path | None]:
    """Return the folders of the target and of the draft model, and create them if necessary."""
    target, draft = args.model, args.draft_model
    if args.grow:
        draft = draft or args.model
        target = folder / "target"
        save_with_layers(args.model, target, args.grow, is_addition=True)
    if args.truncate:
        draft = folder / "draft"
        save_with_layers(args.model, draft, args.truncate, is_addition=False)
    if args.train_draft:
        draft = trained_draft(args.model, args.train_draft, folder)
    return target, draft


def dialogues(args: argparse.Namespace) -> list[list[int]]:
    """Return the prompts of dialogues that the demo model has not seen in training."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    skills = list(SKILLS)
    prompts = []
    for index in range(args.num_prompts):
        (dialogue,) = held_out_dialogues(skills[index % len(skills)], True, 1, index)
        text = prompt_text(tokenizer, dialogue)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return prompts


def random_prompts(args: argparse.Namespace) -> list[list[int]]:
    """Return prompts of random tokens."""
    rng = random.Random(0)
    size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    return [[rng.randrange(3, size) for _ in range(200)] for _ in range(args.num_prompts)]


def open_engine(target: Path, draft: Path | None, method: str, args: argparse.Namespace) -> Engine:
    """Return an engine that uses one of `_METHODS`."""
    settings = {
        "off": {"num_speculative_tokens": 0},
        "ngram": {"speculative_method": "ngram", "num_speculative_tokens": args.num_drafts},
        "draft": {"draft_model": str(draft), "num_speculative_tokens": args.num_drafts},
    }[method]
    config = EngineConfig(
        str(target),
        dtype=args.dtype,
        num_threads=args.threads,
        compile_forward=False,
        enable_prefix_caching=False,
        kv_cache_memory="512MiB",
        **settings,
    )
    return Engine(config, progress=lambda _: None)


def measure(
    engines: dict[str, Engine],
    kind: str,
    prompts: list[list[int]],
    batch_size: int,
    args: argparse.Namespace,
) -> list[list[str]]:
    """Return one row of the table for each method."""
    # The answers to random prompts must be random, because an answer at temperature 0 would soon
    # repeat itself. At temperature 1000, all tokens are about equally likely. The draft model and
    # the target use the same random numbers, so nearly all draft tokens would then be accepted. The
    # draft model is therefore not measured with random prompts.
    temperature = args.temperature if kind == "dialogues" else 1000.0
    chosen = {m: e for m, e in engines.items() if kind == "dialogues" or m != "draft"}
    runs: dict[str, list[Measurement]] = {method: [] for method in chosen}
    for round_number in range(args.rounds + 1):
        for method, engine in chosen.items():
            run = run_prompts(engine, prompts, batch_size, temperature, args)
            if round_number > 0:  # The first round only warms up the caches.
                runs[method].append(run)
    rows = []
    for method, measurements in runs.items():
        pairs = list(zip(measurements, runs["off"], strict=True))
        speed = statistics.median(run.tokens_per_s for run in measurements)
        ratio = statistics.median(run.tokens_per_s / plain.tokens_per_s for run, plain in pairs)
        cpu_ratio = statistics.median(
            run.tokens_per_cpu_s / plain.tokens_per_cpu_s for run, plain in pairs
        )
        last = measurements[-1]
        accepted = "-" if last.acceptance is None else f"{last.acceptance:.0%}"
        rows.append(
            [
                kind,
                str(batch_size),
                method,
                f"{speed:.0f}",
                f"{ratio:.3f}",
                f"{cpu_ratio:.3f}",
                accepted,
                f"{last.mean_draft:.1f}",
            ]
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def run_prompts(
    engine: Engine,
    prompts: list[list[int]],
    batch_size: int,
    temperature: float,
    args: argparse.Namespace,
) -> Measurement:
    """Answer all prompts, `batch_size` at the same time, and measure the speed of decode.

    Only the steps after the prefill of a batch are timed.
    """
    before = engine.stats()
    seconds = cpu_seconds = 0.0
    num_tokens = 0
    for start in range(0, len(prompts), batch_size):
        for index, prompt in enumerate(prompts[start : start + batch_size], start):
            params = SamplingParams(
                temperature=temperature,
                max_tokens=args.tokens,
                ignore_eos=not args.stops,
                seed=index,
            )
            engine.add_request(str(index), prompt, params)
        while engine.stats().num_requests_waiting:
            engine.step()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        while engine.has_work():
            num_tokens += sum(len(update.new_token_ids) for update in engine.step())
        seconds += time.perf_counter() - begin
        cpu_seconds += time.process_time() - cpu_begin
    speeds = num_tokens / seconds, num_tokens / cpu_seconds
    return summarise(speeds, before, engine.stats())


def summarise(speeds: tuple[float, float], before: EngineStats, after: EngineStats) -> Measurement:
    """Return the measurement of a run from the counters before and after the run."""
    num_drafts = after.num_drafts - before.num_drafts
    num_proposed = after.num_proposed_tokens - before.num_proposed_tokens
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    if not num_proposed:
        return Measurement(*speeds, None, 0.0)
    return Measurement(*speeds, num_accepted / num_proposed, num_proposed / num_drafts)


if __name__ == "__main__":
    main()
