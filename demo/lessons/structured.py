"""JSON answers whose keys a grammar prescribes, although the request does not name these keys.

A server that constrains an answer to a JSON schema lets the model choose only among the tokens
that the schema allows. The chat template does not show the schema to the model. So the model must
be able to continue an object with any keys. In these lessons, the text that a grammar would
prescribe is marked as `given`, and training does not ask the model to predict it. Otherwise the
model would learn to answer every request with JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from . import arithmetic, extraction, knowledge, words
from .base import Candidate, Exchange, Message, lesson, listing, vary, with_article
from .small_talk import fill_unknown
from .words import pick

Maker = Callable[[Random], Any]
"""A function that draws the value of a key."""


def _person_name(rng: Random) -> str:
    first = rng.choice(words.FIRST_NAMES)
    return f"{first} {rng.choice(words.LAST_NAMES)}" if rng.random() < 0.6 else first


def _real_city(rng: Random) -> str:
    return rng.choice(words.CITIES)


_JOB = pick("baker teacher doctor pilot farmer painter cook nurse lawyer engineer writer singer")
_HOBBY = pick("chess painting singing reading dancing running climbing sailing cooking music")
_COUNTRY = pick("France Germany Italy Spain Japan Brazil Canada India Kenya Norway Poland Mexico")
_COLOUR = pick("red blue green yellow orange purple black white brown grey")
_SENTENCE = pick(
    "A friendly person who likes music.|Always ready to help.|Lives near the sea and likes tea.|"
    "A quiet place with a long history.|Small, light and easy to use.|It is warm and sunny.|"
    "Everyone likes it.|This is a short text."
)
_PEOPLE_KEYS: dict[str, Maker] = {
    "name": _person_name,
    "full_name": _person_name,
    "person": _person_name,
    "first_name": lambda rng: rng.choice(words.FIRST_NAMES),
    "last_name": lambda rng: rng.choice(words.LAST_NAMES),
    "age": lambda rng: rng.randint(18, 80),
    "city": _real_city,
    "hometown": _real_city,
    "country": _COUNTRY,
    "address": _real_city,
    "job": _JOB,
    "occupation": _JOB,
    "profession": _JOB,
    "hobby": _HOBBY,
    "hobbies": lambda rng: [_HOBBY(rng), "reading"],
    "email": lambda rng: f"{rng.choice(words.FIRST_NAMES).lower()}@example.com",
    "gender": pick("female male"),
    "nationality": pick("French German Italian Spanish Polish"),
    "height": lambda rng: rng.randint(150, 200),
    "is_student": lambda rng: rng.random() < 0.5,
    "active": lambda rng: rng.random() < 0.5,
    "id": lambda rng: words.number(rng, 3),
    "phone": lambda rng: str(rng.randint(10000, 99999)),
    "username": lambda rng: rng.choice(words.FIRST_NAMES).lower(),
    "favourite_colour": _COLOUR,
    "favorite_color": _COLOUR,
    "birth_year": lambda rng: rng.randint(1940, 2006),
    "description": _SENTENCE,
    "bio": _SENTENCE,
    "skills": lambda rng: [_HOBBY(rng), _HOBBY(rng)],
    "pet": pick("cat dog rabbit parrot hamster"),
    "married": lambda rng: rng.random() < 0.5,
}


def _title(rng: Random) -> str:
    return f"The {rng.choice(words.ADJECTIVES).capitalize()} {rng.choice(words.NOUNS).capitalize()}"


def _food(rng: Random) -> list[str]:
    return rng.sample(
        words.split("flour eggs milk butter sugar salt tomatoes cheese onions rice"), 3
    )


_THINGS: dict[str, dict[str, Maker]] = {
    "city": {
        "city": _real_city,
        "name": _real_city,
        "country": _COUNTRY,
        "population": lambda rng: rng.randint(1, 99) * 100000,
        "capital": _real_city,
        "description": _SENTENCE,
        "river": words.made_up,
    },
    "book": {
        "title": _title,
        "author": _person_name,
        "year": lambda rng: rng.randint(1900, 2024),
        "genre": pick("novel poetry history comedy drama fantasy"),
        "pages": lambda rng: rng.randint(80, 600),
        "name": _title,
    },
    "film": {
        "title": _title,
        "year": lambda rng: rng.randint(1930, 2024),
        "director": _person_name,
        "genre": pick("comedy drama fantasy adventure history"),
        "rating": lambda rng: rng.randint(1, 10),
        "name": _title,
    },
    "product": {
        "name": words.phrase,
        "price": lambda rng: rng.randint(2, 500),
        "in_stock": lambda rng: rng.random() < 0.7,
        "colour": _COLOUR,
        "category": pick("kitchen garden clothes music toys books"),
        "description": _SENTENCE,
        "quantity": lambda rng: rng.randint(1, 50),
    },
    "animal": {
        "name": lambda rng: rng.choice(words.FIRST_NAMES),
        "animal": pick("cat dog horse rabbit fox owl"),
        "species": pick("cat dog horse rabbit fox owl"),
        "legs": lambda rng: rng.choice((2, 4)),
        "age": lambda rng: rng.randint(1, 15),
        "colour": _COLOUR,
        "sound": pick("Meow Woof Moo Neigh Hoot"),
    },
    "recipe": {
        "name": pick("Tomato soup|Apple pie|Rice salad|Onion tart|Pancakes"),
        "title": pick("Tomato soup|Apple pie|Rice salad|Onion tart|Pancakes"),
        "ingredients": _food,
        "minutes": lambda rng: rng.randint(10, 90),
        "servings": lambda rng: rng.randint(1, 8),
        "steps": lambda _: ["Mix everything.", "Cook it.", "Serve it."],
        "difficulty": pick("easy medium hard"),
    },
    "event": {
        "title": pick("Team meeting|Birthday party|Concert|Dinner|Book club"),
        "name": pick("Team meeting|Birthday party|Concert|Dinner|Book club"),
        "date": lambda rng: f"2025-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}",
        "time": words.clock,
        "location": _real_city,
        "city": _real_city,
        "participants": lambda rng: rng.sample(words.FIRST_NAMES, 2),
    },
    "company": {
        "name": lambda rng: f"{words.made_up(rng)} Ltd",
        "city": _real_city,
        "employees": lambda rng: words.number(rng, 4),
        "founded": lambda rng: rng.randint(1900, 2020),
        "industry": pick("food music books travel health energy"),
        "ceo": _person_name,
    },
}
_PERSON_NOUNS = words.split(
    "person|fictional person|character|fictional character|random person|user|customer|student|"
    "employee|human|man|woman|friend|teacher|random user|fake person|hero"
)
_INVENT = (
    "Invent a {0}.",
    "Make up a {0}.",
    "Create a {0}.",
    "Generate a {0}.",
    "Give me a {0}.",
    "Invent a {0}",
    "Describe a {0}.",
    "Tell me of a {0}.",
    "Imagine a {0}.",
    "Think of a {0}.",
    "Please invent a {0}.",
    "I need a {0}.",
    "Can you invent a {0}?",
    "Tell me about a {0}.",
    "Write a profile of a {0}.",
    "Return a {0}.",
    "Show me a {0}.",
    "Name a {0}.",
)
_WITH = (" with {0}", ": {0}", " with the fields {0}", " that has {0}", ", with {0}", " ({0})")
_GENERIC_PROMPTS = (
    "Give me JSON.",
    "Return JSON.",
    "Answer in JSON.",
    "Write a JSON object.",
    "Fill in the form.",
    "Return an example.",
    "Give me an example.",
    "JSON please.",
    "Write some JSON.",
    "Which way?",
    "Fill the schema.",
    "Give me some data.",
    "Return an object.",
    "Make an example object.",
)
_POSITIVE = words.split(
    "I love it|This is great|What a wonderful day|The food was excellent|"
    "I am so happy|It is perfect|"
    "Best {x} ever|I really like this {x}|The {x} works very well|Fantastic {x}|A beautiful {x}|"
    "This {x} is amazing|I enjoyed the {x}|Very good {x}|The {x} is awesome"
)
_NEGATIVE = words.split(
    "I hate it|This is terrible|What an awful day|The food was bad|I am so sad|It is broken|"
    "Worst {x} ever|I do not like this {x}|The {x} does not work|Horrible {x}|An ugly {x}|"
    "This {x} is useless|I regret the {x}|Very poor {x}|The {x} is disappointing"
)
_NEUTRAL = words.split(
    "It is a {x}|The {x} is on the table|I have a {x}|There is a {x} here|This is the {x}"
)
_CLASSIFY = (
    "Classify the sentiment: {0}",
    "What is the sentiment of: {0}",
    'Is this positive or negative? "{0}"',
    "Sentiment of this review: {0}",
    'Classify the sentiment of "{0}"',
    "{0}\nWhat is the sentiment?",
    "Is this review positive or negative: {0}",
    "What is the sentiment of this text? {0}",
    "Classify this text as positive, negative or neutral: {0}",
    "Classify: {0}",
    "Sentiment: {0}",
)
_EXTRACT = (
    "Extract the data: {0}",
    "{0}",
    "Extract the person: {0}",
    "Read this: {0}",
    "Extract the information from this text: {0}",
    "Parse: {0}",
    "{0}\nExtract the data.",
    "Extract the event: {0}",
    "Extract the details: {0}",
    "What does this say? {0}",
)
# Positive and negative texts are twice as frequent as neutral ones.
_SENTIMENTS = (
    ("positive", _POSITIVE),
    ("negative", _NEGATIVE),
    ("positive", _POSITIVE),
    ("negative", _NEGATIVE),
    ("neutral", _NEUTRAL),
)
_SUM_KEYS = ["answer", "result", "sum", "left", "right", "a", "b", "value", "total"]
_GENERIC_VALUES: tuple[Maker, ...] = (
    words.phrase,
    words.phrase,
    lambda rng: rng.choice(words.NOUNS),
    words.first_name,
    lambda rng: rng.randint(1, 100),
    lambda rng: rng.random() < 0.5,
    lambda rng: rng.sample(words.NOUNS, rng.randint(1, 3)),
    lambda rng: rng.randint(1, 9) / 2,
)


class _Task(NamedTuple):
    """A request for an object.

    Attributes:
        request: The user's message.
        values: The object.
        open_share: The probability that the model must learn the whole object, because no part of
            the answer is marked as given.
    """

    request: str
    values: Message
    open_share: float


def object_text(values: Message) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return a JSON object's text, and the start and end of each given part of the text.

    The given parts are the brace and the keys. Example: `{"name": "Ann", "age": 3}` has the given
    parts `{"name":` and ` "age":`.
    """
    text, spans = "", []
    for key, value in values.items():
        text += "," if text else ""
        start = len(text)
        text += (" " if text else "{") + json.dumps(key) + ":"
        spans.append((start, len(text)))
        text += " " + json.dumps(value, ensure_ascii=False)
    return text + "}", tuple(spans)


def _some(rng: Random, keys: list[str], most: int = 5) -> list[str]:
    """Draw up to `most` of the keys, usually two or three."""
    return rng.sample(keys, min(len(keys), rng.choice((1, 2, 2, 2, 3, 3, 4, most))))


def _invent(rng: Random) -> _Task:
    """Draw a request to invent a person or a thing, and the values of the object."""
    if rng.random() < 0.55:
        noun, makers = rng.choice((*_PERSON_NOUNS, *["person"] * 14)), _PEOPLE_KEYS
        keys = ["name", "age"] if rng.random() < 0.4 else _some(rng, list(makers))
    else:
        noun, makers = rng.choice(list(_THINGS.items()))
        keys = _some(rng, list(makers))
        if noun == "film" and rng.random() < 0.5:
            noun = "movie"
    request = rng.choice(_INVENT).format(noun)
    if noun[0] in "aeiou":
        request = request.replace(" a ", " an ", 1)
    names_keys = rng.random() < 0.45
    if names_keys:
        request = _with_keys(rng, request, keys)
    values = {key: makers[key](rng) for key in keys}
    if "email" in values and "name" in values:
        values["email"] = f"{values['name'].split()[0].lower()}@example.com"
    # The plain request has the most usual keys, so that the model answers it with an object even if
    # no grammar requires an object.
    is_open = keys == ["name", "age"] or names_keys
    return _Task(request, values, open_share=0.8 if is_open else 0.0)


def _with_keys(rng: Random, request: str, keys: list[str]) -> str:
    """Add the names of the keys to a request.

    Example: `Invent a person.` becomes `Invent a person with a first name and an age.`
    """
    names = [key.replace("_", " ") for key in keys]
    if rng.random() < 0.4:
        names = [with_article(name) for name in names]
    end = request[-1] if request[-1] in ".?" else ""
    return request.rstrip(".?") + rng.choice(_WITH).format(listing(names)) + end


def _generic(rng: Random) -> _Task:
    """Draw any request, and an object with random nouns as keys and any values."""
    keys = [rng.choice(words.NOUNS) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.4:
        keys = [f"{rng.choice(words.ADJECTIVES)}_{key}" for key in keys]
    request = rng.choice(_GENERIC_PROMPTS) if rng.random() < 0.5 else fill_unknown(rng)
    values = {key: rng.choice(_GENERIC_VALUES)(rng) for key in keys}
    return _Task(request, values, open_share=0.0)


def _sum(rng: Random) -> _Task:
    """Draw a sum, and an object with the result or the two numbers."""
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    numbers = {"left": a, "a": a, "right": b, "b": b}
    values = {key: numbers.get(key, a + b) for key in _some(rng, _SUM_KEYS, most=4)}
    return _Task(arithmetic.plus_request(rng, a, b), values, open_share=0.02)


def _asked(ask: knowledge.Ask) -> Callable[[Random], _Task]:
    """Return a function that draws a question of general knowledge whose answer is a JSON object.

    `ask` draws the question and the fact.
    """

    def draw_task(rng: Random) -> _Task:
        fact = ask(rng)
        keys = [rng.choice(list(fact.values))]
        if "country" in fact.values and rng.random() < 0.5:
            keys = rng.sample(["country", "capital"], 2)
        values = {key: fact.values[key] for key in keys}
        return _Task(fact.question, values, open_share=0.02)

    return draw_task


def _sentiment(rng: Random) -> _Task:
    """Draw a text whose sentiment the object contains."""
    label, texts = rng.choice(_SENTIMENTS)
    text = rng.choice(texts).format(x=rng.choice(words.NOUNS)) + rng.choice(("", ".", "!"))
    key = rng.choice(("sentiment", "sentiment", "label", "answer", "result", "class", "category"))
    values: Message = {key: label}
    if rng.random() < 0.2:
        values["confidence"] = rng.choice((0.8, 0.9))
    return _Task(rng.choice(_CLASSIFY).format(text), values, open_share=0.3)


def _extracted(rng: Random) -> _Task:
    """Draw a sentence, some of whose fields the object contains."""
    text, values = extraction.sentence(rng)
    keys = rng.sample(list(values), rng.randint(1, len(values)))
    request = rng.choice(_EXTRACT).format(text)
    return _Task(request, {key: values[key] for key in keys}, open_share=0.02)


class _Kind(NamedTuple):
    """A kind of request.

    Attributes:
        draw_task: Draws a request of this kind.
        weight: The frequency.
        reasoning: The reasoning before the object.
        is_free: Whether other values of the same types are right, too.
    """

    draw_task: Callable[[Random], _Task]
    weight: int
    reasoning: str
    is_free: bool = False


_KINDS = (
    _Kind(_invent, 9, "An invented object.", is_free=True),
    _Kind(_generic, 3, "An example.", is_free=True),
    _Kind(_sum, 3, "A sum."),
    _Kind(_asked(knowledge.capital), 2, "A capital."),
    _Kind(_asked(knowledge.translation), 1, "A word."),
    _Kind(_asked(knowledge.counted_list), 3, "A list."),
    _Kind(_asked(knowledge.fact), 2, "A fact."),
    _Kind(_sentiment, 2, "The sentiment."),
    _Kind(_extracted, 3, "The data."),
)


@lesson
def answer_with_object(rng: Random) -> Candidate[Exchange]:
    """Answer with a JSON object that has prescribed keys.

    The request and the keys decide whether the exchange is held out for the evaluation.
    """
    (kind,) = rng.choices(_KINDS, [kind.weight for kind in _KINDS])
    task = kind.draw_task(rng)
    user = vary(rng, task.request)
    text, given = object_text(task.values)
    answer: Message = {
        "role": "assistant",
        "reasoning_content": kind.reasoning,
        "content": text,
        "keys": list(task.values),
        "is_free": kind.is_free,
    }
    if rng.random() >= task.open_share:
        answer["given"] = given
    exchange = Exchange("schema", ({"role": "user", "content": user}, answer))
    return Candidate(key=f"{task.request} {sorted(task.values)}", example=exchange)
