"""Measure the demo model for drawings on questions about drawings that it has never seen."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from lessons.drawings import Question, make_drawing, make_questions, render
from PIL.Image import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration, LlavaProcessor

FOLDER = Path(__file__).with_name("see")
FLOOR = 0.95
"""The smallest accepted share of right answers."""
_BATCH_SIZE = 32


class Asked(NamedTuple):
    """A question about the image of a drawing."""

    image: Image
    question: Question


def measure(folder: Path, num_drawings: int, seed: int) -> tuple[Counter[str], Counter[str]]:
    """Return the number of right answers and the number of questions for each skill."""
    processor = AutoProcessor.from_pretrained(folder)
    processor.tokenizer.padding_side = "left"
    model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    asked = _held_out_questions(num_drawings, seed)
    right: Counter[str] = Counter()
    for start in range(0, len(asked), _BATCH_SIZE):
        batch = asked[start : start + _BATCH_SIZE]
        for (_, question), answer in zip(batch, _answers(model, processor, batch), strict=True):
            right[question.skill] += answer == question.answer
    return right, Counter(question.skill for _, question in asked)


def _held_out_questions(num_drawings: int, seed: int) -> list[Asked]:
    """Return all questions about some drawings that training never contains."""
    # Training uses seeds that begin with the word "drawings".
    rng = Random(f"evaluation {seed}")
    drawings = [make_drawing(rng, held_out=True) for _ in range(num_drawings)]
    return [
        Asked(render(drawing, rng), question)
        for drawing in drawings
        for question in make_questions(drawing, rng)
    ]


def _answers(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, asked: list[Asked]
) -> list[str]:
    """Answer a batch of questions with greedy decoding."""
    prompts = []
    for _, question in asked:
        content = [{"type": "image"}, {"type": "text", "text": question.text}]
        message = {"role": "user", "content": content}
        prompts.append(processor.apply_chat_template([message], add_generation_prompt=True))
    images = [image for image, _ in asked]
    batch = processor(text=prompts, images=images, padding=True, return_tensors="pt")
    prompt_length = batch["input_ids"].shape[1]
    with torch.inference_mode():
        output = model.generate(**batch, max_new_tokens=48)
    texts = processor.batch_decode(output[:, prompt_length:], skip_special_tokens=True)
    return [text.strip() for text in texts]


def main() -> int:
    """Print the table, and return 1 if the share of right answers is below the floor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=FOLDER, help="default: %(default)s")
    parser.add_argument("--count", type=int, default=200, help="the number of drawings")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the drawings")
    arguments = parser.parse_args()
    right, total = measure(arguments.model, arguments.count, arguments.seed)
    for skill in sorted(total):
        print(f"{skill:<14} {right[skill] / total[skill]:>7.1%} of {total[skill]}")
    share = right.total() / total.total()
    print(f"{'all':<14} {share:>7.1%} of {total.total()}")
    return int(share < FLOOR)


if __name__ == "__main__":
    sys.exit(main())
