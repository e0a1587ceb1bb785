"""Train the demo chat model from nothing: its data, its tokenizer and its weights from one seed."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from chat_format import (
    END_OF_TEXT,
    TEMPLATE_FILE,
    TURN_END,
    Encoder,
    Sample,
    prompt_text,
    reply_text,
    train_tokenizer,
)
from lessons import training_dialogue
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


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the checkpoint."""

    seed: int = 1
    steps: int = 1933
    dialogues_per_step: int = 40
    matrix_lr: float = 0.02
    other_lr: float = 4e-3
    weight_decay: float = 0.05
    warmup_steps: int = 40
    decay_steps: int = 500
    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 5
    num_heads: int = 6
    num_kv_heads: int = 2
    workers: int = 2


def plain_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention as matrix products: for short rows faster than SDPA's backward.

    Shapes: query [B, H, T, D]; key, value [B, G, T, D]; returns [B, T, H, D].
    """
    del module, attention_mask
    batch, heads, length, dim = query.shape
    groups = key.shape[1]
    query = (query * scaling).reshape(batch, groups, heads // groups * length, dim)
    scores = (query @ key.transpose(-1, -2)).view(batch, groups, -1, length, length)
    future = torch.full((length, length), -torch.inf, dtype=scores.dtype).triu(1)
    weights = torch.softmax(scores + future, -1, dtype=value.dtype)
    mixed = weights.view(batch, groups, -1, length) @ value
    return mixed.view(batch, heads, length, dim).transpose(1, 2).contiguous(), None


def make_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the text of some training dialogues."""
    rng = Random(f"tokenizer {recipe.seed}")
    dialogues = [training_dialogue(rng) for _ in range(6000)]
    plain = train_tokenizer([], recipe.vocab_size)  # renders, but knows only bytes
    texts = [prompt_text(plain, d) + reply_text(d.messages[-1], d.thinking) for d in dialogues]
    return train_tokenizer(texts, recipe.vocab_size)


def make_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 of the recipe's size, float32."""
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


def batches(samples: list[Sample], max_tokens: int = 1024) -> Iterator[tuple[Tensor, Tensor]]:
    """Group samples of similar length into padded rows.

    Padding is on the right of causal attention, so nothing sees it and no mask is needed.

    Yields:
        token_ids [B, T] int64, and labels [B, T] int64: the next token, or -100.
    """
    rows: list[Sample] = []
    for sample in [*sorted(samples, key=lambda s: len(s.token_ids)), None]:
        if rows and (sample is None or len(sample.token_ids) * (len(rows) + 1) > max_tokens):
            longest = len(rows[-1].token_ids)
            token_ids = torch.zeros(len(rows), longest, dtype=torch.long)
            labels = torch.full((len(rows), longest), -100)
            for index, row in enumerate(rows):
                ids = torch.tensor(row.token_ids)
                token_ids[index, : len(ids)] = ids
                wanted = torch.tensor(row.is_target[1:])
                labels[index, : len(ids) - 1] = torch.where(wanted, ids[1:], -100)
            yield token_ids, labels
            rows = []
        if sample is not None:
            rows.append(sample)


class Optimizer:
    """Muon for the layers' matrices, AdamW for the embedding and the norms; one schedule."""

    def __init__(self, model: Qwen3ForCausalLM, recipe: Recipe) -> None:
        layers = model.model.layers
        matrices = [p for p in layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
        self._parts: list[tuple[torch.optim.Optimizer, float]] = [
            (
                torch.optim.Muon(
                    matrices, lr=recipe.matrix_lr, weight_decay=recipe.weight_decay, momentum=0.95
                ),
                recipe.matrix_lr,
            ),
            (
                torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
                recipe.other_lr,
            ),
        ]
        self._recipe = recipe

    def step(self, step: int) -> None:
        """Apply the gradients and clear them; linear warm-up, at last linear decay to zero."""
        warmup = min(1.0, (step + 1) / self._recipe.warmup_steps)
        scale = warmup * min(1.0, (self._recipe.steps - step) / self._recipe.decay_steps)
        for optimizer, lr in self._parts:
            optimizer.param_groups[0]["lr"] = lr * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def loss_sum(model: Qwen3ForCausalLM, token_ids: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy summed over the targets; logits are computed for targets alone."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state
        is_target = labels != -100
        logits = model.lm_head(hidden[is_target])
    return F.cross_entropy(logits.float(), labels[is_target], reduction="sum")


class Gradients:
    """Mean gradients of a step's batches, computed by single-threaded workers side by side.

    Every batch has its own gradients, added in a fixed order: how the workers are scheduled changes
    nothing, and on a busy machine nobody waits at the barriers of a shared matrix product.
    """

    def __init__(self, model: Qwen3ForCausalLM, workers: int) -> None:
        torch.set_num_threads(1)
        self._model = model
        self._parameters = list(model.parameters())
        self._pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))

    def compute(self, samples: list[Sample]) -> float:
        """Fill every parameter's `grad`; return the mean loss per target."""
        num_targets = sum(sum(sample.is_target) for sample in samples)

        def one(batch: tuple[Tensor, Tensor]) -> tuple[float, tuple[Tensor, ...]]:
            loss = loss_sum(self._model, *batch) / num_targets
            return loss.item(), torch.autograd.grad(loss, self._parameters)

        losses, gradients = zip(*self._pool.map(one, batches(samples)), strict=True)
        for parameter, parts in zip(self._parameters, zip(*gradients, strict=True), strict=True):
            parameter.grad = functools.reduce(torch.add, parts)
        return sum(losses)


def continue_from(folder: Path, recipe: Recipe) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Take the tokenizer and the weights of an earlier checkpoint, under the template of today."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE_FILE.read_text()
    model = make_model(recipe, tokenizer)
    model.load_state_dict(Qwen3ForCausalLM.from_pretrained(folder).state_dict())
    return model, tokenizer


def train(
    recipe: Recipe, start_from: Path | None = None
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast, dict[str, float]]:
    """Run the whole recipe, printing a line now and then."""
    if start_from is None:
        tokenizer = make_tokenizer(recipe)
        model = make_model(recipe, tokenizer)
    else:
        model, tokenizer = continue_from(start_from, recipe)
    print(f"{model.num_parameters() / 1e6:.2f} M parameters, {len(tokenizer)} tokens", flush=True)
    encoder, optimizer = Encoder(tokenizer), Optimizer(model, recipe)
    gradients = Gradients(model, recipe.workers)
    begun, num_tokens, average = time.monotonic(), 0, math.nan
    for step in range(recipe.steps):
        rng = Random(f"step {step} of {recipe.seed}")
        samples = encoder.encode([training_dialogue(rng) for _ in range(recipe.dialogues_per_step)])
        loss = gradients.compute(samples)
        optimizer.step(step)
        num_tokens += sum(len(sample.token_ids) for sample in samples)
        average = loss if math.isnan(average) else 0.98 * average + 0.02 * loss
        if step % 25 == 0 or step == recipe.steps - 1:
            minutes = (time.monotonic() - begun) / 60
            left = minutes / (step + 1) * (recipe.steps - step - 1)
            speed = num_tokens / minutes / 60
            print(
                f"step {step:5d}/{recipe.steps}  loss {average:.4f}  {speed:6.0f} tokens/s"
                f"  {minutes:5.1f} min, {left:5.1f} to go",
                flush=True,
            )
    figures = {
        "final_loss": round(average, 4),
        "num_tokens": num_tokens,
        "minutes": round(minutes, 1),
    }
    return model, tokenizer, figures


def save(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    training: dict[str, object],
) -> None:
    """Write the checkpoint in Hugging Face layout, with a record of its training."""
    ids = tokenizer.convert_tokens_to_ids
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[ids(TURN_END), ids(END_OF_TEXT)],
        pad_token_id=ids(END_OF_TEXT),
    )
    model.set_attn_implementation("sdpa")
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(training, indent=2) + "\n")


def main() -> None:
    """Parse the command line, train, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=FOLDER, help="folder to write (default: %(default)s)"
    )
    parser.add_argument("--start-from", type=Path, help="checkpoint to continue (default: none)")
    for name, value in asdict(Recipe()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(value), default=value, help="default: %(default)s")
    arguments = vars(parser.parse_args())
    output, start_from = arguments.pop("output"), arguments.pop("start_from")
    recipe = Recipe(**arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    model, tokenizer, figures = train(recipe, start_from)
    training: dict[str, object] = {"recipe": asdict(recipe), **figures, "torch": torch.__version__}
    if start_from is not None:
        training["started_from"] = json.loads((start_from / "training.json").read_text())
    save(model, tokenizer, output, training)
    print(f"saved {output}")


if __name__ == "__main__":
    main()
