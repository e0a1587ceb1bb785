"""The shape of a tool family: names, parameters, requests and results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from . import words
from .base import capitalised, listing

Values = dict[str, Any]


class Filled(NamedTuple):
    """The values of a family's slots.

    Attributes:
        values: The arguments.
        written: The slots whose value the user writes differently, for example `off` for False.
    """

    values: Values
    written: Values


class ToolResult(NamedTuple):
    """The result of a call as JSON, and the answer to the user."""

    returned: Any
    answer: str


Fill = Callable[[Random], Filled]
Result = Callable[[Random, Values], ToolResult]


@dataclass(frozen=True)
class Parameter:
    """One argument of a family's tools.

    Attributes:
        slot: The placeholder in the family's requests from which this argument is copied.
        keys: The names that this argument may have in a schema.
        type: The JSON type. An array contains strings.
        choices: The schema's `enum`, if any.
        required: Optional arguments are passed only if the request has their slot.
        descriptions: The descriptions that this argument may have in a schema.
    """

    slot: str
    keys: tuple[str, ...]
    type: str = "string"
    choices: tuple[str, ...] = ()
    required: bool = True
    descriptions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """Tools with the same purpose.

    Attributes:
        topics: The topics of the family. Tools that share a topic are never offered together.
        names: The names that a tool may have.
        descriptions: The descriptions that a tool may have in its schema.
        parameters: The arguments.
        requests: The texts of requests. `{slot}` stands for a value as the user writes it.
        fill: Draws the values of the slots.
        result: Draws the result of a call with some values, and the answer to the user.
        listed: Slots that a user may fill with two values at once, for two calls.
    """

    topics: frozenset[str]
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    fill: Fill
    result: Result
    listed: tuple[str, ...] = ()


def variant(rng: Random, options: Sequence[str], held_out: bool) -> str:
    """Draw an option for training, or return the option for the evaluation.

    The last of at least four options is never used in training. The first option is the usual one.
    """
    if len(options) < 4:
        return rng.choice(options)
    if held_out:
        return options[-1]
    return options[0] if rng.random() < 0.25 else rng.choice(options[:-1])


def parameter(
    slot: str,
    keys: str,
    kind: str = "string",
    choices: str = "",
    *,
    required: bool = True,
    docs: str = "",
) -> Parameter:
    """Make a parameter from keys and choices that are separated by blanks.

    `docs` contains the descriptions, which are separated by bars.
    """
    return Parameter(
        slot=slot,
        keys=words.split(keys),
        type=kind,
        choices=words.split(choices),
        required=required,
        descriptions=tuple(text.strip() for text in docs.split("|")) if docs else (),
    )


def fill(**makers: Callable[[Random], Any]) -> Fill:
    """Make a `fill` that draws the value of each slot with the function of the same name.

    The user writes a list as `a, b and c`.
    """

    def draw_values(rng: Random) -> Filled:
        values = {slot: make(rng) for slot, make in makers.items()}
        lists = {slot: value for slot, value in values.items() if isinstance(value, list)}
        return Filled(values, written={slot: listing(items) for slot, items in lists.items()})

    return draw_values


CITY = parameter(
    "city",
    "city location place city_name town",
    docs="The city.|City name|Name of the city, e.g. Paris|"
    "The city and state, e.g. San Francisco, CA|Where",
)
DONE: tuple[Any, ...] = (
    {"status": "ok"},
    {"success": True},
    {"ok": True},
    {"result": "done"},
    "ok",
    "done",
    "OK",
    {"status": "success"},
    {"status": "done"},
    "success",
    {"error": None},
    "Done.",
)


def done(answer: str) -> Result:
    """Make a `result` of a tool that only reports success.

    Example: `done("Now playing {artist}.")` draws a result such as `{"status": "ok"}`.
    """

    def result(rng: Random, values: Values) -> ToolResult:
        texts = {
            slot: listing(value) if isinstance(value, list) else value
            for slot, value in values.items()
        }
        return ToolResult(rng.choice(DONE), answer.format(**texts))

    return result


def returns(keys: str, make: Callable[[Random], Any], answer: str) -> Result:
    """Make a `result` of one value, which `make` draws and the answer contains as `{found}`.

    The tool returns the value as text, or in an object under the key `result` or one of `keys`.
    """

    def result(rng: Random, values: Values) -> ToolResult:
        value = make(rng)
        chance, text = rng.random(), answer.format(found=value, **values)
        if chance < 0.3:
            return ToolResult(str(value), text)
        key = "result" if chance < 0.4 else rng.choice(keys.split())
        return ToolResult({key: value}, text)

    return result


def sentence(returned: Any) -> str:  # noqa: ANN401 - any JSON value
    """Put any result into words.

    Example: `{"price": 12, "colour": "red"}` becomes `The price is 12 and the colour is red.`
    """
    if not isinstance(returned, dict):
        return f"The result is {_value_text(returned)}."
    clauses = [
        f"the {key.replace('_', ' ')} is {_value_text(value)}" for key, value in returned.items()
    ]
    return f"{capitalised(listing(clauses))}."


def _value_text(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Return a value in words: `yes` for True, and `red and blue` for a list."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return listing(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def family(  # noqa: PLR0913 - one for each field
    topics: str,
    names: str,
    descriptions: str,
    parameters: tuple[Parameter, ...],
    requests: str,
    fill: Fill,
    result: Result,
    listed: str = "",
) -> Family:
    """Make a family from texts.

    Blanks separate topics, names and listed slots. Bars separate descriptions and requests.
    """
    return Family(
        topics=frozenset(topics.split()),
        names=tuple(names.split()),
        descriptions=tuple(descriptions.split("|")),
        parameters=parameters,
        requests=tuple(requests.split("|")),
        fill=fill,
        result=result,
        listed=tuple(listed.split()),
    )
