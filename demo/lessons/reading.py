"""Answers from passages in the system message, about people and places that are new each time."""

from __future__ import annotations

from random import Random

from . import words
from .base import Exchange, Message, draw, plain, vary
from .retrieval import _DISHES, _HOBBIES, _JOBS, _PETS
from .world import BACKWARD, FAMOUS, FORWARD, PEOPLE, PLACES, RIVER

_HEADS = (
    "Answer from these passages:",
    "Context:",
    "Use these passages:",
    "Answer from the context.",
    "Passages:",
    "Here is what you know:",
)


def _passages(rng: Random) -> tuple[list[str], str, str, str]:
    """Draw passages and one question: passages, question, reasoning and answer."""
    chance = rng.random()
    if chance < 0.2:
        place = rng.choice(PLACES)
        name, river = (
            (place.name, place.river)
            if rng.random() < 0.5
            else (words.made_up(rng), words.made_up(rng))
        )
        passage = f"The river {river} flows through {name}."
        others = [
            f"{words.made_up(rng)} is famous for its {words.phrase(rng)}."
            for _ in range(rng.randint(0, 2))
        ]
        if rng.random() < 0.5:
            famous = f"its {words.phrase(rng)}"
            passage = f"{name} is a city on the river {river}, famous for {famous}."
            if rng.random() < 0.4:
                return (
                    [*others, passage],
                    rng.choice(FAMOUS).format(name=name),
                    passage,
                    f"{name} is famous for {famous}.",
                )
        return (
            [*others, passage],
            rng.choice(RIVER).format(name=name),
            passage,
            f"The river {river} flows through {name}.",
        )
    values: Message = {
        "name": words.first_name(rng),
        "city": words.city(rng),
        "job": rng.choice(_JOBS),
        "pet": rng.choice(_PETS),
        "food": f"{rng.choice(words.NOUNS)} {rng.choice(_DISHES)}",
        "hobby": rng.choice(_HOBBIES),
    }
    if chance < 0.35:
        person = rng.choice(PEOPLE)
        values = {key: getattr(person, key) for key in values}
    name, attribute = values["name"], rng.choice(list(FORWARD))
    answer = FORWARD[attribute][0].format(name=name, value=values[attribute])
    whole = (
        f"{name} is a {values['job']} from {values['city']}. {name} has a {values['pet']}, "
        f"likes {values['food']} and enjoys {values['hobby']}."
    )
    passages = [whole if rng.random() < 0.5 else answer]
    for _ in range(rng.randint(0, 3)):
        other = rng.choice(list(FORWARD))
        value = words.city(rng) if other == "city" else words.made_up(rng).lower()
        passages.append(FORWARD[other][0].format(name=words.made_up(rng), value=value))
    rng.shuffle(passages)
    question = rng.choice(FORWARD[attribute][2]).format(name=name)
    if chance > 0.75:
        question = rng.choice(BACKWARD[attribute]).format(value=values[attribute])
        verb = {"city": "lives in {v}", "job": "is a {v}", "pet": "has a {v}", "food": "likes {v}"}
        if attribute == "hobby":
            answer = f"{name}'s hobby is {values['hobby']}."
        else:
            answer = f"{name} {verb[attribute].format(v=values[attribute])}."
    return (
        passages,
        question,
        passages[passages.index(whole)] if whole in passages else answer,
        answer,
    )


def read(rng: Random, held_out: bool) -> Exchange:
    """Ask about passages that the system message contains. They are held out by their words."""

    def make() -> tuple[str, Exchange]:
        passages, question, _, answer = _passages(rng)
        system = "\n".join([rng.choice(_HEADS), *passages])
        exchange = plain(
            "answers from passages", vary(rng, question), "The passages say it.", answer
        )
        return system, Exchange(
            exchange.skill, ({"role": "system", "content": system}, *exchange.messages)
        )

    return draw(make, held_out)
