"""Train the demo model for drawings. The training depends only on a seed."""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
import transformers
from chat_format import END_OF_TEXT, TURN_END, TURN_START, Sample
from lessons.drawings import (
    COLOURS,
    NAMES,
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
from train import Optimizer, attention_mask, next_tokens, pad, plain_attention
from transformers import (
    AttentionInterface,
    AutoTokenizer,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen3Config,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

FOLDER = Path(__file__).with_name("see")
TOKENIZER = Path(__file__).with_name("chat")
TEMPLATE_FILE = Path(__file__).with_name("see_template.jinja")
IMAGE_TOKEN = "<image>"
_USER = f"{TURN_START}user\n"
# The share of the rows with an earlier turn about another drawing, and of those without a drawing.
_EARLIER, _NO_DRAWING = 0.12, 0.02


@dataclass(frozen=True)
class Recipe:
    """The parameters of the training. They determine the checkpoint completely.

    Attributes:
        questions: the largest number of questions about one drawing in a step.
        image_size: the width and height of the prepared image in pixels.
        patch_size: the width and height of a patch, which becomes one token, in pixels.
    """

    seed: int = 1
    steps: int = 1500
    drawings_per_step: int = 32
    questions: int = 4
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    weight_decay: float = 0.05
    warmup_steps: int = 60
    decay_steps: int = 600
    image_size: int = 96
    patch_size: int = 16
    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 2
    num_vision_layers: int = 3
    num_heads: int = 4

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
    common = {
        "hidden_size": recipe.hidden_size,
        "num_attention_heads": recipe.num_heads,
    }
    vision = SiglipVisionConfig(
        **common,
        num_hidden_layers=recipe.num_vision_layers,
        intermediate_size=4 * recipe.hidden_size,
        image_size=recipe.image_size,
        patch_size=recipe.patch_size,
        vision_use_head=False,
    )
    text = Qwen3Config(
        **common,
        num_hidden_layers=recipe.num_layers,
        vocab_size=len(tokenizer),
        intermediate_size=recipe.intermediate_size,
        num_key_value_heads=recipe.num_heads // 2,
        head_dim=recipe.hidden_size // recipe.num_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
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
    return model


@dataclass(frozen=True)
class Row:
    """Questions about a drawing, each in a branch that follows the drawing.

    Attributes:
        images: the drawings, in the order of their placeholders.
        patches: what each patch of the drawings shows; see `patch_labels`.
        sample: the tokens. A drawing has `Recipe.image_tokens` placeholders.
    """

    images: list[Image]
    patches: list[tuple[int, int]]
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
            self._add_turn(row, *no_picture(rng), branch=0)
            return row
        if rng.random() < _EARLIER:
            _, question, answer = self._add_drawing(row, rng)[0]
            self._add_turn(row, question, answer, branch=0)
            self._add_text(row, "\n", branch=0)
        questions = self._add_drawing(row, rng)[: self._recipe.questions]
        for branch, (_, question, answer) in enumerate(questions, start=1):
            if 1 < branch == len(questions):
                # The last question is the second turn of the branch before it.
                self._add_text(row, f"\n{_USER}", branch - 1)
                self._add_turn(row, question, answer, branch - 1)
            else:
                self._add_turn(row, question, answer, branch)
        return row

    def _add_drawing(self, row: Row, rng: Random) -> list[Question]:
        """Add a drawing to a row, and return its questions."""
        drawing = make_drawing(rng)
        row.images.append(render(drawing, rng))
        row.patches.extend(patch_labels(drawing, self._recipe.patches_per_side))
        self._add_text(row, _USER + IMAGE_TOKEN * self._recipe.image_tokens, 0)
        return make_questions(drawing, rng)

    def _add_turn(self, row: Row, question: str, answer: str, branch: int) -> None:
        """Add the rest of a user's message and the answer."""
        self._add_text(row, f"{question}{TURN_END}\n{TURN_START}assistant\n", branch)
        self._add_text(row, answer + TURN_END, branch, is_target=True)

    def _add_text(self, row: Row, text: str, branch: int, *, is_target: bool = False) -> None:
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        row.sample.token_ids.extend(token_ids)
        row.sample.is_target.extend([is_target] * len(token_ids))
        row.sample.branch.extend([branch] * len(token_ids))


class Trainer:
    """The training of the model."""

    def __init__(self, recipe: Recipe) -> None:
        self.tokenizer = make_tokenizer()
        self.processor = make_processor(recipe, self.tokenizer)
        self.model = make_model(recipe, self.tokenizer)
        # This layer is needed only in the training. It learns from the features of each patch what
        # the patch shows. The image encoder learns much faster from it than from the answers.
        self._classify = torch.nn.Linear(recipe.hidden_size, len(NAMES) + len(COLOURS))
        self._recipe = recipe
        self._rows = RowMaker(recipe, self.tokenizer)
        self._image_token = self.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)

    def train(self) -> dict[str, float]:
        """Train to the last step, and return the final loss and the time in minutes."""
        recipe, begun, average = self._recipe, time.monotonic(), math.nan
        inner = self.model.model
        layers = [*inner.vision_tower.encoder.layers, *inner.language_model.layers]
        optimizer = Optimizer(torch.nn.ModuleList([self.model, self._classify]), layers, recipe)
        num_steps = recipe.steps
        for step in range(num_steps):
            rng = Random(f"drawings {step} of {recipe.seed}")
            loss = self._loss([self._rows.make(rng) for _ in range(recipe.drawings_per_step)])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step(step)
            average = loss.item() if math.isnan(average) else 0.97 * average + 0.03 * loss.item()
            if step % 25 == 0 or step == num_steps - 1:
                minutes = (time.monotonic() - begun) / 60
                print(f"{step:5d}/{num_steps}  loss {average:.4f}  {minutes:.1f} min", flush=True)
        minutes = round((time.monotonic() - begun) / 60, 1)
        return {"final_loss": round(average, 4), "minutes": minutes}

    def _loss(self, rows: list[Row]) -> Tensor:
        """Return the cross entropy of the target tokens and of the contents of the patches."""
        samples = [row.sample for row in rows]
        token_ids = pad([sample.token_ids for sample in samples], 0)
        targets = pad([next_tokens(sample) for sample in samples], -100)
        images = [image for row in rows for image in row.images]
        pixels = self.processor.image_processor(images, return_tensors="pt")["pixel_values"]
        inner = self.model.model
        with torch.autocast("cpu", dtype=torch.bfloat16):
            features = inner.vision_tower(pixels).last_hidden_state
            patch_logits = self._classify(features).float().flatten(0, 1)
            features = inner.multi_modal_projector(features)
            embeddings = inner.get_input_embeddings()(token_ids)
            is_image = (token_ids == self._image_token)[:, :, None].expand_as(embeddings)
            embeddings = embeddings.masked_scatter(is_image, features.to(embeddings))
            hidden = inner.language_model(
                inputs_embeds=embeddings,
                position_ids=pad([sample.positions for sample in samples], 0),
                attention_mask={
                    "full_attention": attention_mask(pad([s.branch for s in samples], -1))
                },
                use_cache=False,
            ).last_hidden_state
            is_target = targets != -100
            logits = self.model.lm_head(hidden[is_target])
        names, colours = patch_logits.split([len(NAMES), len(COLOURS)], dim=-1)
        labels = torch.tensor([label for row in rows for label in row.patches])
        patch_loss = F.cross_entropy(names, labels[:, 0]) + F.cross_entropy(colours, labels[:, 1])
        return F.cross_entropy(logits.float(), targets[is_target]) + patch_loss

    def save(self, folder: Path, figures: dict[str, float]) -> None:
        """Write the checkpoint in Hugging Face layout, with a record of its training."""
        end = self.tokenizer.convert_tokens_to_ids(TURN_END)
        padding = self.tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        self.model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=[end, padding], pad_token_id=padding
        )
        self.model.set_attn_implementation("sdpa")
        self.model.eval().save_pretrained(folder)
        self.processor.save_pretrained(folder)
        record = {"recipe": asdict(self._recipe), **figures, "torch": torch.__version__}
        (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    for name, value in asdict(Recipe()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(value), default=value, help="default: %(default)s")
    arguments = vars(parser.parse_args())
    output, threads = arguments.pop("output"), arguments.pop("threads")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    trainer = Trainer(Recipe(**arguments))
    print(f"{trainer.model.num_parameters() / 1e6:.2f} M parameters", flush=True)
    trainer.save(output, trainer.train())


if __name__ == "__main__":
    main()
