"""Train the demo model for drawings. The training depends only on a seed.

A training that starts from a checkpoint trains only the language model.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from chat_format import END_OF_TEXT, TURN_END, TURN_START, Sample
from lessons.drawings import (
    COLOURS,
    NAMES,
    PatchLabel,
    Question,
    make_drawing,
    make_questions,
    no_picture,
    patch_labels,
    render,
)
from PIL.Image import Image
from torch import Tensor
from torch.nn import functional as F
from train import (
    NO_TARGET,
    Optimizer,
    attention_mask,
    generation_config,
    make_batch,
    make_parser,
    plain_attention,
    read_record,
    single_threaded_workers,
    store_state,
)
from transformers import (
    AttentionInterface,
    AutoTokenizer,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen3Config,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

FOLDER = Path(__file__).with_name("see")
WORK = Path(__file__).with_name("unfinished_see")
TOKENIZER = Path(__file__).with_name("chat")
TEMPLATE_FILE = Path(__file__).parent / "see" / "chat_template.jinja"
IMAGE_TOKEN = "<image>"
_USER = f"{TURN_START}user\n"
# The share of the rows with an earlier turn about another drawing, and of those without a drawing.
_EARLIER, _NO_DRAWING = 0.12, 0.08
# The number of classes of each attribute of a PatchLabel.
_LABEL_SIZES = [len(NAMES), len(COLOURS), 2]


@dataclass(frozen=True)
class Recipe:
    """The parameters of the training. They determine the checkpoint completely.

    Attributes:
        image_steps: the number of steps at the beginning that train only the image encoder.
        questions: the largest number of questions about one drawing in a step.
        image_size: the width and height of the prepared image in pixels.
        patch_size: the width and height of a patch, which becomes one token, in pixels.
    """

    seed: int = 1
    steps: int = 5000
    image_steps: int = 3000
    drawings_per_step: int = 32
    questions: int = 4
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    weight_decay: float = 0.05
    warmup_steps: int = 60
    decay_steps: int = 900
    image_size: int = 100
    patch_size: int = 20
    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 3
    num_vision_layers: int = 4
    num_heads: int = 4
    workers: int = 2

    @property
    def image_tokens(self) -> int:
        """The number of tokens of an image."""
        return self.patches_per_side**2

    @property
    def patches_per_side(self) -> int:
        """The number of patches in a row or column of an image."""
        return self.image_size // self.patch_size


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the chat model's tokenizer with a token for images and another chat template."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    tokenizer.chat_template = TEMPLATE_FILE.read_text()
    return tokenizer


def make_processor(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Return the processor, which resizes each image to a square."""
    side = recipe.image_size
    return LlavaProcessor(
        SiglipImageProcessorPil(size={"height": side, "width": side}),
        tokenizer,
        patch_size=recipe.patch_size,
        vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
        image_token=IMAGE_TOKEN,
        num_additional_image_tokens=0,
    )


def make_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """Return a randomly initialised model in float32."""
    image_token, turn_end, end_of_text = tokenizer.convert_tokens_to_ids(
        [IMAGE_TOKEN, TURN_END, END_OF_TEXT]
    )
    vision = SiglipVisionConfig(
        hidden_size=recipe.hidden_size,
        num_attention_heads=recipe.num_heads,
        num_hidden_layers=recipe.num_vision_layers,
        intermediate_size=4 * recipe.hidden_size,
        image_size=recipe.image_size,
        patch_size=recipe.patch_size,
        vision_use_head=False,
    )
    text = Qwen3Config(
        hidden_size=recipe.hidden_size,
        num_attention_heads=recipe.num_heads,
        num_hidden_layers=recipe.num_layers,
        vocab_size=len(tokenizer),
        intermediate_size=recipe.intermediate_size,
        num_key_value_heads=recipe.num_heads // 2,
        head_dim=recipe.hidden_size // recipe.num_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=turn_end,
        pad_token_id=end_of_text,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image_token,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        image_seq_length=recipe.image_tokens,
        tie_word_embeddings=True,
        dtype="float32",
    )
    torch.manual_seed(recipe.seed)
    model = LlavaForConditionalGeneration(config).train()
    AttentionInterface.register("demo_plain", plain_attention)
    model.model.language_model.set_attn_implementation("demo_plain")
    # On a CPU, the gradient of SDPA is slow for the few tokens of an image.
    model.model.vision_tower.set_attn_implementation("eager")
    return model


@dataclass(frozen=True)
class Row:
    """A training sequence: a drawing, and questions about it.

    Each question is a branch (see `Sample`), so no question attends to another question.

    Attributes:
        images: the drawings, in the order of their placeholders.
        patches: what each patch of the drawings shows; see `patch_labels`.
        sample: the tokens. A drawing has `Recipe.image_tokens` placeholders.
    """

    images: list[Image]
    patches: list[PatchLabel]
    sample: Sample


class RowMaker:
    """The random rows of the training."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
        self._recipe = recipe
        self._tokenizer = tokenizer

    def make(self, rng: Random) -> Row:
        """Return a random row."""
        row = Row([], [], Sample([], [], []))
        if rng.random() < _NO_DRAWING:
            self._add_text(row, _USER, branch=0)
            self._add_turn(row, no_picture(rng), branch=0)
            return row
        if rng.random() < _EARLIER:
            first_question = self._add_drawing(row, rng)[0]
            self._add_turn(row, first_question, branch=0)
            self._add_text(row, "\n", branch=0)
        questions = self._add_drawing(row, rng)[: self._recipe.questions]
        for branch, question in enumerate(questions, start=1):
            if 1 < branch == len(questions):
                # The last question is the second turn of the branch before it.
                self._add_text(row, f"\n{_USER}", branch - 1)
                self._add_turn(row, question, branch - 1)
            else:
                self._add_turn(row, question, branch)
        return row

    def _add_drawing(self, row: Row, rng: Random) -> list[Question]:
        """Add a drawing to a row, and return its questions."""
        drawing = make_drawing(rng, held_out=False)
        row.images.append(render(drawing, rng))
        row.patches.extend(patch_labels(drawing, self._recipe.patches_per_side))
        self._add_text(row, _USER + IMAGE_TOKEN * self._recipe.image_tokens, branch=0)
        return make_questions(drawing, rng)

    def _add_turn(self, row: Row, question: Question, branch: int) -> None:
        """Add the rest of a user's message and the answer."""
        self._add_text(row, f"{question.text}{TURN_END}\n{TURN_START}assistant\n", branch)
        self._add_text(row, question.answer + TURN_END, branch, is_target=True)

    def _add_text(self, row: Row, text: str, branch: int, *, is_target: bool = False) -> None:
        """Add the tokens of a text to a branch. The branch 0 is the common prefix."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        row.sample.token_ids.extend(token_ids)
        row.sample.is_target.extend([is_target] * len(token_ids))
        row.sample.branch.extend([branch] * len(token_ids))


class Trainer:
    """A training that can be stopped at any time and continued with the same result.

    The work folder contains `state.pt` with the weights and the state of the optimizers, which is
    written after each 100 steps.

    Args:
        recipe: the parameters of the training.
        work: the work folder.
        start_from: the folder of a checkpoint that this training improves. The weights of the image
            encoder stay as they are in this checkpoint. None starts with random weights.
    """

    def __init__(self, recipe: Recipe, work: Path, start_from: Path | None = None) -> None:
        self.tokenizer = make_tokenizer()
        self.processor = make_processor(recipe, self.tokenizer)
        self.model = make_model(recipe, self.tokenizer)
        # This layer is needed only in the training. It learns from the features of each patch what
        # the patch shows. The image encoder learns much faster from it than from the answers.
        self._patch_classifier = torch.nn.Linear(recipe.hidden_size, sum(_LABEL_SIZES))
        self._recipe = recipe
        self._previous = read_record(start_from)
        self._trains_image_encoder = start_from is None
        if start_from is not None:
            trained = LlavaForConditionalGeneration.from_pretrained(start_from)
            self.model.load_state_dict(trained.state_dict())
        self._rows = RowMaker(recipe, self.tokenizer)
        self._modules = torch.nn.ModuleList([self.model, self._patch_classifier])
        self._parameters = list(self._modules.parameters())
        inner = self.model.model
        layers = [*inner.vision_tower.encoder.layers, *inner.language_model.layers]
        self._optimizer = Optimizer(self._modules, layers, recipe)
        self._pool = single_threaded_workers(recipe.workers)
        self._state_file = work / "state.pt"
        self._progress: dict[str, float] = {"steps": 0, "loss": math.nan, "minutes": 0}
        if self._state_file.exists():
            self._load()

    def _load(self) -> None:
        """Continue the training in the work folder.

        Raises:
            ValueError: the training has other parameters. Only the number of all steps may differ,
                because it has no effect before the learning rate decays.
        """
        state: dict[str, Any] = torch.load(self._state_file, weights_only=True)
        if state["recipe"] | {"steps": 0} != asdict(self._recipe) | {"steps": 0}:
            raise ValueError(f"{self._state_file} has other parameters. Delete the file.")
        self._modules.load_state_dict(state["modules"])
        self._optimizer.load(state["optimizer"])
        self._progress = state["progress"]

    def _store(self) -> None:
        """Write the state to the work folder."""
        state = {
            "recipe": asdict(self._recipe),
            "modules": self._modules.state_dict(),
            "optimizer": self._optimizer.state(),
            "progress": self._progress,
        }
        store_state(state, self._state_file)

    def train(self) -> dict[str, float]:
        """Train to the last step, and return the final loss and the time in minutes."""
        progress, start = self._progress, time.monotonic()
        minutes_before = progress["minutes"]
        for step in range(int(progress["steps"]), self._recipe.steps):
            loss = self._compute_gradients(step)
            torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
            self._optimizer.step(step)
            mean_loss = progress["loss"]
            progress["loss"] = loss if math.isnan(mean_loss) else 0.97 * mean_loss + 0.03 * loss
            progress["steps"] = step + 1
            progress["minutes"] = minutes_before + (time.monotonic() - start) / 60
            if (step + 1) % 25 == 0:
                print(
                    f"{step + 1:5d}/{self._recipe.steps}  loss {progress['loss']:.4f}"
                    f"  {progress['minutes']:.1f} min",
                    flush=True,
                )
            if (step + 1) % 100 == 0:
                self._store()
        return {
            "final_loss": round(progress["loss"], 4),
            "minutes": round(progress["minutes"], 1),
        }

    def _compute_gradients(self, step: int) -> float:
        """Store the mean gradients of a step in the parameters, and return the mean loss.

        Each worker computes an equal part of the drawings in one thread. On a busy machine, this is
        faster than matrix products of several threads.
        """
        recipe = self._recipe
        has_text = not self._trains_image_encoder or step >= recipe.image_steps

        def compute_part(part: int) -> tuple[float, tuple[Tensor | None, ...]]:
            rng = Random(f"drawings {step}, part {part}, of {recipe.seed}")
            num_rows = recipe.drawings_per_step // recipe.workers
            loss = self._loss([self._rows.make(rng) for _ in range(num_rows)], has_text=has_text)
            gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            return loss.item(), gradients

        results = self._pool.map(compute_part, range(recipe.workers))
        losses, part_gradients = zip(*results, strict=True)
        for parameter, *gradients in zip(self._parameters, *part_gradients, strict=True):
            # A gradient is None if the part does not use the parameter.
            used = [gradient for gradient in gradients if gradient is not None]
            if used:
                parameter.grad = torch.stack(used).sum(0) / recipe.workers
        return sum(losses) / recipe.workers

    def _loss(self, rows: list[Row], *, has_text: bool) -> Tensor:
        """Return the cross entropy of the contents of the patches and of the target tokens.

        If `has_text` is False, the target tokens are left out. If the image encoder is not trained,
        the contents of the patches are left out.
        """
        images = [image for row in rows for image in row.images]
        pixels = self.processor.image_processor(images, return_tensors="pt")["pixel_values"]
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            torch.set_grad_enabled(self._trains_image_encoder),
        ):
            features = self.model.model.vision_tower(pixels).last_hidden_state
        if not self._trains_image_encoder:
            return self._text_loss(rows, features)
        patch_loss = self._patch_loss(rows, features)
        return patch_loss + self._text_loss(rows, features) if has_text else patch_loss

    def _patch_loss(self, rows: list[Row], features: Tensor) -> Tensor:
        """Return the loss of the patches: the sum of the cross entropies of all attributes.

        Args:
            rows: the rows.
            features: the features of the patches of all drawings, [num_drawings, patches, size].
        """
        with torch.autocast("cpu", dtype=torch.bfloat16):
            all_logits = self._patch_classifier(features).float().flatten(0, 1)
        labels = torch.tensor([astuple(label) for row in rows for label in row.patches])
        attributes = zip(all_logits.split(_LABEL_SIZES, dim=-1), labels.unbind(dim=-1), strict=True)
        return torch.stack([F.cross_entropy(logits, label) for logits, label in attributes]).sum()

    def _text_loss(self, rows: list[Row], features: Tensor) -> Tensor:
        """Return the cross entropy of the target tokens. See `_patch_loss` for the arguments."""
        batch = make_batch([row.sample for row in rows])
        is_target = batch.labels != NO_TARGET
        image_token = self.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        inner = self.model.model
        with torch.autocast("cpu", dtype=torch.bfloat16):
            embeddings = inner.get_input_embeddings()(batch.token_ids)
            is_image = (batch.token_ids == image_token)[:, :, None].expand_as(embeddings)
            projected = inner.multi_modal_projector(features).to(embeddings)
            hidden = inner.language_model(
                inputs_embeds=embeddings.masked_scatter(is_image, projected),
                position_ids=batch.positions,
                attention_mask={"full_attention": attention_mask(batch.branch)},
                use_cache=False,
            ).last_hidden_state
            logits = self.model.lm_head(hidden[is_target])
        return F.cross_entropy(logits.float(), batch.labels[is_target])

    def save(self, folder: Path, results: dict[str, float]) -> None:
        """Write the checkpoint in Hugging Face layout, with a record of its training."""
        self.model.generation_config = generation_config(self.tokenizer)
        self.model.set_attn_implementation("sdpa")
        self.model.eval().save_pretrained(folder)
        self.processor.save_pretrained(folder)
        record = {"recipe": asdict(self._recipe), **results, "torch": torch.__version__}
        if self._previous is not None:
            record["previous"] = self._previous
        (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")


def main() -> None:
    """Parse the command line and train."""
    parser = make_parser(__doc__, FOLDER, WORK, asdict(Recipe()))
    arguments = vars(parser.parse_args())
    output, work, start_from = (arguments.pop(name) for name in ("output", "work", "start_from"))
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    trainer = Trainer(Recipe(**arguments), work, start_from)
    print(f"{trainer.model.num_parameters() / 1e6:.2f} M parameters", flush=True)
    trainer.save(output, trainer.train())


if __name__ == "__main__":
    main()
