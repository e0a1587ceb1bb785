"""Dialogues with tools: call the right one, call two, decline when none fits, use the result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from string import Formatter
from typing import Any

from . import words
from .base import Exchange, Message, draw, plain, vary
from .small_talk import DECLINE_TOOLS, fill_unknown
from .toolbox import FAMILIES, Family, Parameter, Values

_RESERVED = "calculation"


@dataclass(frozen=True)
class Tool:
    """One tool as offered, with a key for each of its slots."""

    family: Family
    name: str
    keys: dict[str, str]
    definition: Message


@dataclass(frozen=True)
class Call:
    """A request for a tool, and the call that answers it."""

    tool: Tool
    user: str
    values: Values

    @property
    def arguments(self) -> Values:
        """The values under the names of the tool's schema, in its order."""
        return {
            key: self.values[slot] for slot, key in self.tool.keys.items() if slot in self.values
        }


def _schema(rng: Random, parameter: Parameter, described: bool) -> Message:
    schema: Message = {"type": parameter.type}
    if parameter.choices:
        schema["enum"] = list(parameter.choices)
    if described:
        schema["description"] = rng.choice(parameter.descriptions)
    return schema


def make_tool(rng: Random, family: Family) -> Tool:
    """Offer a family; only the descriptions vary."""
    described = rng.random() < 0.5
    function: Message = {"name": family.name}
    if rng.random() < 0.9:
        function["description"] = rng.choice(family.descriptions)
    function["parameters"] = {
        "type": "object",
        "properties": {p.key: _schema(rng, p, described) for p in family.parameters},
    }
    if rng.random() < 0.9:
        function["parameters"]["required"] = [p.key for p in family.parameters if p.required]
    keys = {p.slot: p.key for p in family.parameters}
    return Tool(family, family.name, keys, {"type": "function", "function": function})


def offer(rng: Random) -> list[Tool]:
    """One to four tools of different families."""
    num = rng.choices((1, 2, 3, 4), (35, 30, 20, 15))[0]
    return [make_tool(rng, family) for family in rng.sample(FAMILIES, num)]


def _slots(request: str) -> set[str]:
    return {slot for _, slot, _, _ in Formatter().parse(request) if slot}


def _request(rng: Random, tool: Tool) -> tuple[str, Values, Values]:
    """A request with its placeholders, the values it needs and their spoken forms."""
    fitting = [request for request in tool.family.requests if _slots(request) <= set(tool.keys)]
    request = rng.choice(fitting)
    values, spoken = tool.family.fill(rng)
    values = {slot: value for slot, value in values.items() if slot in _slots(request)}
    return request, values, values | spoken


def make_call(rng: Random, tool: Tool) -> Call:
    """One request that this tool answers."""
    request, values, spoken = _request(rng, tool)
    return Call(tool, request.format(**spoken), values)


def _same_tool_twice(rng: Random, tool: Tool) -> list[Call]:
    """`What is the weather in A and B?`: two calls that differ in one value."""
    (slot,) = tool.family.spoken_lists
    request, values, spoken = _request(rng, tool)
    other = tool.family.fill(rng)[0][slot]
    user = request.format(**(spoken | {slot: f"{spoken[slot]} and {other}"}))
    return [Call(tool, user, values), Call(tool, user, values | {slot: other})]


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def _two_requests(rng: Random, tools: Sequence[Tool]) -> list[Call]:
    """Two requests in one message, for two tools or for one twice."""
    first, second = (make_call(rng, rng.choice(tools)) for _ in range(2))
    if len(tools) > 1 and first.tool is second.tool:
        second = make_call(rng, rng.choice([tool for tool in tools if tool is not first.tool]))
    joined = rng.choice(
        (
            f"{first.user.rstrip('?.')} and {_lower(second.user)}",
            f"{first.user.rstrip('?.')}, and {_lower(second.user)}",
            f"{first.user} {second.user}",
            f"{first.user} And {_lower(second.user)}",
            f"{first.user} Also, {_lower(second.user)}",
        )
    )
    return [Call(first.tool, joined, first.values), Call(second.tool, joined, second.values)]


def two_calls(rng: Random, tools: Sequence[Tool]) -> list[Call]:
    """One user message that needs two calls at once."""
    able = [tool for tool in tools if tool.family.spoken_lists]
    if able and rng.random() < 0.5:
        return _same_tool_twice(rng, rng.choice(able))
    return _two_requests(rng, tools)


def _result(rng: Random, call: Call) -> tuple[str, str]:
    """What the tool returns, and the answer to the user."""
    if rng.random() < 0.05:
        error = rng.choice(
            ("not found", "timeout", "no connection", "unknown " + words.phrase(rng))
        )
        return json.dumps({"error": error}), f"Sorry, the tool failed: {error}."
    returned, answer = call.tool.family.result(rng, call.values)
    if rng.random() < 0.12:
        text = ", ".join(f"{key} {value}" for key, value in returned.items())
        return text, f"Here is the result: {text}."
    if list(returned) == ["result"] and rng.random() < 0.5:
        return str(returned["result"]), answer
    return json.dumps(returned), answer


def _reasoning(tools: Sequence[Tool], wanted: str) -> str:
    offered = json.dumps([tool.name for tool in tools])
    return f"Offered: {offered}. The user wants {wanted}."


def call_exchange(
    rng: Random, tools: Sequence[Tool], calls: list[Call], skill: str, finish: bool
) -> Exchange:
    """User, calls and, if `finish`, results and the answer."""
    wanted = "; ".join(f'{call.tool.family.purpose}: "{call.tool.name}"' for call in calls)
    user = vary(rng, calls[0].user) if rng.random() < 0.5 else calls[0].user
    tool_calls = [
        {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": c.tool.name, "arguments": c.arguments},
        }
        for n, c in enumerate(calls)
    ]
    asked: Message = {"role": "assistant", "content": "", "tool_calls": tool_calls}
    asked["reasoning_content"] = _reasoning(tools, wanted)
    messages: list[Message] = [{"role": "user", "content": user}, asked]
    if not finish:
        return Exchange(skill, tuple(messages))
    answers = []
    for n, call in enumerate(calls):
        returned, answer = _result(rng, call)
        messages.append({"role": "tool", "tool_call_id": f"call_{n}", "content": returned})
        answers.append(answer)
    content = " ".join(answers)
    messages.append(
        {"role": "assistant", "reasoning_content": "I have the result.", "content": content}
    )
    return Exchange("answers from results", tuple(messages))


def tool_exchange(
    rng: Random, tools: Sequence[Tool], held_out: bool, skill: str, finish: bool
) -> Exchange:
    """One or two calls; held out by the user's words."""

    def make() -> tuple[str, Exchange]:
        many = skill == "two tool calls" or (finish and rng.random() < 0.3)
        calls = two_calls(rng, tools) if many else [make_call(rng, rng.choice(tools))]
        return calls[0].user, call_exchange(rng, tools, calls, skill, finish)

    return draw(make, held_out)


def _unfitting(rng: Random, tools: Sequence[Tool]) -> tuple[str, str]:
    """A request that these tools cannot serve, and what the reasoning calls it."""
    purposes = {tool.family.purpose for tool in tools}
    if rng.random() < 0.3 and "a web search" not in purposes:
        return fill_unknown(rng), "something else"
    while True:
        family = rng.choice(FAMILIES)
        if family.purpose not in purposes and _RESERVED not in family.purpose:
            return make_call(rng, make_tool(rng, family)).user, family.purpose


def decline_exchange(rng: Random, tools: Sequence[Tool], held_out: bool) -> Exchange:
    """A request that none of these tools can serve."""

    def make() -> tuple[str, Exchange]:
        user, wanted = _unfitting(rng, tools)
        reasoning = _reasoning(tools, f"{wanted}: none fits")
        said = vary(rng, user)
        return user, plain("declines, no tool fits", said, reasoning, DECLINE_TOOLS)

    return draw(make, held_out)


def tool_request(rng: Random) -> str:
    """A request that would need a tool, for dialogues that offer none."""
    return _unfitting(rng, ())[0]


def definitions(tools: Sequence[Tool]) -> tuple[dict[str, Any], ...]:
    """The OpenAI `tools` list."""
    return tuple(tool.definition for tool in tools)


def has_calculator(tools: Sequence[Tool]) -> bool:
    """Whether sums belong to a tool here."""
    return any(_RESERVED in tool.family.purpose for tool in tools)
