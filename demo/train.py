"""Train the demo chat model. Its data, its tokenizer and its weights depend only on one seed."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch
import transformers
from chat_format import (
    END_OF_TEXT,
    TURN_END,
    Encoder,
    Sample,
    join,
    prompt_text,
    reply_text,
    train_tokenizer,
)
from lessons import training_group
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FOLDER = Path(__file__).with_name("chat")
WORK = Path(__file__).with_name("unfinished")
NO_TARGET = -100
"""The label of a token that the model need not predict."""


@dataclass(frozen=True)
class Recipe:
    """The parameters of a training run. They determine the checkpoint completely."""

    seed: int = 1
    steps: int = 3000
    groups_per_step: int = 32
    matrix_lr: float = 0.02
    other_lr: float = 4e-3
    weight_decay: float = 0.05
    warmup_steps: int = 60
    decay_steps: int = 700
    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 5
    num_heads: int = 6
    num_kv_heads: int = 2
    workers: int = 2


def attention_mask(branch: Tensor) -> Tensor:
    """Return the mask that hides later tokens and other branches.

    Args:
        branch: [B, T], the branch of each token, 0 for the prefix that all branches see.

    Returns:
        [B, 1, T, T] bfloat16: zero for a visible key, else -inf.
    """
    length = branch.shape[1]
    query_branch, key_branch = branch[:, :, None], branch[:, None, :]
    is_not_later = torch.ones(length, length, dtype=torch.bool).tril()
    is_visible = is_not_later & ((key_branch == 0) | (key_branch == query_branch))
    mask = torch.zeros(is_visible.shape, dtype=torch.bfloat16).masked_fill(~is_visible, -torch.inf)
    return mask[:, None]


def plain_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute causal attention with matrix products, which are faster than SDPA for short rows.

    The model calls this function with the arguments of an attention function of transformers.

    Shapes: query [B, H, T, D]; key, value [B, G, T, D]; attention_mask [B, 1, T, T]; returns
    [B, T, H, D].
    """
    del module
    assert attention_mask is not None
    batch, heads, length, dim = query.shape
    groups = key.shape[1]
    # The query heads that share a key head become the rows of one matrix.
    rows = heads // groups * length
    query = (query * scaling).reshape(batch, groups, rows, dim)
    scores = (query @ key.transpose(-1, -2)).view(batch, groups, -1, length, length)
    weights = torch.softmax(scores + attention_mask[:, None], -1, dtype=value.dtype)
    mixed = weights.view(batch, groups, rows, length) @ value
    return mixed.view(batch, heads, length, dim).transpose(1, 2).contiguous(), None


def make_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the text of 6000 training dialogues, one from each of 6000 groups."""
    rng = Random(f"tokenizer {recipe.seed}")
    dialogues = [training_group(rng)[0] for _ in range(6000)]
    renderer = train_tokenizer([], recipe.vocab_size)  # only renders the chat template
    texts = [prompt_text(renderer, d) + reply_text(d.messages[-1], d.thinking) for d in dialogues]
    return train_tokenizer(texts, recipe.vocab_size)


def make_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a randomly initialised Qwen3 model of the recipe's size in float32."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        use_cache=True,
        dtype="float32",
    )
    torch.manual_seed(recipe.seed)
    model = Qwen3ForCausalLM(config).train()
    AttentionInterface.register("demo_plain", plain_attention)
    model.set_attn_implementation("demo_plain")
    return model


@dataclass(frozen=True)
class Batch:
    """Padded rows of samples, each [B, T] int64.

    Attributes:
        token_ids: The token ids.
        labels: The next token of the same branch, or `NO_TARGET`.
        branch: The branch of each token; -1 for padding.
        positions: The position of each token.
    """

    token_ids: Tensor
    labels: Tensor
    branch: Tensor
    positions: Tensor


def pad(rows: list[list[int]], value: int) -> Tensor:
    """Return the rows as one tensor, with `value` at the right of the shorter rows."""
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


def next_tokens(sample: Sample) -> list[int]:
    """Return for each token the next token of its branch, or `NO_TARGET`."""
    labels = [NO_TARGET] * len(sample.token_ids)
    for position, (branch, next_branch) in enumerate(itertools.pairwise(sample.branch)):
        if branch == next_branch and sample.is_target[position + 1]:
            labels[position] = sample.token_ids[position + 1]
    return labels


def make_batch(samples: Sequence[Sample]) -> Batch:
    """Pad samples to the same length.

    The padding is on the right, where no other token attends to it.
    """
    return Batch(
        token_ids=pad([sample.token_ids for sample in samples], 0),
        labels=pad([next_tokens(sample) for sample in samples], NO_TARGET),
        branch=pad([sample.branch for sample in samples], -1),
        positions=pad([sample.positions for sample in samples], 0),
    )


def batches(
    samples: list[Sample], max_tokens: int = 1024, max_ratio: float = 1.4
) -> Iterator[Batch]:
    """Group samples of similar length into batches.

    Args:
        samples: The samples.
        max_tokens: The largest number of tokens of a batch, with padding.
        max_ratio: The largest ratio of the longest to the shortest sample of a batch.
    """
    rows: list[Sample] = []
    for sample in sorted(samples, key=len):
        num_tokens = len(sample) * (len(rows) + 1)
        if rows and (num_tokens > max_tokens or len(sample) > max_ratio * len(rows[0])):
            yield make_batch(rows)
            rows = []
        rows.append(sample)
    if rows:
        yield make_batch(rows)


class Schedule(Protocol):
    """The parameters of a recipe that determine the learning rates."""

    steps: int
    matrix_lr: float
    other_lr: float
    weight_decay: float
    warmup_steps: int
    decay_steps: int


class Optimizer:
    """Muon for the matrices of the layers, and AdamW for the embedding and the norms."""

    def __init__(
        self, model: torch.nn.Module, layers: Iterable[torch.nn.Module], recipe: Schedule
    ) -> None:
        """Create the two optimizers; `layers` are the layers of the model."""
        matrices = [p for layer in layers for p in layer.parameters() if p.ndim == 2]
        matrix_ids = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in matrix_ids]
        self._recipe = recipe
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=recipe.matrix_lr, weight_decay=recipe.weight_decay, momentum=0.95
            ),
            torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def step(self, step: int) -> None:
        """Apply the gradients and clear them.

        The learning rate rises linearly, stays constant, and decays linearly to zero at the end.

        Args:
            step: The index of this step.
        """
        warmup = min(1.0, (step + 1) / self._recipe.warmup_steps)
        decay = min(1.0, (self._recipe.steps - step) / self._recipe.decay_steps)
        for optimizer in self._optimizers:
            optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * (warmup * decay)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        """Return the state of the two optimizers."""
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Restore the state that `state` returned."""
        for optimizer, optimizer_state in zip(self._optimizers, state, strict=True):
            optimizer.load_state_dict(optimizer_state)


def loss_sum(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    """Return the sum of the targets' cross entropies. Logits are computed for targets only."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            attention_mask={"full_attention": attention_mask(batch.branch)},
            use_cache=False,
        ).last_hidden_state
        is_target = batch.labels != NO_TARGET
        logits = model.lm_head(hidden[is_target])
    return F.cross_entropy(logits.float(), batch.labels[is_target], reduction="sum")


class Gradients:
    """The mean gradients of a step's batches, computed by single-threaded workers in parallel.

    The gradients of the batches are added in a fixed order, so the result does not depend on the
    order in which the workers finish. On a busy machine, this is faster than matrix products of
    several threads.
    """

    def __init__(self, model: Qwen3ForCausalLM, workers: int) -> None:
        torch.set_num_threads(1)
        self._model = model
        self._parameters = list(model.parameters())
        self._pool = single_threaded_workers(workers)

    def compute(self, samples: list[Sample]) -> float:
        """Store the gradients in the parameters and return the mean loss of a target."""
        num_targets = sum(sum(sample.is_target) for sample in samples)

        def compute_batch(batch: Batch) -> tuple[float, tuple[Tensor, ...]]:
            loss = loss_sum(self._model, batch) / num_targets
            return loss.item(), torch.autograd.grad(loss, self._parameters)

        results = self._pool.map(compute_batch, batches(samples))
        losses, batch_gradients = zip(*results, strict=True)
        for parameter, *gradients in zip(self._parameters, *batch_gradients, strict=True):
            parameter.grad = functools.reduce(torch.add, gradients)
        return sum(losses)


def single_threaded_workers(count: int) -> ThreadPoolExecutor:
    """Return a pool of threads, each of which runs the operations of torch in one thread."""
    return ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))


class Progress:
    """The time, the tokens and the loss of a run so far."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_steps = 0
        self.num_tokens = 0
        self.loss = math.nan

    def add(self, samples: list[Sample], loss: float, seconds: float) -> None:
        """Add a step. The loss is smoothed over about 50 steps."""
        self.seconds += seconds
        self.num_steps += 1
        self.num_tokens += sum(len(sample) for sample in samples)
        self.loss = loss if math.isnan(self.loss) else 0.98 * self.loss + 0.02 * loss

    def line(self, steps: int) -> str:
        """Return a line for the console."""
        seconds_left = self.seconds / self.num_steps * (steps - self.num_steps)
        return (
            f"step {self.num_steps:5d}/{steps}  loss {self.loss:.4f}"
            f"  {self.num_tokens / self.seconds:6.0f} tokens/s"
            f"  {self.seconds / 60:5.1f} min, {seconds_left / 60:5.1f} to go"
        )

    def record(self, recipe: Recipe) -> dict[str, object]:
        """Return the content of training.json."""
        return {
            "recipe": asdict(recipe),
            "final_loss": round(self.loss, 4),
            "num_tokens": self.num_tokens,
            "minutes": round(self.seconds / 60, 1),
            "torch": torch.__version__,
        }


class Run:
    """A training run that can be interrupted and continued with the same result.

    The run stores its state after every 100 steps.

    The work folder contains the last checkpoint and the file `state.pt`. This file contains the
    recipe, the progress and the state of the optimizers. A run can start from the weights of an
    older checkpoint. The record of the new checkpoint then contains the record of the older one
    under the key "previous".
    """

    def __init__(self, recipe: Recipe, work: Path, start_from: Path | None = None) -> None:
        self._recipe, self._work = recipe, work
        self._state_file = work / "state.pt"
        self._previous = read_record(start_from)
        state = self._load_state()
        checkpoint = start_from if state is None else work
        if checkpoint is None:
            self._tokenizer = make_tokenizer(recipe)
        else:
            self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._model = make_model(recipe, self._tokenizer)
        self._optimizer = Optimizer(self._model, self._model.model.layers, recipe)
        self._progress = Progress()
        if state is not None:
            self._model.load_state_dict(state["model"])
            self._optimizer.load(state["optimizer"])
            vars(self._progress).update(state["progress"])
        elif start_from is not None:
            self._model.load_state_dict(Qwen3ForCausalLM.from_pretrained(start_from).state_dict())
        size = self._model.num_parameters() / 1e6
        print(f"{size:.2f} M parameters, {len(self._tokenizer)} tokens", flush=True)

    def _load_state(self) -> dict[str, Any] | None:
        """Return the state of an interrupted run with the same recipe, if there is one."""
        if not self._state_file.exists():
            return None
        state: dict[str, Any] = torch.load(self._state_file, weights_only=True)
        if state["recipe"] != asdict(self._recipe) or state["previous"] != self._previous:
            print(f"{self._work} contains a run with another recipe, which is overwritten")
            return None
        return state

    def train(self, minutes: float) -> bool:
        """Train to the end, or for some minutes if `minutes` is positive.

        Returns:
            Whether the run has reached its last step.
        """
        recipe, progress = self._recipe, self._progress
        encoder, gradients = Encoder(self._tokenizer), Gradients(self._model, recipe.workers)
        run_start = time.monotonic()
        while progress.num_steps < recipe.steps:
            step_start, step = time.monotonic(), progress.num_steps
            rng = Random(f"step {step} of {recipe.seed}")
            groups = [training_group(rng) for _ in range(recipe.groups_per_step)]
            samples = [join(encoder.encode(group)) for group in groups]
            loss = gradients.compute(samples)
            self._optimizer.step(step)
            progress.add(samples, loss, time.monotonic() - step_start)
            if progress.num_steps % 25 == 0:
                print(progress.line(recipe.steps), flush=True)
            if progress.num_steps % 100 == 0:
                self._store()
                if 0 < minutes * 60 <= time.monotonic() - run_start:
                    return False
        return True

    def _store(self) -> None:
        """Write the checkpoint and the state to the work folder."""
        self.save(self._work)
        state = {
            "recipe": asdict(self._recipe),
            "previous": self._previous,
            "progress": vars(self._progress),
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state(),
        }
        store_state(state, self._state_file)

    def save(self, folder: Path) -> None:
        """Write the checkpoint with the record of its training."""
        record = self._progress.record(self._recipe) | {"previous": self._previous}
        save(self._model, self._tokenizer, folder, record)


def store_state(state: dict[str, Any], file: Path) -> None:
    """Write the state of a run. A killed run leaves the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new_file = file.with_suffix(".new")
    torch.save(state, new_file)
    new_file.replace(file)


def read_record(folder: Path | None) -> dict[str, Any] | None:
    """Return the content of a checkpoint's training.json, or None if there is no checkpoint."""
    if folder is None:
        return None
    record: dict[str, Any] = json.loads((folder / "training.json").read_text())
    return record


def generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """Return the configuration of greedy decoding that stops at the end of the turn."""
    turn_end, end_of_text = tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
    return GenerationConfig(
        do_sample=False, eos_token_id=[turn_end, end_of_text], pad_token_id=end_of_text
    )


def save(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    training: dict[str, object],
) -> None:
    """Write the checkpoint in Hugging Face layout, with a record of its training.

    Each file is replaced by a single operation, so that a killed run leaves only complete files.
    """
    model.generation_config = generation_config(tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as new:
        model.set_attn_implementation("sdpa")
        model.eval().save_pretrained(new)
        tokenizer.save_pretrained(new)
        model.train().set_attn_implementation("demo_plain")
        (Path(new) / "training.json").write_text(json.dumps(training, indent=2) + "\n")
        for file in sorted(Path(new).iterdir()):
            file.replace(folder / file.name)


def make_parser(
    description: str | None, output: Path, work: Path, recipe: dict[str, int | float]
) -> argparse.ArgumentParser:
    """Return a parser with a flag for each field of a recipe, and flags for the folders of a run.

    `output`, `work` and the values of `recipe` are the default values.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--output", type=Path, default=output, help="folder to write (default: %(default)s)"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=work,
        help="folder of an unfinished run, which is continued (default: %(default)s)",
    )
    parser.add_argument(
        "--start-from",
        type=Path,
        metavar="FOLDER",
        help="a checkpoint that the training improves (default: random weights)",
    )
    for name, value in recipe.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(value), default=value, help="default: %(default)s")
    return parser


def main() -> None:
    """Parse the command line and train."""
    parser = make_parser(__doc__, FOLDER, WORK, asdict(Recipe()))
    parser.add_argument(
        "--minutes",
        type=float,
        default=0,
        help="stop after this time; the same command continues the run (default: no limit)",
    )
    arguments = vars(parser.parse_args())
    output, work, minutes, start_from = (
        arguments.pop(name) for name in ("output", "work", "minutes", "start_from")
    )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.utils.logging.disable_progress_bar()
    run = Run(Recipe(**arguments), work, start_from)
    if run.train(minutes):
        run.save(output)
        print(f"saved {output}")
    else:
        print(f"stopped; the same command continues the run in {work}")


if __name__ == "__main__":
    main()
