"""Greetings, thanks, questions about the model itself, remembering a name, and declining."""

from __future__ import annotations

from random import Random

from . import words
from .base import Exchange, draw, plain, vary

NAME = "Nereid's demo model"
DECLINE = "Sorry, I do not know that. I am only a tiny demonstration model."
DECLINE_TOOLS = "Sorry, none of my tools can do that."
_HELP = (
    "I can do small sums, answer questions about my little world, write facts as JSON, "
    "count, and call tools."
)
_GREETING = "Hello! How can I help you?"

# (what the user says, the reasoning, the answer); `{x}` is a friendly word that may be dropped.
_TALK = (
    (("Hello", "Hi", "Hey", "Hello there", "Hi there", "Good morning", "Good evening",
      "Good afternoon", "Greetings", "Hello {x}", "Hi {x}", "Hey {x}", "Hey there", "Good day"),
     "The user greets me.", _GREETING),
    (("Hi, how are you?", "How are you?", "How are you today?", "How do you do?",
      "How is it going?", "Are you well?", "How are you doing {x}?", "Hello, how are you?"),
     "A polite question.", "I am well, thank you. How can I help you?"),
    (("Thanks", "Thank you", "Thank you very much", "Thanks a lot", "Many thanks", "Thanks {x}",
      "Great, thanks",
      "Thank you {x}", "Perfect, thank you", "That helps, thanks", "Cheers, thank you"),
     "The user thanks me.", "You are welcome!"),
    (("Bye", "Goodbye", "See you", "See you later", "Good night", "Bye bye", "Bye {x}",
      "Goodbye {x}", "Farewell"),
     "The user leaves.", "Goodbye!"),
    (("Who are you?", "What are you?", "What is your name?", "Are you a human?", "Are you an AI?",
      "Which model are you?",
      "Introduce yourself.", "Tell me about yourself.", "Are you a robot?", "What model is this?",
      "Who am I talking to?"),
     "A question about me.",
     f"I am {NAME}: tiny, trained on invented examples, and not a real assistant."),
    (("What can you do?", "How can you help me?", "Help", "What do you know?",
      "What are your skills?", "Can you help me?",
      "What should I ask you?", "What are you able to do?", "I need help.", "What can I ask?"),
     "The user asks what I can do.", _HELP),
)  # fmt: skip
_FRIENDLY = ("friend", "everyone", "my friend", "again", "model", "assistant", "you", "all", "dear")
_UNKNOWN = (
    "What is the capital of {city}?", "Who won the {noun} cup in {year}?",
    "Write a poem about a {noun}.",
    "Explain {noun} theory.", "How do I fix my {noun}?", "What is the meaning of {noun}?",
    "Who invented the {noun}?", "How tall is the tower of {city}?", "What happened in {year}?",
    "How many people live in {city}?", "Tell me a joke about a {noun}.",
    "Write a story about a {noun} and a {noun2}.",
    "Who is the president of {city}?", "Which is better, a {noun} or a {noun2}?",
    "Recommend a {noun}.",
    "How do I cook {noun}?", "Is the {noun} {adjective}?", "What colour is the {noun}?",
    "Where can I buy a {noun}?", "Write code for a {noun}.", "What do you think about {noun}?",
    "Who wrote the {adjective} {noun}?",
    "Book a flight to {city}.", "Order a {adjective} {noun}.", "Summarise the {noun} of {year}.",
    "What is the population of {city}?", "Define {noun}.", "What is a {noun}?",
    "Why is the {noun} {adjective}?",
    "How far is {city} from here?", "How old is {name} {name2}?", "Give me {adjective} advice.",
)  # fmt: skip
_MY_NAME = ("My name is {0}.", "I am {0}.", "Hello, I am {0}.", "Hi, my name is {0}.", "I'm {0}.",
            "Call me {0}.", "You can call me {0}.", "Hello! My name is {0}.")  # fmt: skip
_ASK_NAME = (
    "What is my name?",
    "Who am I?",
    "Do you remember my name?",
    "What's my name?",
    "Can you say my name?",
)


def talk(rng: Random, held_out: bool) -> Exchange:
    """Greetings and the like; held out by the wording."""

    def make() -> tuple[str, Exchange]:
        forms, reasoning, answer = rng.choice(_TALK)
        user = rng.choice(forms).format(x=rng.choice(_FRIENDLY))
        if user[-1] not in "?.":
            user += rng.choice(("", "!", ".", "!", "!!", ", " + words.made_up(rng) + "!"))
        elif rng.random() < 0.25:
            user = user[:-1] + rng.choice(("", "??", ", please" + user[-1], " " + user[-1]))
        if rng.random() < 0.35:
            opener = rng.choice(("Oh", "Well", "So", "OK", "Ah", "Right", "Hm", "Please", "Now"))
            user = f"{opener}, {user[0].lower()}{user[1:]}"
        if rng.random() < 0.15:
            user = user.lower()
        return user, plain("small talk", user, reasoning, answer)

    return draw(make, held_out)


def fill_unknown(rng: Random) -> str:
    """A request about anything that this model was never taught."""
    return rng.choice(_UNKNOWN).format(
        city=words.city(rng),
        noun=rng.choice(words.NOUNS),
        noun2=rng.choice(words.NOUNS),
        adjective=rng.choice(words.ADJECTIVES),
        year=rng.randint(1200, 2030),
        name=words.first_name(rng),
        name2=words.made_up(rng),
    )


def unknown(rng: Random, held_out: bool) -> Exchange:
    """Requests beyond the model: one polite decline."""

    def make() -> tuple[str, Exchange]:
        user = fill_unknown(rng)
        return user, plain("declines", vary(rng, user), "I do not know this.", DECLINE)

    return draw(make, held_out)


def remember_name(rng: Random, held_out: bool) -> list[Exchange]:
    """The user's name, told first and asked for last; held out by the name."""

    def make() -> tuple[str, list[Exchange]]:
        name = words.full_name(rng) if rng.random() < 0.2 else words.first_name(rng)
        told = plain(
            "remembers a name",
            rng.choice(_MY_NAME).format(name),
            f"The user is called {name}.",
            f"Nice to meet you, {name}!",
        )
        asked = plain(
            "remembers a name",
            rng.choice(_ASK_NAME),
            f"Earlier the user said: {name}.",
            f"Your name is {name}.",
        )
        return name, [told, asked]

    return draw(make, held_out)
