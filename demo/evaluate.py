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


@dataclass(frozen=True)
class Reply:
    """The parts of the model's text. `calls` is None if a call is not valid JSON."""

    reasoning: str | None
    content: str
    calls: list[tuple[str, dict[str, Any]]] | None


def read_reply(text: str) -> Reply:
    """Split a reply into its reasoning, its content and its calls."""
    text = text.replace(END_OF_TEXT, "").removesuffix(TURN_END)
    head, closed, body = text.rpartition("</think>")
    reasoning = head.removeprefix("<think>").strip("\n") if closed else None
    content, *blocks = body.lstrip("\n").split("<tool_call>")
    try:
        parsed = [json.loads(block.strip().removesuffix("</tool_call>")) for block in blocks]
        calls = [(call["name"], call["arguments"]) for call in parsed]
    except (ValueError, KeyError, TypeError):
        calls = None
    return Reply(reasoning, content.rstrip("\n"), calls)


def is_right(dialogue: Dialogue, reply: Reply) -> bool:
    """Return whether a reply is right.

    Calls and JSON are compared by value. Other text must equal one of the texts in the lesson.
    """
    wanted = dialogue.messages[-1]
    if reply.calls != _calls(wanted):
        return False
    if dialogue.thinking and not reply.reasoning:
        return False
    if wanted["content"].startswith("{"):
        try:
            given, right = json.loads(reply.content), json.loads(wanted["content"])
        except ValueError:
            return False
        return _same_types(given, right) if wanted.get("is_free") else bool(given == right)
    return reply.content in wanted.get("alternatives", (wanted["content"],))


def _same_types(given: dict[str, Any], right: dict[str, Any]) -> bool:
    """Return whether two objects have the same keys, and short values of the same types.

    A schema without a limit on a string's length accepts any text. A very long text shows that the
    model has not ended the string, so it counts as wrong.
    """
    if list(given) != list(right):
        return False
    return all(
        type(given[key]) is type(right[key]) and 0 < len(str(given[key])) < 120 for key in right
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
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        answers = [""] * len(prompts)
        for begin in range(0, len(order), batch_size):
            chosen = order[begin : begin + batch_size]
            batch = self.tokenizer(
                [prompts[index] for index in chosen], return_tensors="pt", padding=True
            )
            with torch.inference_mode():
                output = self._model.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    max_new_tokens=max_new_tokens,
                )
            new = output[:, batch["input_ids"].shape[1] :]
            for index, text in zip(chosen, self.tokenizer.batch_decode(new), strict=True):
                answers[index] = text
        return answers

    def fill_object(self, prompts: list[str], keys: list[list[str]]) -> list[str]:
        """Answer each prompt with a JSON object of prescribed keys, as a grammar enforces it.

        The model writes the reasoning, if the prompt leaves it open, and the values. Braces, keys
        and commas are prescribed. A value that is not complete JSON makes the answer incomplete.
        """
        texts = list(prompts)
        is_open = [not prompt.endswith("</think>\n\n") for prompt in prompts]
        for index, reply in zip(*self._some(texts, is_open), strict=True):
            texts[index] += reply.partition("</think>")[0] + "</think>\n\n"
        for place in range(max(map(len, keys))):
            has_key = [place < len(names) for names in keys]
            for index, names in enumerate(keys):
                if has_key[index]:
                    texts[index] += (", " if place else "{") + json.dumps(names[place]) + ":"
            for index, reply in zip(*self._some(texts, has_key), strict=True):
                texts[index] += _first_value(reply)
        return [
            text.removeprefix(prompt) + "}" for text, prompt in zip(texts, prompts, strict=True)
        ]

    def _some(self, texts: list[str], chosen: list[bool]) -> tuple[list[int], list[str]]:
        """Continue the chosen texts; return their indices and the continuations."""
        indices = [index for index, is_chosen in enumerate(chosen) if is_chosen]
        return indices, self.answer([texts[index] for index in indices], max_new_tokens=64)


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
        right = is_right(dialogue, read_reply(answer))
        num_right += right
        if show_wrong and not right:
            wanted = dialogue.messages[-1]
            print(f"  offered: {[tool['function']['name'] for tool in dialogue.tools]}")
            print(f"  asked:   {dialogue.messages[-2]['content']!r}")
            print(f"  wanted:  {wanted['content'] or _calls(wanted)!r}")
            print(f"  wrote:   {answer.replace(END_OF_TEXT, '')!r}", flush=True)
    return num_right / len(dialogues)


def _calls(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], function["arguments"]) for function in functions]


def main() -> int:
    """Print the tables."""
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
    failed = [] if arguments.only == "ranking" else measure_chat(arguments)
    if arguments.only != "chat" and not arguments.skill:
        failed += measure_ranking()
    if failed:
        print(f"below the floor: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def measure_ranking() -> list[str]:
    """Print the nDCG@10 of the rankings, and return the names of the rankings below their floor."""
    begun, failed = time.monotonic(), []
    print(f"\n{'ranking':<24} {'nDCG@10':>8} {'floor':>7}")
    for row in retrieval_scores.table():
        below = row.ndcg < row.floor
        failed += [row.ranking] if below else []
        text = f"{row.ranking:<24} {row.ndcg:>8.3f} {row.floor:>7.2f}"
        print(text + ("   BELOW" if below else ""), flush=True)
    print(
        f"{retrieval_scores.num_questions()} held-out questions, {time.monotonic() - begun:.0f} s"
    )
    return failed


def measure_chat(arguments: argparse.Namespace) -> list[str]:
    """Print the chat model's table and return the names of the skills below their floor."""
    examinee = Examinee(arguments.model)
    begun, failed, total = time.monotonic(), [], 0.0
    skills = arguments.skill or list(SKILLS)
    print(f"{'skill':<24} {'direct':>8} {'thinking':>9} {'floor':>7}")
    for skill in skills:
        scores = [
            accuracy(
                examinee,
                held_out_dialogues(skill, thinking, arguments.count, arguments.seed),
                arguments.show_wrong,
            )
            for thinking in (False, True)
        ]
        floor = SKILLS[skill].floor
        below = min(scores) < floor
        failed += [skill] if below else []
        total += sum(scores) / 2
        row = f"{skill:<24} {scores[0]:>8.1%} {scores[1]:>9.1%} {floor:>7.0%}"
        print(row + ("   BELOW" if below else ""), flush=True)
    print(f"{'mean':<24} {total / len(skills):>8.1%}")
    seconds = time.monotonic() - begun
    print(f"{2 * arguments.count * len(skills)} held-out prompts, {seconds:.0f} s")
    return failed


if __name__ == "__main__":
    sys.exit(main())
