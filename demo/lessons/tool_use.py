"""Dialogues with tools: call the right one, call two, decline when none fits, use the result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from string import Formatter
from typing import Any, NamedTuple

from . import tools_bookings, tools_facts, tools_household, tools_messages, tools_unseen, words
from .base import Candidate, Exchange, Message, draw, plain, vary
from .invented_tools import invent
from .small_talk import DECLINE_TOOLS, fill_unknown
from .tool_family import Family, Parameter, ToolResult, Values, sentence, variant

FAMILIES = (
    *tools_facts.FAMILIES,
    *tools_messages.FAMILIES,
    *tools_bookings.FAMILIES,
    *tools_household.FAMILIES,
)
# The first families are the ones that people try first: weather, time, sums, search, e-mail,
# alarms, timers, stock prices, translations and currencies. Training offers them more often.
_NUM_TRIED_FIRST = 24
_TOPICS_OF_OTHER_LESSONS = frozenset(
    {"joke", "add", "subtract", "multiply", "divide", "capital", "translate"}
)


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


def _parameter_schema(rng: Random, parameter: Parameter, key: str, described: bool) -> Message:
    """Draw the JSON schema of a parameter."""
    schema: Message = {"type": parameter.type}
    if parameter.type == "array":
        schema["items"] = {"type": "string"}
    if parameter.choices:
        schema["enum"] = list(parameter.choices)
    if described:
        default = (key.replace("_", " ").capitalize(), f"The {key}.")
        schema["description"] = rng.choice(parameter.descriptions or default)
    if rng.random() < 0.04:
        return {"title": key.replace("_", " ").title(), **schema}
    return dict(reversed(schema.items())) if rng.random() < 0.3 else schema


def _object_schema(rng: Random, parameters: list[Parameter], keys: dict[str, str]) -> Message:
    """Draw the JSON schema of a tool's arguments. `keys` contains the key of each slot."""
    described = rng.random() < 0.4
    properties = {
        keys[parameter.slot]: _parameter_schema(rng, parameter, keys[parameter.slot], described)
        for parameter in parameters
    }
    schema: Message = {"type": "object", "properties": properties}
    chance = rng.random()
    if chance < 0.85 and (parameters or chance < 0.4):
        schema["required"] = [keys[p.slot] for p in parameters if p.required]
    if rng.random() < 0.15:
        schema["additionalProperties"] = False
    return schema


def make_tool(rng: Random, family: Family, held_out: bool = False) -> Tool:
    """Make a tool of `family`: draw one of the family's names and some of the optional parameters.

    If `held_out` is true, draw only names and parameter keys that never occur in training.
    """
    name = variant(rng, family.names, held_out)
    parameters = [p for p in family.parameters if p.required or rng.random() < 0.5]
    if rng.random() < 0.25:
        rng.shuffle(parameters)
    keys = {p.slot: variant(rng, p.keys, held_out) for p in parameters}
    if len(set(keys.values())) < len(keys):
        # Two parameters have the same key.
        return make_tool(rng, family, held_out)
    schema = _object_schema(rng, parameters, keys)
    function: Message = {"name": name}
    # A name such as `fn7` does not say what the tool does.
    needs_description = name.startswith(("tool_", "fn")) or len(family.names) == 1
    if rng.random() < 0.75 or needs_description:
        function["description"] = rng.choice(family.descriptions)
    function["parameters"] = schema
    if rng.random() < 0.06:
        function["strict"] = True
    return Tool(family, name, keys, {"type": "function", "function": function})


def _family(rng: Random, unseen: bool) -> Family:
    """Draw a family: a generated one, a known one, or one that training never shows."""
    if unseen:
        return rng.choice(tools_unseen.FAMILIES) if rng.random() < 0.5 else invent(rng, True)
    if rng.random() < 0.4:
        return invent(rng, False)
    return rng.choice(FAMILIES[:_NUM_TRIED_FIRST] if rng.random() < 0.4 else FAMILIES)


def offer(rng: Random, unseen: bool = False, new_names: bool = False) -> list[Tool]:
    """Offer one to four tools of different topics.

    Args:
        rng: Draws the tools.
        unseen: Whether to offer the tools that training never shows.
        new_names: Whether to offer known tools under names and keys that training never shows.
    """
    (num_tools,) = rng.choices((1, 2, 3, 4), weights=(40, 30, 18, 12))
    tools: list[Tool] = []
    while len(tools) < num_tools:
        family = rng.choice(FAMILIES) if new_names else _family(rng, unseen)
        if family.topics & topics(tools):
            continue
        tool = make_tool(rng, family, held_out=new_names)
        if all(tool.name != other.name for other in tools):
            tools.append(tool)
    return tools


class _Request(NamedTuple):
    """A request for a tool.

    Attributes:
        template: The text with a placeholder for each slot.
        values: The arguments that the text mentions, by slot.
        written: The values as the user writes them, by slot.
    """

    template: str
    values: Values
    written: Values

    @property
    def text(self) -> str:
        """The user's message."""
        return self.template.format(**self.written)


def _slots(template: str) -> set[str]:
    """Return the names of the placeholders in a template."""
    return {slot for _, slot, _, _ in Formatter().parse(template) if slot}


def _request(rng: Random, tool: Tool) -> _Request:
    """Draw a request that mentions at least the required parameters of a tool."""
    required = {p.slot for p in tool.family.parameters if p.required}
    fitting = [
        template
        for template in tool.family.requests
        if required <= _slots(template) <= set(tool.keys)
    ]
    values, written = tool.family.fill(rng)
    if not fitting or rng.random() < 0.05:
        template = _explicit_template(rng, tool)
        written = {slot: _explicit_value(value) for slot, value in values.items()}
    else:
        template = rng.choice(fitting)
    mentioned = {slot: value for slot, value in values.items() if slot in _slots(template)}
    return _Request(template, mentioned, mentioned | written)


def _explicit_template(rng: Random, tool: Tool) -> str:
    """Write a template that names the tool and its parameters.

    Example: `Call get_weather with city = {city}.`
    """
    pair = rng.choice(("{k} {v}", "{k} = {v}", "{k}={v}", "{k}: {v}"))
    pairs = [pair.format(k=key, v=f"{{{slot}}}") for slot, key in tool.keys.items()]
    wordings = ("Call {n} with {p}.", "Use {n} with {p}", "Use the tool {n}: {p}", "{n}: {p}")
    wording = rng.choice(wordings)
    if not pairs:
        wording = rng.choice(("Call {n}.", "Use {n}.", "Use the tool {n}."))
    return wording.format(n=tool.name, p=", ".join(pairs))


def _explicit_value(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Return the text of a value: `red, blue` for a list, and `true` for True."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return json.dumps(value) if isinstance(value, bool) else str(value)


def make_call(rng: Random, tool: Tool) -> Call:
    """Draw one request that this tool answers."""
    request = _request(rng, tool)
    return Call(tool, request.text, request.values)


def _same_tool_twice(rng: Random, tool: Tool) -> list[Call]:
    """Draw a request that needs two calls, such as `What is the weather in A and B?`."""
    (slot,) = tool.family.listed
    while True:
        request = _request(rng, tool)
        is_mentioned = slot in _slots(request.template)
        # The request mentions two values, for example "Paris and Rome". The second value is written
        # exactly as in the call, so the first value must be, too. For example, a request must not
        # contain "tomorrow" if the call contains a date.
        if is_mentioned and str(request.written[slot]) == str(request.values[slot]):
            break
    other = tool.family.fill(rng).values[slot]
    both = {slot: f"{request.written[slot]} and {other}"}
    user = request.template.format(**(request.written | both))
    return [Call(tool, user, request.values), Call(tool, user, request.values | {slot: other})]


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def _two_requests(rng: Random, tools: Sequence[Tool]) -> list[Call]:
    """Draw two requests in one message, for two tools or for one tool twice."""
    first, second = (make_call(rng, rng.choice(tools)) for _ in range(2))
    if len(tools) > 1 and first.tool is second.tool:
        second = make_call(rng, rng.choice([tool for tool in tools if tool is not first.tool]))
    user = rng.choice(
        (
            f"{first.user.rstrip('?.')} and {_lower(second.user)}",
            f"{first.user.rstrip('?.')}, and {_lower(second.user)}",
            f"{first.user} {second.user}",
            f"{first.user} And {_lower(second.user)}",
            f"{first.user} Also, {_lower(second.user)}",
        )
    )
    return [replace(first, user=user), replace(second, user=user)]


def two_calls(rng: Random, tools: Sequence[Tool]) -> list[Call]:
    """Draw one user message that needs two calls at once."""
    listable = [tool for tool in tools if tool.family.listed]
    if listable and rng.random() < 0.6:
        return _same_tool_twice(rng, rng.choice(listable))
    return _two_requests(rng, tools)


def _result(rng: Random, call: Call) -> ToolResult:
    """Draw the text that a tool returns, and the answer. In rare cases, it returns an error."""
    if rng.random() < 0.05:
        error = rng.choice(
            ("not found", "timeout", "no connection", "unknown " + words.phrase(rng))
        )
        return ToolResult(json.dumps({"error": error}), f"Sorry, the tool failed: {error}.")
    returned, answer = call.tool.family.result(rng, call.values)
    if isinstance(returned, dict) and rng.random() < 0.08:
        # A tool may return any result, whatever its name is.
        returned = {f"{rng.choice(words.ADJECTIVES)}_{rng.choice(words.NOUNS)}": words.number(rng)}
        answer = sentence(returned)
    if not isinstance(returned, str):
        returned = json.dumps(returned, ensure_ascii=False)
    return ToolResult(returned, answer)


def _reasoning(names: Sequence[str]) -> str:
    """Return the reasoning before calls of the tools with these names."""
    if not names:
        return "No tool fits."
    if len(set(names)) == 1:
        times = f" {len(names)} times" if len(names) > 1 else ""
        return f"The tool {names[0]} fits{times}."
    return f"The tools {' and '.join(names)} fit."


def _call_exchange(skill: str, user: str, calls: list[Call]) -> Exchange:
    """Build the user's message and the assistant's message with the calls."""
    tool_calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": call.tool.name, "arguments": call.arguments},
        }
        for number, call in enumerate(calls)
    ]
    message: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": tool_calls,
        "reasoning_content": _reasoning([call.tool.name for call in calls]),
    }
    return Exchange(skill, ({"role": "user", "content": user}, message))


def _with_results(rng: Random, exchange: Exchange, calls: list[Call]) -> Exchange:
    """Add the results of the calls and the assistant's answer to an exchange."""
    results = [_result(rng, call) for call in calls]
    messages = [
        {"role": "tool", "tool_call_id": f"call_{number}", "content": result.returned}
        for number, result in enumerate(results)
    ]
    answer = {
        "role": "assistant",
        "reasoning_content": "I have the result.",
        "content": " ".join(result.answer for result in results),
    }
    return Exchange("answers from results", (*exchange.messages, *messages, answer))


def tool_exchange(
    rng: Random, tools: Sequence[Tool], held_out: bool, skill: str, with_results: bool
) -> Exchange:
    """Draw a message that needs one or two calls. Its words decide whether it is held out.

    Args:
        rng: Draws the calls and their results.
        tools: The tools on offer.
        held_out: Whether the exchange is for the evaluation.
        skill: The skill of an exchange without results.
        with_results: Whether the exchange contains the results and the answer from them.
    """

    def propose() -> Candidate[Exchange]:
        needs_two = skill == "two tool calls" or (with_results and rng.random() < 0.2)
        calls = two_calls(rng, tools) if needs_two else [make_call(rng, rng.choice(tools))]
        request = calls[0].user
        user = vary(rng, request) if rng.random() < 0.5 else request
        exchange = _call_exchange(skill, user, calls)
        if with_results:
            exchange = _with_results(rng, exchange, calls)
        return Candidate(key=request, example=exchange)

    return draw(propose, held_out)


_AGAIN = ("And {0}?", "What about {0}?", "And what about {0}?", "Now {0}.", "And for {0}?",
          "How about {0}?", "The same for {0}.")  # fmt: skip


def follow_up(rng: Random, tools: Sequence[Tool], held_out: bool) -> list[Exchange]:
    """Draw a call, its answer, and a question such as `And in Rome?` that needs the tool again."""
    tool = rng.choice([tool for tool in tools if tool.family.listed])
    (slot,) = tool.family.listed

    def propose() -> Candidate[list[Exchange]]:
        first = make_call(rng, tool)
        other = tool.family.fill(rng).values[slot]
        preposition = "in " if slot == "city" and rng.random() < 0.6 else ""
        question = rng.choice(_AGAIN).format(f"{preposition}{other}").replace("for in ", "in ")
        second = Call(tool, question, first.values | {slot: other})
        user = vary(rng, first.user) if rng.random() < 0.5 else first.user
        opening = _with_results(rng, _call_exchange("", user, [first]), [first])
        closing = _call_exchange("tool call", question, [second])
        return Candidate(key=f"{first.user} {question}", example=[opening, closing])

    return draw(propose, held_out)


def _unfitting(rng: Random, tools: Sequence[Tool]) -> str:
    """Draw a request that neither these tools nor other lessons can serve."""
    offered = topics(tools)
    if rng.random() < 0.3 and not offered & {"search", "wikipedia", "news"}:
        return fill_unknown(rng)
    while True:
        family = invent(rng, False) if rng.random() < 0.35 else rng.choice(FAMILIES)
        if not family.topics & (offered | _TOPICS_OF_OTHER_LESSONS):
            return make_call(rng, make_tool(rng, family)).user


def decline_exchange(rng: Random, tools: Sequence[Tool], held_out: bool) -> Exchange:
    """Draw a request that none of these tools can serve."""

    def propose() -> Candidate[Exchange]:
        request = _unfitting(rng, tools)
        user = vary(rng, request)
        skill, reasoning = "declines, no tool fits", _reasoning(())
        exchange = plain(skill, user, reasoning=reasoning, answer=DECLINE_TOOLS)
        return Candidate(key=request, example=exchange)

    return draw(propose, held_out)


def tool_request(rng: Random) -> str:
    """Draw a request that would need a tool, for dialogues that offer none."""
    return _unfitting(rng, ())


def definitions(tools: Sequence[Tool]) -> tuple[dict[str, Any], ...]:
    """Return the OpenAI `tools` list."""
    return tuple(tool.definition for tool in tools)


def topics(tools: Sequence[Tool]) -> frozenset[str]:
    """Return the topics of all these tools."""
    return frozenset().union(*(tool.family.topics for tool in tools))
