"""Measure the demo model for drawings on questions about drawings that it has never seen."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from random import Random

import torch
from lessons.drawings import make_drawing, make_questions, render
from transformers import AutoProcessor, LlavaForConditionalGeneration

FOLDER = Path(__file__).with_name("see")
FLOOR = 0.95
"""The smallest accepted share of right answers."""
_BATCH_SIZE = 32


def measure(folder: Path, num_drawings: int, seed: int) -> tuple[Counter[str], Counter[str]]:
    """Return the number of right answers and the number of questions for each skill."""
    processor = AutoProcessor.from_pretrained(folder)
    processor.tokenizer.padding_side = "left"
    model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    # Training uses seeds that begin with the word "drawings".
    rng = Random(f"evaluation {seed}")
    drawings = [make_drawing(rng, held_out=True) for _ in range(num_drawings)]
    asked = [
        (render(drawing, rng), *question)
        for drawing in drawings
        for question in make_questions(drawing, rng)
    ]
    right: Counter[str] = Counter()
    for start in range(0, len(asked), _BATCH_SIZE):
        images, skills, questions, answers = zip(*asked[start : start + _BATCH_SIZE], strict=True)
        prompts = [
            processor.apply_chat_template(
                [
                    {
                        "role": "user",
                        "content": [{"type": "image"}, {"type": "text", "text": question}],
                    }
                ],
                add_generation_prompt=True,
            )
            for question in questions
        ]
        batch = processor(text=prompts, images=list(images), padding=True, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(**batch, max_new_tokens=48)
        texts = processor.batch_decode(
            output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
        )
        for skill, answer, text in zip(skills, answers, texts, strict=True):
            right[skill] += text.strip() == answer
    return right, Counter(skill for _, skill, _, _ in asked)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=FOLDER, help="default: %(default)s")
    parser.add_argument("--count", type=int, default=200, help="the number of drawings")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the drawings")
    arguments = parser.parse_args()
    right, total = measure(arguments.model, arguments.count, arguments.seed)
    for skill in sorted(total):
        print(f"{skill:<14} {right[skill] / total[skill]:>7.1%} of {total[skill]}")
    share = sum(right.values()) / sum(total.values())
    print(f"{'all':<14} {share:>7.1%} of {sum(total.values())}")
    return int(share < FLOOR)


if __name__ == "__main__":
    sys.exit(main())
