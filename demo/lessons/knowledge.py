"""Small facts that everybody asks for: capitals, words in other languages, opposites, colours."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from .base import (
    NEVER_TRAINED,
    Candidate,
    Exchange,
    Lesson,
    Message,
    capitalised,
    draw,
    lesson,
    plain,
    vary,
    with_article,
)
from .words import split


class Fact(NamedTuple):
    """A question with its answer in words and as JSON.

    Attributes:
        question: The user's question.
        reasoning: The reasoning before the answer.
        answer: The answer in words.
        values: The answer as a JSON object. Each key is one of several names for the answer.
    """

    question: str
    reasoning: str
    answer: str
    values: Message


Ask = Callable[[Random], Fact]


def _pairs(text: str) -> dict[str, str]:
    """Parse `key=value|key=value` into a dictionary."""
    return dict(pair.split("=") for pair in split(text))


CAPITALS = _pairs(
    "France=Paris|Germany=Berlin|Italy=Rome|Spain=Madrid|Portugal=Lisbon|England=London|"
    "the United Kingdom=London|Ireland=Dublin|Scotland=Edinburgh|the Netherlands=Amsterdam|"
    "Belgium=Brussels|Switzerland=Bern|Austria=Vienna|Poland=Warsaw|Sweden=Stockholm|"
    "Norway=Oslo|Denmark=Copenhagen|Finland=Helsinki|Iceland=Reykjavik|Greece=Athens|"
    "Turkey=Ankara|Russia=Moscow|Ukraine=Kyiv|Hungary=Budapest|the Czech Republic=Prague|"
    "Romania=Bucharest|Croatia=Zagreb|Egypt=Cairo|Kenya=Nairobi|Nigeria=Abuja|Morocco=Rabat|"
    "South Africa=Pretoria|China=Beijing|Japan=Tokyo|South Korea=Seoul|India=New Delhi|"
    "Thailand=Bangkok|Vietnam=Hanoi|Indonesia=Jakarta|Israel=Jerusalem|Iran=Tehran|"
    "Australia=Canberra|New Zealand=Wellington|Canada=Ottawa|the United States=Washington|"
    "the USA=Washington|Mexico=Mexico City|Brazil=Brasilia|Argentina=Buenos Aires|"
    "Chile=Santiago|Peru=Lima|Colombia=Bogota|Cuba=Havana"
)
LANGUAGES = ("French", "Spanish", "German", "Italian", "Portuguese", "Dutch")
_PHRASEBOOK = {
    phrase: dict(zip(LANGUAGES, row, strict=True))
    for phrase, *row in (
        split(line)
        for line in (
            "hello|Bonjour|Hola|Hallo|Ciao|Olá|Hallo",
            "good morning|Bonjour|Buenos días|Guten Morgen|Buongiorno|Bom dia|Goedemorgen",
            "good evening|Bonsoir|Buenas tardes|Guten Abend|Buonasera|Boa tarde|Goedenavond",
            "good night|Bonne nuit|Buenas noches|Gute Nacht|Buonanotte|Boa noite|Goedenacht",
            "goodbye|Au revoir|Adiós|Auf Wiedersehen|Arrivederci|Adeus|Tot ziens",
            "thank you|Merci|Gracias|Danke|Grazie|Obrigado|Dank je",
            "please|S'il vous plaît|Por favor|Bitte|Per favore|Por favor|Alsjeblieft",
            "yes|Oui|Sí|Ja|Sì|Sim|Ja",
            "no|Non|No|Nein|No|Não|Nee",
            "how are you|Comment ça va|Cómo estás|Wie geht es dir|Come stai|Como estás|"
            "Hoe gaat het",
            "I love you|Je t'aime|Te quiero|Ich liebe dich|Ti amo|Eu te amo|Ik hou van jou",
            "cat|Chat|Gato|Katze|Gatto|Gato|Kat",
            "dog|Chien|Perro|Hund|Cane|Cão|Hond",
            "house|Maison|Casa|Haus|Casa|Casa|Huis",
            "water|Eau|Agua|Wasser|Acqua|Água|Water",
            "bread|Pain|Pan|Brot|Pane|Pão|Brood",
            "friend|Ami|Amigo|Freund|Amico|Amigo|Vriend",
            "book|Livre|Libro|Buch|Libro|Livro|Boek",
        )
    )
}
_SAY = (
    "Translate '{phrase}' to {language}.",
    "Translate '{phrase}' into {language}.",
    'Translate "{phrase}" to {language}.',
    'Translate "{phrase}" into {language}.',
    "Translate {phrase} to {language}.",
    "Translate {phrase} into {language}.",
    "How do you say {phrase} in {language}?",
    "How do you say '{phrase}' in {language}?",
    'How do you say "{phrase}" in {language}?',
    "What is '{phrase}' in {language}?",
    "What is {phrase} in {language}?",
    "What is the {language} word for {phrase}?",
    "Say {phrase} in {language}.",
    "How do I say {phrase} in {language}?",
    "Can you translate {phrase} to {language}?",
    "{phrase} in {language}",
)
_CAPITAL = (
    "What is the capital of {0}?",
    "What's the capital of {0}?",
    "Capital of {0}?",
    "Which city is the capital of {0}?",
    "Name the capital of {0}.",
    "What is the capital city of {0}?",
    "Tell me the capital of {0}.",
    "Do you know the capital of {0}?",
    "Can you tell me the capital of {0}?",
    "What city is the capital of {0}?",
)
_COUNTRY_OF = (
    "Which country has the capital {0}?",
    "{0} is the capital of which country?",
    "Of which country is {0} the capital?",
)
_OPPOSITES = _pairs(
    "hot=cold|big=small|fast=slow|up=down|day=night|black=white|good=bad|happy=sad|old=young|"
    "long=short|high=low|open=closed|rich=poor|light=dark|full=empty|hard=soft|left=right|"
    "early=late|wet=dry|strong=weak|loud=quiet|true=false|yes=no|in=out|first=last"
)
_COLOURS = _pairs(
    "the sky=blue|grass=green|snow=white|a banana=yellow|a lemon=yellow|blood=red|"
    "a strawberry=red|a tomato=red|coal=black|an orange=orange|milk=white|the sun=yellow|"
    "a carrot=orange|an elephant=grey|chocolate=brown"
)
_SOUNDS = _pairs(
    "cat=Meow|dog=Woof|cow=Moo|sheep=Baa|duck=Quack|horse=Neigh|pig=Oink|lion=Roar|owl=Hoot|"
    "bee=Buzz|frog=Ribbit|mouse=Squeak"
)
_LEGS = _pairs(
    "dog=4|cat=4|horse=4|cow=4|bird=2|chicken=2|human=2|spider=8|insect=6|ant=6|bee=6|snake=0|"
    "octopus=8|elephant=4"
)
_TRUE = split(
    "Is the sky blue?|Is fire hot?|Is ice cold?|Is water wet?|Is Paris in France?|"
    "Is Rome in Italy?|Is a cat an animal?|Is a dog an animal?|Is an apple a fruit?|"
    "Is the Earth round?|Can birds fly?|Can fish swim?|Is snow white?|Is the sun a star?|"
    "Is a whale a mammal?|Is Berlin in Germany?|Is London in England?|Do cats have four legs?|"
    "Is grass green?|Is Tokyo in Japan?|Is 10 more than 5?|Is a rose a flower?"
)
_FALSE = split(
    "Is the sky green?|Is fire cold?|Is ice hot?|Is Paris in Germany?|Is Rome in Spain?|"
    "Is a cat a fish?|Is an apple an animal?|Is the Earth flat?|Can dogs fly?|Can cars swim?|"
    "Is snow black?|Is the moon a star?|Is a spider an insect?|Is Berlin in France?|"
    "Is London in Japan?|Do dogs have six legs?|Is grass red?|Is Tokyo in Italy?|"
    "Is 3 more than 8?|Can fish talk?"
)
_DAYS = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."
_MONTHS = (
    "January, February, March, April, May, June, July, August, September, October, November "
    "and December."
)
_PRIMARY = "The primary colours are red, yellow and blue."
# Each member contains the questions with the same answer, and the answer.
_FIXED = (
    (
        (
            "Say the days of the week.",
            "What are the days of the week?",
            "List the days of the week.",
            "Name the days of the week.",
            "Tell me the days of the week.",
            "Which days does a week have?",
        ),
        _DAYS,
    ),
    (
        (
            "Say the months of the year.",
            "What are the months of the year?",
            "List the months.",
            "Name the months of the year.",
            "List the months of the year.",
        ),
        _MONTHS,
    ),
    (
        (
            "What are the primary colours?",
            "What are the primary colors?",
            "Name the primary colours.",
            "List the primary colours.",
            "Name the primary colors.",
            "Name the three primary colours.",
            "What are the three primary colors?",
            "List the primary colors.",
            "Which colours are primary?",
        ),
        _PRIMARY,
    ),
    (
        (
            "What are the seasons?",
            "Name the seasons.",
            "Name the four seasons.",
            "List the seasons.",
            "What are the four seasons?",
        ),
        "Spring, summer, autumn and winter.",
    ),
    (("How many days are in a week?", "How many days does a week have?"), "A week has 7 days."),
    (
        ("How many months are in a year?", "How many months does a year have?"),
        "A year has 12 months.",
    ),
    (("How many hours are in a day?", "How many hours does a day have?"), "A day has 24 hours."),
    (
        ("How many minutes are in an hour?", "How many minutes does an hour have?"),
        "An hour has 60 minutes.",
    ),
    (("How many days are in a year?", "How many days does a year have?"), "A year has 365 days."),
    (
        (
            "What is the largest planet?",
            "Which planet is the largest?",
            "What is the biggest planet?",
        ),
        "The largest planet is Jupiter.",
    ),
    (
        (
            "What is the largest animal?",
            "Which animal is the biggest?",
            "What is the biggest animal?",
        ),
        "The largest animal is the blue whale.",
    ),
    (
        (
            "What is the highest mountain?",
            "What is the tallest mountain in the world?",
            "Which mountain is the highest?",
        ),
        "The highest mountain is Mount Everest.",
    ),
    (
        ("What is the largest ocean?", "What is the biggest ocean?"),
        "The largest ocean is the Pacific.",
    ),
    (("Who wrote Romeo and Juliet?", "Who wrote Hamlet?"), "William Shakespeare wrote it."),
    (("Who painted the Mona Lisa?",), "Leonardo da Vinci painted it."),
    (("What is water made of?", "What is H2O?"), "Water is made of hydrogen and oxygen."),
    (("What is the capital of Italy and France?",), "Rome and Paris."),
    (("What is the meaning of life?",), "Some say 42. I am too tiny to know."),
    (("What day comes after Monday?", "Which day comes after Monday?"), "Tuesday."),
    (
        (
            "Recite the alphabet.",
            "Say the alphabet.",
            "What is the alphabet?",
            "Tell me the alphabet.",
        ),
        "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
    ),
)
_LISTS = {
    "fruits": "apple banana cherry grape lemon mango orange",
    "vegetables": "carrot potato onion tomato pea cabbage bean",
    "animals": "cat dog horse cow lion elephant rabbit",
    "colours": "red blue green yellow orange purple black",
    "colors": "red blue green yellow orange purple black",
    "countries": "France Germany Italy Spain Japan Brazil Canada",
    "cities": "Paris London Rome Berlin Madrid Tokyo Vienna",
    "birds": "robin sparrow eagle owl swan pigeon crow",
    "flowers": "rose tulip lily daisy violet orchid poppy",
    "planets": "Mercury Venus Earth Mars Jupiter Saturn Uranus",
    "sports": "football tennis swimming running golf hockey rowing",
    "languages": "English French Spanish German Italian Dutch Polish",
    "names": "Anna Peter Maria Tom Emma Paul Lisa",
    "tools": "hammer saw ladder screwdriver drill knife pliers",
    "drinks": "water tea coffee milk juice lemonade cocoa",
    "jobs": "baker teacher doctor pilot farmer painter cook",
    "trees": "oak pine birch maple willow beech elm",
    "numbers": "1 2 3 4 5 6 7",
    "days": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "words": "apple river stone cloud music garden light",
    "pets": "cat dog rabbit hamster parrot goldfish turtle",
    "books": "Hamlet Emma Dracula Ulysses Frankenstein Dune Heidi",
}
_NUMBER_WORDS = ("one", "two", "three", "four", "five", "six", "seven")
_LIST_REQUESTS = (
    "List {n} {kind}.",
    "Name {n} {kind}.",
    "Give me {n} {kind}.",
    "Tell me {n} {kind}.",
    "Give me a list of {n} {kind}.",
    "Write a list of {n} {kind}.",
    "Can you name {n} {kind}?",
    "Can you list {n} {kind}?",
    "I need {n} {kind}.",
    "What are {n} {kind}?",
    "Please list {n} {kind}.",
    "Make a list of {n} {kind}.",
    "Write down {n} {kind}.",
)

_OPPOSITE_REQUESTS = (
    "What is the opposite of {0}?",
    "Opposite of {0}?",
    "Name the opposite of {0}.",
    "What's the opposite of {0}?",
)
_COUNT_REQUESTS = (
    "Count from {a} to {b}.",
    "Please count from {a} to {b}.",
    "Can you count from {a} to {b}?",
    "List the numbers from {a} to {b}.",
)
_COUNT_REQUESTS_FROM_1 = ("Count to {b}.", "Count up to {b}.", "Can you count to {b}?")
# The wordings of some facts are so few that all of them may be held out, or none of them.
# Therefore the opening is a part of the key.
_OPENINGS = (
    "",
    "",
    "",
    "Tell me: ",
    "Quick question: ",
    "A question: ",
    "Please answer: ",
    "Do you know this? ",
    "Hi! ",
    "Hey, ",
    "I wonder: ",
    "My question is: ",
)


def capital(rng: Random) -> Fact:
    """Draw a question for a capital or, rarely, for the country of a capital."""
    country = rng.choice(list(CAPITALS))
    city = CAPITALS[country]
    short_name = country.removeprefix("the ")
    asked_country = short_name if rng.random() < 0.15 else country
    values: Message = {"capital": city, "city": city, "answer": city, "country": short_name}
    if rng.random() < 0.08:
        question = rng.choice(_COUNTRY_OF).format(city)
        # Some countries have several names. The answer always contains the first one.
        country = next(name for name, capital in CAPITALS.items() if capital == city)
        return Fact(question, "A country.", f"{city} is the capital of {country}.", values)
    question = rng.choice(_CAPITAL).format(asked_country)
    return Fact(question, "A capital.", f"The capital of {country} is {city}.", values)


def translation(rng: Random) -> Fact:
    """Draw a request for the translation of a word or phrase."""
    phrase, language = rng.choice(list(_PHRASEBOOK)), rng.choice(LANGUAGES)
    asked_phrase = phrase.capitalize() if rng.random() < 0.25 else phrase
    question = rng.choice(_SAY).format(phrase=asked_phrase, language=language)
    answer = _PHRASEBOOK[phrase][language]
    values: Message = {
        "translation": answer,
        "text": answer,
        "answer": answer,
        "language": language,
    }
    return Fact(question, f"A word in {language}.", answer, values)


def counted_list(rng: Random) -> Fact:
    """Draw a request for a list, such as `Name three birds.`. The answer has numbered lines."""
    kind, count = rng.choice(list(_LISTS)), rng.choice((1, 2, 3, 3, 3, 4, 5, 5, 6, 7))
    number = _NUMBER_WORDS[count - 1] if rng.random() < 0.7 else str(count)
    noun = kind.removesuffix("s") if count == 1 else kind
    question = rng.choice(_LIST_REQUESTS).format(n=number, kind=noun)
    items = split(_LISTS[kind])[:count]
    lines = "\n".join(f"{place}. {item}" for place, item in enumerate(items, 1))
    keys = ("items", kind, "list", "names", "answers", "results", "values")
    return Fact(question, f"A list of {count}.", lines, {key: list(items) for key in keys})


def _opposite(rng: Random) -> Fact:
    """Draw a question such as `What is the opposite of hot?`."""
    word = rng.choice(list(_OPPOSITES))
    other = _OPPOSITES[word]
    if rng.random() < 0.5:
        word, other = other, word
    return Fact(
        question=rng.choice(_OPPOSITE_REQUESTS).format(word),
        reasoning="An opposite.",
        answer=f"The opposite of {word} is {other}.",
        values={"opposite": other, "answer": other},
    )


def _colour(rng: Random) -> Fact:
    """Draw a question such as `What colour is grass?`."""
    thing = rng.choice(list(_COLOURS))
    colour = _COLOURS[thing]
    wordings = ("What colour is {0}?", "What color is {0}?", "Which colour has {0}?")
    return Fact(
        question=rng.choice(wordings).format(thing),
        reasoning="A colour.",
        answer=f"{capitalised(thing)} is {colour}.",
        values={"colour": colour, "color": colour, "answer": colour},
    )


def _sound(rng: Random) -> Fact:
    """Draw a question such as `What does a cow say?`."""
    animal = rng.choice(list(_SOUNDS))
    sound = _SOUNDS[animal]
    wordings = ("What sound does a {0} make?", "What does a {0} say?", "How does a {0} sound?")
    return Fact(
        question=rng.choice(wordings).format(animal),
        reasoning="An animal's sound.",
        answer=f"{sound}!",
        values={"sound": sound, "answer": sound},
    )


def _legs(rng: Random) -> Fact:
    """Draw a question such as `How many legs does a spider have?`."""
    name = rng.choice(list(_LEGS))
    animal, number = with_article(name), int(_LEGS[name])
    wordings = ("How many legs does {0} have?", "How many legs has {0}?")
    return Fact(
        question=rng.choice(wordings).format(animal),
        reasoning="Legs.",
        answer=f"{capitalised(animal)} has {number or 'no'} legs.",
        values={"legs": number, "answer": number},
    )


def _yes_or_no(rng: Random) -> Fact:
    """Draw a question such as `Is the sky blue?`."""
    is_true = rng.random() < 0.5
    question = rng.choice(_TRUE if is_true else _FALSE)
    values: Message = dict.fromkeys(("answer", "is_true", "correct", "value", "result"), is_true)
    return Fact(question, "Yes or no.", "Yes." if is_true else "No.", values)


def _fixed(rng: Random) -> Fact:
    questions, answer = rng.choice(_FIXED)
    return Fact(rng.choice(questions), "I know this.", answer, {"answer": answer})


_FACTS = {_fixed: 8, _opposite: 3, _colour: 2, _sound: 1, _legs: 1, _yes_or_no: 3}
"""The functions that draw common facts, and their frequencies."""


def fact(rng: Random) -> Fact:
    """Draw a question of common knowledge."""
    (ask,) = rng.choices(list(_FACTS), list(_FACTS.values()))
    return ask(rng)


def question_lesson(skill: str, ask: Ask) -> Lesson[Exchange]:
    """Make a lesson whose questions `ask` draws.

    The words of a question decide whether the exchange is held out for the evaluation.
    """

    @lesson
    def draw_exchange(rng: Random) -> Candidate[Exchange]:
        question, reasoning, answer, _ = ask(rng)
        exchange = plain(skill, vary(rng, question), reasoning=reasoning, answer=answer)
        return Candidate(key=question, example=exchange)

    return draw_exchange


def common(rng: Random, held_out: bool) -> Exchange:
    """Ask for a common fact. The opening and the question decide whether it is held out.

    Training uses only questions with a colon, such as `Tell me: Is the sky blue?`.
    """

    def propose() -> Candidate[Exchange]:
        question, reasoning, answer, _ = fact(rng)
        request = rng.choice(_OPENINGS) + question
        user = vary(rng, request)
        exchange = plain("common knowledge", user, reasoning=reasoning, answer=answer)
        key = request if held_out or ":" in request else NEVER_TRAINED
        return Candidate(key, exchange)

    return draw(propose, held_out)


def counting(rng: Random) -> Fact:
    """Draw a request to count, such as `Count from 3 to 12.`."""
    start = 1 if rng.random() < 0.6 else rng.randint(0, 12)
    end = 10 if rng.random() < 0.4 else start + rng.randint(2, 12)
    end = max(end, start + 1)
    writes_ten = end == 10 and rng.random() < 0.3
    writes_one = writes_ten and start == 1 and rng.random() < 0.5
    wordings = _COUNT_REQUESTS + (_COUNT_REQUESTS_FROM_1 if start == 1 else ())
    numbers = list(range(start, end + 1))
    return Fact(
        question=rng.choice(wordings).format(
            a="one" if writes_one else start, b="ten" if writes_ten else end
        ),
        reasoning=f"From {start} to {end}.",
        answer=", ".join(map(str, numbers)),
        values={"numbers": numbers},
    )
