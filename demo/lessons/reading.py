"""Answers from passages in the system message, about people and places that are new each time."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from . import words
from .base import Candidate, Exchange, lesson, plain, vary
from .retrieval import DISHES, HOBBIES, JOBS, PETS
from .world import ATTRIBUTES, FAMOUS, PEOPLE, PLACES, RIVER, Person, Place

_HEADS = (
    "Answer from these passages:",
    "Context:",
    "Use these passages:",
    "Answer from the context.",
    "Passages:",
    "Here is what you know:",
)


class _Text(NamedTuple):
    """Passages, and a question that one of them answers."""

    passages: list[str]
    question: str
    answer: str


def _text_about_place(rng: Random) -> _Text:
    """Draw a place of the fixed world or a new one, passages, and a question about the place."""
    known = rng.choice(PLACES)
    if rng.random() < 0.5:
        name, river = known.name, known.river
    else:
        name, river = words.made_up(rng), words.made_up(rng)
    others = [
        f"{words.made_up(rng)} is famous for its {words.phrase(rng)}."
        for _ in range(rng.randint(0, 2))
    ]
    place = Place(name, river, famous_for="")
    passage = place.river_sentence
    if rng.random() < 0.5:
        place = Place(name, river, famous_for=f"its {words.phrase(rng)}")
        passage = place.description
        if rng.random() < 0.4:
            question = rng.choice(FAMOUS).format(name=name)
            return _Text([*others, passage], question, place.fame_sentence)
    question = rng.choice(RIVER).format(name=name)
    return _Text([*others, passage], question, place.river_sentence)


def _text_about_person(rng: Random, *, is_known: bool, asks_for_person: bool) -> _Text:
    """Draw passages about people, and a question about one of them.

    If `is_known` is true, that person lives in the fixed world. If `asks_for_person` is true, the
    question is one such as `Who lives in Rome?`.
    """
    person = _new_person(rng)
    if is_known:
        person = rng.choice(PEOPLE)
    attribute = rng.choice(list(ATTRIBUTES))
    wordings, value = ATTRIBUTES[attribute], getattr(person, attribute)
    answer = person.sentence(attribute)
    passages = [person.description if rng.random() < 0.5 else answer]
    passages += [_other_passage(rng) for _ in range(rng.randint(0, 3))]
    rng.shuffle(passages)
    question = rng.choice(wordings.questions).format(name=person.name)
    if asks_for_person:
        question = rng.choice(wordings.who_questions).format(value=value)
        answer = wordings.who_answer.format(name=person.name, value=value)
    return _Text(passages, question, answer)


def _new_person(rng: Random) -> Person:
    """Draw a person who is not in the fixed world."""
    return Person(
        name=words.first_name(rng),
        city=words.city(rng),
        job=rng.choice(JOBS),
        pet=rng.choice(PETS),
        food=f"{rng.choice(words.NOUNS)} {rng.choice(DISHES)}",
        hobby=rng.choice(HOBBIES),
    )


def _other_passage(rng: Random) -> str:
    """Draw a passage about a new person, such as `Treldova lives in Rome.`."""
    attribute = rng.choice(list(ATTRIBUTES))
    value = words.city(rng) if attribute == "city" else words.made_up(rng).lower()
    return ATTRIBUTES[attribute].answer.format(name=words.made_up(rng), value=value)


def _draw_text(rng: Random) -> _Text:
    """Draw passages about a place or, in most cases, about people."""
    chance = rng.random()
    if chance < 0.2:
        return _text_about_place(rng)
    return _text_about_person(rng, is_known=chance < 0.35, asks_for_person=chance > 0.75)


@lesson
def read(rng: Random) -> Candidate[Exchange]:
    """Ask about passages in the system message.

    The words of the system message decide whether the exchange is held out for the evaluation.
    """
    text = _draw_text(rng)
    system = "\n".join([rng.choice(_HEADS), *text.passages])
    skill, messages = "answers from passages", ({"role": "system", "content": system},)
    user = vary(rng, text.question)
    exchange = plain(skill, user, reasoning="The passages say it.", answer=text.answer)
    return Candidate(key=system, example=Exchange(skill, messages + exchange.messages))
