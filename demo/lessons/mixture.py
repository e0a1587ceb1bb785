"""The skills, the frequency of each skill in training, and the composition of dialogues."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

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
from .base import Candidate, Dialogue, Exchange, Lesson, Message, NoKeyError, lesson, plain, vary

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


@lesson
def _needs_tool(rng: Random) -> Candidate[Exchange]:
    """Draw a request that needs a tool, in a dialogue that offers none."""
    request = tool_use.tool_request(rng)
    user = vary(rng, request)
    reasoning, answer = "I do not know this.", small_talk.DECLINE
    exchange = plain("declines", user, reasoning=reasoning, answer=answer)
    return Candidate(key=request, example=exchange)


def _unknown(rng: Random, held_out: bool) -> Exchange:
    """Draw a request beyond the model, or one that needs a tool."""
    if rng.random() < 0.7:
        return small_talk.unknown(rng, held_out)
    return _needs_tool(rng, held_out)


def _declines(rng: Random, held_out: bool) -> Exchange:
    """Draw a request that the model must decline."""
    lessons = (_unknown, world.strangers, arithmetic.too_large)
    (draw_exchange,) = rng.choices(lessons, weights=(6, 2, 2))
    return draw_exchange(rng, held_out)


class Conversation(NamedTuple):
    """The exchanges of a dialogue, and the tools on offer."""

    exchanges: list[Exchange]
    tools: Sequence[tool_use.Tool] = ()


_MAX_TOOL_DRAWS = 50


@dataclass(frozen=True)
class Skill:
    """One row of the evaluation.

    Attributes:
        weight: The share of the training dialogues; 0 for a skill that is only measured.
        make: Draws a dialogue's exchanges, and the tools on offer.
        floor: The accuracy below which the evaluation fails.
    """

    weight: float
    make: Lesson[Conversation]
    floor: float = 0.9


# The lessons without tools. The number is the share of the training dialogues.
_LESSONS: dict[str, tuple[float, Lesson[Exchange]]] = {
    "small talk": (6, small_talk.talk),
    "addition": (10, arithmetic.sums),
    "subtraction": (16, arithmetic.differences),
    "times table": (14, arithmetic.products),
    "world facts": (5, world.facts),
    "capitals": (7, knowledge.question_lesson("capitals", knowledge.capital)),
    "translation": (6, knowledge.question_lesson("translation", knowledge.translation)),
    "common knowledge": (8, knowledge.common),
    "lists": (5, knowledge.question_lesson("lists", knowledge.counted_list)),
    "counting": (6, knowledge.question_lesson("counting", knowledge.counting)),
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

_DRILLED: tuple[Lesson[Exchange], ...] = (arithmetic.sums, arithmetic.differences)


def _earlier(rng: Random, held_out: bool, topics: frozenset[str] = frozenset()) -> Exchange:
    """Draw a short exchange that needs no tool of these topics."""
    taken_over = frozenset().union(*(_TAKEN_OVER.get(topic, frozenset()) for topic in topics))
    names = [name for name in _FAMILIAR if name not in taken_over]
    (name,) = rng.choices(names, [_FAMILIAR[name] for name in names])
    _, draw_exchange = _LESSONS[name]
    return draw_exchange(rng, held_out)


def _alone(last_lesson: Lesson[Exchange]) -> Lesson[Conversation]:
    """Return a lesson of dialogues without tools that end with an exchange of another lesson.

    Most of the dialogues contain only this exchange.
    """

    def draw_conversation(rng: Random, held_out: bool) -> Conversation:
        (num_earlier,) = rng.choices((0, 1, 2, 3), weights=(70, 15, 10, 5))
        if last_lesson in _DRILLED and not held_out and rng.random() < 0.4:
            drills = rng.choices(_DRILLED, k=5)
            return Conversation([drill(rng, False) for drill in [*drills, last_lesson]])
        if last_lesson is reading.read:
            num_earlier = 0  # The passages are in the system message, which comes first.
        earlier = [_earlier(rng, held_out) for _ in range(num_earlier)]
        return Conversation([*earlier, last_lesson(rng, held_out)])

    return draw_conversation


def _follow_up(rng: Random, held_out: bool) -> Conversation:
    return Conversation(world.follow_ups(rng, held_out))


def _remembers_name(rng: Random, held_out: bool) -> Conversation:
    """Draw up to two other exchanges between the user's name and the question for the name."""
    introduction, question = small_talk.remember_name(rng, held_out)
    others = [_earlier(rng, held_out) for _ in range(rng.randint(0, 2))]
    return Conversation([introduction, *others, question])


def _last_with_tools(
    rng: Random, skill: str, tools: Sequence[tool_use.Tool], held_out: bool
) -> Exchange:
    """Draw the exchange of a skill for the tools on offer."""
    if skill == "declines, no tool fits":
        return tool_use.decline_exchange(rng, tools, held_out)
    if skill == "plain beside tools":
        exchange = _earlier(rng, held_out, tool_use.topics(tools))
        return Exchange(skill, exchange.messages)
    with_results = skill == "answers from results"
    return tool_use.tool_exchange(rng, tools, held_out, skill, with_results)


def _earlier_with_tools(rng: Random, tools: Sequence[tool_use.Tool], held_out: bool) -> Exchange:
    """Draw an answered call, a request that no tool fits, or an exchange that needs no tool."""
    chance = rng.random()
    if chance < 0.55:
        return tool_use.tool_exchange(rng, tools, held_out, "tool call", with_results=True)
    if chance < 0.82:
        return tool_use.decline_exchange(rng, tools, held_out)
    return _earlier(rng, held_out, tool_use.topics(tools))


def _with_tools(skill: str) -> Lesson[Conversation]:
    """Return a lesson of dialogues with tools that end with an exchange of a skill."""

    def draw_conversation(rng: Random, held_out: bool) -> Conversation:
        tools = tool_use.offer(rng)
        (num_earlier,) = rng.choices((0, 1, 2, 3), weights=(60, 20, 12, 8))
        earlier = [_earlier_with_tools(rng, tools, held_out) for _ in range(num_earlier)]
        return Conversation([*earlier, _last_with_tools(rng, skill, tools, held_out)], tools)

    return draw_conversation


def _new_names(rng: Random, held_out: bool) -> Conversation:
    """Draw a call of a known tool under a name and keys that training never shows."""
    tools = tool_use.offer(rng, new_names=True)
    return Conversation([_last_with_tools(rng, "tool call", tools, held_out)], tools)


def _unseen_tools(rng: Random, held_out: bool) -> Conversation:
    """Draw a call of a tool that training never shows."""
    tools = tool_use.offer(rng, unseen=True)
    return Conversation([_last_with_tools(rng, "tool call", tools, held_out)], tools)


def _tool_again(rng: Random, held_out: bool) -> Conversation:
    """Draw a call and a question such as `And in Rome?` that needs the same tool again."""
    while True:
        tools = tool_use.offer(rng)
        if any(tool.family.listed for tool in tools):
            return Conversation(tool_use.follow_up(rng, tools, held_out), tools)


# The skills whose last exchange can be drawn for any tools, and their frequencies in training.
_TOOL_SKILLS = {
    "tool call": 25,
    "two tool calls": 9,
    "declines, no tool fits": 16,
    "plain beside tools": 3,
    "answers from results": 3,
}

SKILLS: dict[str, Skill] = {
    **{name: Skill(weight, _alone(last)) for name, (weight, last) in _LESSONS.items()},
    "follow-up": Skill(2, _follow_up),
    "remembers a name": Skill(2, _remembers_name),
    **{name: Skill(weight, _with_tools(name)) for name, weight in _TOOL_SKILLS.items()},
    "tool again": Skill(2, _tool_again),
    "unseen names and keys": Skill(0, _new_names),
    "unseen tools": Skill(0, _unseen_tools),
}
_BRANCHES_WITH_TOOLS = 6


def make_dialogue(rng: Random, skill: str, held_out: bool, thinking: bool) -> Dialogue:
    """Draw a dialogue whose last exchange is of this skill.

    All exchanges of the dialogue are held out, or none of them.
    """
    exchanges, tools = _make_exchanges(rng, skill, held_out)
    return _dialogue(skill, _system(rng, exchanges), exchanges, tools, thinking)


def _system(rng: Random, exchanges: list[Exchange]) -> tuple[Message, ...]:
    """Draw a system message for 40 % of the dialogues that have none."""
    if rng.random() < 0.4 and exchanges[0].messages[0]["role"] != "system":
        return ({"role": "system", "content": rng.choice(_SYSTEMS)},)
    return ()


def _dialogue(
    skill: str,
    system: tuple[Message, ...],
    exchanges: list[Exchange],
    tools: Sequence[tool_use.Tool],
    thinking: bool,
) -> Dialogue:
    """Join exchanges to a dialogue.

    Only the last exchange has reasoning, and only if `thinking` is true, because prompts do not
    contain earlier reasoning.
    """
    *earlier, last = exchanges
    messages = [*system]
    for exchange in earlier:
        messages += _without_reasoning(exchange)
    messages += last.messages if thinking else _without_reasoning(last)
    return Dialogue(skill, tuple(messages), tool_use.definitions(tools), thinking)


def _without_reasoning(exchange: Exchange) -> list[Message]:
    """Return the messages of an exchange without the assistant's reasoning."""
    return [
        {key: value for key, value in message.items() if key != "reasoning_content"}
        for message in exchange.messages
    ]


def _make_exchanges(rng: Random, skill: str, held_out: bool) -> Conversation:
    """Draw the exchanges of a dialogue. If the drawn tools have no fitting prompt, draw others.

    Raises:
        NoKeyError: no draw for this skill has a fitting prompt.
    """
    for _ in range(_MAX_TOOL_DRAWS):
        with suppress(NoKeyError):
            return SKILLS[skill].make(rng, held_out)
    raise NoKeyError(f"{skill}: no prompt has held_out={held_out}")


def training_group(rng: Random) -> list[Dialogue]:
    """Draw dialogues for training that differ only in their last exchange.

    The skills are drawn by weight, and half of the dialogues have reasoning. A group with tools has
    several dialogues, because the definitions of the tools are much longer than an exchange, and
    the training computes them once. Any other group has one dialogue.
    """
    weights = [skill.weight for skill in SKILLS.values()]
    (skill,) = rng.choices(list(SKILLS), weights)
    (*earlier, last), tools = _make_exchanges(rng, skill, held_out=False)
    last_exchanges = [(skill, last)]
    if tools:
        other_skills = rng.choices(
            list(_TOOL_SKILLS), list(_TOOL_SKILLS.values()), k=_BRANCHES_WITH_TOOLS - 1
        )
        with suppress(NoKeyError):  # Some tools have no prompt that training may use.
            last_exchanges += [
                (other_skill, _last_with_tools(rng, other_skill, tools, held_out=False))
                for other_skill in other_skills
            ]
    system = _system(rng, [*earlier, last])
    return [
        _dialogue(name, system, [*earlier, exchange], tools, thinking=rng.random() < 0.5)
        for name, exchange in last_exchanges
    ]
