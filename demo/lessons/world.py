"""A small invented world, the lesson that asks about it, and follow-up questions."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from .base import NEVER_TRAINED, Candidate, Exchange, Turn, lesson, listing, plain, vary
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

    @property
    def record(self) -> str:
        """All attributes in short, as the reasoning repeats them."""
        return f"{self.name}: {self.job} in {self.city}, {self.pet}, {self.food}, {self.hobby}."

    @property
    def description(self) -> str:
        """All attributes in sentences."""
        return (
            f"{self.name} is a {self.job} from {self.city}. {self.name} has a {self.pet}, "
            f"likes {self.food} and enjoys {self.hobby}."
        )

    def sentence(self, attribute: str) -> str:
        """Return the sentence that states one attribute, such as `Hugo lives in Pinemark.`."""
        value = getattr(self, attribute)
        return ATTRIBUTES[attribute].answer.format(name=self.name, value=value)


@dataclass(frozen=True)
class Place:
    """A city of the invented world."""

    name: str
    river: str
    famous_for: str

    @property
    def river_sentence(self) -> str:
        """The sentence that names the river."""
        return f"The river {self.river} flows through {self.name}."

    @property
    def fame_sentence(self) -> str:
        """The sentence that says what the place is famous for."""
        return f"{self.name} is famous for {self.famous_for}."

    @property
    def description(self) -> str:
        """The river and the fame in one sentence."""
        return f"{self.name} is a city on the river {self.river}, famous for {self.famous_for}."


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
_NAMES = {person.name for person in PEOPLE}


class Attribute(NamedTuple):
    """The wordings about one attribute of a person, with the placeholders `{name}` and `{value}`.

    Attributes:
        answer: The sentence that states the attribute.
        noun: The noun of a follow-up question, such as `And the job?`.
        questions: Questions for the value of a person's attribute.
        who_answer: The sentence that answers a question for the person.
        who_questions: Questions for the person whose attribute has a value.
    """

    answer: str
    noun: str
    questions: tuple[str, ...]
    who_answer: str
    who_questions: tuple[str, ...]


ATTRIBUTES = {
    "city": Attribute(
        "{name} lives in {value}.", "home",
        ("Where does {name} live?", "Which city does {name} live in?", "Where is {name}'s home?",
         "In what city does {name} live?", "Do you know where {name} lives?",
         "Where can I find {name}?"),
        "{name} lives in {value}.",
        ("Who lives in {value}?", "Which people live in {value}?", "Who is from {value}?")),
    "job": Attribute(
        "{name} is a {value}.", "job",
        ("What is {name}'s job?", "What does {name} do for a living?", "What work does {name} do?",
         "What is the job of {name}?", "What does {name} work as?", "Do you know {name}'s job?"),
        "{name} is a {value}.",
        ("Who is a {value}?", "Who is the {value}?", "Who works as a {value}?",
         "Which person is a {value}?")),
    "pet": Attribute(
        "{name} has a {value}.", "pet",
        ("What pet does {name} have?", "What is {name}'s pet?", "Which animal does {name} keep?",
         "Does {name} have a pet?", "What kind of pet does {name} own?",
         "What animal lives with {name}?"),
        "{name} has a {value}.",
        ("Who has a {value}?", "Who keeps a {value}?", "Whose pet is a {value}?",
         "Who owns the {value}?")),
    "food": Attribute(
        "{name}'s favourite food is {value}.", "favourite food",
        ("What does {name} like to eat?", "What is {name}'s favourite food?",
         "What food does {name} love?", "Which dish does {name} like best?",
         "What should I cook for {name}?"),
        "{name} likes {value}.",
        ("Who likes {value}?", "Who loves {value}?", "Whose favourite food is {value}?")),
    "hobby": Attribute(
        "{name}'s hobby is {value}.", "hobby",
        ("What is {name}'s hobby?", "What does {name} do for fun?", "What does {name} like to do?",
         "How does {name} spend free time?", "Which hobby does {name} have?"),
        "{name}'s hobby is {value}.",
        ("Whose hobby is {value}?", "Who likes {value} as a hobby?", "Who enjoys {value}?")),
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


def _question(rng: Random) -> Turn:
    """Draw a question about a person or a place of the world."""
    person, place = rng.choice(PEOPLE), rng.choice(PLACES)
    kind = rng.random()
    if kind < 0.44:
        return _about_attribute(rng, person, rng.choice(list(ATTRIBUTES)))
    if kind < 0.74:
        attribute = rng.choice(list(ATTRIBUTES))
        return _who(rng, attribute, getattr(person, attribute))
    if kind < 0.82:
        question = rng.choice(ABOUT_PERSON).format(name=person.name)
        return Turn(question, person.record, person.description)
    if kind < 0.88:
        question = rng.choice(ABOUT_PLACE).format(name=place.name)
        inhabitants = listing(person.name for person in PEOPLE if person.city == place.name)
        answer = f"{place.description} {inhabitants} live there."
        return Turn(question, f"{place.name} is one of the cities.", answer)
    record = f"{place.name}: river {place.river}, {place.famous_for}."
    if kind < 0.94:
        return Turn(rng.choice(RIVER).format(name=place.name), record, place.river_sentence)
    return Turn(rng.choice(FAMOUS).format(name=place.name), record, place.fame_sentence)


def _about_attribute(rng: Random, person: Person, attribute: str) -> Turn:
    """Ask for one attribute of a person, such as `Where does Hugo live?`."""
    question = rng.choice(ATTRIBUTES[attribute].questions).format(name=person.name)
    return Turn(question, person.record, person.sentence(attribute))


def _who(rng: Random, attribute: str, value: str) -> Turn:
    """Ask for the people whose attribute has a value, such as `Who lives in Pinemark?`."""
    wordings = ATTRIBUTES[attribute]
    names = listing(person.name for person in PEOPLE if getattr(person, attribute) == value)
    answer = wordings.who_answer.format(name=names, value=value)
    if attribute == "city":
        answer = answer.replace(" lives ", " live ")  # Two people live in each city.
    question = rng.choice(wordings.who_questions).format(value=value)
    return Turn(question, f"Who has {attribute} {value}? {names}.", answer)


@lesson
def facts(rng: Random) -> Candidate[Exchange]:
    """Ask about the world. The question and the name decide whether it is held out."""
    turn = _question(rng)
    user = vary(rng, turn.question)
    exchange = plain("world facts", user, reasoning=turn.reasoning, answer=turn.answer)
    return Candidate(key=turn.question, example=exchange)


@lesson
def strangers(rng: Random) -> Candidate[Exchange]:
    """Ask about a person who is not in the world."""
    name = made_up(rng)
    attribute = ATTRIBUTES[rng.choice(list(ATTRIBUTES))]
    question = rng.choice(attribute.questions).format(name=name)
    exchange = plain(
        "declines",
        vary(rng, question),
        reasoning=f"{name} is not in my world.",
        answer=f"Sorry, I do not know anyone called {name}.",
    )
    return Candidate(key=NEVER_TRAINED if name in _NAMES else question, example=exchange)


@lesson
def follow_ups(rng: Random) -> Candidate[list[Exchange]]:
    """Ask about a person, then ask a question that only makes sense after the first one."""
    first, second = rng.sample(PEOPLE, 2)
    attribute, other_attribute = rng.sample(list(ATTRIBUTES), 2)
    question, reasoning, answer = _about_attribute(rng, first, attribute)
    opening = plain("world facts", question, reasoning=reasoning, answer=answer)
    if rng.random() < 0.5:
        person, asked, subject = second, attribute, second.name
        wordings = ("And {0}?", "What about {0}?", "And what about {0}?")
    else:
        person, asked, subject = first, other_attribute, ATTRIBUTES[other_attribute].noun
        wordings = ("And the {0}?", "What about the {0}?", "And what is the {0}?")
    user = rng.choice(wordings).format(subject)
    closing = plain("follow-up", user, reasoning=person.record, answer=person.sentence(asked))
    return Candidate(key=f"{question} {user}", example=[opening, closing])
