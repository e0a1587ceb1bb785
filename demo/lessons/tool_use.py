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
from .toolbox import Family, Parameter, Values, random_family

_RESERVED = "calculation"


@dataclass(frozen=True)
class Tool:
    """One tool as offered: a family under a name, with a key for each of its slots."""

    family: Family
    name: str
    keys: dict[str, str]
    defaults: Values
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
    return dict(reversed(schema.items())) if rng.random() < 0.15 else schema


def _name(rng: Random, family: Family, unseen: bool) -> str:
    if unseen or len(family.names) == 1:
        return family.names[-1]
    if rng.random() < 0.08:
        return words.made_up(rng).lower()
    name = rng.choice(family.names[:-1])
    if rng.random() < 0.08:
        head, *tail = name.split("_")
        return head + "".join(part.capitalize() for part in tail)
    return name


def make_tool(rng: Random, family: Family, unseen: bool) -> Tool:
    """Offer a family under one of its names; `unseen` names never occur in training."""
    parameters = [p for p in family.parameters if p.required or rng.random() < 0.6]
    keys: dict[str, str] = {}
    for parameter in parameters:
        first = 0.4 if parameter.keys[0] not in keys.values() else 0
        free = [key for key in parameter.keys if key not in keys.values()]
        keys[parameter.slot] = parameter.keys[0] if rng.random() < first else rng.choice(free)
    forced = {
        p.slot: p.choices[0]
        for p in parameters
        if not p.required and p.choices and rng.random() < 0.2
    }
    name = _name(rng, family, unseen)
    described = rng.random() < 0.5
    function: Message = {"name": name}
    if name not in family.names[:-1] or rng.random() < 0.9:
        function["description"] = rng.choice(family.descriptions)
    function["parameters"] = {
        "type": "object",
        "properties": {keys[p.slot]: _schema(rng, p, described) for p in parameters},
    }
    if rng.random() < 0.9:
        required = [keys[p.slot] for p in parameters if p.required or p.slot in forced]
        function["parameters"]["required"] = required
    if rng.random() < 0.1:
        function["parameters"]["additionalProperties"] = False
    return Tool(family, name, keys, forced, {"type": "function", "function": function})


def offer(rng: Random, unseen: bool = False) -> list[Tool]:
    """One to four tools of different families."""
    tools: dict[str, Tool] = {}
    for _ in range(rng.choices((1, 2, 3, 4), (35, 30, 20, 15))[0]):
        family = random_family(rng, unseen)
        tools.setdefault(family.purpose, make_tool(rng, family, unseen))
    return list(tools.values())


def _slots(request: str) -> set[str]:
    return {slot for _, slot, _, _ in Formatter().parse(request) if slot}


def _request(rng: Random, tool: Tool) -> tuple[str, Values, Values]:
    """A request with its placeholders, the values it needs and their spoken forms."""
    fitting = [request for request in tool.family.requests if _slots(request) <= set(tool.keys)]
    request = rng.choice(fitting)
    values, spoken = tool.family.fill(rng)
    values = {slot: value for slot, value in values.items() if slot in _slots(request)}
    return request, tool.defaults | values, values | spoken


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


def call_exchange(rng: Random, calls: list[Call], skill: str, finish: bool) -> Exchange:
    """User, calls and, if `finish`, results and the answer."""
    wanted = "; ".join(f"{call.tool.family.purpose}: {call.tool.name}" for call in calls)
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
    asked["reasoning_content"] = f"The user wants {wanted}."
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
        return calls[0].user, call_exchange(rng, calls, skill, finish)

    return draw(make, held_out)


def _unfitting(rng: Random, tools: Sequence[Tool]) -> str:
    purposes = {tool.family.purpose for tool in tools}
    if rng.random() < 0.3 and "a web search" not in purposes:
        return fill_unknown(rng)
    while True:
        family = random_family(rng, unseen=False)
        if family.purpose not in purposes and _RESERVED not in family.purpose:
            return make_call(rng, make_tool(rng, family, unseen=False)).user


def decline_exchange(rng: Random, tools: Sequence[Tool], held_out: bool) -> Exchange:
    """A request that none of these tools can serve."""

    def make() -> tuple[str, Exchange]:
        user = _unfitting(rng, tools)
        return user, plain(
            "declines, no tool fits", vary(rng, user), "No tool fits.", DECLINE_TOOLS
        )

    return draw(make, held_out)


def tool_request(rng: Random) -> str:
    """A request that would need a tool, for dialogues that offer none."""
    return _unfitting(rng, ())


def definitions(tools: Sequence[Tool]) -> tuple[dict[str, Any], ...]:
    """The OpenAI `tools` list."""
    return tuple(tool.definition for tool in tools)


def has_calculator(tools: Sequence[Tool]) -> bool:
    """Whether sums belong to a tool here."""
    return any(_RESERVED in tool.family.purpose for tool in tools)
