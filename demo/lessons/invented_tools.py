"""Tools that are invented by rule: any object, any verb, any parameters.

From many such tools, the model learns to find the tool whose words a request contains, and to copy
the name of the tool and the names of its parameters from the offered schema.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from . import tool_values, words
from .base import is_held_out, listing
from .tool_family import DONE, Family, Filled, Parameter, ToolResult, sentence
from .tool_values import lower_word
from .words import one_of

_OBJECTS = words.split(
    "account address album answer appointment archive article atlas auction badge balance band "
    "bill bin board bonus booking branch budget bug bus calendar camp card case cart catalogue "
    "chapter chart chat class clinic coach code collection comment committee concert contract copy "
    "counter country coupon course court crew crop customer deadline deal debt "
    "delivery department deposit device diet "
    "discount document door draft driver drone duty employee engine entry essay "
    "exam exhibition expense export factory fair "
    "fare farm fee ferry field fine flag fleet floor folder form forum fountain frame fridge "
    "fuel game gate gift goal grade grant graph group guest guide harbour harvest heater helper "
    "history holiday hospital house idea image index insurance interview invoice "
    "issue item job journal "
    "journey key label lake lamp lecture lesson level library licence limit loan "
    "locker log logo lottery machine "
    "magazine manual map mark match meal medicine member memo menu metro mission "
    "model module monitor mood "
    "museum network nurse offer office oven page paper parade parcel park parking "
    "part party passport password "
    "patient pattern payment permit picture pipeline plan plant plate playlist "
    "player poll pool port post poster "
    "printer prize profile program project puzzle quiz race radio ranking receipt "
    "record refund region report "
    "request rescue review ring river road robot role roof room route rule salary "
    "sample schedule school score screen "
    "season seat section sensor server session shelf shift ship shop signal site "
    "slot speaker sport "
    "station statue stock store storage street student study subject survey switch "
    "table tag tariff task tax taxi "
    "team template tent test theatre ticket tide title toll tour tower track trade "
    "traffic trail training trip "
    "truck tunnel unit vaccine valve vehicle video view visa visit voice vote "
    "voucher wallet warehouse "
    "warranty water website wedding window winner workshop yard zone"
)
_QUERY_VERBS = words.split(
    "get get get find fetch check show lookup read list query retrieve load see search"
)
# Templates of requests. Example: the tool get_invoice has the object "invoice", so the template
# `Get the {o}{p}.` becomes `Get the invoice with id 7.` The field `{o}` is the object of the tool,
# and `{v}` is its verb. The field `{p}` is a phrase with the value of each parameter.
_QUERIES = (
    "What is the {o}{p}?",
    "What's the {o}{p}?",
    "Show me the {o}{p}.",
    "Get the {o}{p}.",
    "I need the {o}{p}.",
    "Tell me the {o}{p}.",
    "Give me the {o}{p}.",
    "Find the {o}{p}.",
    "Can you find the {o}{p}?",
    "Look up the {o}{p}.",
    "What {o} is there{p}?",
    "Which {o} is there{p}?",
    "Check the {o}{p}.",
    "Do you know the {o}{p}?",
    "How is the {o}{p}?",
    "I want to see the {o}{p}.",
    "Please show the {o}{p}.",
    "Is there a {o}{p}?",
    "{O}{p}, please.",
    "Where is the {o}{p}?",
    "Show the {o}{p}.",
    "What about the {o}{p}?",
    "List the {o}{p}.",
)
_ACTION_VERBS = words.split(
    "create add delete update send book order cancel start stop open close set "
    "reserve rent buy sell "
    "print save share publish move copy remove plan schedule register assign "
    "approve reject clean repair "
    "build draw write upload download archive lock unlock rename paint deliver "
    "invite activate pause "
    "resume reset test count measure compare check mark export import request make change"
)
_ACTIONS = (
    "{V} the {o}{p}.",
    "{V} a {o}{p}.",
    "Please {v} the {o}{p}.",
    "Please {v} a {o}{p}.",
    "I want to {v} a {o}{p}.",
    "Can you {v} the {o}{p}?",
    "I need to {v} the {o}{p}.",
    "{V} my {o}{p}.",
    "Could you {v} a {o}{p}?",
    "{V} {o}{p}.",
    "{V} a new {o}{p}.",
    "Let us {v} the {o}{p}.",
    "Can you please {v} my {o}{p}?",
    "I would like to {v} a {o}{p}.",
)
_NUMBER_KEYS = words.split(
    "days hours minutes seconds weeks months years nights guests people seats "
    "rooms pages items copies "
    "points steps rows users tickets players units boxes bottles cups meters "
    "kilometers degrees percent "
    "tables chairs books songs images words lines files orders miles pounds floors rounds"
)
_NUMBER_NAMES = words.split(
    "limit count max min number quantity amount level size age volume priority "
    "budget price width height "
    "length weight depth speed score rating page version port distance duration "
    "capacity offset total radius"
)
_PLACE_KEYS = words.split(
    "city location place town destination address region area country city_name "
    "origin site district "
    "venue state where position home_city target_city"
)
_PERSON_KEYS = words.split(
    "name person user username customer contact recipient employee student patient "
    "owner author member "
    "guest driver teacher friend client full_name player visitor sender manager assignee"
)
_DATE_KEYS = words.split(
    "date day on start_date due_date when delivery_date event_date from_date deadline"
)
_TIME_KEYS = words.split("time at start_time hour clock_time begin departure_time start until")
_TEXT_KEYS = words.split(
    "text message content note body comment description title label reason caption"
)
_TOPIC_KEYS = words.split(
    "topic query subject keyword theme search_term about category title question"
)
_ID_KEYS = words.split(
    "id code order_id ticket_id number reference key serial item_id account_id uid token"
)
_LIST_KEYS = words.split(
    "items tags names products ingredients topics words values labels parts things fields"
)
_FLAGS = words.split(
    "breakfast music details images parking insurance sound history comments "
    "pictures delivery lights "
    "sugar milk invoice copies notes help warranty subtitles gifts photos links"
)
_ENUM_KEYS = words.split(
    "type mode kind format color colour style category level size status language "
    "unit theme quality"
)


class _Value(NamedTuple):
    """The value of a parameter, and the value as the user writes it."""

    value: Any
    written: str


@dataclass(frozen=True)
class _Invented:
    """A parameter that is invented by rule.

    Attributes:
        key: The name in the schema.
        phrase: The words of a request that mention the value `{v}`, such as ` in {v}`.
        draw_value: Draws a value.
        type: The JSON type.
        choices: The schema's `enum`, if any.
    """

    key: str
    phrase: str
    draw_value: Callable[[Random], _Value]
    type: str = "string"
    choices: tuple[str, ...] = ()


Kind = Callable[[Random], _Invented]
"""A function that invents a parameter of some kind."""


def _plain(make: Callable[[Random], Any]) -> Callable[[Random], _Value]:
    """Return a function that draws a value which the user writes without a change."""

    def draw_value(rng: Random) -> _Value:
        value = make(rng)
        return _Value(value, str(value))

    return draw_value


def _key_words(key: str) -> str:
    """Return the words of a key, such as `start date` for `start_date`."""
    return key.replace("_", " ")


def _text_kind(keys: Sequence[str], phrases: Sequence[str], make: Callable[[Random], Any]) -> Kind:
    """Return a kind of text parameters whose phrases do not contain the key."""

    def invent_parameter(rng: Random) -> _Invented:
        phrase = rng.choice(phrases)
        return _Invented(rng.choice(keys), phrase, _plain(make))

    return invent_parameter


def _named_kind(keys: Sequence[str], phrases: Sequence[str], make: Callable[[Random], Any]) -> Kind:
    """Return a kind of text parameters whose phrases may contain the words of the key as `K`."""

    def invent_parameter(rng: Random) -> _Invented:
        key = rng.choice(keys)
        phrase = rng.choice(phrases).replace("K", _key_words(key))
        return _Invented(key, phrase, _plain(make))

    return invent_parameter


_place = _text_kind(
    _PLACE_KEYS,
    (" in {v}", " in {v}", " for {v}", " at {v}", " near {v}", " of {v}", " from {v}", " to {v}"),
    words.city,
)
_person = _text_kind(
    _PERSON_KEYS,
    (" for {v}", " of {v}", " by {v}", " with {v}", " from {v}", " to {v}", " called {v}"),
    one_of(words.full_name, words.first_name),
)


def _counted(rng: Random) -> _Invented:
    """Invent a parameter for a number of things: `num_guests` with the phrase ` for {v} guests`."""
    noun = rng.choice(_NUMBER_KEYS)
    key = rng.choice((noun, noun, f"num_{noun}", f"number_of_{noun}", f"max_{noun}"))
    phrase = rng.choice(
        (" for {v} K", " with {v} K", ", {v} K", " of {v} K", " after {v} K", " in {v} K")
    )
    number = _plain(tool_values.small(2, 99))
    return _Invented(key, phrase.replace("K", noun), number, type="integer")


def _named_number(rng: Random) -> _Invented:
    """Invent a number parameter, such as `max_price` with the phrase ` and max price {v}`."""
    key = rng.choice(_NUMBER_NAMES)
    if rng.random() >= 0.7:
        key = f"{rng.choice(('max', 'min', 'total', 'new', 'target'))}_{key}"
    phrase = rng.choice(
        (" with K {v}", " with a K of {v}", ", K {v}", " and K {v}", " at K {v}", " (K {v})")
    ).replace("K", _key_words(key))
    if rng.random() < 0.3:
        return _Invented(key, phrase, _plain(_integer_or_half), type="number")
    number_type = rng.choice(("integer", "integer", "number"))
    return _Invented(key, phrase, _plain(words.number), number_type)


def _integer_or_half(rng: Random) -> float:
    return rng.choice((words.number(rng, 3), rng.randint(1, 99) + 0.5))


_date = _text_kind(
    _DATE_KEYS,
    (" on {v}", " on {v}", " for {v}", ", {v}", " until {v}", " by {v}"),
    tool_values.date,
)
_time = _text_kind(
    _TIME_KEYS,
    (" at {v}", " at {v}", " from {v}", " until {v}", " for {v}"),
    tool_values.clock,
)
_topic = _text_kind(
    _TOPIC_KEYS,
    (" about {v}", " about {v}", " on {v}", " for {v}", " with the topic {v}"),
    one_of(tool_values.phrase, tool_values.phrase, tool_values.title),
)
_identifier = _named_kind(
    _ID_KEYS,
    (" {v}", " with the K {v}", " with K {v}", " number {v}", ", K {v}", " {v}"),
    tool_values.code,
)
_email = _named_kind(
    words.split("email email_address to recipient address mail contact_email"),
    (" to {v}", " for {v}", " with the email {v}", ", {v}"),
    tool_values.email,
)
_CHOICES = (
    words.ADJECTIVES,
    words.NOUNS,
    words.split("low medium high urgent"),
    words.split("pdf html text csv json"),
    words.split("small medium large"),
    words.split("daily weekly monthly yearly"),
    words.split("asc desc none"),
)


def _enum(rng: Random) -> _Invented:
    """Invent a parameter that accepts only some texts."""
    source = rng.choice(_CHOICES)
    choices = tuple(rng.sample(source, min(len(source), rng.randint(2, 5))))
    key = rng.choice(_ENUM_KEYS) if rng.random() < 0.6 else lower_word(rng)
    phrase = rng.choice(
        (" with K {v}", ", K {v}", " in {v} K", " as {v}", " with the K {v}", " in {v}", " ({v})")
    )
    value = _plain(lambda rng: rng.choice(choices))
    return _Invented(key, phrase.replace("K", _key_words(key)), value, choices=choices)


def _flag(rng: Random) -> _Invented:
    """Invent a parameter such as `include_breakfast`, which the user writes as `with breakfast`."""
    noun = rng.choice(_FLAGS)
    key = rng.choice(
        (f"include_{noun}", f"with_{noun}", noun, f"has_{noun}", f"show_{noun}", f"add_{noun}")
    )

    def draw_value(rng: Random) -> _Value:
        value = rng.random() < 0.5
        return _Value(value, f"{'with' if value else 'without'} {noun}")

    return _Invented(key, " {v}", draw_value, type="boolean")


def _generic(rng: Random) -> _Invented:
    """Invent a parameter whose key and values are any words."""
    if rng.random() < 0.6:
        key = lower_word(rng)
    else:
        key = f"{rng.choice(words.ADJECTIVES)}_{lower_word(rng)}"
    phrase = rng.choice(
        (" with K {v}", " with the K {v}", ", K {v}", " and K {v}", " where K is {v}", " (K: {v})")
    )
    make = rng.choice(
        (words.made_up, lower_word, tool_values.phrase, words.full_name, tool_values.code)
    )
    return _Invented(key, phrase.replace("K", _key_words(key)), _plain(make))


def _list(rng: Random) -> _Invented:
    """Invent a list of words, which the user writes as `red, blue and old`."""
    key = rng.choice(_LIST_KEYS)
    source = rng.choice((words.NOUNS, words.ADJECTIVES, words.FIRST_NAMES, words.CITIES))

    def draw_value(rng: Random) -> _Value:
        items = rng.sample(source, rng.choice((1, 2, 2, 3, 3, 4)))
        return _Value(items, listing(items))

    phrase = rng.choice((" with {v}", " with the K {v}", " for {v}", ": {v}", ", K: {v}"))
    return _Invented(key, phrase.replace("K", _key_words(key)), draw_value, type="array")


_text = _named_kind(
    _TEXT_KEYS,
    (" saying {v}", ": {v}", " with the K '{v}'", ' "{v}"', " with K: {v}", ' with the K "{v}"'),
    words.message,
)
_KINDS: dict[Kind, int] = {
    _place: 10,
    _person: 7,
    _counted: 7,
    _named_number: 7,
    _date: 6,
    _time: 4,
    _topic: 7,
    _identifier: 5,
    _email: 2,
    _enum: 8,
    _flag: 5,
    _generic: 12,
    _list: 5,
    _text: 6,
}
"""The functions that invent a parameter, and their frequencies."""


def _styled(rng: Random, parts: list[str]) -> str:
    """Join the words of a tool's name in one of the usual styles.

    Example: `get` and `ticket` become `get_ticket`, `getTicket`, `GetTicket`, `get-ticket` or
    `ticket_get`.
    """
    chance = rng.random()
    if chance < 0.72:
        return "_".join(parts)
    capitals = [part.capitalize() for part in parts]
    if chance < 0.86:
        return "".join([parts[0], *capitals[1:]])
    if chance < 0.93:
        return "".join(capitals)
    return "-".join(parts) if chance < 0.97 else "_".join([parts[-1], *parts[:-1]])


def _thing(rng: Random, held_out: bool) -> list[str]:
    """Draw an object of one or two words. The last word decides whether it is held out."""
    while True:
        head = rng.choice(_OBJECTS)
        if is_held_out(f"tool {head}") == held_out:
            break
    if rng.random() < 0.45:
        return [head]
    first = rng.choice(_OBJECTS if rng.random() < 0.6 else words.NOUNS)
    is_usable = first != head and not is_held_out(f"tool {first}")
    return [first, head] if is_usable else [head]


def invent(rng: Random, held_out: bool) -> Family:
    """Invent a tool, and return it as a `Family` that contains only this tool.

    A tool has a verb and an object, such as "get" and "invoice". The objects of held-out tools
    never occur in the training data.
    """
    thing = _thing(rng, held_out)
    noun = " ".join(thing)
    is_query = rng.random() < 0.5
    verb = rng.choice(_QUERY_VERBS if is_query else _ACTION_VERBS)
    name = _tool_name(rng, verb, thing, is_query)
    descriptions: tuple[str, ...] = (
        f"{verb.capitalize()} the {noun}.",
        f"{verb.capitalize()} a {noun}",
        noun.capitalize(),
        f"A tool to {verb} a {noun}.",
        f"Use this to {verb} the {noun}.",
        f"Returns the {noun}.",
    )
    if rng.random() < 0.06:
        # This name does not contain the verb, so each description must contain it.
        name, descriptions = _meaningless_name(rng), descriptions[:2]
    invented = _parameters(rng)
    parameters = _offered(rng, invented, thing[-1])
    wordings = _QUERIES if is_query else _ACTIONS
    can_be_listed = len(invented) == 1 and invented[0].type in ("string", "integer")
    return Family(
        topics=frozenset({noun, thing[-1]}),
        names=(name,),
        descriptions=descriptions,
        parameters=tuple(parameters),
        requests=tuple(
            _template(rng, wordings, verb, noun, _phrases(rng, invented, parameters))
            for _ in range(3)
        ),
        fill=lambda rng: _fill(rng, invented),
        result=lambda rng, _: _returned(rng, thing[-1]),
        listed=("p0",) if can_be_listed else (),
    )


def _tool_name(rng: Random, verb: str, thing: list[str], is_query: bool) -> str:
    """Draw a name such as `get_ticket` or, for a query, `ticket_info`."""
    parts = [verb, *thing]
    if rng.random() < 0.12 and is_query:
        parts = [*thing, rng.choice(("info", "lookup", "search", "tool", "finder", "status"))]
    return _styled(rng, parts)


def _meaningless_name(rng: Random) -> str:
    return rng.choice((f"tool_{rng.randint(1, 99)}", lower_word(rng), f"fn{rng.randint(1, 20)}"))


def _parameters(rng: Random) -> list[_Invented]:
    """Invent up to four parameters of different kinds and with different keys."""
    (count,) = rng.choices((0, 1, 2, 3, 4), weights=(5, 40, 32, 17, 6))
    invented: dict[str, _Invented] = {}
    used_kinds = set()
    while len(invented) < count:
        (kind,) = rng.choices(list(_KINDS), list(_KINDS.values()))
        if kind in used_kinds and kind is not _generic:
            continue
        parameter = kind(rng)
        if parameter.key in invented:
            continue
        used_kinds.add(kind)
        invented[parameter.key] = parameter
    return list(invented.values())


def _offered(rng: Random, invented: list[_Invented], noun: str) -> list[Parameter]:
    """Return the parameters of the schema, whose slots are `p0`, `p1` and so on."""
    parameters = []
    for index, parameter in enumerate(invented):
        name = _key_words(parameter.key)
        offered = Parameter(
            slot=f"p{index}",
            keys=(parameter.key,),
            type=parameter.type,
            choices=parameter.choices,
            required=index == 0 or rng.random() < 0.7,
            descriptions=(name.capitalize(), f"The {name}.", f"{name} of the {noun}"),
        )
        parameters.append(offered)
    return parameters


def _fill(rng: Random, invented: list[_Invented]) -> Filled:
    """Draw the values of the slots `p0`, `p1` and so on."""
    drawn = {f"p{index}": one.draw_value(rng) for index, one in enumerate(invented)}
    return Filled(
        values={slot: value.value for slot, value in drawn.items()},
        written={slot: value.written for slot, value in drawn.items()},
    )


def _phrases(rng: Random, invented: list[_Invented], parameters: list[Parameter]) -> str:
    """Join the phrases of every required parameter and of some of the others.

    Example: ` in {p0} for {p1} guests`.
    """
    early: list[str] = []
    late: list[str] = []
    for parameter, offered in zip(invented, parameters, strict=True):
        if not offered.required and rng.random() >= 0.5:
            continue
        phrase = parameter.phrase.replace("{v}", f"{{{offered.slot}}}")
        # A text or a list may contain any words, so it comes last in the request.
        is_late = parameter.type == "array" or ":" in phrase or "saying" in phrase
        (late if is_late else early).append(phrase)
    # A phrase without a preposition follows the object directly.
    early.sort(key=lambda phrase: not phrase.startswith(" {"))
    return "".join(early + late)


def _template(rng: Random, wordings: tuple[str, ...], verb: str, noun: str, phrases: str) -> str:
    """Write a request with placeholders, such as `Book a room in {p0} for {p1} guests.`."""
    return rng.choice(wordings).format(
        o=noun, O=noun.capitalize(), v=verb, V=verb.capitalize(), p=phrases
    )


_TEXTS_AND_NUMBERS: tuple[Callable[[Random], Any], ...] = (
    words.number,
    tool_values.phrase,
    words.made_up,
    tool_values.title,
    tool_values.code,
    tool_values.clock,
    tool_values.date,
    words.full_name,
    words.city,
)
_JSON_VALUES = (
    *_TEXTS_AND_NUMBERS,
    lambda rng: rng.random() < 0.5,
    tool_values.word_list,
    lambda rng: rng.randint(1, 999) / 10,
    words.message,
)


def _returned(rng: Random, noun: str) -> ToolResult:
    """Draw a result of any shape: a report of success, a single value or an object."""
    chance = rng.random()
    if chance < 0.2:
        return ToolResult(rng.choice(DONE), "Done.")
    if chance < 0.4:
        value = rng.choice((*_TEXTS_AND_NUMBERS, words.message))(rng)
        return ToolResult(str(value), sentence(value))
    keys = {
        noun,
        *words.split("name value result price status total date city count title text"),
        lower_word(rng),
        f"{rng.choice(words.ADJECTIVES)}_{lower_word(rng)}",
        rng.choice(_OBJECTS),
        rng.choice(_NUMBER_NAMES),
    }
    used_keys = rng.sample(sorted(keys), rng.choice((1, 1, 1, 2, 2, 3)))
    returned = {key: rng.choice(_JSON_VALUES)(rng) for key in used_keys}
    return ToolResult(returned, sentence(returned))
