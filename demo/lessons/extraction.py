"""Fields of a sentence as a JSON object."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from . import words
from .base import Candidate, Exchange, lesson, listing, plain

_DOMAINS = ("example.com", "mail.org", "post.net", "example.org")
_JOBS = ("baker", "nurse", "pilot", "lawyer", "driver", "painter", "engineer", "cook", "farmer",
         "clerk", "plumber", "dentist", "teacher", "writer", "singer", "builder")  # fmt: skip

# The sentences about a person, an order or an event mention different fields in different orders.
_PERSON = (
    "{name} is {age} years old and lives in {city}.",
    "{name} ({age}) works as a {job} in {city}.",
    "My name is {name}, I am {age} and I am a {job} from {city}.",
    "In {city} there is a {job} called {name}, aged {age}.",
    "{name} from {city} can be reached at {email}.",
    "Please write to {email}: that is {name}, our {job}.",
    "The {job} {name} turned {age} on {date}.",
    "{name}, {age}, {city}.",
    "I met {name} in {city}. {name} is a {job} and {age} years old.",
)
_ORDER = (
    "{name} ordered {quantity} {item} for {price} dollars.",
    "Order {code}: {quantity} x {item}, {price} dollars, to {city}.",
    "Please send {quantity} {item} to {name} in {city}.",
    "{name} from {city} bought a {item} on {date} and paid {price} dollars.",
    "Invoice {code} of {date}: {name} owes {price} dollars.",
    "We shipped {item} to {city} on {date}, order {code}.",
)
_EVENT = (
    "The meeting with {name} is on {date} at {time} in {city}.",
    "{name} arrives in {city} at {time} on {date}.",
    "Dinner with {name} at {time}, {date}.",
    "Train {code} to {city} leaves at {time} on {date}.",
    "On {date} at {time} {name} speaks in {city}.",
)
_ASK = (
    "Extract {fields} as JSON: {text}",
    "Extract {fields} as JSON from this text: {text}",
    "Give me {fields} as JSON. {text}",
    "{text}\nExtract {fields} as JSON.",
    "{text}\nReturn a JSON object with {fields}.",
    "Return {fields} as JSON.\n{text}",
    "Return JSON with the keys {fields} for: {text}",
    'Read the text and answer with JSON ({fields}): "{text}"',
)


def _values(rng: Random) -> dict[str, Any]:
    """Draw a value for each field that a sentence can mention."""
    name = words.full_name(rng) if rng.random() < 0.6 else words.first_name(rng)
    return {
        "name": name,
        "age": rng.randint(1, 99),
        "city": words.city(rng),
        "job": rng.choice(_JOBS),
        "email": f"{name.split()[0].lower()}@{rng.choice(_DOMAINS)}",
        "date": f"{rng.randint(1, 28)} {rng.choice(words.MONTHS)}",
        "time": words.clock(rng),
        "quantity": rng.randint(2, 90),
        "item": words.phrase(rng),
        "price": words.number(rng, 3),
        "code": f"{words.made_up(rng)[0]}{rng.randint(100, 9999)}",
    }


def sentence(rng: Random) -> tuple[str, dict[str, Any]]:
    """Return a sentence and the fields that it mentions.

    Example: `Ann, 30, Paris.` and `{"name": "Ann", "age": 30, "city": "Paris"}`.
    """
    template = rng.choice(rng.choice((_PERSON, _PERSON, _ORDER, _EVENT)))
    values = _values(rng)
    mentioned = {key: value for key, value in values.items() if f"{{{key}}}" in template}
    return template.format(**values), mentioned


@lesson
def extract(rng: Random) -> Candidate[Exchange]:
    """Ask for fields of a sentence as JSON. The sentence decides whether it is held out."""
    text, values = sentence(rng)
    fields = rng.sample(list(values), rng.randint(min(2, len(values)), len(values)))
    field_list = ", ".join(fields) if rng.random() < 0.5 else listing(fields)
    exchange = plain(
        "JSON extraction",
        rng.choice(_ASK).format(fields=field_list, text=text),
        reasoning=", ".join(f"{field}: {values[field]}" for field in fields) + ".",
        answer=json.dumps({field: values[field] for field in fields}, ensure_ascii=False),
    )
    return Candidate(key=text, example=exchange)
