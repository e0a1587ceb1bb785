"""The skills, the frequency of each skill in training, and the composition of dialogues."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from . import (
    arithmetic,
    extraction,
    knowledge,
    reading,
    small_talk,
    structured,
    tool_use,
    world,
    writing,
)
from .base import Dialogue, Exchange, Message, NoKeyError, draw, plain, vary

Lesson = Callable[[Random, bool], Exchange]

_SYSTEMS = (
    "You are a helpful assistant.", "You are a friendly assistant.", "Answer briefly.",
    "Be concise.", "Be polite.",
    "You are a tiny model.", "Help the user.", "You are an assistant that can call tools.",
    "Use the tools when they help.", "You are Nereid's demo model.", "Answer the question.",
    "You are a helpful, honest and careful assistant.",
    "Reply in English.", "Today is Monday.", "You are a test assistant for a server.",
    "Do not guess.", "You are a helpful assistant. Use the tools.", "Answer with JSON.",
    "You help with everyday tasks.", "Speak like a pirate.", "You are a bot.", "Assistant",
    "You can call tools. Call one if it fits.", "Answer in one sentence.",
)  # fmt: skip


def _unknown(rng: Random, held_out: bool) -> Exchange:
    """Draw a request beyond the model, or one that needs a tool where no tool is offered."""
    if rng.random() < 0.7:
        return small_talk.unknown(rng, held_out)

    def make() -> tuple[str, Exchange]:
        user = tool_use.tool_request(rng)
        exchange = plain("declines", vary(rng, user), "I do not know this.", small_talk.DECLINE)
        return user, exchange

    return draw(make, held_out)


def _declines(rng: Random, held_out: bool) -> Exchange:
    lesson = rng.choices((_unknown, world.strangers, arithmetic.too_large), (6, 2, 2))[0]
    return lesson(rng, held_out)


Drawn = tuple[list[Exchange], list[tool_use.Tool]]
_MAX_TOOL_DRAWS = 50


@dataclass(frozen=True)
class Skill:
    """One row of the evaluation.

    Attributes:
        weight: The share of the training dialogues; 0 for a skill that is only measured.
        floor: The accuracy below which the evaluation fails.
        make: Draws a dialogue's exchanges, and the tools on offer.
    """

    weight: float
    floor: float
    make: Callable[[Random, bool], Drawn]


_LESSONS: dict[str, tuple[float, Lesson]] = {
    "small talk": (6, small_talk.talk),
    "addition": (10, arithmetic.sums),
    "subtraction": (16, arithmetic.differences),
    "times table": (14, arithmetic.products),
    "world facts": (5, world.facts),
    "capitals": (7, knowledge.lesson("capitals", knowledge.capital)),
    "translation": (6, knowledge.lesson("translation", knowledge.translation)),
    "common knowledge": (8, knowledge.common),
    "lists": (5, knowledge.lesson("lists", knowledge.counted_list)),
    "counting": (6, knowledge.lesson("counting", knowledge.counting)),
    "stories and poems": (4, writing.write),
    "declines": (6, _declines),
    "JSON extraction": (6, extraction.extract),
    "schema": (20, structured.answer_with_object),
    "answers from passages": (6, reading.read),
}
# Exchanges that may come before the measured exchange of a dialogue, and their frequencies.
_FAMILIAR = {
    "small talk": 4, "world facts": 3, "addition": 2, "subtraction": 2, "times table": 1,
    "capitals": 2, "common knowledge": 2, "lists": 1, "stories and poems": 1,
    "JSON extraction": 2, "translation": 1,
}  # fmt: skip
_SUMS = frozenset({"addition", "subtraction", "times table"})
# For each topic of a tool, the skills whose questions the tool can answer.
_TAKEN_OVER = {
    **dict.fromkeys(("add", "subtract", "multiply", "divide"), _SUMS),
    "capital": frozenset({"capitals"}),
    "translate": frozenset({"translation"}),
    "joke": frozenset({"stories and poems"}),
    "search": frozenset({"common knowledge", "capitals"}),
}

_DRILLED: tuple[Lesson, ...] = (arithmetic.sums, arithmetic.differences)


def _earlier(rng: Random, held_out: bool, topics: frozenset[str] = frozenset()) -> Exchange:
    """Draw a short exchange that needs no tool of these topics."""
    taken = frozenset().union(*(_TAKEN_OVER.get(topic, frozenset()) for topic in topics))
    names = [name for name in _FAMILIAR if name not in taken]
    name = rng.choices(names, [_FAMILIAR[name] for name in names])[0]
    return _LESSONS[name][1](rng, held_out)


def _alone(lesson: Lesson) -> Callable[[Random, bool], Drawn]:
    def make(rng: Random, held_out: bool) -> Drawn:
        num_earlier = rng.choices((0, 1, 2, 3), (70, 15, 10, 5))[0]
        if lesson in _DRILLED and not held_out and rng.random() < 0.4:
            drills = rng.choices(_DRILLED, k=5)
            return [drill(rng, False) for drill in [*drills, lesson]], []
        if lesson is reading.read:
            num_earlier = 0
        earlier = [_earlier(rng, held_out) for _ in range(num_earlier)]
        return [*earlier, lesson(rng, held_out)], []

    return make


def _follow_up(rng: Random, held_out: bool) -> Drawn:
    return world.follow_ups(rng, held_out), []


def _name(rng: Random, held_out: bool) -> Drawn:
    told, asked = small_talk.remember_name(rng, held_out)
    return [told, *(_earlier(rng, held_out) for _ in range(rng.randint(0, 2))), asked], []


def _last_with_tools(
    rng: Random, skill: str, tools: list[tool_use.Tool], held_out: bool
) -> Exchange:
    """Draw the exchange of a skill for the tools on offer."""
    if skill == "declines, no tool fits":
        return tool_use.decline_exchange(rng, tools, held_out)
    if skill == "plain beside tools":
        exchange = _earlier(rng, held_out, tool_use.topics(tools))
        return Exchange(skill, exchange.messages)
    finish = skill == "answers from results"
    return tool_use.tool_exchange(rng, tools, held_out, skill, finish)


def _with_tools(
    skill: str, unseen: bool = False, new_names: bool = False
) -> Callable[[Random, bool], Drawn]:
    def make(rng: Random, held_out: bool) -> Drawn:
        tools = tool_use.offer(rng, unseen, new_names)
        if unseen or new_names:
            return [_last_with_tools(rng, "tool call", tools, held_out)], tools
        exchanges = []
        for _ in range(rng.choices((0, 1, 2, 3), (60, 20, 12, 8))[0]):
            kind = rng.random()
            if kind < 0.55:
                earlier = tool_use.tool_exchange(rng, tools, held_out, "tool call", finish=True)
            elif kind < 0.82:
                earlier = tool_use.decline_exchange(rng, tools, held_out)
            else:
                earlier = _earlier(rng, held_out, tool_use.topics(tools))
            exchanges.append(earlier)
        return [*exchanges, _last_with_tools(rng, skill, tools, held_out)], tools

    return make


def _tool_again(rng: Random, held_out: bool) -> Drawn:
    """Draw a call and a question such as `And in Rome?` that needs the same tool again."""
    while True:
        tools = tool_use.offer(rng)
        if any(tool.family.listed for tool in tools):
            return tool_use.follow_up(rng, tools, held_out), tools


# The skills whose last exchange can be drawn for any tools, and their frequencies in training.
_TOOL_SKILLS = {
    "tool call": 25,
    "two tool calls": 9,
    "declines, no tool fits": 16,
    "plain beside tools": 3,
    "answers from results": 3,
}

SKILLS: dict[str, Skill] = {
    **{name: Skill(weight, 0.9, _alone(lesson)) for name, (weight, lesson) in _LESSONS.items()},
    "follow-up": Skill(2, 0.9, _follow_up),
    "remembers a name": Skill(2, 0.9, _name),
    **{name: Skill(weight, 0.9, _with_tools(name)) for name, weight in _TOOL_SKILLS.items()},
    "tool again": Skill(2, 0.9, _tool_again),
    "unseen names and keys": Skill(0, 0.9, _with_tools("tool call", new_names=True)),
    "unseen tools": Skill(0, 0.9, _with_tools("tool call", unseen=True)),
}
_BRANCHES_WITH_TOOLS = 6


def make_dialogue(rng: Random, skill: str, held_out: bool, thinking: bool) -> Dialogue:
    """Draw a dialogue whose last exchange is of this skill.

    All exchanges of the dialogue are held out, or none of them.
    """
    exchanges, tools = _make_exchanges(rng, skill, held_out)
    return _dialogue(skill, _system(rng, exchanges), exchanges, tools, thinking)


def _system(rng: Random, exchanges: list[Exchange]) -> tuple[Message, ...]:
    """Draw the system message of a dialogue that has none, in 40 % of the dialogues."""
    if rng.random() < 0.4 and exchanges[0].messages[0]["role"] != "system":
        return ({"role": "system", "content": rng.choice(_SYSTEMS)},)
    return ()


def _dialogue(
    skill: str,
    system: tuple[Message, ...],
    exchanges: list[Exchange],
    tools: list[tool_use.Tool],
    thinking: bool,
) -> Dialogue:
    """Join exchanges to a dialogue.

    Only the last exchange has reasoning, and only if `thinking` is true, because prompts do not
    contain earlier reasoning.
    """
    messages = list(system)
    for exchange in exchanges:
        keep = thinking and exchange is exchanges[-1]
        for message in exchange.messages:
            kept = {k: v for k, v in message.items() if keep or k != "reasoning_content"}
            messages.append(kept)
    return Dialogue(skill, tuple(messages), tool_use.definitions(tools), thinking)


def _make_exchanges(rng: Random, skill: str, held_out: bool) -> Drawn:
    """Draw the exchanges of a dialogue. If the drawn tools have no fitting prompt, draw others.

    Raises:
        NoKeyError: no draw for this skill has a fitting prompt.
    """
    for _ in range(_MAX_TOOL_DRAWS):
        try:
            return SKILLS[skill].make(rng, held_out)
        except NoKeyError:
            continue
    raise NoKeyError(f"{skill}: no prompt has held_out={held_out}")


def training_group(rng: Random) -> list[Dialogue]:
    """Draw dialogues for training that differ only in their last exchange.

    The skills are drawn by weight, and half of the dialogues have reasoning. A group with tools has
    several dialogues, because the definitions of the tools are much longer than an exchange, and
    the training computes them once. Any other group has one dialogue.
    """
    names = list(SKILLS)
    skill = rng.choices(names, [SKILLS[name].weight for name in names])[0]
    exchanges, tools = _make_exchanges(rng, skill, held_out=False)
    lasts = [(skill, exchanges[-1])]
    if tools:
        weights = list(_TOOL_SKILLS.values())
        others = rng.choices(list(_TOOL_SKILLS), weights, k=_BRANCHES_WITH_TOOLS - 1)
        with suppress(NoKeyError):  # Some tools have no prompt that training may use.
            lasts += [(other, _last_with_tools(rng, other, tools, False)) for other in others]
    system = _system(rng, exchanges)
    return [
        _dialogue(name, system, [*exchanges[:-1], last], tools, rng.random() < 0.5)
        for name, last in lasts
    ]
