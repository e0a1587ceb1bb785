"""A small invented world, the lesson that asks about it, and follow-up questions."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .base import Exchange, draw, listing, plain, vary
from .words import made_up


@dataclass(frozen=True)
class Person:
    """A person of the invented world."""

    name: str
    city: str
    job: str
    pet: str
    food: str
    hobby: str


@dataclass(frozen=True)
class Place:
    """A city of the invented world."""

    name: str
    river: str
    famous_for: str


PEOPLE = tuple(
    Person(*row.split("/"))
    for row in (
        "Adela/Korvale/baker/cat/plum pie/chess",
        "Bram/Korvale/pilot/parrot/lentil soup/painting",
        "Cleo/Saltmere/doctor/goat/grilled fish/sailing",
        "Dario/Saltmere/carpenter/dog/pumpkin bread/fishing",
        "Elin/Windhollow/teacher/hedgehog/mushroom stew/singing",
        "Farid/Windhollow/miller/donkey/fig jam/kite flying",
        "Greta/Pinemark/ranger/fox/blueberry cake/climbing",
        "Hugo/Pinemark/clockmaker/turtle/onion tart/reading",
        "Ilse/Lanterby/writer/rabbit/honey toast/dancing",
        "Joran/Lanterby/sailor/crow/crab salad/juggling",
        "Kaya/Fernwick/gardener/snail/tomato rice/running",
        "Lorcan/Fernwick/blacksmith/horse/pepper cheese/knitting",
    )
)
PLACES = tuple(
    Place(*row.split("/"))
    for row in (
        "Korvale/Amber/its bridges",
        "Saltmere/Tidewater/its harbour",
        "Windhollow/Grey/its windmills",
        "Pinemark/Cold/its forest",
        "Lanterby/Silver/its lantern festival",
        "Fernwick/Moss/its gardens",
    )
)
_BY_NAME = {person.name: person for person in PEOPLE}

# For each attribute: the answer, the words of a follow-up question, and the questions.
FORWARD: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "city": ("{name} lives in {value}.", "home",
             ("Where does {name} live?", "Which city does {name} live in?",
              "Where is {name}'s home?",
              "In what city does {name} live?", "Do you know where {name} lives?",
              "Where can I find {name}?")),
    "job": ("{name} is a {value}.", "job",
            ("What is {name}'s job?", "What does {name} do for a living?",
             "What work does {name} do?", "What is the job of {name}?", "What does {name} work as?",
             "Do you know {name}'s job?")),
    "pet": ("{name} has a {value}.", "pet",
            ("What pet does {name} have?", "What is {name}'s pet?",
             "Which animal does {name} keep?",
             "Does {name} have a pet?", "What kind of pet does {name} own?",
             "What animal lives with {name}?")),
    "food": ("{name}'s favourite food is {value}.", "favourite food",
             ("What does {name} like to eat?", "What is {name}'s favourite food?",
              "What food does {name} love?",
              "Which dish does {name} like best?", "What should I cook for {name}?")),
    "hobby": ("{name}'s hobby is {value}.", "hobby",
              ("What is {name}'s hobby?", "What does {name} do for fun?",
               "What does {name} like to do?",
               "How does {name} spend free time?", "Which hobby does {name} have?")),
}  # fmt: skip
BACKWARD: dict[str, tuple[str, ...]] = {
    "city": ("Who lives in {value}?", "Which people live in {value}?", "Who is from {value}?"),
    "job": ("Who is a {value}?", "Who is the {value}?", "Who works as a {value}?",
            "Which person is a {value}?"),
    "pet": ("Who has a {value}?", "Who keeps a {value}?", "Whose pet is a {value}?",
            "Who owns the {value}?"),
    "food": ("Who likes {value}?", "Who loves {value}?", "Whose favourite food is {value}?"),
    "hobby": ("Whose hobby is {value}?", "Who likes {value} as a hobby?", "Who enjoys {value}?"),
}  # fmt: skip
ABOUT_PERSON = (
    "Tell me about {name}.",
    "Who is {name}?",
    "Describe {name}.",
    "What do you know about {name}?",
)
ABOUT_PLACE = (
    "Tell me about {name}.",
    "Describe {name}.",
    "What do you know about {name}?",
    "What is {name}?",
)
RIVER = (
    "Which river flows through {name}?",
    "What is the river in {name}?",
    "Name the river of {name}.",
)
FAMOUS = ("What is {name} famous for?", "What is {name} known for?", "Why is {name} famous?")


def _record(person: Person) -> str:
    rest = f"{person.pet}, {person.food}, {person.hobby}."
    return f"{person.name}: {person.job} in {person.city}, {rest}"


def _forward(person: Person, attribute: str) -> tuple[str, str]:
    """Return the reasoning and the answer for one attribute of one person."""
    answer = FORWARD[attribute][0].format(name=person.name, value=getattr(person, attribute))
    return _record(person), answer


def _backward(attribute: str, value: str) -> tuple[str, str]:
    names = listing(p.name for p in PEOPLE if getattr(p, attribute) == value)
    verb = "live" if attribute == "city" else "lives"
    answer = {
        "city": f"{names} {verb} in {value}.",
        "job": f"{names} is a {value}.",
        "pet": f"{names} has a {value}.",
        "food": f"{names} likes {value}.",
        "hobby": f"{names}'s hobby is {value}.",
    }[attribute]
    return f"Who has {attribute} {value}? {names}.", answer


def _about_person(person: Person) -> str:
    return (
        f"{person.name} is a {person.job} from {person.city}. {person.name} has a {person.pet}, "
        f"likes {person.food} and enjoys {person.hobby}."
    )


def _about_place(place: Place) -> str:
    names = listing(p.name for p in PEOPLE if p.city == place.name)
    return (
        f"{place.name} is a city on the river {place.river}, famous for {place.famous_for}. "
        f"{names} live there."
    )


def _question(rng: Random) -> tuple[str, str, str]:
    """Draw a question, the reasoning and the answer."""
    person, place = rng.choice(PEOPLE), rng.choice(PLACES)
    kind = rng.random()
    if kind < 0.44:
        attribute = rng.choice(list(FORWARD))
        user = rng.choice(FORWARD[attribute][2]).format(name=person.name)
        return user, *_forward(person, attribute)
    if kind < 0.74:
        attribute = rng.choice(list(BACKWARD))
        value = getattr(person, attribute)
        user = rng.choice(BACKWARD[attribute]).format(value=value)
        return user, *_backward(attribute, value)
    if kind < 0.82:
        user = rng.choice(ABOUT_PERSON).format(name=person.name)
        return user, _record(person), _about_person(person)
    if kind < 0.88:
        user = rng.choice(ABOUT_PLACE).format(name=place.name)
        return user, f"{place.name} is one of the cities.", _about_place(place)
    about = f"{place.name}: river {place.river}, {place.famous_for}."
    if kind < 0.94:
        answer = f"The river {place.river} flows through {place.name}."
        return rng.choice(RIVER).format(name=place.name), about, answer
    answer = f"{place.name} is famous for {place.famous_for}."
    return rng.choice(FAMOUS).format(name=place.name), about, answer


def facts(rng: Random, held_out: bool) -> Exchange:
    """Ask about the world. The words of the question and the name decide what is held out."""

    def make() -> tuple[str, Exchange]:
        user, reasoning, answer = _question(rng)
        return user, plain("world facts", vary(rng, user), reasoning, answer)

    return draw(make, held_out)


def strangers(rng: Random, held_out: bool) -> Exchange:
    """Ask about a person who is not in the world."""

    def make() -> tuple[str, Exchange]:
        name = made_up(rng)
        user = rng.choice(FORWARD[rng.choice(list(FORWARD))][2]).format(name=name)
        answer = f"Sorry, I do not know anyone called {name}."
        exchange = plain("declines", vary(rng, user), f"{name} is not in my world.", answer)
        return ("" if name in _BY_NAME else user), exchange

    return draw(make, held_out)


def follow_ups(rng: Random, held_out: bool) -> list[Exchange]:
    """Ask about a person, then ask a question that only makes sense after the first one."""

    def make() -> tuple[str, list[Exchange]]:
        first, second = rng.sample(PEOPLE, 2)
        attribute, other = rng.sample(list(FORWARD), 2)
        opening = rng.choice(FORWARD[attribute][2]).format(name=first.name)
        if rng.random() < 0.5:
            words, answered = second.name, _forward(second, attribute)
            forms: tuple[str, ...] = ("And {0}?", "What about {0}?", "And what about {0}?")
        else:
            words, answered = FORWARD[other][1], _forward(first, other)
            forms = ("And the {0}?", "What about the {0}?", "And what is the {0}?")
        closing = rng.choice(forms).format(words)
        turns = [
            plain("world facts", opening, *_forward(first, attribute)),
            plain("follow-up", closing, *answered),
        ]
        return f"{opening} {closing}", turns

    return draw(make, held_out)
