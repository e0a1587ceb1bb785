"""Families of tools: how each may be named and described, what users say, what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from . import words
from .base import is_held_out

Values = dict[str, Any]


@dataclass(frozen=True)
class Parameter:
    """One argument of a family's tools.

    Attributes:
        slot: The placeholder in the family's requests that this argument copies.
        keys: Names that the schema may give it.
        descriptions: Texts that the schema may give it.
        type: The JSON type.
        choices: The schema's `enum`, if any.
        required: Optional arguments are passed only when the request has their slot.
    """

    slot: str
    keys: tuple[str, ...]
    descriptions: tuple[str, ...]
    type: str = "string"
    choices: tuple[str, ...] = ()
    required: bool = True


@dataclass(frozen=True)
class Family:
    """Tools that do one thing, under many names.

    Attributes:
        purpose: What the reasoning calls it.
        names: Names in use; the last one is reserved for the evaluation.
        descriptions: What the schema may say.
        parameters: Its arguments.
        requests: What users say; `{slot}` stands for a value as spoken.
        fill: Draws the values and, where they differ from them, the spoken forms.
        result: Draws what the tool returns for those values, and the answer made from it.
    """

    purpose: str
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    fill: Callable[[Random], tuple[Values, Values]]
    result: Callable[[Random, Values], tuple[Values, str]]
    spoken_lists: tuple[str, ...] = field(default=())


def _city(key: str = "city") -> Parameter:
    return Parameter(
        "city",
        (key, "city", "location", "place", "town"),
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
    return {"result": number}, f"{values['expression']} = {number}"


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
        ("get_weather", "get_current_weather", "weather", "weather_lookup", "fetch_weather",
         "current_weather", "forecast_for"),
        ("Get the weather for a city.", "Get the current weather in a given location.",
         "Current weather of a place.", "Weather report"),
        (_city(), Parameter("unit", ("unit", "units", "scale"), ("The temperature unit.",
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
        ("calculate", "calculator", "compute", "evaluate", "do_math", "eval_expression",
         "math_eval"),
        ("Calculate an arithmetic expression.", "Evaluate a mathematical expression.",
         "Do arithmetic", "A calculator."),
        (Parameter("expression", ("expression", "expr", "formula", "input"),
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
        ("get_time", "get_current_time", "current_time", "time_in", "clock", "local_time",
         "what_time"),
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
        ("search", "web_search", "search_web", "google", "find_pages", "internet_search",
         "lookup_web"),
        ("Search the web.", "Find web pages about a query.", "Internet search"),
        (Parameter("query", ("query", "q", "text", "keywords"), ("The query.",
            "What to search for", "Search words")),),
        ("Search for {query}.", "Search the web for {query}.", "Look up {query}.",
         "Find pages about {query}.", "Google {query}.",
         "Please search {query}.", "Can you search the web for {query}?"),
        _fill(query=words.phrase), _found("title", words.made_up, "I found: {found}."),
    ),
    Family(
        "a message",
        ("send_message", "send_email", "send_text", "message", "notify", "write_to",
         "post_message"),
        ("Send a message to somebody.", "Send a text to a person.", "Write to a contact"),
        (Parameter("to", ("to", "recipient", "name", "contact"), ("Who receives it.",
            "The recipient", "Name")),
         Parameter("text", ("text", "message", "body", "content"), ("The text.", "What to say",
             "Body of the message"))),
        ("Send {to} the message: {text}", "Tell {to}: {text}", "Write to {to}: {text}",
         "Send a message to {to} saying {text}.",
         "Message {to}: {text}", "Text {to} saying {text}."),
        _fill(to=words.first_name, text=words.message), _done("I sent your message to {to}."),
    ),
    Family(
        "a currency conversion",
        ("convert_currency", "exchange", "currency_converter", "convert", "exchange_rate",
         "convert_money"),
        ("Convert money between currencies.", "Currency conversion.",
         "Exchange an amount of money"),
        (Parameter("amount", ("amount", "value", "sum"), ("How much.", "The amount"), "number"),
         Parameter("source", ("from", "from_currency", "source"), ("Currency code.",
             "The currency to convert from")),
         Parameter("target", ("to", "to_currency", "target"), ("Currency code.",
             "The currency to convert to"))),
        ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?",
         "Change {amount} {source} into {target}.", "What are {amount} {source} in {target}?"),
        _fill_money, _found("amount", words.number, "{amount} {source} is {found} {target}."),
    ),
    Family(
        "a timer",
        ("set_timer", "start_timer", "timer", "countdown", "create_timer", "begin_timer"),
        ("Set a timer.", "Start a countdown.", "Kitchen timer"),
        (Parameter("minutes", ("minutes", "duration", "length"), ("Minutes.",
            "How long, in minutes"), "integer"),),
        ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.",
         "Wake me in {minutes} minutes.",
         "Timer for {minutes} minutes, please.", "Remind me in {minutes} minutes."),
        _fill(minutes=lambda rng: rng.randint(2, 99)),
        _done("The timer is set for {minutes} minutes."), ("minutes",),
    ),
    Family(
        "a translation",
        ("translate", "translate_text", "translator", "translation", "to_language"),
        ("Translate a text.", "Translate words into another language.", "Translation"),
        (Parameter("text", ("text", "words", "phrase"), ("The text.", "What to translate")),
         Parameter("language", ("language", "target_language", "to", "lang"), ("The language.",
             "Target language"))),
        ("Translate {text} into {language}.", "Translate {text} to {language}.",
         "How do you say {text} in {language}?", "What is {text} in {language}?"),
        _fill(text=words.message, language=_pick(*_LANGUAGES)), _found("translation",
            words.made_up, "In {language}: {found}."),
    ),
    Family(
        "a telephone number",
        ("find_contact", "get_phone_number", "phone_book", "contact", "lookup_contact",
         "call_number"),
        ("Find a person's telephone number.", "Phone book.", "Look up a contact"),
        (Parameter("name", ("name", "person", "contact", "who"), ("The person.",
            "Name of the contact")),),
        ("What is the phone number of {name}?", "What is {name}'s phone number?",
         "Find the number of {name}.",
         "Give me {name}'s telephone number.", "How can I call {name}?"),
        _fill(name=words.full_name), _found("phone", lambda rng: str(rng.randint(10000, 99999)),
                                            "The number of {name} is {found}."), ("name",),
    ),
    Family(
        "music",
        ("play_song", "play_music", "play", "music_player", "start_song", "jukebox"),
        ("Play a song.", "Play music by an artist.", "Music player"),
        (Parameter("artist", ("artist", "singer", "band", "by"), ("The artist.", "Who plays it")),),
        ("Play a song by {artist}.", "Play {artist}.", "Play some music by {artist}.",
         "I want to hear {artist}.", "Put on {artist}."),
        _fill(artist=words.full_name), _done("Now playing {artist}."), ("artist",),
    ),
    Family(
        "a table",
        ("book_table", "reserve_table", "book_restaurant", "restaurant_booking", "get_table"),
        ("Book a table in a restaurant.", "Reserve a table.", "Restaurant reservations"),
        (Parameter("restaurant", ("restaurant", "place", "name", "where"), ("The restaurant.",
            "Where to book")),
         Parameter("people", ("people", "guests", "party_size", "seats"), ("How many people.",
             "Number of guests"), "integer"),
         Parameter("time", ("time", "at", "hour"), ("The time.", "When, e.g. 19:30"),
                   required=False)),
        ("Book a table at {restaurant} for {people}.",
         "Reserve a table for {people} at {restaurant}.",
         "Book a table for {people} people at {restaurant} at {time}.",
         "Get me a table for {people} at {restaurant}, {time}."),
        _fill(restaurant=words.made_up, people=lambda rng: rng.randint(2, 20), time=words.clock),
        _done("Your table for {people} at {restaurant} is booked."),
    ),
    Family(
        "a share price",
        ("get_stock_price", "stock_price", "share_price", "quote", "ticker", "stock_quote"),
        ("Get the price of a share.", "Stock price of a company.", "Stock quotes"),
        (Parameter("company", ("company", "symbol", "name", "stock"), ("The company.",
            "Which company")),),
        ("What is the stock price of {company}?", "How much is a share of {company}?",
         "Stock price of {company}",
         "What does {company} trade at?", "Get the share price of {company}."),
        _fill(company=words.made_up), _found("price", words.number,
                                             "A share of {company} costs {found}."), ("company",),
    ),
    Family(
        "a lamp",
        ("switch_light", "set_light", "light", "lamp", "control_light", "light_switch"),
        ("Switch a light on or off.", "Control the lights.", "Lights in a room"),
        (Parameter("room", ("room", "where", "location"), ("The room.", "Which room")),
         Parameter("state", ("state", "power", "action"), ("on or off", "The new state."),
                   choices=("on", "off"))),
        ("Turn {state} the light in the {room}.", "Switch the {room} light {state}.",
         "Turn the light in the {room} {state}.",
         "Lights {state} in the {room}, please.", "Switch {state} the lamp in the {room}."),
        _fill(room=_pick(*_ROOMS), state=_pick("on", "off")),
        _done("The light in the {room} is {state}."),
    ),
    Family(
        "a note",
        ("create_note", "add_note", "note", "remember", "save_note", "write_note"),
        ("Save a note.", "Write something down.", "Notes"),
        (Parameter("text", ("text", "note", "content"), ("The note.", "What to write down")),),
        ("Make a note: {text}", "Note down {text}.", "Remember {text}.",
         "Save a note saying {text}.", "Write down {text}."),
        _fill(text=words.message), _done("I noted it."),
    ),
    Family(
        "a distance",
        ("get_distance", "distance", "route", "directions", "how_far", "measure_distance"),
        ("Get the distance between two cities.", "Distance from one place to another.",
         "Route planner"),
        (Parameter("start", ("from", "origin", "start"), ("The first city.", "Start")),
         Parameter("goal", ("to", "destination", "end"), ("The second city.", "Destination"))),
        ("How far is it from {start} to {goal}?", "What is the distance from {start} to {goal}?",
         "Distance between {start} and {goal}",
         "How many kilometres are there from {start} to {goal}?"),
        _two_cities, _found("km", words.number, "It is {found} km from {start} to {goal}."),
    ),
)  # fmt: skip

_VERBS = ("open", "close", "delete", "cancel", "update", "print", "archive", "check", "approve",
          "reject", "lock", "unlock",
          "track", "restart", "renew", "rename", "copy", "export", "import", "block")  # fmt: skip
_THINGS = ("invoice", "ticket", "order", "report", "booking", "account", "file", "contract",
           "parcel", "server", "project",
           "card", "subscription", "document", "task", "policy", "badge", "machine", "request",
           "claim")  # fmt: skip


def record_family(verb: str, thing: str) -> Family:
    """A tool made from two words, such as `cancel_order(id)`: their names must be read."""
    return Family(
        f"to {verb} the {thing}",
        (f"{verb}_{thing}",),
        (f"{verb.capitalize()} the {thing}.", f"{verb.capitalize()} the {thing} with this number."),
        (Parameter("id", ("id", f"{thing}_id", "number", f"{thing}_number", "code"),
                   (f"The {thing}.", "Its number"), "integer"),),
        (f"{verb.capitalize()} {thing} {{id}}.", f"Please {verb} the {thing} {{id}}.",
         f"{verb.capitalize()} the {thing} with number {{id}}.",
         f"I want to {verb} {thing} {{id}}."),
        _fill(id=words.number),
        _done(f"The {thing} {{id}}: {verb} is done."),
        ("id",),
    )  # fmt: skip


def random_family(rng: Random, unseen: bool) -> Family:
    """One of the families, or a two-word one; `unseen` two-word ones are not for training."""
    if rng.random() < 0.67:
        return rng.choice(FAMILIES)
    while True:
        verb, thing = rng.choice(_VERBS), rng.choice(_THINGS)
        if is_held_out(f"{verb}_{thing}") == unseen:
            return record_family(verb, thing)
