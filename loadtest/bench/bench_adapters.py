"""Measure how much CPU time LoRA adapters add to decode steps.

    python -m loadtest.bench.bench_adapters --shapes 0.1b                 # random weights
    python -m loadtest.bench.bench_adapters --models demo/chat --compile  # a checkpoint

The program writes random adapters for all linear layers except the output layer. In each round, it
measures a batch without adapters, and then the same batch whose requests take turns with the
adapters. Only steps in which every request generates a token are measured. The table shows the
tokens for each second of CPU time, and the median and the range of the loss over all rounds.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from nereid_backend import Engine, EngineConfig, SamplingParams
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from loadtest import command_line
from loadtest.bench.bench import SHAPES, make_checkpoint
from loadtest.bench.markdown_table import table


def main() -> None:
    """Measure all models, and print a table."""
    args = arguments().parse_args()
    with tempfile.TemporaryDirectory(prefix="nereid-adapters-") as temporary:
        models = [Path(model) for model in args.models]
        for shape in args.shapes:
            models.append(Path(temporary) / shape)
            make_checkpoint(models[-1], shape, args.dtype)
        rows = []
        for number, model in enumerate(models):
            folders = [Path(temporary) / f"{number}-{index}" for index in range(args.adapters)]
            for seed, folder in enumerate(folders):
                write_adapter(folder, model, args.rank, seed)
            rows.append(measure_model(model, folders, args))
            print(rows[-1], file=sys.stderr, flush=True)
    names = ["model", "tokens/CPU s", "with adapters", "loss", "range of the loss"]
    print(
        f"\nBatches of {args.batch} requests, {args.adapters} adapters of rank {args.rank}, "
        f"{args.dtype}, compile_forward={args.compile}, weight_dtype={args.weight_dtype}, "
        f"{args.threads} threads.\n"
    )
    print(table(names, rows))


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    add("--models", nargs="*", default=[], help="folders of checkpoints")
    add("--shapes", nargs="*", default=[], choices=sorted(SHAPES), help="random models")
    add("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="dtype of the model")
    add("--weight-dtype", default="auto", choices=["auto", "int8", "int4"], help="rounded weights")
    add("--batch", type=int, default=16, help="number of requests")
    add("--adapters", type=int, default=4, help="number of adapters")
    add("--rank", type=int, default=8, help="rank of the adapters")
    add("--context", type=int, default=128, help="tokens of each prompt")
    add("--answer", type=int, default=64, help="tokens of each answer")
    add("--rounds", type=int, default=7, help="number of rounds")
    add("--threads", type=int, default=1, help="number of threads")
    add("--compile", action="store_true", help="compile the forward pass before the measurement")
    return parser


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
                matrix = torch.randn(shape, generator=generator) * 0.02
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = matrix
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def measure_model(model: Path, folders: list[Path], args: argparse.Namespace) -> list[str]:
    """Return the row of the table for one model."""
    config = EngineConfig(
        str(model),
        dtype=args.dtype,
        weight_dtype=args.weight_dtype,
        num_threads=args.threads,
        compile_forward=args.compile,
        num_speculative_tokens=0,
        lora_adapters={folder.name: str(folder) for folder in folders},
    )
    engine = Engine(config)
    rng = random.Random(0)
    rates: list[list[float]] = []
    for _ in range(args.rounds + 1):
        without = decode_rate(engine, rng, [""], args)
        rates.append([without, decode_rate(engine, rng, engine.lora_names, args)])
    engine.close()
    del rates[0]  # The first round includes work that happens once.
    losses = [1 - adapted / plain for plain, adapted in rates]
    speeds = [f"{statistics.median(column):.0f}" for column in zip(*rates, strict=True)]
    span = f"{min(losses):.1%} to {max(losses):.1%}"
    return [model.name, *speeds, f"{statistics.median(losses):.1%}", span]


def decode_rate(
    engine: Engine, rng: random.Random, names: list[str], args: argparse.Namespace
) -> float:
    """Measure decode steps that contain all requests. Return the tokens per second of CPU time.

    Args:
        engine: the engine.
        rng: the source of random prompts.
        names: the names of the adapters. The requests use the adapters in turn. "" means no
            adapter.
        args: the command line.
    """
    for number in range(args.batch):
        prompt = [rng.randrange(3, engine.info.vocab_size) for _ in range(args.context)]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=args.answer,
            ignore_eos=True,
            lora_name=names[number % len(names)],
        )
        engine.add_request(str(number), prompt, params)
    times = []
    while engine.has_work():
        started = time.process_time()
        updates = engine.step()
        if len(updates) == args.batch:
            times.append(time.process_time() - started)
    # The first step computes prompts.
    return args.batch * len(times[1:]) / sum(times[1:])


if __name__ == "__main__":
    main()
