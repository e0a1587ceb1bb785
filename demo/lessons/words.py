"""Real words, and made-up words that a model can only copy, to fill sentences with."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any


def split(text: str) -> tuple[str, ...]:
    """Split a text at its bars if it has any, otherwise at blanks."""
    return tuple(text.strip("| ").split("|" if "|" in text else None))


def pick(options: str) -> Callable[[Random], str]:
    """Make a function that draws one of the options, which bars or blanks separate."""
    texts = split(options)
    return lambda rng: rng.choice(texts)


def one_of(*makers: Callable[[Random], Any]) -> Callable[[Random], Any]:
    """Make a function that calls one of these functions, which is drawn each time."""
    return lambda rng: rng.choice(makers)(rng)


FIRST_NAMES = split(
    "Anna Maria Peter Paul John Mary James Linda Robert Susan David Karen Thomas Lisa Daniel "
    "Nancy Mark Sandra Steven Emma Olivia Noah Liam Sophia Mia Lucas Amir Fatima Omar Layla "
    "Wei Mei Hiro Yuki Ravi Priya Arjun Ivan Olga Sven Ingrid Pierre Claire Marco Giulia Pablo "
    "Carmen Joao Zoe Kofi Ama Chidi Ngozi Tariq Leila Jan Eva Tom Kate Sam Alex Nina Oscar "
    "Ruby Max Ella Finn Iris"
)
LAST_NAMES = split(
    "Smith Jones Brown Taylor Wilson Davies Evans Walker Meyer Schmidt Fischer Weber Rossi "
    "Russo Moreau Dubois Garcia Lopez Silva Santos Kim Park Chen Wang Tanaka Sato Singh Patel "
    "Khan Ali Novak Kovac Ivanov Petrov Hansen Larsen Berg Lind Okafor Mensah Adeyemi Costa "
    "Ferrari Bauer"
)
CITIES = split(
    "Paris London Berlin Rome Madrid Tokyo Kyoto Osaka Beijing Shanghai Delhi Mumbai Cairo "
    "Lagos Nairobi Sydney Melbourne Toronto Montreal Boston Chicago Seattle Denver Dallas "
    "Houston Miami Oslo Stockholm Helsinki Copenhagen Vienna Prague Warsaw Budapest Athens "
    "Istanbul Lisbon Porto Dublin Zurich Geneva Hamburg Munich Milan Naples Lyon Brussels "
    "Amsterdam Seoul Singapore Bangkok Hanoi Jakarta Manila Lima Bogota Santiago Moscow Kyiv "
    "Ankara Tehran Dubai Accra Dakar"
)
TWO_WORD_CITIES = split(
    "New York|San Francisco|Los Angeles|Hong Kong|Mexico City|Buenos Aires|Cape Town|New Delhi|"
    "Rio de Janeiro|Tel Aviv|San Diego|Kuala Lumpur|Las Vegas|Abu Dhabi|St. Louis|"
    "Salt Lake City"
)
NOUNS = split(
    "apple bread cheese table chair lamp window garden river mountain train ticket book letter "
    "camera phone jacket shoes bicycle coffee tea sugar milk rice salad soup cake flower tree "
    "stone boat engine bridge market museum school doctor teacher winter summer music film "
    "story dream cloud storm island forest horse tiger eagle whale button carpet pillow mirror "
    "basket hammer pencil paper candle pepper onion tomato potato lemon butter honey ladder "
    "bucket helmet wallet"
)
ADJECTIVES = split(
    "red blue green black white old new small large cheap quiet bright warm cold fresh sweet "
    "fast slow heavy light round wooden simple strange famous local modern ancient free sharp"
)
MONTHS = split(
    "January February March April May June July August September October November December"
)
_STARTS = split("b c d f g h j k l m n p r s t v w z br cl dr fl gr kr pl pr st tr sh th ch")
_VOWELS = split("a e i o u a e i o u ai ea io ou ")
_ENDS = split("n r l s m t k d x nd lt rk sh ")


def made_up(rng: Random) -> str:
    """Draw a capitalised word of two or three random syllables, such as `Treldova`."""
    num_syllables = rng.choice((2, 2, 2, 3))
    word = "".join(rng.choice(_STARTS) + rng.choice(_VOWELS) for _ in range(num_syllables))
    if rng.random() < 0.5:
        word += rng.choice(_ENDS)
    return word.capitalize()


def first_name(rng: Random) -> str:
    """Draw a given name. Half of the names are made up."""
    return made_up(rng) if rng.random() < 0.5 else rng.choice(FIRST_NAMES)


def full_name(rng: Random) -> str:
    """Draw a given name and a family name."""
    last = made_up(rng) if rng.random() < 0.5 else rng.choice(LAST_NAMES)
    return f"{first_name(rng)} {last}"


def city(rng: Random) -> str:
    """Draw a city. Half of the cities are made up, and some have two words."""
    chance = rng.random()
    if chance < 0.5:
        return made_up(rng)
    if chance < 0.58:
        return f"{rng.choice(('New', 'San', 'Port', 'Old', 'Saint'))} {made_up(rng)}"
    if chance < 0.68:
        return rng.choice(TWO_WORD_CITIES)
    return rng.choice(CITIES)


def phrase(rng: Random) -> str:
    """Draw one to three lower-case words, such as `old wooden boat`."""
    adjectives = rng.sample(ADJECTIVES, rng.choice((0, 1, 1, 2)))
    return " ".join([*adjectives, rng.choice(NOUNS)])


_MESSAGES = (
    "I will be late", "see you at {time}", "please buy {phrase}", "the {phrase} is ready",
    "happy birthday", "call {name} tomorrow", "dinner is at {time}", "the train leaves at {time}",
    "thank you for the {phrase}",
    "I am in {city}", "bring the {phrase}", "we meet in {city} at {time}",
    "{name} likes the {phrase}", "good luck", "do not forget the {phrase}", "{phrase}", "{phrase}",
    "I sold the {phrase} to {name}",
)  # fmt: skip


def message(rng: Random) -> str:
    """Draw a message to a friend, or a note."""
    return rng.choice(_MESSAGES).format(
        time=clock(rng), phrase=phrase(rng), name=first_name(rng), city=city(rng)
    )


def number(rng: Random, max_digits: int = 4) -> int:
    """Draw a positive number of one to `max_digits` digits."""
    num_digits = rng.randint(1, max_digits)
    return rng.randint(10 ** (num_digits - 1), 10**num_digits - 1)


def clock(rng: Random) -> str:
    """Draw a time of day, such as `07:45`."""
    return f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
