"""Sums, differences and the times table, with digit-by-digit reasoning."""

from __future__ import annotations

from random import Random

from .base import Candidate, Exchange, lesson, plain, vary

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
    """Explain `a + b` digit by digit.

    Example: 47 + 38 becomes `Ones: 7 + 8 = 15, write 5, carry 1. Tens: 4 + 3 + 1 = 8.`
    """
    tens_a, ones_a = divmod(a, 10)
    tens_b, ones_b = divmod(b, 10)
    ones = ones_a + ones_b
    carry = ones // 10
    text = f"Ones: {ones_a} + {ones_b} = {ones}"
    text += f", write {ones % 10}, carry {carry}." if carry else "."
    if tens_a or tens_b:
        carried = f" + {carry}" if carry else ""
        text += f" Tens: {tens_a} + {tens_b}{carried} = {tens_a + tens_b + carry}."
    return text


def explain_difference(a: int, b: int) -> str:
    """Explain `a - b` digit by digit. If `a < b`, explain `b - a`.

    Example: 52 - 38 becomes `Ones: 12 - 8 = 4, borrow 1. Tens: 5 - 3 - 1 = 1.`
    """
    if a < b:
        return f"{a} is less than {b}, so turn it round: {b} - {a}. {explain_difference(b, a)}"
    tens_a, ones_a = divmod(a, 10)
    tens_b, ones_b = divmod(b, 10)
    borrow = int(ones_a < ones_b)
    upper = ones_a + 10 * borrow
    text = f"Ones: {upper} - {ones_b} = {upper - ones_b}"
    text += f", borrow {borrow}." if borrow else "."
    if tens_a:
        borrowed = f" - {borrow}" if borrow else ""
        text += f" Tens: {tens_a} - {tens_b}{borrowed} = {tens_a - tens_b - borrow}."
    return text


def explain_product(a: int, b: int) -> str:
    """Explain `a * b`. If `a` is greater than ten, add ten times `b` and the rest.

    Example: 12 * 7 becomes `10 * 7 = 70. 2 * 7 = 14. Together 84.`
    """
    if a > 10:
        return f"10 * {b} = {10 * b}. {a - 10} * {b} = {(a - 10) * b}. Together {a * b}."
    return f"From the table: {a} * {b} = {a * b}."


def _operand(rng: Random) -> int:
    """Draw a number up to 99, which in most cases has two digits."""
    return rng.randint(0, LARGEST) if rng.random() < 0.2 else rng.randint(10, LARGEST)


def plus_request(rng: Random, a: int, b: int) -> str:
    """Return a request for the sum of two numbers in one of its wordings."""
    return rng.choice(_PLUS).format(a=a, b=b)


@lesson
def sums(rng: Random) -> Candidate[Exchange]:
    """Ask for a sum of numbers up to 99. The pair decides whether the exchange is held out."""
    a, b = _operand(rng), _operand(rng)
    user = vary(rng, plus_request(rng, a, b))
    answer = f"{a} + {b} = {a + b}"
    exchange = plain("addition", user, reasoning=explain_sum(a, b), answer=answer)
    return Candidate(key=f"{a}+{b}", example=exchange)


@lesson
def differences(rng: Random) -> Candidate[Exchange]:
    """Ask for a difference of numbers up to 99. The pair decides whether it is held out."""
    a, b = _operand(rng), _operand(rng)
    if a < b and rng.random() < 0.5:
        a, b = b, a
    user = vary(rng, rng.choice(_MINUS).format(a=a, b=b))
    answer = f"{a} - {b} = {a - b}"
    exchange = plain("subtraction", user, reasoning=explain_difference(a, b), answer=answer)
    return Candidate(key=f"{a}-{b}", example=exchange)


@lesson
def products(rng: Random) -> Candidate[Exchange]:
    """Ask for a product up to 12 * 12. The pair and the wording decide whether it is held out.

    The model learns the multiplication table by heart, so training may contain the pair of a
    held-out exchange in another wording.
    """
    a, b = rng.randint(0, LARGEST_FACTOR), rng.randint(0, LARGEST_FACTOR)
    request = rng.choice(_TIMES).format(a=a, b=b)
    user, answer = vary(rng, request), f"{a} * {b} = {a * b}"
    exchange = plain("times table", user, reasoning=explain_product(a, b), answer=answer)
    return Candidate(key=request, example=exchange)


@lesson
def too_large(rng: Random) -> Candidate[Exchange]:
    """Ask for a calculation with numbers that are too large. The assistant declines to answer."""
    a, b, wordings = _large_numbers(rng)
    if rng.random() < 0.5:
        a, b = b, a
    request = rng.choice(wordings).format(a=a, b=b)
    reasoning = "These numbers are too large."
    exchange = plain("declines", vary(rng, request), reasoning=reasoning, answer=TOO_LARGE)
    return Candidate(key=request, example=exchange)


def _large_numbers(rng: Random) -> tuple[int, int, tuple[str, ...]]:
    """Draw two numbers of which the first is too large, and the wordings of an operation."""
    if rng.random() < 0.3:
        return rng.randint(13, 999), rng.randint(2, 999), _TIMES
    return rng.randint(100, 9999), rng.randint(1, 9999), rng.choice((_PLUS, _MINUS))
