"""Measure the demo models on held-out prompts and questions: exit 1 below a floor.

The chat model has a row for each skill, the embedder and the reranker one each.
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
    """What the model wrote, taken apart; `calls` is None where a call is not valid JSON."""

    reasoning: str | None
    content: str
    calls: list[tuple[str, dict[str, Any]]] | None


def read_reply(text: str) -> Reply:
    """Split a reply into reasoning, content and calls."""
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
    """Whether a reply says what it must: calls and JSON by value, anything else to the letter."""
    wanted = dialogue.messages[-1]
    functions = [call["function"] for call in wanted.get("tool_calls", ())]
    if reply.calls != [(function["name"], function["arguments"]) for function in functions]:
        return False
    if dialogue.thinking and not reply.reasoning:
        return False
    if wanted["content"].startswith("{"):
        try:
            return bool(json.loads(reply.content) == json.loads(wanted["content"]))
        except ValueError:
            return False
    return bool(reply.content == wanted["content"])


class Examinee:
    """A checkpoint that answers prompts greedily, many at once."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def answer(self, prompts: list[str], batch_size: int = 64) -> list[str]:
        """Continue each prompt up to the end of the turn; special tokens stay in the text."""
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
                    max_new_tokens=320,
                )
            new = output[:, batch["input_ids"].shape[1] :]
            for index, text in zip(chosen, self.tokenizer.batch_decode(new), strict=True):
                answers[index] = text
        return answers


def held_out_dialogues(skill: str, thinking: bool, count: int, seed: int) -> list[Dialogue]:
    """The dialogues that a skill is measured on: none shares its last prompt with training."""
    rng = Random(f"evaluation {seed} {skill} {thinking}")
    return [make_dialogue(rng, skill, held_out=True, thinking=thinking) for _ in range(count)]


def accuracy(examinee: Examinee, dialogues: list[Dialogue], show_wrong: bool) -> float:
    """The share of dialogues answered right."""
    prompts = [prompt_text(examinee.tokenizer, dialogue) for dialogue in dialogues]
    num_right = 0
    for dialogue, answer in zip(dialogues, examinee.answer(prompts), strict=True):
        right = is_right(dialogue, read_reply(answer))
        num_right += right
        if show_wrong and not right:
            wanted = dialogue.messages[-1]
            print(f"  asked:  {dialogue.messages[-2]['content']!r}")
            print(f"  wanted: {wanted['content'] or wanted['tool_calls']!r}")
            print(f"  wrote:  {answer.replace(END_OF_TEXT, '')!r}", flush=True)
    return num_right / len(dialogues)


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=FOLDER, help="checkpoint (default: %(default)s)"
    )
    parser.add_argument(
        "--count", type=int, default=100, help="prompts per cell (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument(
        "--skill", choices=list(SKILLS), action="append", help="only this; repeatable"
    )
    parser.add_argument("--show-wrong", action="store_true", help="print every wrong answer")
    parser.add_argument("--only", choices=("chat", "ranking"), help="measure these models alone")
    arguments = parser.parse_args()
    failed = [] if arguments.only == "ranking" else measure_chat(arguments)
    if arguments.only != "chat" and not arguments.skill:
        failed += measure_ranking()
    if failed:
        print(f"below the floor: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def measure_ranking() -> list[str]:
    """Print nDCG@10 of the embedder and the reranker; the names of those below their floor."""
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
    """Print the chat model's table; the names of the skills below their floor."""
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
