"""The shape of a tool family: names, parameters, requests and results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from . import words
from .base import listing

Values = dict[str, Any]
Fill = Callable[[Random], tuple[Values, Values]]
Result = Callable[[Random, Values], tuple[Any, str]]


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
        fill: Draws the values and, if they differ, the forms in which the user writes them.
        result: Draws the result of the tool for these values, and the answer to the user.
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
    """Draw an option for training, or return the option for the evaluation if there is one."""
    if len(options) < 4:
        return rng.choice(options)
    if held_out:
        return options[-1]
    # The first options are the usual ones.
    return options[0] if rng.random() < 0.25 else rng.choice(options[:-1])


def parameter(
    slot: str,
    keys: str,
    kind: str = "string",
    choices: str = "",
    *,
    required: bool = True,
    said: str = "",
) -> Parameter:
    """Make a parameter from keys and choices that are separated by blanks."""
    return Parameter(
        slot,
        words.split(keys),
        kind,
        words.split(choices),
        required,
        tuple(text.strip() for text in said.split("|")) if said else (),
    )


def fill(**makers: Callable[[Random], Any]) -> Fill:
    """Make a `fill` that draws each slot by itself."""
    return lambda rng: ({slot: make(rng) for slot, make in makers.items()}, {})


def pick(options: str) -> Callable[[Random], str]:
    """Make a function that draws one of the options."""
    chosen = words.split(options)
    return lambda rng: rng.choice(chosen)


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
    """Make a `result` of a tool that only reports success."""
    return lambda rng, values: (
        rng.choice(DONE),
        answer.format(**{k: listing(v) if isinstance(v, list) else v for k, v in values.items()}),
    )


def found(keys: str, make: Callable[[Random], Any], answer: str) -> Result:
    """Make a `result` of one value, which the answer names as `{found}`."""

    def result(rng: Random, values: Values) -> tuple[Any, str]:
        value = make(rng)
        chance, text = rng.random(), answer.format(found=value, **values)
        if chance < 0.3:
            return str(value), text
        key = "result" if chance < 0.4 else rng.choice(keys.split())
        return {key: value}, text

    return result


def sentence(returned: Any) -> str:  # noqa: ANN401 - any JSON value
    """Put any result into words.

    Example: `{"price": 12, "colour": "red"}` becomes `The price is 12 and the colour is red.`
    """
    if isinstance(returned, dict):
        parts = [
            f"the {key.replace('_', ' ')} is {_plain(value)}" for key, value in returned.items()
        ]
        text = listing(parts)
        return f"{text[0].upper()}{text[1:]}."
    return f"The result is {_plain(returned)}."


def _plain(value: Any) -> str:  # noqa: ANN401 - any JSON value
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
    """Make a family from texts whose parts are separated by bars or blanks."""
    return Family(
        frozenset(topics.split()),
        tuple(names.split()),
        tuple(descriptions.split("|")),
        parameters,
        tuple(requests.split("|")),
        fill,
        result,
        tuple(listed.split()),
    )
