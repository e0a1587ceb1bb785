"""Measure the demo models on held-out prompts and questions.

The table of the chat model has a row for each skill. The exit code is 1 if a result is below its
floor, the smallest accepted value.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import retrieval_scores
import torch
from chat_format import END_OF_TEXT, TURN_END, prompt_text
from lessons import SKILLS, Dialogue, make_dialogue
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).with_name("chat")
_MAX_TEXT = 120
"""The length below which a free text in an object counts as ended."""
Call = tuple[str, dict[str, Any]]
"""The name and the arguments of a tool call."""


@dataclass(frozen=True)
class Reply:
    """The parts of the model's text. `calls` is None if a call is not valid JSON."""

    reasoning: str | None
    content: str
    calls: list[Call] | None


def read_reply(text: str) -> Reply:
    r"""Split a reply into its reasoning, its content and its calls.

    Example: the reasoning of `<think>\nA greeting.\n</think>\n\nHello!<|im_end|>` is
    `A greeting.`, and its content is `Hello!`.
    """
    text = text.replace(END_OF_TEXT, "").removesuffix(TURN_END)
    before, end_marker, after = text.rpartition("</think>")
    reasoning = before.removeprefix("<think>").strip("\n") if end_marker else None
    content, *blocks = after.lstrip("\n").split("<tool_call>")
    try:
        functions = [json.loads(block.strip().removesuffix("</tool_call>")) for block in blocks]
        calls = [(function["name"], function["arguments"]) for function in functions]
    except (ValueError, KeyError, TypeError):
        calls = None
    return Reply(reasoning, content.rstrip("\n"), calls)


def is_right(dialogue: Dialogue, reply: Reply) -> bool:
    """Return whether a reply is right.

    Calls and JSON are compared by value. Other text must equal one of the texts in the lesson.
    """
    message = dialogue.messages[-1]
    if reply.calls != _calls(message):
        return False
    if dialogue.thinking and not reply.reasoning:
        return False
    if not message["content"].startswith("{"):
        return reply.content in message.get("alternatives", (message["content"],))
    try:
        values = json.loads(reply.content)
    except ValueError:
        return False
    right_values = json.loads(message["content"])
    return _same_types(values, right_values) if message.get("is_free") else values == right_values


def _same_types(values: dict[str, Any], right_values: dict[str, Any]) -> bool:
    """Return whether two objects have the same keys, and short values of the same types.

    A schema without a limit on a string's length accepts any text. A very long text shows that the
    model has not ended the string, so it counts as wrong.
    """
    if list(values) != list(right_values):
        return False
    return all(
        type(values[key]) is type(right_value) and 0 < len(str(values[key])) < _MAX_TEXT
        for key, right_value in right_values.items()
    )


class Examinee:
    """A checkpoint that answers batches of prompts with greedy decoding."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def answer(
        self, prompts: list[str], batch_size: int = 64, max_new_tokens: int = 320
    ) -> list[str]:
        """Continue each prompt up to the end of the turn. Special tokens stay in the text."""
        # A batch contains prompts of similar length, so that it needs little padding.
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        answers = [""] * len(prompts)
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            batch_prompts = [prompts[index] for index in indices]
            for index, text in zip(
                indices, self._answer_batch(batch_prompts, max_new_tokens), strict=True
            ):
                answers[index] = text
        return answers

    def _answer_batch(self, prompts: list[str], max_new_tokens: int) -> list[str]:
        """Continue prompts that are padded on the left to the same length."""
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True)
        prompt_length = batch["input_ids"].shape[1]
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=max_new_tokens,
            )
        texts: list[str] = self.tokenizer.batch_decode(output[:, prompt_length:])
        return texts

    def fill_object(self, prompts: list[str], keys: list[list[str]]) -> list[str]:
        """Answer each prompt with a JSON object of prescribed keys, as a grammar enforces it.

        The model writes the reasoning, if the prompt leaves it open, and the values. Braces, keys
        and commas are prescribed. A value that is not complete JSON makes the answer incomplete.
        """
        texts = list(prompts)
        thinking = [n for n, text in enumerate(texts) if not text.endswith("</think>\n\n")]
        for index, reply in self._continue(texts, thinking):
            texts[index] += reply.partition("</think>")[0] + "</think>\n\n"
        for place in range(max(map(len, keys))):
            unfinished = [index for index, names in enumerate(keys) if place < len(names)]
            for index in unfinished:
                texts[index] += (", " if place else "{") + json.dumps(keys[index][place]) + ":"
            for index, reply in self._continue(texts, unfinished):
                texts[index] += _first_value(reply)
        return [
            text.removeprefix(prompt) + "}" for text, prompt in zip(texts, prompts, strict=True)
        ]

    def _continue(self, texts: list[str], indices: list[int]) -> list[tuple[int, str]]:
        """Continue the texts with these indices; return the indices and the continuations."""
        replies = self.answer([texts[index] for index in indices], max_new_tokens=64)
        return list(zip(indices, replies, strict=True))


def _first_value(text: str) -> str:
    """Return the JSON value at the start of a text, or "" if it is incomplete.

    Example: ` "Ann", "age": 3}` becomes ` "Ann"`.
    """
    start = len(text) - len(text.lstrip())
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return ""
    return text[:end]


def held_out_dialogues(skill: str, thinking: bool, count: int, seed: int) -> list[Dialogue]:
    """Return the dialogues that measure a skill. Training contains none of their last prompts."""
    rng = Random(f"evaluation {seed} {skill} {thinking}")
    return [make_dialogue(rng, skill, held_out=True, thinking=thinking) for _ in range(count)]


def accuracy(examinee: Examinee, dialogues: list[Dialogue], show_wrong: bool) -> float:
    """Return the share of dialogues that are answered right."""
    prompts = [prompt_text(examinee.tokenizer, dialogue) for dialogue in dialogues]
    keys = [dialogue.messages[-1].get("keys") for dialogue in dialogues]
    answers = examinee.fill_object(prompts, keys) if all(keys) else examinee.answer(prompts)
    num_right = 0
    for dialogue, answer in zip(dialogues, answers, strict=True):
        if is_right(dialogue, read_reply(answer)):
            num_right += 1
        elif show_wrong:
            _print_wrong(dialogue, answer)
    return num_right / len(dialogues)


def _print_wrong(dialogue: Dialogue, answer: str) -> None:
    """Print the request, the right answer and the wrong answer."""
    message = dialogue.messages[-1]
    print(f"  offered: {[tool['function']['name'] for tool in dialogue.tools]}")
    print(f"  asked:   {dialogue.messages[-2]['content']!r}")
    print(f"  wanted:  {message['content'] or _calls(message)!r}")
    print(f"  wrote:   {answer.replace(END_OF_TEXT, '')!r}", flush=True)


def _calls(message: dict[str, Any]) -> list[Call]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], function["arguments"]) for function in functions]


def main() -> int:
    """Print the tables, and return 1 if a result is below its floor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=FOLDER, help="checkpoint (default: %(default)s)"
    )
    parser.add_argument(
        "--count", type=int, default=100, help="prompts per cell (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the prompts (default: %(default)s)"
    )
    parser.add_argument(
        "--skill",
        choices=list(SKILLS),
        action="append",
        help="measure only this skill (repeatable)",
    )
    parser.add_argument("--show-wrong", action="store_true", help="print every wrong answer")
    parser.add_argument("--only", choices=("chat", "ranking"), help="measure only these models")
    arguments = parser.parse_args()
    below_floor = [] if arguments.only == "ranking" else measure_chat(arguments)
    if arguments.only != "chat" and not arguments.skill:
        below_floor += measure_ranking()
    if below_floor:
        print(f"below the floor: {', '.join(below_floor)}", file=sys.stderr)
    return 1 if below_floor else 0


def measure_ranking() -> list[str]:
    """Print the nDCG@10 of the rankings, and return the names of the rankings below their floor."""
    start, below_floor = time.monotonic(), []
    print(f"\n{'ranking':<24} {'nDCG@10':>8} {'floor':>7}")
    for row in retrieval_scores.table():
        line = f"{row.ranking:<24} {row.ndcg:>8.3f} {row.floor:>7.2f}"
        if row.ndcg < row.floor:
            below_floor.append(row.ranking)
            line += "   BELOW"
        print(line, flush=True)
    seconds = time.monotonic() - start
    print(f"{retrieval_scores.num_questions()} held-out questions, {seconds:.0f} s")
    return below_floor


def measure_chat(arguments: argparse.Namespace) -> list[str]:
    """Print the chat model's table and return the names of the skills below their floor."""
    examinee = Examinee(arguments.model)
    start, below_floor, mean_scores = time.monotonic(), [], []
    skills = arguments.skill or list(SKILLS)
    print(f"{'skill':<24} {'direct':>8} {'thinking':>9} {'floor':>7}")
    for skill in skills:
        direct, thinking = (
            accuracy(
                examinee,
                held_out_dialogues(skill, thinking, arguments.count, arguments.seed),
                arguments.show_wrong,
            )
            for thinking in (False, True)
        )
        mean_scores.append((direct + thinking) / 2)
        floor = SKILLS[skill].floor
        line = f"{skill:<24} {direct:>8.1%} {thinking:>9.1%} {floor:>7.0%}"
        if min(direct, thinking) < floor:
            below_floor.append(skill)
            line += "   BELOW"
        print(line, flush=True)
    print(f"{'mean':<24} {sum(mean_scores) / len(skills):>8.1%}")
    seconds = time.monotonic() - start
    print(f"{2 * arguments.count * len(skills)} held-out prompts, {seconds:.0f} s")
    return below_floor


if __name__ == "__main__":
    sys.exit(main())
