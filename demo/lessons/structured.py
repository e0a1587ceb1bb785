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
from typing import Any

from . import arithmetic, extraction, knowledge, words
from .base import Exchange, Message, draw, vary
from .small_talk import fill_unknown

# For each key, the function that draws its value. The keys of the first group are about people, the
# keys of the second group are about things.
Maker = Callable[[Random], Any]


def _pick(text: str) -> Maker:
    options = words.split(text)
    return lambda rng: rng.choice(options)


def _person_name(rng: Random) -> str:
    first = rng.choice(words.FIRST_NAMES)
    return f"{first} {rng.choice(words.LAST_NAMES)}" if rng.random() < 0.6 else first


def _real_city(rng: Random) -> str:
    return rng.choice(words.CITIES)


_JOB = _pick("baker teacher doctor pilot farmer painter cook nurse lawyer engineer writer singer")
_HOBBY = _pick("chess painting singing reading dancing running climbing sailing cooking music")
_COUNTRY = _pick("France Germany Italy Spain Japan Brazil Canada India Kenya Norway Poland Mexico")
_COLOUR = _pick("red blue green yellow orange purple black white brown grey")
_SENTENCE = _pick(
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
    "gender": _pick("female male"),
    "nationality": _pick("French German Italian Spanish Polish"),
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
    "pet": _pick("cat dog rabbit parrot hamster"),
    "married": lambda rng: rng.random() < 0.5,
}


def _title(rng: Random) -> str:
    return f"The {rng.choice(words.ADJECTIVES).capitalize()} {rng.choice(words.NOUNS).capitalize()}"


def _food(rng: Random) -> list[str]:
    return rng.sample(
        words.split("flour eggs milk butter sugar salt tomatoes cheese onions rice"), 3
    )


_THINGS: dict[str, tuple[tuple[str, ...], dict[str, Maker]]] = {
    "city": (
        ("city", "name", "country", "population", "capital", "description", "river"),
        {
            "city": _real_city,
            "name": _real_city,
            "capital": _real_city,
            "country": _COUNTRY,
            "population": lambda rng: rng.randint(1, 99) * 100000,
            "description": _SENTENCE,
            "river": words.made_up,
        },
    ),
    "book": (
        ("title", "author", "year", "genre", "pages", "name"),
        {
            "title": _title,
            "name": _title,
            "author": _person_name,
            "year": lambda rng: rng.randint(1900, 2024),
            "genre": _pick("novel poetry history comedy drama fantasy"),
            "pages": lambda rng: rng.randint(80, 600),
        },
    ),
    "film": (
        ("title", "year", "director", "genre", "rating", "name"),
        {
            "title": _title,
            "name": _title,
            "director": _person_name,
            "year": lambda rng: rng.randint(1930, 2024),
            "genre": _pick("comedy drama fantasy adventure history"),
            "rating": lambda rng: rng.randint(1, 10),
        },
    ),
    "product": (
        ("name", "price", "in_stock", "colour", "category", "description", "quantity"),
        {
            "name": words.phrase,
            "price": lambda rng: rng.randint(2, 500),
            "in_stock": lambda rng: rng.random() < 0.7,
            "colour": _COLOUR,
            "category": _pick("kitchen garden clothes music toys books"),
            "description": _SENTENCE,
            "quantity": lambda rng: rng.randint(1, 50),
        },
    ),
    "animal": (
        ("name", "animal", "species", "legs", "age", "colour", "sound"),
        {
            "name": lambda rng: rng.choice(words.FIRST_NAMES),
            "animal": _pick("cat dog horse rabbit fox owl"),
            "species": _pick("cat dog horse rabbit fox owl"),
            "legs": lambda rng: rng.choice((2, 4)),
            "age": lambda rng: rng.randint(1, 15),
            "colour": _COLOUR,
            "sound": _pick("Meow Woof Moo Neigh Hoot"),
        },
    ),
    "recipe": (
        ("name", "title", "ingredients", "minutes", "servings", "steps", "difficulty"),
        {
            "name": _pick("Tomato soup|Apple pie|Rice salad|Onion tart|Pancakes"),
            "title": _pick("Tomato soup|Apple pie|Rice salad|Onion tart|Pancakes"),
            "ingredients": _food,
            "minutes": lambda rng: rng.randint(10, 90),
            "servings": lambda rng: rng.randint(1, 8),
            "steps": lambda _: ["Mix everything.", "Cook it.", "Serve it."],
            "difficulty": _pick("easy medium hard"),
        },
    ),
    "event": (
        ("title", "name", "date", "time", "location", "city", "participants"),
        {
            "title": _pick("Team meeting|Birthday party|Concert|Dinner|Book club"),
            "name": _pick("Team meeting|Birthday party|Concert|Dinner|Book club"),
            "date": lambda rng: f"2025-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}",
            "time": words.clock,
            "location": _real_city,
            "city": _real_city,
            "participants": lambda rng: rng.sample(words.FIRST_NAMES, 2),
        },
    ),
    "company": (
        ("name", "city", "employees", "founded", "industry", "ceo"),
        {
            "name": lambda rng: f"{words.made_up(rng)} Ltd",
            "city": _real_city,
            "employees": lambda rng: words.number(rng, 4),
            "founded": lambda rng: rng.randint(1900, 2020),
            "industry": _pick("food music books travel health energy"),
            "ceo": _person_name,
        },
    ),
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


def object_text(values: Message) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return a JSON object's text and the spans of its given parts: the brace and the keys.

    Example: `{"name": "Ann"}` has the span of `{"name":`.
    """
    text, spans = "", []
    for key, value in values.items():
        text += ", " if text else ""
        start = max(0, len(text) - 1)
        text += ("" if start else "{") + json.dumps(key) + ":"
        spans.append((start, len(text)))
        text += " " + json.dumps(value, ensure_ascii=False)
    return text + "}", tuple(spans)


def _answer(
    rng: Random, user: str, reasoning: str, values: Message, open_share: float, is_free: bool
) -> Exchange:
    """Build the exchange.

    Args:
        rng: The source of randomness.
        user: The request.
        reasoning: The reasoning before the answer.
        values: The object.
        open_share: The probability that no part of the answer is marked as given.
        is_free: Whether other values of the same types are right, too.
    """
    text, spans = object_text(values)
    answer = {"role": "assistant", "reasoning_content": reasoning, "content": text}
    answer |= {"keys": list(values), "is_free": is_free}
    if rng.random() >= open_share:
        answer["given"] = spans
    return Exchange("schema", ({"role": "user", "content": user}, answer))


def _some(rng: Random, keys: list[str], most: int = 5) -> list[str]:
    return rng.sample(keys, min(len(keys), rng.choice((1, 2, 2, 2, 3, 3, 4, most))))


def _invent(rng: Random) -> tuple[str, Message, float]:
    """Draw a request to invent something, and the values of its object."""
    keys: list[str]
    makers: dict[str, Maker]
    if rng.random() < 0.55:
        noun, makers = rng.choice((*_PERSON_NOUNS, *["person"] * 14)), _PEOPLE_KEYS
        keys = ["name", "age"] if rng.random() < 0.4 else _some(rng, list(makers))
    else:
        noun, (names, makers) = rng.choice(list(_THINGS.items()))
        keys = _some(rng, list(names))
        if noun == "film" and rng.random() < 0.5:
            noun = "movie"
    user = rng.choice(_INVENT).format(noun)
    if noun[0] in "aeiou":
        user = user.replace(" a ", " an ", 1)
    names_keys = rng.random() < 0.45
    if names_keys:
        named = [key.replace("_", " ") for key in keys]
        if rng.random() < 0.4:
            named = [("an " if name[0] in "aeiou" else "a ") + name for name in named]
        end = user[-1] if user[-1] in ".?" else ""
        listed = f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else named[0]
        user = user.rstrip(".?") + rng.choice(_WITH).format(listed) + end
    values = {key: makers[key](rng) for key in keys}
    if "email" in values and "name" in values:
        values["email"] = f"{values['name'].split()[0].lower()}@example.com"
    # The plain request has the most usual keys, so that the model answers it with an object even if
    # no grammar requires an object.
    is_open = keys == ["name", "age"] or names_keys
    return user, values, 0.8 if is_open else 0.0


def _generic(rng: Random) -> tuple[str, Message, float]:
    """Draw any request and any keys: values are plain words and numbers, and the object ends."""
    makers: tuple[Maker, ...] = (
        words.phrase,
        words.phrase,
        lambda rng: rng.choice(words.NOUNS),
        words.first_name,
        lambda rng: rng.randint(1, 100),
        lambda rng: rng.random() < 0.5,
        lambda rng: rng.sample(words.NOUNS, rng.randint(1, 3)),
        lambda rng: rng.randint(1, 9) / 2,
    )
    keys = [rng.choice(words.NOUNS) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.4:
        keys = [f"{rng.choice(words.ADJECTIVES)}_{key}" for key in keys]
    user = rng.choice(_GENERIC_PROMPTS) if rng.random() < 0.5 else fill_unknown(rng)
    return user, {key: rng.choice(makers)(rng) for key in keys}, 0.0


def _sum(rng: Random) -> tuple[str, Message, float]:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    values: Message = {}
    for key in _some(
        rng, ["answer", "result", "sum", "left", "right", "a", "b", "value", "total"], 4
    ):
        values[key] = a if key in ("left", "a") else b if key in ("right", "b") else a + b
    return arithmetic.plus_request(rng, a, b), values, 0.02


def _asked(ask: knowledge.Question) -> Callable[[Random], tuple[str, Message, float]]:
    def make(rng: Random) -> tuple[str, Message, float]:
        user, _, _, values = ask(rng)
        keys = [rng.choice(list(values))]
        if "country" in values and rng.random() < 0.5:
            keys = rng.sample(["country", "capital"], 2)
        return user, {key: values[key] for key in keys}, 0.02

    return make


def _sentiment(rng: Random) -> tuple[str, Message, float]:
    label, texts = rng.choice(
        (
            ("positive", _POSITIVE),
            ("negative", _NEGATIVE),
            ("positive", _POSITIVE),
            ("negative", _NEGATIVE),
            ("neutral", _NEUTRAL),
        )
    )
    text = rng.choice(texts).format(x=rng.choice(words.NOUNS)) + rng.choice(("", ".", "!"))
    key = rng.choice(("sentiment", "sentiment", "label", "answer", "result", "class", "category"))
    values: Message = {key: label}
    if rng.random() < 0.2:
        values["confidence"] = rng.choice((0.8, 0.9))
    return rng.choice(_CLASSIFY).format(text), values, 0.3


def _extracted(rng: Random) -> tuple[str, Message, float]:
    text, values = extraction.sentence(rng)
    keys = rng.sample(list(values), rng.randint(1, len(values)))
    form = rng.choice(
        (
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
    )
    return form.format(text), {key: values[key] for key in keys}, 0.02


_KINDS: tuple[tuple[Callable[[Random], tuple[str, Message, float]], int, str], ...] = (
    (_invent, 9, "An invented object."),
    (_generic, 3, "An example."),
    (_sum, 3, "A sum."),
    (_asked(knowledge.capital), 2, "A capital."),
    (_asked(knowledge.translation), 1, "A word."),
    (_asked(knowledge.counted_list), 3, "A list."),
    (_asked(knowledge.fact), 2, "A fact."),
    (_sentiment, 2, "The sentiment."),
    (_extracted, 3, "The data."),
)


def answer_with_object(rng: Random, held_out: bool) -> Exchange:
    """Answer with a JSON object of prescribed keys. It is held out by the request and the keys."""

    def make() -> tuple[str, Exchange]:
        kinds, weights, thoughts = zip(*_KINDS, strict=True)
        index = rng.choices(range(len(kinds)), weights)[0]
        user, values, open_share = kinds[index](rng)
        key = f"{user} {sorted(values)}"
        user = vary(rng, user)
        is_free = kinds[index] in (_invent, _generic)
        return key, _answer(rng, user, thoughts[index], values, open_share, is_free)

    return draw(make, held_out)
