"""Values that requests for tools mention: dates, times, codes, addresses, lists of words."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from . import words

TICKERS = {
    "Apple": "AAPL",
    "Microsoft": "MSFT",
    "Google": "GOOG",
    "Tesla": "TSLA",
    "Amazon": "AMZN",
    "Nvidia": "NVDA",
    "Netflix": "NFLX",
    "Intel": "INTC",
}
_TODOS = words.split(
    "buy {x}|call {name}|clean the {x}|water the flowers|pay the rent|feed the cat|read the {x}|"
    "write to {name}|sell the {x}|go to the museum|take the {x} to {name}|wash the car|book a train"
)


def lower_word(rng: Random) -> str:
    """Draw a lower-case word: a noun, or a made-up word that can only be copied."""
    return words.made_up(rng).lower() if rng.random() < 0.5 else rng.choice(words.NOUNS)


def phrase(rng: Random) -> str:
    """Draw one to three lower-case words."""
    chance = rng.random()
    if chance < 0.5:
        return words.phrase(rng)
    if chance < 0.75:
        return lower_word(rng)
    return f"{lower_word(rng)} {lower_word(rng)}"


def title(rng: Random) -> str:
    """Draw a title of capitalised words, such as `Old Wooden Boat`."""
    return words.phrase(rng).title() if rng.random() < 0.6 else words.made_up(rng)


def date(rng: Random) -> str:
    """Draw a day in one of the usual forms: `2025-03-07`, `7 March`, `March 7` or `Friday`."""
    chance = rng.random()
    day = rng.randint(1, 28)
    if chance < 0.35:
        return f"20{rng.randint(23, 27)}-{rng.randint(1, 12):02d}-{day:02d}"
    if chance < 0.5:
        return f"{day} {rng.choice(words.MONTHS)}"
    if chance < 0.6:
        return f"{rng.choice(words.MONTHS)} {day}"
    return rng.choice(_WEEKDAYS)


_WEEKDAYS = words.split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


def clock(rng: Random) -> str:
    """Draw a time of day in one of the usual forms: `07:45`, `7 pm` or `7:30 pm`."""
    chance = rng.random()
    hour = rng.randint(1, 12)
    if chance < 0.5:
        return words.clock(rng)
    half = rng.choice(("am", "pm"))
    return f"{hour} {half}" if chance < 0.75 else f"{hour}:{rng.choice(('00', '15', '30'))} {half}"


def email(rng: Random) -> str:
    """Draw an address."""
    domain = rng.choice(("example.com", "mail.org", "post.net", "example.org"))
    return f"{words.first_name(rng).lower()}@{domain}"


def code(rng: Random) -> str:
    """Draw an identifier, such as `A1042` or `KX-17`."""
    letters = "".join(rng.choice("ABCDEFGHKLMNPRSTVWXZ") for _ in range(rng.randint(1, 3)))
    return f"{letters}{rng.choice(('', '', '-'))}{words.number(rng, 5)}"


def ticker(rng: Random) -> str:
    """Draw a stock's symbol."""
    if rng.random() < 0.5:
        return rng.choice(list(TICKERS.values()))
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 4)))


def word_list(rng: Random) -> list[str]:
    """Draw one to four lower-case nouns."""
    return rng.sample(words.NOUNS, rng.choice((1, 2, 2, 3, 3, 4)))


def todo(rng: Random) -> str:
    """Draw something that somebody has to do, such as `call Anna`."""
    return rng.choice(_TODOS).format(x=rng.choice(words.NOUNS), name=words.first_name(rng))


def file_name(rng: Random) -> str:
    """Draw the name of a file."""
    return f"{lower_word(rng)}.{rng.choice(('txt', 'csv', 'md', 'json', 'pdf', 'py'))}"


def small(low: int, high: int) -> Callable[[Random], int]:
    """Make a function that draws a number between two limits."""
    return lambda rng: rng.randint(low, high)
