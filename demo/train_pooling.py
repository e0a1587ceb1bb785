"""Train the demo's embedder and reranker. Everything in the training depends only on one seed."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from lessons.base import vary
from lessons.retrieval import Library, Question, fixed_library, random_library, trained
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
_RERANKER_ONLY = (
    "reranker_steps",
    "reranker_learning_rate",
    "reranker_questions_per_step",
    "negatives",
)


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


_SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
# The capitalised words and the verbs of questions, which are not names.
_COMMON_WORDS = frozenset(
    {"What", "Which", "Who", "Whose", "Where", "is", "a", "the", "does", "in", "of", "to"}
)


def make_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Train a lower-casing WordPiece tokenizer on the text of some libraries."""
    rng = Random(f"pooling tokenizer {recipe.seed}")
    libraries = [fixed_library(), *(random_library(rng) for _ in range(60))]
    texts = [text for library in libraries for text in library.passages]
    texts += [question.text for library in libraries for question in trained(library)]
    tokenizer = Tokenizer(models.WordPiece(unk_token=_SPECIAL_TOKENS["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    # The vocabulary contains every printable ASCII character, so that no ASCII word is unknown.
    alphabet = [chr(code) for code in range(33, 127)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=recipe.vocab_size,
        initial_alphabet=alphabet,
        special_tokens=list(_SPECIAL_TOKENS.values()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    sep, cls = (
        (token, tokenizer.token_to_id(token))
        for token in (_SPECIAL_TOKENS["sep_token"], _SPECIAL_TOKENS["cls_token"])
    )
    tokenizer.post_processor = processors.BertProcessing(sep, cls)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=recipe.max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **_SPECIAL_TOKENS,
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
    library = _draw_library(rng, fixed_share=0.5)
    questions = rng.sample(trained(library), recipe.questions_per_step)
    texts = [vary(rng, question.text) for question in questions]
    # Half of the questions have the query prompt, so that the model learns questions with the
    # prompt and without it.
    texts = [PROMPTS["query"] + text if rng.random() < 0.5 else text for text in texts]
    question_vectors = embed(model, tokenizer(texts, padding=True, return_tensors="pt"))
    passages = tokenizer(list(library.passages), padding=True, return_tensors="pt")
    passage_vectors = embed(model, passages)
    is_relevant = torch.zeros(len(questions), len(library.passages), dtype=torch.bool)
    for row, question in enumerate(questions):
        is_relevant[row, list(question.relevant)] = True
    return _ranking_loss(question_vectors, passage_vectors, is_relevant, recipe)


def _ranking_loss(
    question_vectors: Tensor, passage_vectors: Tensor, is_relevant: Tensor, recipe: Recipe
) -> Tensor:
    """Return the mean cross entropy of the relevant passages for each length of the vectors.

    Shapes: question_vectors [Q, hidden_size]; passage_vectors [P, hidden_size]; is_relevant [Q, P].
    """
    losses = []
    for size in recipe.dimensions:
        questions = F.normalize(question_vectors[:, :size], dim=-1)
        passages = F.normalize(passage_vectors[:, :size], dim=-1)
        log_probs = torch.log_softmax(questions @ passages.T / recipe.temperature, dim=-1)
        # The loss is the mean over all right passages, because all of them should be found.
        losses.append(-(log_probs * is_relevant).sum(-1) / is_relevant.sum(-1))
    return torch.stack(losses).mean()


def reranker_loss(
    model: BertForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    rng: Random,
) -> Tensor:
    """Return the cross entropy of the prediction that a passage answers a question."""
    library = _draw_library(rng, fixed_share=0.8)
    texts: list[str] = []
    passages: list[str] = []
    for question in rng.sample(trained(library), recipe.reranker_questions_per_step):
        right = rng.choice(sorted(question.relevant))
        wrong = _near_misses(library, question, rng, recipe.negatives)
        texts += [vary(rng, question.text)] * (1 + recipe.negatives)
        passages += [library.passages[number] for number in (right, *wrong)]
    batch = tokenizer(texts, passages, padding=True, return_tensors="pt")
    # In each row, the first passage is the right one.
    logits = model(**batch).logits.view(-1, 1 + recipe.negatives)
    targets = torch.zeros_like(logits)
    targets[:, 0] = 1.0
    weights = torch.where(targets > 0, recipe.negatives / 2, 1.0)
    # The first loss trains the order of the scores, the second one trains their meaning.
    order_loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
    return order_loss + F.binary_cross_entropy_with_logits(logits, targets, weight=weights)


def _draw_library(rng: Random, fixed_share: float) -> Library:
    """Return the fixed world's library with the probability `fixed_share`, or a new one."""
    return fixed_library() if rng.random() < fixed_share else random_library(rng)


def _near_misses(library: Library, question: Question, rng: Random, count: int) -> list[int]:
    """Draw the numbers of wrong passages. Most of them contain a name of the question."""
    names = {word.strip("?.,").removesuffix("'s") for word in question.text.split()} - _COMMON_WORDS
    wrong = [number for number in range(len(library.passages)) if number not in question.relevant]
    near = [
        number
        for number in wrong
        if not names.isdisjoint(library.passages[number].replace(".", " ").split())
    ]
    chosen = rng.sample(near, min(len(near), count - 1))
    rest = [number for number in wrong if number not in chosen]
    return chosen + rng.sample(rest, count - len(chosen))


def train(
    name: str, model: PreTrainedModel, loss_at: Callable[[int], Tensor], steps: int, peak_lr: float
) -> dict[str, float]:
    """Minimise the loss, and return the final loss and the time in seconds.

    Args:
        name: The name that the progress lines contain.
        model: The model.
        loss_at: Returns the loss of the step with this index.
        steps: The number of steps.
        peak_lr: The largest learning rate.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    start, mean_loss = time.monotonic(), math.nan
    model.train()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = peak_lr * _lr_scale(step, steps)
        loss = loss_at(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean_loss = loss.item() if math.isnan(mean_loss) else 0.97 * mean_loss + 0.03 * loss.item()
        if step % 100 == 0 or step == steps - 1:
            seconds = time.monotonic() - start
            print(f"{name} {step:5d}/{steps}  loss {mean_loss:.4f}  {seconds:5.0f} s", flush=True)
    model.eval()
    return {
        "final_loss": round(mean_loss, 4),
        "seconds": round(time.monotonic() - start, 1),
    }


def _lr_scale(step: int, steps: int) -> float:
    """Return the factor of the learning rate, which rises linearly and falls as a cosine."""
    warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
    return warmup * 0.5 * (1 + math.cos(math.pi * step / steps))


def train_embedder(recipe: Recipe, folder: Path) -> None:
    """Train and write the embedder, in the layout of sentence-transformers."""
    tokenizer = make_tokenizer(recipe)
    model = BertModel(make_config(recipe, tokenizer), add_pooling_layer=False)

    def loss_at(step: int) -> Tensor:
        rng = Random(f"embedder {step} of {recipe.seed}")
        return embedder_loss(model, tokenizer, recipe, rng)

    result = train("embedder", model, loss_at, recipe.steps, recipe.learning_rate)
    parameters = asdict(recipe)
    for name in _RERANKER_ONLY:
        del parameters[name]
    save(model, tokenizer, folder, {"recipe": parameters, **result})
    _write_sentence_transformers_files(recipe, folder)


def _write_sentence_transformers_files(recipe: Recipe, folder: Path) -> None:
    """Write the files that describe the mean pooling, the normalisation and the prompts."""
    modules = ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")
    _write_json(folder / "modules.json", [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(modules)
    ])  # fmt: skip
    _write_json(folder / "1_Pooling" / "config.json", {
        "word_embedding_dimension": recipe.hidden_size,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
    })  # fmt: skip
    _write_json(folder / "sentence_bert_config.json", {
        "max_seq_length": recipe.max_length, "do_lower_case": False,
    })  # fmt: skip
    _write_json(folder / "config_sentence_transformers.json", {
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

    result = train("reranker", model, loss_at, recipe.reranker_steps, recipe.reranker_learning_rate)
    save(model, tokenizer, folder, {"recipe": asdict(recipe), **result})


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    record: dict[str, object],
) -> None:
    """Write the checkpoint in Hugging Face layout, with a record of its training."""
    if folder.exists():
        shutil.rmtree(folder)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _write_json(folder / "training.json", {**record, "torch": torch.__version__})


def _write_json(path: Path, value: object) -> None:
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
    recipe = Recipe(
        seed=arguments.seed, steps=arguments.steps, reranker_steps=arguments.reranker_steps
    )
    if arguments.only != "reranker":
        train_embedder(recipe, arguments.embedder)
    if arguments.only != "embedder":
        train_reranker(recipe, arguments.embedder, arguments.reranker)


if __name__ == "__main__":
    main()
