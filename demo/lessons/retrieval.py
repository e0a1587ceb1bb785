"""Passages about a small world and questions with the passages that answer them.

The world is the fixed world of `world.py`, or a random world. From many random worlds, a model
learns to match names that it has never seen, instead of learning the fixed world by heart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from .base import is_held_out
from .words import CITIES, FIRST_NAMES, NOUNS, made_up, phrase, split
from .world import (
    ABOUT_PERSON,
    ABOUT_PLACE,
    BACKWARD,
    FAMOUS,
    FORWARD,
    PEOPLE,
    PLACES,
    RIVER,
    Person,
    Place,
    listing,
)

_JOBS = split(
    "tailor painter nurse farmer fisher cook judge potter singer driver builder weaver hunter "
    "banker dentist plumber butcher tutor porter guide archer dancer farrier librarian"
)
_PETS = split(
    "mouse pony frog duck goose lizard canary hamster beetle sheep owl pigeon hen otter newt "
    "ferret kitten puppy swan lamb piglet toad falcon bee"
)
_DISHES = split("soup pie stew bread salad cake jam rice tart pudding")
_HOBBIES = split(
    "swimming|drawing|hiking|cycling|skating|archery|acting|gardening|cooking|surfing|rowing|"
    "writing|carving|sewing|skiing|camping|baking|bird watching|star gazing|card games|pottery|"
    "fencing|yoga|origami"
)


@dataclass(frozen=True)
class Question:
    """A question and the passages that answer it.

    Attributes:
        text: The question's text.
        relevant: The indices of the passages that answer the question.
    """

    text: str
    relevant: frozenset[int]


@dataclass(frozen=True)
class Library:
    """All passages about one world, and all questions about this world."""

    passages: tuple[str, ...]
    questions: tuple[Question, ...]


def fixed_library() -> Library:
    """Return the library of the demo's own world."""
    return make_library(PEOPLE, PLACES)


def random_library(rng: Random) -> Library:
    """Draw a world with as many people and places as the fixed world, and return its library."""
    cities = _distinct(len(PLACES), lambda: rng.choice((made_up(rng), rng.choice(CITIES))))
    names = _distinct(len(PEOPLE), lambda: rng.choice((made_up(rng), rng.choice(FIRST_NAMES))))
    values = [
        rng.sample(_JOBS, len(names)),
        rng.sample(_PETS, len(names)),
        _distinct(len(names), lambda: f"{rng.choice(NOUNS)} {rng.choice(_DISHES)}"),
        rng.sample(_HOBBIES, len(names)),
    ]
    people = [
        Person(name, rng.choice(cities), *rest) for name, *rest in zip(names, *values, strict=True)
    ]
    rivers = _distinct(len(cities), lambda: made_up(rng))
    famous = _distinct(len(cities), lambda: f"its {phrase(rng)}")
    return make_library(people, [Place(*row) for row in zip(cities, rivers, famous, strict=True)])


def make_library(people: Sequence[Person], places: Sequence[Place]) -> Library:
    """Return all passages and all questions about a world."""
    shelf = _Shelf()
    for person in people:
        for attribute, (sentence, _, _) in FORWARD.items():
            value = getattr(person, attribute)
            shelf.add(
                sentence.format(name=person.name, value=value),
                _said(person.name, attribute), _said(attribute, value), _said(person.name),
            )  # fmt: skip
        shelf.add(
            f"{person.name} is a {person.job} from {person.city}. {person.name} has a "
            f"{person.pet}, likes {person.food} and enjoys {person.hobby}.",
            _said(person.name),
            *(_said(person.name, attribute) for attribute in FORWARD),
            *(_said(attribute, getattr(person, attribute)) for attribute in FORWARD),
        )
    for place in places:
        names = [person.name for person in people if person.city == place.name]
        shelf.add(
            f"The river {place.river} flows through {place.name}.",
            _said(place.name, "river"), _said(place.name),
        )  # fmt: skip
        shelf.add(
            f"{place.name} is famous for {place.famous_for}.",
            _said(place.name, "famous"), _said(place.name),
        )  # fmt: skip
        live = f" {listing(names)} live there." if names else ""
        shelf.add(
            f"{place.name} is a city on the river {place.river}, famous for "
            f"{place.famous_for}.{live}",
            _said(place.name), _said(place.name, "river"), _said(place.name, "famous"),
            _said("city", place.name), *(_said(name, "city") for name in names),
        )  # fmt: skip
    return Library(tuple(shelf.passages), tuple(_questions(people, places, shelf)))


def held_out(library: Library) -> list[Question]:
    """Return the questions that training never shows."""
    return [question for question in library.questions if is_held_out(question.text)]


class _Shelf:
    """Passages, and the facts that each passage states."""

    def __init__(self) -> None:
        self.passages: list[str] = []
        self._says: dict[str, set[int]] = {}

    def add(self, passage: str, *said: str) -> None:
        for what in said:
            self._says.setdefault(what, set()).add(len(self.passages))
        self.passages.append(passage)

    def question(self, text: str, what: str) -> Question:
        return Question(text, frozenset(self._says[what]))


def _questions(
    people: Sequence[Person], places: Sequence[Place], shelf: _Shelf
) -> dict[Question, None]:
    made: dict[Question, None] = {}

    def ask(forms: Sequence[str], what: str, **words: str) -> None:
        for form in forms:
            made[shelf.question(form.format(**words), what)] = None

    for person in people:
        ask(ABOUT_PERSON, _said(person.name), name=person.name)
        for attribute, (_, _, forms) in FORWARD.items():
            ask(forms, _said(person.name, attribute), name=person.name)
            value = getattr(person, attribute)
            ask(BACKWARD[attribute], _said(attribute, value), value=value)
    for place in places:
        ask(ABOUT_PLACE, _said(place.name), name=place.name)
        ask(RIVER, _said(place.name, "river"), name=place.name)
        ask(FAMOUS, _said(place.name, "famous"), name=place.name)
    return made


def _said(*words: str) -> str:
    return " / ".join(words)


def _distinct(count: int, make: Callable[[], str]) -> list[str]:
    """Return `count` different values."""
    values: dict[str, None] = {}
    while len(values) < count:
        values[make()] = None
    return list(values)
