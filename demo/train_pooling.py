"""Train the demo's embedder and reranker. Everything in the training depends only on one seed."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from lessons.base import is_held_out, vary
from lessons.retrieval import Library, Question, fixed_library, random_library
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

EMBEDDER = Path(__file__).with_name("embed")
RERANKER = Path(__file__).with_name("rerank")
PROMPTS = {"query": "question: ", "document": ""}
_WARMUP_STEPS = 60
_RERANKER_ONLY = frozenset(
    {"reranker_steps", "reranker_learning_rate", "reranker_questions_per_step", "negatives"}
)
_SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


@dataclass(frozen=True)
class Recipe:
    """The parameters of the training. They determine the checkpoints completely.

    Attributes:
        questions_per_step: the number of questions about one library in one step. The embedder
            ranks all passages of the library for each question.
        negatives: the number of wrong passages for each right passage in the reranker's training.
        dimensions: the lengths to which an embedding can be truncated. Each length is trained.
        temperature: the temperature of the softmax over cosine similarities.
    """

    seed: int = 1
    steps: int = 1000
    reranker_steps: int = 850
    learning_rate: float = 1.5e-3
    reranker_learning_rate: float = 1e-3
    questions_per_step: int = 48
    reranker_questions_per_step: int = 20
    negatives: int = 4
    dimensions: tuple[int, ...] = (128, 64, 32)
    temperature: float = 0.05
    vocab_size: int = 2000
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 3
    num_heads: int = 4
    max_length: int = 512


def make_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Train a lower-casing WordPiece tokenizer on the text of some libraries."""
    rng = Random(f"pooling tokenizer {recipe.seed}")
    libraries = [fixed_library(), *(random_library(rng) for _ in range(60))]
    texts = [text for library in libraries for text in library.passages]
    texts += [question.text for library in libraries for question in _trained(library)]
    tokenizer = Tokenizer(models.WordPiece(unk_token=_SPECIAL["unk"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    # The vocabulary contains every printable ASCII character, so that no ASCII word is unknown.
    alphabet = [chr(code) for code in range(33, 127)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=recipe.vocab_size,
        initial_alphabet=alphabet,
        special_tokens=list(_SPECIAL.values()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    cls, sep = (tokenizer.token_to_id(_SPECIAL[name]) for name in ("cls", "sep"))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", sep), ("[CLS]", cls))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=recipe.max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{name}_token": token for name, token in _SPECIAL.items()},
    )


def make_config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, **extra: Any) -> BertConfig:  # noqa: ANN401
    """Return the encoder's configuration and seed torch's generator for the model made next."""
    torch.manual_seed(recipe.seed)
    return BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        max_position_embeddings=recipe.max_length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=tokenizer.pad_token_id,
        **extra,
    )


def embed(model: BertModel, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean of the last hidden states. The mean is not normalised.

    Shapes: batch's tensors [B, T]; returns [B, hidden_size] float32.
    """
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1)


def embedder_loss(
    model: BertModel, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, rng: Random
) -> Tensor:
    """Return the loss of a ranking. Passages that answer the question should come first."""
    library = _library(rng, fixed=0.5)
    questions = rng.sample(_trained(library), recipe.questions_per_step)
    texts = [vary(rng, question.text) for question in questions]
    # Half of the questions have the query prompt, so that the model learns questions with the
    # prompt and without it.
    texts = [PROMPTS["query"] + text if rng.random() < 0.5 else text for text in texts]
    asked = embed(model, tokenizer(texts, padding=True, return_tensors="pt"))
    written = embed(model, tokenizer(list(library.passages), padding=True, return_tensors="pt"))
    is_relevant = torch.zeros(len(questions), len(library.passages), dtype=torch.bool)
    for row, question in enumerate(questions):
        is_relevant[row, list(question.relevant)] = True
    losses = []
    for size in recipe.dimensions:
        left, right = (F.normalize(vectors[:, :size], dim=-1) for vectors in (asked, written))
        logits = torch.log_softmax(left @ right.T / recipe.temperature, dim=-1)
        # The loss is the mean over all right passages, because all of them should be found.
        losses.append(-(logits * is_relevant).sum(-1) / is_relevant.sum(-1))
    return torch.stack(losses).mean()


def reranker_loss(
    model: BertForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    rng: Random,
) -> Tensor:
    """Return the cross entropy of the prediction that a passage answers a question."""
    library = _library(rng, fixed=0.8)
    pairs: list[tuple[str, str]] = []
    labels: list[float] = []
    for question in rng.sample(_trained(library), recipe.reranker_questions_per_step):
        right = rng.choice(sorted(question.relevant))
        wrong = [at for at in range(len(library.passages)) if at not in question.relevant]
        chosen = [right, *_near_misses(library, question, wrong, rng, recipe.negatives)]
        text = vary(rng, question.text)
        pairs += [(text, library.passages[at]) for at in chosen]
        labels += [1.0, *[0.0] * recipe.negatives]
    batch = tokenizer(
        [left for left, _ in pairs], [right for _, right in pairs],
        padding=True, return_tensors="pt",
    )  # fmt: skip
    logits = model(**batch).logits.view(-1, 1 + recipe.negatives)
    # The first loss trains the order of the scores, the second one trains their meaning.
    listwise = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
    target = torch.tensor(labels).view_as(logits)
    weight = torch.where(target > 0, recipe.negatives / 2, 1.0)
    return listwise + F.binary_cross_entropy_with_logits(logits, target, weight=weight)


def train(
    name: str, model: PreTrainedModel, loss_at: Callable[[int], Tensor], steps: int, peak: float
) -> dict[str, float]:
    """Minimise the loss. The learning rate rises, then falls to zero as a cosine."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    begun, average = time.monotonic(), math.nan
    model.train()
    for step in range(steps):
        warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
        scale = warmup * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = peak * scale
        loss = loss_at(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average = loss.item() if math.isnan(average) else 0.97 * average + 0.03 * loss.item()
        if step % 100 == 0 or step == steps - 1:
            seconds = time.monotonic() - begun
            print(f"{name} {step:5d}/{steps}  loss {average:.4f}  {seconds:5.0f} s", flush=True)
    model.eval()
    seconds = round(time.monotonic() - begun, 1)
    return {"final_loss": round(average, 4), "seconds": seconds}


def train_embedder(recipe: Recipe, folder: Path) -> None:
    """Train and write the embedder, in the layout of sentence-transformers."""
    tokenizer = make_tokenizer(recipe)
    model = BertModel(make_config(recipe, tokenizer), add_pooling_layer=False)

    def loss_at(step: int) -> Tensor:
        rng = Random(f"embedder {step} of {recipe.seed}")
        return embedder_loss(model, tokenizer, recipe, rng)

    figures = train("embedder", model, loss_at, recipe.steps, recipe.learning_rate)
    save(model, tokenizer, folder, recipe, figures)
    modules = ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")
    _write(folder / "modules.json", [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(modules)
    ])  # fmt: skip
    _write(folder / "1_Pooling" / "config.json", {
        "word_embedding_dimension": recipe.hidden_size,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
    })  # fmt: skip
    _write(
        folder / "sentence_bert_config.json",
        {"max_seq_length": recipe.max_length, "do_lower_case": False},
    )
    _write(folder / "config_sentence_transformers.json", {
        "prompts": PROMPTS, "default_prompt_name": None, "similarity_fn_name": "cosine",
    })  # fmt: skip


def train_reranker(recipe: Recipe, embedder: Path, folder: Path) -> None:
    """Train and write the reranker: a sequence classifier with one label.

    The training starts from the embedder's encoder, whose weights already relate words to each
    other. From random weights, the reranker learns nothing in the same time.
    """
    tokenizer = make_tokenizer(recipe)
    config = make_config(recipe, tokenizer, num_labels=1)
    model = BertForSequenceClassification(config)
    encoder = BertModel.from_pretrained(embedder, add_pooling_layer=False)
    model.bert.load_state_dict(encoder.state_dict(), strict=False)  # the encoder has no pooler

    def loss_at(step: int) -> Tensor:
        rng = Random(f"reranker {step} of {recipe.seed}")
        return reranker_loss(model, tokenizer, recipe, rng)

    figures = train(
        "reranker", model, loss_at, recipe.reranker_steps, recipe.reranker_learning_rate
    )
    save(model, tokenizer, folder, recipe, figures)


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    recipe: Recipe,
    figures: dict[str, float],
) -> None:
    """Write the checkpoint in Hugging Face layout, with a record of its training."""
    if folder.exists():
        shutil.rmtree(folder)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    decided = asdict(recipe)
    if isinstance(model, BertModel):
        decided = {name: value for name, value in decided.items() if name not in _RERANKER_ONLY}
    _write(folder / "training.json", {"recipe": decided, **figures, "torch": torch.__version__})


def _library(rng: Random, fixed: float) -> Library:
    """Return the fixed world's library with the probability `fixed`, or a new one."""
    return fixed_library() if rng.random() < fixed else random_library(rng)


def _trained(library: Library) -> list[Question]:
    return [question for question in library.questions if not is_held_out(question.text)]


def _near_misses(
    library: Library, question: Question, wrong: Sequence[int], rng: Random, count: int
) -> list[int]:
    """Draw wrong passages. Most of them mention a name of the question."""
    words = {word.strip("?.,").removesuffix("'s") for word in question.text.split()}
    words -= {"What", "Which", "Who", "Whose", "Where", "is", "a", "the", "does", "in", "of", "to"}
    near = [at for at in wrong if words & set(library.passages[at].replace(".", " ").split())]
    chosen = rng.sample(near, min(len(near), count - 1))
    rest = [at for at in wrong if at not in chosen]
    return chosen + rng.sample(rest, count - len(chosen))


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("embedder", "reranker"), help="train one of the two")
    parser.add_argument("--embedder", type=Path, default=EMBEDDER, help="default: %(default)s")
    parser.add_argument("--reranker", type=Path, default=RERANKER, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=Recipe.seed, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="default: %(default)s")
    parser.add_argument(
        "--reranker-steps", type=int, default=Recipe.reranker_steps, help="default: %(default)s"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # so that the additions have the same order on every machine
    recipe = Recipe(arguments.seed, arguments.steps, arguments.reranker_steps)
    if arguments.only != "reranker":
        train_embedder(recipe, arguments.embedder)
    if arguments.only != "embedder":
        train_reranker(recipe, arguments.embedder, arguments.reranker)


if __name__ == "__main__":
    main()
