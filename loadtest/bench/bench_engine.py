"""Compare the tokens per second of the engine with `generate` of transformers, in one process.

    python -m loadtest.bench.bench_engine                  # random weights in the demo's shape
    python -m loadtest.bench.bench_engine --model PATH --batches 1 8 32 --threads 1

The engine and transformers take turns --repeat times, and the table shows the best run of each, so
that other work on the machine affects the figures little. All requests are greedy and have the same
length. The times include the prompts.
"""

import argparse
import contextlib
import io
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from nereid_backend import Engine, EngineConfig, SamplingParams
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging


def make_checkpoint(folder: Path, args: argparse.Namespace) -> Path:
    """Save a small Qwen3 model with random weights in `folder`, and return `folder`."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 64,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def time_of(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the seconds that a call takes, measured with `clock`."""
    started = clock()
    work()
    return clock() - started


def run_reference(model: PreTrainedModel, prompts: list[list[int]], num_tokens: int) -> None:
    """Generate answers to prompts of equal length with transformers, in one batch."""
    ids = torch.tensor(prompts)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )


def profile(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> str:
    """Return the median microseconds of each part of a decode step, as text."""
    runner, scheduler = engine._runner, engine._scheduler
    spent: dict[str, list[float]] = {"plan": [], "model": [], "sample": [], "rest": []}
    for number, prompt in enumerate(prompts):
        engine.add_request(f"profile-{number}", prompt, params)
    from nereid_backend.core.step import StepResult
    from nereid_backend.sampling.sampler import sample

    with torch.inference_mode():
        while engine.has_work():
            marks = [time.perf_counter()]
            plan = scheduler.plan()
            marks.append(time.perf_counter())
            logits = runner._path.forward(plan)
            marks.append(time.perf_counter())
            sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
            sampled = sample(logits, sampling) if sampling else []
            marks.append(time.perf_counter())
            scheduler.commit(plan, StepResult(sampled))
            marks.append(time.perf_counter())
            if plan.num_tokens == len(prompts):
                for name, start, end in zip(spent, marks, marks[1:], strict=False):
                    spent[name].append(end - start)
    if not spent["plan"]:
        return "no step contained all sequences"
    return ", ".join(f"{n} {statistics.median(v) * 1e6:.0f}" for n, v in spent.items())


def main() -> None:
    """Measure all batch sizes, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="folder of a checkpoint (default: a model with random weights)")
    add("--hidden", type=int, default=256, help="hidden size of the random model")
    add("--layers", type=int, default=6, help="number of layers of the random model")
    add("--vocab", type=int, default=4096, help="vocabulary size of the random model")
    add("--batches", type=int, nargs="+", default=[1, 8, 32], help="batch sizes")
    add("--prompt-len", type=int, default=64, help="tokens of each prompt")
    add("--tokens", type=int, default=64, help="tokens of each answer")
    add("--threads", type=int, default=1, help="number of threads")
    add("--repeat", type=int, default=5, help="number of runs, of which the best one counts")
    add("--dtype", default="auto", help="dtype of the engine, as in EngineConfig")
    add(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="`cpu` measures the CPU time of this process, for one thread on a busy machine",
    )
    args = parser.parse_args()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stderr(io.StringIO()):
            path = args.model or str(make_checkpoint(Path(folder), args))
        engine = Engine(EngineConfig(path, dtype=args.dtype, num_threads=args.threads))
        dtype = getattr(torch, engine.info.dtype)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        print(f"{engine.info.architecture}, {engine.info.dtype}, {args.threads} threads,", end=" ")
        print(f"prompt {args.prompt_len}, answer {args.tokens} tokens, {args.clock} clock")
        print("| batch | engine tokens/s | transformers tokens/s | ratio | decode step, us |")
        print("|---|---|---|---|---|")
        for size in args.batches:
            print(measure(engine, model, size, args), flush=True)


def measure(engine: Engine, model: PreTrainedModel, size: int, args: argparse.Namespace) -> str:
    """Measure one batch size, and return its row of the table."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(3, engine.info.vocab_size) for _ in range(args.prompt_len)]
        for _ in range(size)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    ours: list[float] = []
    theirs: list[float] = []
    engine.generate(prompts, params)
    for _ in range(args.repeat):
        ours.append(time_of(lambda: engine.generate(prompts, params), clock))
        theirs.append(time_of(lambda: run_reference(model, prompts, args.tokens), clock))
    total = size * args.tokens
    fast, slow = total / min(ours), total / min(theirs)
    parts = profile(engine, prompts, params)
    return f"| {size} | {fast:.0f} | {slow:.0f} | {fast / slow:.2f} | {parts} |"


if __name__ == "__main__":
    main()
