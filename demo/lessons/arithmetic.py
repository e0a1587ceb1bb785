"""Sums, differences and the times table, with digit-by-digit reasoning."""

from __future__ import annotations

from random import Random

from .base import Exchange, draw, plain, vary

LARGEST = 99
LARGEST_FACTOR = 12

_PLUS = (
    "What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} =", "{a} plus {b}?",
    "Add {a} and {b}.",
    "What is {a} plus {b}?", "Compute {a} + {b}.", "How much is {a} + {b}?", "What's {a} + {b}?",
    "What is the sum of {a} and {b}?", "Can you add {a} and {b}?", "Calculate {a} + {b}.",
    "I have {a} apples and get {b} more. How many do I have?",
)  # fmt: skip
_MINUS = (
    "What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} =", "{a} minus {b}?",
    "Calculate {a} - {b}.",
    "What is {a} minus {b}?", "Compute {a} - {b}.", "How much is {a} - {b}?", "What's {a} - {b}?",
    "Subtract {b} from {a}.", "Take {b} away from {a}.",
)  # fmt: skip
_TIMES = (
    "What is {a} * {b}?", "{a} * {b}", "{a}*{b}", "{a} x {b}", "{a} times {b}?",
    "Calculate {a} * {b}.",
    "What is {a} times {b}?", "Multiply {a} by {b}.", "How much is {a} x {b}?",
    "What's {a} times {b}?", "Compute {a} * {b}.", "What is the product of {a} and {b}?",
)  # fmt: skip
TOO_LARGE = "Sorry, that is too large for me: I add and subtract up to 99 and multiply up to 12."


def explain_sum(a: int, b: int) -> str:
    """Explain `a + b` with the written method: ones, carry, tens."""
    ones = a % 10 + b % 10
    steps = [f"Ones: {a % 10} + {b % 10} = {ones}"]
    steps.append(f", write {ones % 10}, carry {ones // 10}." if ones > 9 else ".")
    if a > 9 or b > 9:
        carried = " + 1" if ones > 9 else ""
        steps.append(f" Tens: {a // 10} + {b // 10}{carried} = {a // 10 + b // 10 + ones // 10}.")
    return "".join(steps)


def explain_difference(a: int, b: int) -> str:
    """Explain `a - b` with the written method. If `a < b`, explain `b - a`."""
    turned = ""
    if a < b:
        turned = f"{a} is less than {b}, so turn it round: {b} - {a}. "
        a, b = b, a
    borrow = a % 10 < b % 10
    ones = a % 10 + 10 * borrow
    steps = [turned, f"Ones: {ones} - {b % 10} = {ones - b % 10}", ", borrow 1." if borrow else "."]
    if a > 9:
        borrowed = " - 1" if borrow else ""
        steps.append(f" Tens: {a // 10} - {b // 10}{borrowed} = {a // 10 - b // 10 - borrow}.")
    return "".join(steps)


def explain_product(a: int, b: int) -> str:
    """Explain `a * b`: for a factor above ten, as ten times `b` and the rest."""
    if a > 10:
        return f"10 * {b} = {10 * b}. {a - 10} * {b} = {(a - 10) * b}. Together {a * b}."
    return f"From the table: {a} * {b} = {a * b}."


def _operand(rng: Random) -> int:
    return rng.randint(0, LARGEST) if rng.random() < 0.2 else rng.randint(10, LARGEST)


def plus_request(rng: Random, a: int, b: int) -> str:
    """Return a request for the sum of two numbers in one of its wordings."""
    return rng.choice(_PLUS).format(a=a, b=b)


def sums(rng: Random, held_out: bool) -> Exchange:
    """Ask for a sum of numbers up to 99. The pair of numbers decides what is held out."""

    def make() -> tuple[str, Exchange]:
        a, b = _operand(rng), _operand(rng)
        user = vary(rng, rng.choice(_PLUS).format(a=a, b=b))
        return f"{a}+{b}", plain("addition", user, explain_sum(a, b), f"{a} + {b} = {a + b}")

    return draw(make, held_out)


def differences(rng: Random, held_out: bool) -> Exchange:
    """Ask for a difference of numbers up to 99. The pair decides what is held out."""

    def make() -> tuple[str, Exchange]:
        a, b = _operand(rng), _operand(rng)
        if a < b and rng.random() < 0.5:
            a, b = b, a
        user = vary(rng, rng.choice(_MINUS).format(a=a, b=b))
        reasoning = explain_difference(a, b)
        return f"{a}-{b}", plain("subtraction", user, reasoning, f"{a} - {b} = {a - b}")

    return draw(make, held_out)


def products(rng: Random, held_out: bool) -> Exchange:
    """Ask for a product up to 12 * 12. The words together with the pair decide what is held out.

    The model learns the table by heart, so each pair appears in training in some words.
    """

    def make() -> tuple[str, Exchange]:
        a, b = rng.randint(0, LARGEST_FACTOR), rng.randint(0, LARGEST_FACTOR)
        user = rng.choice(_TIMES).format(a=a, b=b)
        reasoning = explain_product(a, b)
        return user, plain("times table", vary(rng, user), reasoning, f"{a} * {b} = {a * b}")

    return draw(make, held_out)


def too_large(rng: Random, held_out: bool) -> Exchange:
    """Ask with numbers that are too large for the model. The answer says so."""

    def make() -> tuple[str, Exchange]:
        forms: tuple[str, ...]
        if rng.random() < 0.3:
            a, b, forms = rng.randint(13, 999), rng.randint(2, 999), _TIMES
        else:
            a, b, forms = rng.randint(100, 9999), rng.randint(1, 9999), rng.choice((_PLUS, _MINUS))
        if rng.random() < 0.5:
            a, b = b, a
        user = rng.choice(forms).format(a=a, b=b)
        return user, plain("declines", vary(rng, user), "These numbers are too large.", TOO_LARGE)

    return draw(make, held_out)
