"""Dialogues with tools: call the right one, call two, decline when none fits, use the result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from string import Formatter
from typing import Any

from . import tools_bookings, tools_facts, tools_household, tools_messages, tools_unseen, words
from .base import Exchange, Message, draw, plain, vary
from .invented_tools import invent
from .small_talk import DECLINE_TOOLS, fill_unknown
from .tool_family import Family, Parameter, Values, sentence, variant

FAMILIES = (
    *tools_facts.FAMILIES,
    *tools_messages.FAMILIES,
    *tools_bookings.FAMILIES,
    *tools_household.FAMILIES,
)
# The first families are the ones that people try first: weather, time, sums, search, e-mail,
# alarms, timers, stock prices, translations and currencies. Training offers them more often.
_NUM_TRIED_FIRST = 24


@dataclass(frozen=True)
class Tool:
    """One tool as offered.

    Attributes:
        keys: The schema's key of each slot, in the schema's order.
    """

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


def _schema(rng: Random, parameter: Parameter, key: str, described: bool) -> Message:
    schema: Message = {"type": parameter.type}
    if parameter.type == "array":
        schema["items"] = {"type": "string"}
    if parameter.choices:
        schema["enum"] = list(parameter.choices)
    if described:
        said = parameter.descriptions or (key.replace("_", " ").capitalize(), f"The {key}.")
        schema["description"] = rng.choice(said)
    if rng.random() < 0.04:
        schema = {"title": key.replace("_", " ").title(), **schema}
    elif rng.random() < 0.3:
        schema = dict(reversed(schema.items()))
    return schema


def make_tool(rng: Random, family: Family, held_out: bool = False) -> Tool:
    """Offer a tool of a family under one of its names, with some of the optional parameters.

    Args:
        rng: The source of randomness.
        family: The family.
        held_out: Whether to use the names and keys that training never shows.
    """
    name = variant(rng, family.names, held_out)
    parameters = [p for p in family.parameters if p.required or rng.random() < 0.5]
    if rng.random() < 0.25:
        rng.shuffle(parameters)
    keys: dict[str, str] = {}
    for parameter in parameters:
        keys[parameter.slot] = variant(rng, parameter.keys, held_out)
    if len(set(keys.values())) < len(keys):
        return make_tool(rng, family, held_out)
    described = rng.random() < 0.4
    schema: Message = {
        "type": "object",
        "properties": {keys[p.slot]: _schema(rng, p, keys[p.slot], described) for p in parameters},
    }
    chance = rng.random()
    if chance < 0.85 and (parameters or chance < 0.4):
        schema["required"] = [keys[p.slot] for p in parameters if p.required]
    if rng.random() < 0.15:
        schema["additionalProperties"] = False
    function: Message = {"name": name}
    is_opaque = name.startswith(("tool_", "fn")) or len(family.names) == 1
    if rng.random() < 0.75 or is_opaque:
        function["description"] = rng.choice(family.descriptions)
    function["parameters"] = schema
    if rng.random() < 0.06:
        function["strict"] = True
    return Tool(family, name, keys, {"type": "function", "function": function})


def _family(rng: Random, unseen: bool) -> Family:
    """Draw a family, which is invented by rule or one of the families that people try first."""
    if unseen:
        return rng.choice(tools_unseen.FAMILIES) if rng.random() < 0.5 else invent(rng, True)
    if rng.random() < 0.4:
        return invent(rng, False)
    return rng.choice(FAMILIES[:_NUM_TRIED_FIRST] if rng.random() < 0.4 else FAMILIES)


def offer(rng: Random, unseen: bool = False, new_names: bool = False) -> list[Tool]:
    """Offer one to four tools of different topics.

    Args:
        rng: The source of randomness.
        unseen: Whether to offer the tools that training never shows.
        new_names: Whether to offer known tools under names and keys that training never shows.
    """
    num = rng.choices((1, 2, 3, 4), (40, 30, 18, 12))[0]
    tools: list[Tool] = []
    while len(tools) < num:
        family = rng.choice(FAMILIES) if new_names else _family(rng, unseen)
        if any(family.topics & tool.family.topics for tool in tools):
            continue
        tool = make_tool(rng, family, new_names)
        if all(tool.name != other.name for other in tools):
            tools.append(tool)
    return tools


def _slots(request: str) -> set[str]:
    return {slot for _, slot, _, _ in Formatter().parse(request) if slot}


def _request(rng: Random, tool: Tool) -> tuple[str, Values, Values]:
    """Draw a request with placeholders, the values, and the values as the user writes them."""
    required = {p.slot for p in tool.family.parameters if p.required}
    fitting = [
        request for request in tool.family.requests if required <= _slots(request) <= set(tool.keys)
    ]
    values, spoken = tool.family.fill(rng)
    if not fitting or rng.random() < 0.05:
        request, spoken = (
            _explicit(rng, tool),
            {
                slot: ", ".join(map(str, v))
                if isinstance(v, list)
                else json.dumps(v)
                if isinstance(v, bool)
                else v
                for slot, v in values.items()
            },
        )
    else:
        request = rng.choice(fitting)
    values = {slot: value for slot, value in values.items() if slot in _slots(request)}
    return request, values, values | spoken


def _explicit(rng: Random, tool: Tool) -> str:
    """Write a request that names the tool and its parameters."""
    pair = rng.choice(("{k} {v}", "{k} = {v}", "{k}={v}", "{k}: {v}"))
    pairs = [pair.format(k=key, v=f"{{{slot}}}") for slot, key in tool.keys.items()]
    form = rng.choice(
        ("Call {n} with {p}.", "Use {n} with {p}", "Use the tool {n}: {p}", "{n}: {p}")
    )
    if not pairs:
        form = rng.choice(("Call {n}.", "Use {n}.", "Use the tool {n}."))
    return form.format(n=tool.name, p=", ".join(pairs))


def make_call(rng: Random, tool: Tool) -> Call:
    """Draw one request that this tool answers."""
    request, values, spoken = _request(rng, tool)
    return Call(tool, request.format(**spoken), values)


def _same_tool_twice(rng: Random, tool: Tool) -> list[Call]:
    """Draw a request that needs two calls, such as `What is the weather in A and B?`."""
    (slot,) = tool.family.listed
    while True:
        request, values, spoken = _request(rng, tool)
        if slot in _slots(request) and str(spoken[slot]) == str(values[slot]):
            break
    other = tool.family.fill(rng)[0][slot]
    user = request.format(**(spoken | {slot: f"{spoken[slot]} and {other}"}))
    return [Call(tool, user, values), Call(tool, user, values | {slot: other})]


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def _two_requests(rng: Random, tools: Sequence[Tool]) -> list[Call]:
    """Draw two requests in one message, for two tools or for one tool twice."""
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
    """Draw one user message that needs two calls at once."""
    able = [tool for tool in tools if tool.family.listed]
    if able and rng.random() < 0.6:
        return _same_tool_twice(rng, rng.choice(able))
    return _two_requests(rng, tools)


def _result(rng: Random, call: Call) -> tuple[str, str]:
    """Draw the text that the tool returns, and the answer to the user."""
    if rng.random() < 0.05:
        error = rng.choice(
            ("not found", "timeout", "no connection", "unknown " + words.phrase(rng))
        )
        return json.dumps({"error": error}), f"Sorry, the tool failed: {error}."
    returned, answer = call.tool.family.result(rng, call.values)
    if isinstance(returned, dict) and rng.random() < 0.08:
        # A tool may return any result, whatever its name is.
        returned = {f"{rng.choice(words.ADJECTIVES)}_{rng.choice(words.NOUNS)}": words.number(rng)}
        answer = sentence(returned)
    return returned if isinstance(returned, str) else json.dumps(
        returned, ensure_ascii=False
    ), answer


def _reasoning(names: Sequence[str]) -> str:
    if not names:
        return "No tool fits."
    if len(set(names)) == 1:
        times = f" {len(names)} times" if len(names) > 1 else ""
        return f"The tool {names[0]} fits{times}."
    return f"The tools {' and '.join(names)} fit."


def call_exchange(
    rng: Random, calls: list[Call], skill: str, finish: bool, user: str | None = None
) -> Exchange:
    """Build the user's message, the calls and, if `finish`, the results and the answer."""
    if user is None:
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
    asked["reasoning_content"] = _reasoning([call.tool.name for call in calls])
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
    """Draw one or two calls. They are held out by the user's words."""

    def make() -> tuple[str, Exchange]:
        many = skill == "two tool calls" or (finish and rng.random() < 0.2)
        calls = two_calls(rng, tools) if many else [make_call(rng, rng.choice(tools))]
        return calls[0].user, call_exchange(rng, calls, skill, finish)

    return draw(make, held_out)


_AGAIN = ("And {0}?", "What about {0}?", "And what about {0}?", "Now {0}.", "And for {0}?",
          "How about {0}?", "The same for {0}.")  # fmt: skip


def follow_up(rng: Random, tools: Sequence[Tool], held_out: bool) -> list[Exchange]:
    """Draw a call, its answer, and a question such as `And in Rome?` that needs the tool again."""
    tool = rng.choice([tool for tool in tools if tool.family.listed])
    (slot,) = tool.family.listed

    def make() -> tuple[str, list[Exchange]]:
        first = make_call(rng, tool)
        other = tool.family.fill(rng)[0][slot]
        values = {key: value for key, value in first.values.items() if key == slot}
        joint = "in " if slot == "city" and rng.random() < 0.6 else ""
        user = rng.choice(_AGAIN).format(f"{joint}{other}")
        user = user.replace("for in ", "in ")
        second = Call(tool, user, first.values | values | {slot: other})
        return f"{first.user} {user}", [
            call_exchange(rng, [first], "tool call", True),
            call_exchange(rng, [second], "tool call", False, user),
        ]

    return draw(make, held_out)


def _unfitting(rng: Random, tools: Sequence[Tool]) -> str:
    """Draw a request that these tools cannot serve."""
    topics = {topic for tool in tools for topic in tool.family.topics}
    if rng.random() < 0.3 and not topics & {"search", "wikipedia", "news"}:
        return fill_unknown(rng)
    while True:
        family = invent(rng, False) if rng.random() < 0.35 else rng.choice(FAMILIES)
        known = {"joke", "add", "subtract", "multiply", "divide", "capital", "translate"}
        if not family.topics & (topics | known):
            return make_call(rng, make_tool(rng, family)).user


def decline_exchange(rng: Random, tools: Sequence[Tool], held_out: bool) -> Exchange:
    """Draw a request that none of these tools can serve."""

    def make() -> tuple[str, Exchange]:
        user = _unfitting(rng, tools)
        exchange = plain("declines, no tool fits", vary(rng, user), _reasoning(()), DECLINE_TOOLS)
        return user, exchange

    return draw(make, held_out)


def tool_request(rng: Random) -> str:
    """Draw a request that would need a tool, for dialogues that offer none."""
    return _unfitting(rng, ())


def definitions(tools: Sequence[Tool]) -> tuple[dict[str, Any], ...]:
    """Return the OpenAI `tools` list."""
    return tuple(tool.definition for tool in tools)


def topics(tools: Sequence[Tool]) -> frozenset[str]:
    """Return everything that the tools are about."""
    return frozenset().union(*(tool.family.topics for tool in tools))
