"""Measure how much CPU time LoRA adapters add to decode steps.

    python -m loadtest.bench.bench_adapters --shapes 0.1b                 # random weights
    python -m loadtest.bench.bench_adapters --models demo/chat --compile  # a checkpoint

The program writes random adapters for all linear layers except the output layer. In each round, it
measures a batch without adapters, and then a batch whose requests use the adapters in turn. Only
steps in which every request generates a token are measured. The table shows the tokens per second
of CPU time without and with adapters. The column "loss" shows the share of this speed that adapters
cost, as the median of all rounds. The last column shows the range of this share over all rounds.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from nereid_backend import Engine, EngineConfig, SamplingParams
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from loadtest.bench.engine_steps import timed_steps
from loadtest.bench.markdown_table import print_table
from loadtest.bench.random_models import SHAPES, make_checkpoint
from loadtest.bench.random_prompts import random_prompt
from loadtest.command_line import Option, parse_command_line

# The standard deviation of the random weights of adapters.
_WEIGHT_DEVIATION = 0.02

_OPTIONS = {
    "--models": Option([], "folders of checkpoints"),
    "--shapes": Option([], "random models", sorted(SHAPES)),
    "--dtype": Option("bfloat16", "dtype of the model", ["float32", "bfloat16"]),
    "--batch": Option(16, "number of requests"),
    "--adapters": Option(4, "number of adapters"),
    "--rank": Option(8, "rank of the adapters"),
    "--context": Option(128, "tokens of each prompt"),
    "--answer": Option(64, "tokens of each answer"),
    "--rounds": Option(7, "number of rounds"),
    "--threads": Option(1, "number of threads"),
    "--compile": Option(False, "compile the forward pass before the measurement"),
}


class Speeds(NamedTuple):
    """The speeds of one round in tokens per second of CPU time, without and with adapters."""

    plain: float
    adapted: float


def main() -> None:
    """Measure all models, and print a table."""
    args = parse_command_line(__doc__, _OPTIONS)
    print(
        f"Batches of {args.batch} requests, {args.adapters} adapters of rank {args.rank}, "
        f"{args.dtype}, compile_forward={args.compile}, {args.threads} threads.\n"
    )
    with tempfile.TemporaryDirectory(prefix="nereid-adapters-") as temporary:
        models = [Path(model) for model in args.models]
        for shape in args.shapes:
            models.append(Path(temporary) / shape)
            make_checkpoint(models[-1], shape, args.dtype)
        rows = (measure_model(model, args) for model in models)
        head = ["model", "tokens/CPU s", "with adapters", "loss", "range of the loss"]
        print_table(head, rows)


def measure_model(model: Path, args: argparse.Namespace) -> list[str]:
    """Measure one model, and return its row of the table."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="nereid-adapters-") as folder:
        engine = open_engine(model, Path(folder), args)
        speeds = []
        for _ in range(1 + args.rounds):
            plain = decode_speed(engine, rng, [""], args)
            speeds.append(Speeds(plain, decode_speed(engine, rng, engine.lora_names, args)))
        engine.close()
    del speeds[0]  # The first round is slower, because it includes work that is done only once.
    losses = [1 - speed.adapted / speed.plain for speed in speeds]
    return [
        model.name,
        f"{statistics.median(speed.plain for speed in speeds):.0f}",
        f"{statistics.median(speed.adapted for speed in speeds):.0f}",
        f"{statistics.median(losses):.1%}",
        f"{min(losses):.1%} to {max(losses):.1%}",
    ]


def open_engine(model: Path, folder: Path, args: argparse.Namespace) -> Engine:
    """Return an engine with random adapters, which this function writes into `folder`."""
    adapters = {}
    for number in range(args.adapters):
        path = folder / str(number)
        write_adapter(path, model, args.rank, seed=number)
        adapters[path.name] = str(path)
    config = EngineConfig(
        str(model),
        dtype=args.dtype,
        num_threads=args.threads,
        compile_forward=args.compile,
        num_speculative_tokens=0,
        lora_adapters=adapters,
    )
    return Engine(config)


def write_adapter(folder: Path, model: Path, rank: int, seed: int) -> None:
    """Write a random LoRA adapter for all linear layers of a model except the output layer."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in skeleton.named_modules():
        if isinstance(layer, nn.Linear) and layer is not skeleton.get_output_embeddings():
            shapes = {"A": (rank, layer.in_features), "B": (layer.out_features, rank)}
            for letter, shape in shapes.items():
                matrix = torch.randn(shape, generator=generator) * _WEIGHT_DEVIATION
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = matrix
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def decode_speed(
    engine: Engine, rng: random.Random, adapters: list[str], args: argparse.Namespace
) -> float:
    """Answer a batch of requests. Return the tokens per second of CPU time.

    Only steps in which every request gets a token are counted. The requests use `adapters` in turn.
    The name "" means no adapter.
    """
    for number in range(args.batch):
        adapter = adapters[number % len(adapters)]
        params = SamplingParams(
            temperature=0.0, max_tokens=args.answer, ignore_eos=True, lora_name=adapter
        )
        prompt = random_prompt(rng, engine.info.vocab_size, args.context)
        engine.add_request(str(number), prompt, params)
    full_steps = [
        step.seconds
        for step in timed_steps(engine, time.process_time)
        if len(step.updates) == args.batch
    ]
    del full_steps[0]  # The first full step also computes prompts, so it is ignored.
    return float(args.batch * len(full_steps) / sum(full_steps))


if __name__ == "__main__":
    main()
