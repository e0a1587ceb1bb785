"""Passages about a small world and questions with the passages that answer them.

The world is the fixed world of `world.py`, or a random world. From many random worlds, a model
learns to match names that it has never seen, instead of learning the fixed world by heart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from .base import is_held_out, listing
from .words import CITIES, FIRST_NAMES, NOUNS, made_up, phrase, split
from .world import (
    ABOUT_PERSON,
    ABOUT_PLACE,
    ATTRIBUTES,
    FAMOUS,
    PEOPLE,
    PLACES,
    RIVER,
    Person,
    Place,
)

JOBS = split(
    "tailor painter nurse farmer fisher cook judge potter singer driver builder weaver hunter "
    "banker dentist plumber butcher tutor porter guide archer dancer farrier librarian"
)
PETS = split(
    "mouse pony frog duck goose lizard canary hamster beetle sheep owl pigeon hen otter newt "
    "ferret kitten puppy swan lamb piglet toad falcon bee"
)
DISHES = split("soup pie stew bread salad cake jam rice tart pudding")
HOBBIES = split(
    "swimming|drawing|hiking|cycling|skating|archery|acting|gardening|cooking|surfing|rowing|"
    "writing|carving|sewing|skiing|camping|baking|bird watching|star gazing|card games|pottery|"
    "fencing|yoga|origami"
)

# A fact that passages state and questions ask for: `("Hugo", "city")` (where Hugo lives),
# `("city", "Pinemark")` (who lives in Pinemark), or `("Hugo",)` (anything about Hugo).
Fact = tuple[str, ...]


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
    """Return all passages and questions about the fixed world of the demo."""
    return make_library(PEOPLE, PLACES)


def random_library(rng: Random) -> Library:
    """Return passages and questions about random people and places.

    There are as many people and places as in the fixed world.
    """
    cities = _distinct(len(PLACES), lambda: rng.choice((made_up(rng), rng.choice(CITIES))))
    names = _distinct(len(PEOPLE), lambda: rng.choice((made_up(rng), rng.choice(FIRST_NAMES))))
    jobs = rng.sample(JOBS, len(names))
    pets = rng.sample(PETS, len(names))
    foods = _distinct(len(names), lambda: f"{rng.choice(NOUNS)} {rng.choice(DISHES)}")
    hobbies = rng.sample(HOBBIES, len(names))
    people = [
        Person(name, rng.choice(cities), job, pet, food, hobby)
        for name, job, pet, food, hobby in zip(names, jobs, pets, foods, hobbies, strict=True)
    ]
    rivers = _distinct(len(cities), lambda: made_up(rng))
    fames = _distinct(len(cities), lambda: f"its {phrase(rng)}")
    places = [
        Place(city, river, famous_for=fame)
        for city, river, fame in zip(cities, rivers, fames, strict=True)
    ]
    return make_library(people, places)


def make_library(people: Sequence[Person], places: Sequence[Place]) -> Library:
    """Return all passages and all questions about a world."""
    index = _PassageIndex()
    for person in people:
        _add_person(index, person)
    for place in places:
        inhabitants = [person.name for person in people if person.city == place.name]
        _add_place(index, place, inhabitants)
    # Some questions occur twice, for example the question for the inhabitants of a city.
    questions = dict.fromkeys(_questions(people, places, index))
    return Library(tuple(index.passages), tuple(questions))


class _PassageIndex:
    """Passages, and the numbers of the passages that state a fact."""

    def __init__(self) -> None:
        self.passages: list[str] = []
        self._numbers: dict[Fact, set[int]] = {}

    def add(self, passage: str, *facts: Fact) -> None:
        for fact in facts:
            self._numbers.setdefault(fact, set()).add(len(self.passages))
        self.passages.append(passage)

    def ask(self, wordings: Sequence[str], fact: Fact, **values: str) -> list[Question]:
        """Return the question for a fact in each of its wordings."""
        numbers = frozenset(self._numbers[fact])
        return [Question(wording.format(**values), numbers) for wording in wordings]


def _add_person(index: _PassageIndex, person: Person) -> None:
    """Add a passage for each attribute, and a passage with all attributes."""
    all_facts: list[Fact] = []
    for attribute in ATTRIBUTES:
        facts = [(person.name, attribute), (attribute, getattr(person, attribute))]
        index.add(person.sentence(attribute), (person.name,), *facts)
        all_facts += facts
    index.add(person.description, (person.name,), *all_facts)


def _add_place(index: _PassageIndex, place: Place, inhabitants: list[str]) -> None:
    """Add a passage for the river, for the fame, and for all about a place."""
    about, river, fame = (place.name,), (place.name, "river"), (place.name, "famous")
    index.add(place.river_sentence, about, river)
    index.add(place.fame_sentence, about, fame)
    live = f" {listing(inhabitants)} live there." if inhabitants else ""
    homes = [(name, "city") for name in inhabitants]
    index.add(place.description + live, about, river, fame, ("city", place.name), *homes)


def held_out(library: Library) -> list[Question]:
    """Return the questions that training never contains."""
    return [question for question in library.questions if is_held_out(question.text)]


def trained(library: Library) -> list[Question]:
    """Return the questions that training may contain."""
    return [question for question in library.questions if not is_held_out(question.text)]


def _questions(
    people: Sequence[Person], places: Sequence[Place], index: _PassageIndex
) -> Iterator[Question]:
    """Yield the questions about all people and places."""
    for person in people:
        yield from index.ask(ABOUT_PERSON, (person.name,), name=person.name)
        for attribute, wordings in ATTRIBUTES.items():
            value = getattr(person, attribute)
            yield from index.ask(wordings.questions, (person.name, attribute), name=person.name)
            yield from index.ask(wordings.who_questions, (attribute, value), value=value)
    for place in places:
        yield from index.ask(ABOUT_PLACE, (place.name,), name=place.name)
        yield from index.ask(RIVER, (place.name, "river"), name=place.name)
        yield from index.ask(FAMOUS, (place.name, "famous"), name=place.name)


def _distinct(count: int, draw_value: Callable[[], str]) -> list[str]:
    """Call `draw_value` until it has returned `count` different values, and return the values."""
    values: dict[str, None] = {}
    while len(values) < count:
        values[draw_value()] = None
    return list(values)
