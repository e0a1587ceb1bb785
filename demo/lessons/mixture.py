"""Which skills there are, how often each is trained, and how dialogues are put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from . import arithmetic, extraction, small_talk, tool_use, world
from .base import Dialogue, Exchange, draw, plain, vary

Lesson = Callable[[Random, bool], Exchange]

_SYSTEMS = (
    "You are a helpful assistant.", "You are a friendly assistant.", "Answer briefly.",
    "Be concise.", "Be polite.",
    "You are a tiny model.", "Help the user.", "You are an assistant that can call tools.",
    "Use the tools when they help.", "You are Nereid's demo model.", "Answer the question.",
    "You are a helpful, honest and careful assistant.",
    "Reply in English.", "Today is Monday.", "You are a test assistant for a server.",
    "Do not guess.",
)  # fmt: skip


def _unknown(rng: Random, held_out: bool) -> Exchange:
    """Requests beyond the model, or that need a tool where none is offered."""
    if rng.random() < 0.6:
        return small_talk.unknown(rng, held_out)

    def make() -> tuple[str, Exchange]:
        user = tool_use.tool_request(rng)
        exchange = plain("declines", vary(rng, user), "I do not know this.", small_talk.DECLINE)
        return user, exchange

    return draw(make, held_out)


def _declines(rng: Random, held_out: bool) -> Exchange:
    lesson = rng.choices((_unknown, world.strangers, arithmetic.too_large), (5, 2, 2))[0]
    return lesson(rng, held_out)


@dataclass(frozen=True)
class Skill:
    """One row of the evaluation.

    Attributes:
        weight: Its share of the training dialogues.
        floor: The accuracy below which the evaluation fails.
        make: Draws a dialogue's exchanges, and the tools on offer.
    """

    weight: float
    floor: float
    make: Callable[[Random, bool], tuple[list[Exchange], list[tool_use.Tool]]]


_LESSONS: dict[str, tuple[float, Lesson]] = {
    "small talk": (6, small_talk.talk),
    "addition": (9, arithmetic.sums),
    "subtraction": (16, arithmetic.differences),
    "times table": (5, arithmetic.products),
    "world facts": (10, world.facts),
    "declines": (6, _declines),
    "JSON extraction": (12, extraction.extract),
}
_FAMILIAR = (
    "small talk",
    "world facts",
    "addition",
    "subtraction",
    "times table",
    "JSON extraction",
)


_DRILLED: tuple[Lesson, ...] = (arithmetic.sums, arithmetic.differences)


def _earlier(rng: Random, held_out: bool, calculator: bool = False) -> Exchange:
    """Any short exchange that may come before the one that counts."""
    names = [name for name in _FAMILIAR if not (calculator and name in _FAMILIAR[2:5])]
    return _LESSONS[rng.choice(names)][1](rng, held_out)


def _alone(lesson: Lesson) -> Callable[[Random, bool], tuple[list[Exchange], list[tool_use.Tool]]]:
    def make(rng: Random, held_out: bool) -> tuple[list[Exchange], list[tool_use.Tool]]:
        num_earlier = rng.choices((0, 1, 2, 3), (70, 15, 10, 5))[0]
        if lesson in _DRILLED and not held_out and rng.random() < 0.4:
            drills = rng.choices(_DRILLED, k=5)
            return [drill(rng, False) for drill in [*drills, lesson]], []
        earlier = [_earlier(rng, held_out) for _ in range(num_earlier)]
        return [*earlier, lesson(rng, held_out)], []

    return make


def _follow_up(rng: Random, held_out: bool) -> tuple[list[Exchange], list[tool_use.Tool]]:
    return world.follow_ups(rng, held_out), []


def _name(rng: Random, held_out: bool) -> tuple[list[Exchange], list[tool_use.Tool]]:
    told, asked = small_talk.remember_name(rng, held_out)
    return [told, *(_earlier(rng, held_out) for _ in range(rng.randint(0, 2))), asked], []


def _with_tools(skill: str) -> Callable[[Random, bool], tuple[list[Exchange], list[tool_use.Tool]]]:
    def last(rng: Random, tools: list[tool_use.Tool], held_out: bool) -> Exchange:
        if skill == "declines, no tool fits":
            return tool_use.decline_exchange(rng, tools, held_out)
        if skill == "plain beside tools":
            exchange = _earlier(rng, held_out, tool_use.has_calculator(tools))
            return Exchange(skill, exchange.messages)
        finish = skill == "answers from results"
        return tool_use.tool_exchange(rng, tools, held_out, skill, finish)

    def make(rng: Random, held_out: bool) -> tuple[list[Exchange], list[tool_use.Tool]]:
        tools = tool_use.offer(rng)
        exchanges = []
        for _ in range(rng.choices((0, 1, 2, 3, 4), (30, 25, 20, 15, 10))[0]):
            kind = rng.random()
            if kind < 0.45:
                earlier = tool_use.tool_exchange(rng, tools, held_out, "tool call", finish=True)
            elif kind < 0.85:
                earlier = tool_use.decline_exchange(rng, tools, held_out)
            else:
                earlier = _earlier(rng, held_out, tool_use.has_calculator(tools))
            exchanges.append(earlier)
        return [*exchanges, last(rng, tools, held_out)], tools

    return make


SKILLS: dict[str, Skill] = {
    **{name: Skill(weight, 0.95, _alone(lesson)) for name, (weight, lesson) in _LESSONS.items()},
    "follow-up": Skill(2, 0.95, _follow_up),
    "remembers a name": Skill(2, 0.95, _name),
    "tool call": Skill(12, 0.95, _with_tools("tool call")),
    "two tool calls": Skill(9, 0.95, _with_tools("two tool calls")),
    "declines, no tool fits": Skill(9, 0.95, _with_tools("declines, no tool fits")),
    "plain beside tools": Skill(4, 0.95, _with_tools("plain beside tools")),
    "answers from results": Skill(4, 0.95, _with_tools("answers from results")),
}


def make_dialogue(rng: Random, skill: str, held_out: bool, thinking: bool) -> Dialogue:
    """Draw a dialogue whose last exchange is of this skill.

    Every exchange in it is on the same side of the hold-out. Reasoning stays on the last exchange,
    and only with `thinking`: earlier reasoning is no part of a prompt.
    """
    exchanges, tools = SKILLS[skill].make(rng, held_out)
    messages = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": rng.choice(_SYSTEMS)})
    for exchange in exchanges:
        keep = thinking and exchange is exchanges[-1]
        for message in exchange.messages:
            kept = {k: v for k, v in message.items() if keep or k != "reasoning_content"}
            messages.append(kept)
    return Dialogue(skill, tuple(messages), tool_use.definitions(tools), thinking)


def training_dialogue(rng: Random) -> Dialogue:
    """Draw a dialogue for training: skills by weight, thinking half the time."""
    names = list(SKILLS)
    skill = rng.choices(names, [SKILLS[name].weight for name in names])[0]
    return make_dialogue(rng, skill, held_out=False, thinking=rng.random() < 0.5)
