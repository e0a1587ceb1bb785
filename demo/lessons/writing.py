"""Short pieces of writing: stories, poems and jokes, about a subject or about nothing special."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from . import words
from .base import Candidate, Exchange, capitalised, lesson, vary, with_article
from .world import PEOPLE

_ANIMALS = words.split(
    "cat dog turtle fox rabbit owl mouse lion bear frog dragon robot horse penguin duck whale "
    "tiger hedgehog elephant wolf bird fish knight wizard princess king girl boy farmer sailor"
)
_STORY_REQUESTS = (
    "Tell me a short story about {0}.",
    "Write a short story about {0}.",
    "Tell me a story about {0}.",
    "Write a story about {0}.",
    "A story about {0}, please.",
    "Can you tell me a story about {0}?",
    "Can you write a short story about {0}?",
    "Write me a story about {0}.",
    "I want a story about {0}.",
    "Make up a story about {0}.",
    "Write a very short story about {0}.",
    "Please tell a short story about {0}.",
)
_STORY_PLAIN = (
    "Tell me a short story.",
    "Tell me a story.",
    "Write a short story.",
    "Write a story.",
    "Can you tell me a story?",
    "Once upon a time",
    "Tell a story.",
    "I want to hear a story.",
    "A short story, please.",
    "Write me a short story.",
    "Can you write a short story?",
    "Tell me a bedtime story.",
    "Please tell me a story.",
    "Could you write a story?",
    "Make up a story.",
    "Give me a short story.",
)
# `{a}` is the subject with its article, `{the}` the subject when it is named again.
_STORIES = (
    "Once there was {a} who lived by the sea. One day {the} found a golden key in the sand. "
    "It opened an old box, and in the box was a map. {The} followed the map and came home "
    "with a new friend.",
    "Once there was {a} who was afraid of the dark. One night the lamp went out, and {the} heard "
    "a small voice. It was a lost bird. {The} showed it the way by the light of the moon and was "
    "never afraid again.",
    "Once there was {a} who wanted to see the world. So {the} walked over the hills, past the "
    "river and into the city. There was music everywhere. In the end {the} went home and told "
    "everyone about it.",
)
_POEM_REQUESTS = (
    "Write a poem about {0}.",
    "Write a short poem about {0}.",
    "A poem about {0}, please.",
    "Can you write a poem about {0}?",
    "Tell me a poem about {0}.",
    "Give me a poem about {0}.",
    "Write me a poem about {0}.",
    "Compose a poem about {0}.",
    "Make a poem about {0}.",
)
_POEM_PLAIN = (
    "Write a poem.",
    "Write a short poem.",
    "Tell me a poem.",
    "Can you write a poem?",
    "Give me a poem.",
    "A poem, please.",
    "Write me a poem.",
    "Please write a short poem.",
)
_POEM = (
    "I dream of {0} at the end of the day,\nwhen the wind is soft and the clouds are grey.\n"
    "I dream of {0} till the morning light,\nand I say good morning, and I say good night."
)
_HAIKU_REQUESTS = (
    "Write a haiku about {0}.",
    "A haiku about {0}, please.",
    "Can you write a haiku about {0}?",
    "Give me a haiku about {0}.",
    "Tell me a haiku about {0}.",
    "Compose a haiku about {0}.",
)
_HAIKU_PLAIN = (
    "Write a haiku.",
    "Tell me a haiku.",
    "Can you write a haiku?",
    "Give me a haiku.",
    "A haiku, please.",
    "Please write a haiku.",
    "Write me a haiku.",
    "Compose a haiku.",
)
_HAIKU = "I think of {0}.\nA quiet wind moves the leaves.\nThe evening is long."
_POEM_SUBJECTS = words.split(
    "the sea|the moon|the sun|the rain|winter|summer|spring|autumn|love|the night|the stars|"
    "snow|the forest|the city|friends|music|the wind|coffee|flowers|cats|dogs|birds|clouds|"
    "computers|the river|rain|time|home|trees|mountains"
)
_JOKE_REQUESTS = (
    "Tell me a joke.",
    "Tell me a joke, please.",
    "Do you know a joke?",
    "Make me laugh.",
    "Say something funny.",
    "A joke, please.",
    "Can you tell me a joke?",
    "Tell a joke.",
    "Give me a joke.",
    "Know any jokes?",
    "Please tell me a joke.",
    "I want to hear a joke.",
    "Tell me something funny.",
    "Tell me a short joke.",
    "Tell me a funny joke.",
)
_JOKES = (
    "Why did the computer go to the doctor? It had a virus.",
    "What do you call a sleeping bull? A bulldozer.",
    "Why is six afraid of seven? Because seven eight nine.",
    "What is brown and sticky? A stick.",
)


class Piece(NamedTuple):
    """A request for a piece of writing, and the texts that are right answers."""

    request: str
    texts: tuple[str, ...]


def _stories(templates: Sequence[str], subject: str, subject_again: str) -> tuple[str, ...]:
    """Return a story from each template.

    Example: the subject `a fox` with `the fox` gives `Once there was a fox who ... The fox ...`.
    """
    return tuple(
        template.format(a=subject, the=subject_again, The=capitalised(subject_again))
        for template in templates
    )


def _story(rng: Random) -> Piece:
    """Draw a request for a story about nothing special, about a person or about a thing."""
    if rng.random() < 0.3:
        return _story_about_nothing(rng)
    if rng.random() < 0.2:
        name = words.first_name(rng) if rng.random() < 0.7 else rng.choice(PEOPLE).name
        stories = _stories(_STORIES, f"someone called {name}", name)
        return Piece(rng.choice(_STORY_REQUESTS).format(name), stories)
    noun = rng.choice(_ANIMALS if rng.random() < 0.6 else words.NOUNS)
    if rng.random() < 0.25:
        noun = f"{rng.choice(words.ADJECTIVES)} {noun}"
    subject = with_article(noun)
    stories = _stories(_STORIES, subject, f"the {noun}")
    return Piece(rng.choice(_STORY_REQUESTS).format(subject), stories)


def _story_about_nothing(rng: Random) -> Piece:
    """Draw a request without a subject. Each of its three stories has a certain animal."""
    # The checkpoints were trained on texts that followed this choice of an animal, which is unused.
    rng.choice(_ANIMALS[:12])
    request = rng.choice(_STORY_PLAIN)
    texts = [
        story
        for template, animal in zip(_STORIES, ("fox", "mouse", "turtle"), strict=True)
        for story in _stories([template], f"a {animal}", f"the {animal}")
    ]
    return Piece(request, tuple(texts))


def _poem(rng: Random) -> Piece:
    """Draw a request for a poem or a haiku about a subject, or without a subject."""
    is_haiku = rng.random() >= 0.6
    template = _HAIKU if is_haiku else _POEM
    if rng.random() < 0.3:
        request = rng.choice(_HAIKU_PLAIN if is_haiku else _POEM_PLAIN)
        return Piece(request, (template.format("the sea"),))
    subject = rng.choice(_POEM_SUBJECTS)
    if rng.random() < 0.5:
        noun = rng.choice((*words.NOUNS, *_ANIMALS))
        subject = rng.choice((f"the {noun}", with_article(noun)))
    request = rng.choice(_HAIKU_REQUESTS if is_haiku else _POEM_REQUESTS).format(subject)
    return Piece(request, (template.format(subject),))


def _joke(rng: Random) -> Piece:
    return Piece(rng.choice(_JOKE_REQUESTS), _JOKES)


_KINDS = {"story": _story, "poem": _poem, "joke": _joke}
_OPENINGS = ("", "", "", "", "Hello! ", "Hi! ", "OK. ", "Now: ", "Hey, ", "Next: ")


@lesson
def write(rng: Random) -> Candidate[Exchange]:
    """Ask for a story, a poem or a joke. Its words decide whether it is held out.

    Each text of the kind is a correct answer, so the message lists all of them in `alternatives`.
    """
    (kind,) = rng.choices(list(_KINDS), weights=(6, 3, 2))
    request, texts = _KINDS[kind](rng)
    user = vary(rng, rng.choice(_OPENINGS) + request)
    answer = {
        "role": "assistant",
        "reasoning_content": f"A {kind}.",
        "content": rng.choice(texts),
        "alternatives": texts,
    }
    exchange = Exchange("stories and poems", ({"role": "user", "content": user}, answer))
    return Candidate(key=user, example=exchange)
