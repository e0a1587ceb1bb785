"""The tools that the model knows: how each may be described, what users say, what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from . import words

Values = dict[str, Any]


@dataclass(frozen=True)
class Parameter:
    """One argument of a family's tools.

    Attributes:
        slot: The placeholder in the family's requests that this argument copies.
        key: Its name in the schema.
        descriptions: Texts that the schema may give it.
        type: The JSON type.
        choices: The schema's `enum`, if any.
        required: Optional arguments are passed only when the request has their slot.
    """

    slot: str
    key: str
    descriptions: tuple[str, ...]
    type: str = "string"
    choices: tuple[str, ...] = ()
    required: bool = True


@dataclass(frozen=True)
class Family:
    """One tool: what it is for, what users say, what it returns.

    Attributes:
        purpose: What the reasoning calls it.
        name: The tool's name.
        descriptions: What the schema may say.
        parameters: Its arguments.
        requests: What users say; `{slot}` stands for a value as spoken.
        fill: Draws the values and, where they differ from them, the spoken forms.
        result: Draws what the tool returns for those values, and the answer made from it.
    """

    purpose: str
    name: str
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    fill: Callable[[Random], tuple[Values, Values]]
    result: Callable[[Random, Values], tuple[Values, str]]
    spoken_lists: tuple[str, ...] = field(default=())


def _city() -> Parameter:
    return Parameter(
        "city",
        "city",
        ("The city.", "City name", "Name of the city, e.g. Paris", "Where",
         "The city and state, e.g. San Francisco, CA"),
    )  # fmt: skip


def _fill_weather(rng: Random) -> tuple[Values, Values]:
    unit = rng.choice(("celsius", "fahrenheit"))
    spoken = unit.capitalize() if rng.random() < 0.4 else unit
    return {"city": words.city(rng), "unit": unit}, {"unit": spoken}


def _weather(rng: Random, values: Values) -> tuple[Values, str]:
    degrees, sky = (
        rng.randint(-9, 40),
        rng.choice(("sunny", "cloudy", "rainy", "windy", "clear", "snowy", "foggy")),
    )
    keys = rng.choice(
        (
            ("temperature", "condition"),
            ("temp", "sky"),
            ("temperature", "conditions"),
            ("degrees", "weather"),
        )
    )
    city = values["city"]
    result: Values = {"city": city} if rng.random() < 0.5 else {}
    result |= {keys[0]: degrees, keys[1]: sky}
    if rng.random() < 0.3:
        result["unit"] = values.get("unit", "celsius")
    return result, f"It is {degrees} degrees and {sky} in {city}."


_OPERATORS = {
    "+": ("+", "plus"),
    "-": ("-", "minus"),
    "*": ("*", "times", "x"),
    "/": ("/", "divided by"),
}


def _fill_expression(rng: Random) -> tuple[Values, Values]:
    expression = spoken = str(words.number(rng))
    for _ in range(rng.choice((1, 1, 1, 2))):
        operator = rng.choice(list(_OPERATORS))
        value = words.number(rng)
        expression += f" {operator} {value}"
        spoken += f" {rng.choice(_OPERATORS[operator])} {value}"
    if rng.random() < 0.2:
        spoken = expression.replace(" ", "")
    return {"expression": expression}, {"expression": spoken}


def _calculated(rng: Random, values: Values) -> tuple[Values, str]:
    number = words.number(rng, 6)
    return {"result": number}, f"{values['expression']} = {number}."


def _fill(**makers: Callable[[Random], Any]) -> Callable[[Random], tuple[Values, Values]]:
    return lambda rng: ({slot: make(rng) for slot, make in makers.items()}, {})


def _done(answer: str) -> Callable[[Random, Values], tuple[Values, str]]:
    """A tool that only reports success."""
    return lambda rng, values: (
        rng.choice(({"status": "ok"}, {"success": True}, {"ok": True}, {"result": "done"})),
        answer.format(**values),
    )


def _found(
    key: str, make: Callable[[Random], Any], answer: str
) -> Callable[[Random, Values], tuple[Values, str]]:
    """A tool that returns one value, which the answer names as `{found}`."""

    def result(rng: Random, values: Values) -> tuple[Values, str]:
        found = make(rng)
        return {key: found}, answer.format(found=found, **values)

    return result


def _two_cities(rng: Random) -> tuple[Values, Values]:
    return {"start": words.city(rng), "goal": words.city(rng)}, {}


_CURRENCIES = ("EUR", "USD", "GBP", "JPY", "CHF", "SEK", "INR", "BRL")
_LANGUAGES = ("French", "German", "Spanish", "Italian", "Japanese", "Dutch", "Polish", "Turkish")
_ROOMS = ("kitchen", "bedroom", "bathroom", "hall", "office", "garden", "garage", "living room")


def _fill_money(rng: Random) -> tuple[Values, Values]:
    source, target = rng.sample(_CURRENCIES, 2)
    return {"amount": words.number(rng), "source": source, "target": target}, {}


def _pick(*options: str) -> Callable[[Random], str]:
    return lambda rng: rng.choice(options)


FAMILIES = (
    Family(
        "the weather",
        "get_weather",
        ("Get the weather for a city.", "Get the current weather in a given location.",
         "Current weather of a place.", "Weather report"),
        (_city(), Parameter("unit", "unit", ("The temperature unit.",
            "celsius or fahrenheit", "Unit"),
                            choices=("celsius", "fahrenheit"), required=False)),
        ("What is the weather in {city}?", "What's the weather like in {city}?",
         "How is the weather in {city}?", "Weather in {city}",
         "Tell me the weather in {city}.", "Is it raining in {city}?", "How warm is it in {city}?",
         "Get the weather for {city}.",
         "What is the weather in {city} in {unit}?", "How warm is it in {city} in {unit}?",
         "Give me the weather in {city}, in {unit}.",
         "What's the temperature in {city}, in {unit}?", "Do I need an umbrella in {city}?",
         "What is the weather like in {city} today?", "Use {unit}: what is the weather in {city}?"),
        _fill_weather, _weather, ("city",),
    ),
    Family(
        "a calculation",
        "calculate",
        ("Calculate an arithmetic expression.", "Evaluate a mathematical expression.",
         "Do arithmetic", "A calculator."),
        (Parameter("expression", "expression",
                   ("The expression.", "An arithmetic expression, e.g. 2 + 2",
                    "What to calculate")),),
        ("What is {expression}?", "Calculate {expression}.", "Compute {expression}.",
         "How much is {expression}?", "{expression}",
         "What's {expression}?", "Please work out {expression}.",
         "Can you calculate {expression}?", "Use the calculator: {expression}"),
        _fill_expression, _calculated,
    ),
    Family(
        "the time",
        "get_time",
        ("Get the current time in a city.", "Tell the local time of a place.", "Time lookup"),
        (_city(),),
        ("What time is it in {city}?", "What's the time in {city}?", "Tell me the time in {city}.",
         "Current time in {city}",
         "How late is it in {city}?", "Do you know what time it is in {city}?",
         "Give me the local time in {city}."),
        _fill(city=words.city), _found("time", words.clock, "It is {found} in {city}."), ("city",),
    ),
    Family(
        "a web search",
        "search",
        ("Search the web.", "Find web pages about a query.", "Internet search"),
        (Parameter("query", "query", ("The query.",
            "What to search for", "Search words")),),
        ("Search for {query}.", "Search the web for {query}.", "Look up {query}.",
         "Find pages about {query}.", "Google {query}.",
         "Please search {query}.", "Can you search the web for {query}?"),
        _fill(query=words.phrase), _found("title", words.made_up, "I found: {found}."),
    ),
    Family(
        "a message",
        "send_message",
        ("Send a message to somebody.", "Send a text to a person.", "Write to a contact"),
        (Parameter("to", "to", ("Who receives it.",
            "The recipient", "Name")),
         Parameter("text", "text", ("The text.", "What to say",
             "Body of the message"))),
        ("Send {to} the message: {text}", "Tell {to}: {text}", "Write to {to}: {text}",
         "Send a message to {to} saying {text}.",
         "Message {to}: {text}", "Text {to} saying {text}."),
        _fill(to=words.first_name, text=words.message), _done("I sent your message to {to}."),
    ),
    Family(
        "a currency conversion",
        "convert_currency",
        ("Convert money between currencies.", "Currency conversion.",
         "Exchange an amount of money"),
        (Parameter("amount", "amount", ("How much.", "The amount"), "number"),
         Parameter("source", "from", ("Currency code.",
             "The currency to convert from")),
         Parameter("target", "to", ("Currency code.",
             "The currency to convert to"))),
        ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?",
         "Change {amount} {source} into {target}.", "What are {amount} {source} in {target}?"),
        _fill_money, _found("amount", words.number, "{amount} {source} is {found} {target}."),
    ),
    Family(
        "a timer",
        "set_timer",
        ("Set a timer.", "Start a countdown.", "Kitchen timer"),
        (Parameter("minutes", "minutes", ("Minutes.",
            "How long, in minutes"), "integer"),),
        ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.",
         "Wake me in {minutes} minutes.",
         "Timer for {minutes} minutes, please.", "Remind me in {minutes} minutes."),
        _fill(minutes=lambda rng: rng.randint(2, 99)),
        _done("The timer is set for {minutes} minutes."), ("minutes",),
    ),
    Family(
        "a translation",
        "translate",
        ("Translate a text.", "Translate words into another language.", "Translation"),
        (Parameter("text", "text", ("The text.", "What to translate")),
         Parameter("language", "language", ("The language.",
             "Target language"))),
        ("Translate {text} into {language}.", "Translate {text} to {language}.",
         "How do you say {text} in {language}?", "What is {text} in {language}?"),
        _fill(text=words.message, language=_pick(*_LANGUAGES)), _found("translation",
            words.made_up, "In {language}: {found}."),
    ),
    Family(
        "a telephone number",
        "find_contact",
        ("Find a person's telephone number.", "Phone book.", "Look up a contact"),
        (Parameter("name", "name", ("The person.",
            "Name of the contact")),),
        ("What is the phone number of {name}?", "What is {name}'s phone number?",
         "Find the number of {name}.",
         "Give me {name}'s telephone number.", "How can I call {name}?"),
        _fill(name=words.full_name), _found("phone", lambda rng: str(rng.randint(10000, 99999)),
                                            "The number of {name} is {found}."), ("name",),
    ),
    Family(
        "music",
        "play_song",
        ("Play a song.", "Play music by an artist.", "Music player"),
        (Parameter("artist", "artist", ("The artist.", "Who plays it")),),
        ("Play a song by {artist}.", "Play {artist}.", "Play some music by {artist}.",
         "I want to hear {artist}.", "Put on {artist}."),
        _fill(artist=words.full_name), _done("Now playing {artist}."), ("artist",),
    ),
    Family(
        "a lamp",
        "switch_light",
        ("Switch a light on or off.", "Control the lights.", "Lights in a room"),
        (Parameter("room", "room", ("The room.", "Which room")),
         Parameter("state", "state", ("on or off", "The new state."),
                   choices=("on", "off"))),
        ("Turn {state} the light in the {room}.", "Switch the {room} light {state}.",
         "Turn the light in the {room} {state}.",
         "Lights {state} in the {room}, please.", "Switch {state} the lamp in the {room}."),
        _fill(room=_pick(*_ROOMS), state=_pick("on", "off")),
        _done("The light in the {room} is {state}."),
    ),
)  # fmt: skip
