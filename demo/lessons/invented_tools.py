"""Tools that are invented by rule: any object, any verb, any parameters.

From many such tools, the model learns to find the tool whose words a request contains, and to copy
the name of the tool and the names of its parameters from the offered schema.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from . import tool_values, words
from .base import is_held_out, listing
from .tool_family import DONE, Family, Parameter, Values, sentence
from .tool_values import lower_word

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
_ASKED: dict[str, tuple[str, ...]] = {
    "": (
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
    ),
}
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


@dataclass(frozen=True)
class _Drawn:
    """A parameter with the phrase that mentions the value and the function that draws the value."""

    key: str
    type: str
    phrase: str
    make: Callable[[Random], tuple[Any, str]]
    choices: tuple[str, ...] = ()


def _same(make: Callable[[Random], Any]) -> Callable[[Random], tuple[Any, str]]:
    def draw(rng: Random) -> tuple[Any, str]:
        value = make(rng)
        return value, str(value)

    return draw


def _says(key: str) -> str:
    return key.replace("_", " ")


def _place(rng: Random) -> _Drawn:
    form = rng.choice(
        (
            " in {v}",
            " in {v}",
            " for {v}",
            " at {v}",
            " near {v}",
            " of {v}",
            " from {v}",
            " to {v}",
        )
    )
    return _Drawn(rng.choice(_PLACE_KEYS), "string", form, _same(words.city))


def _person(rng: Random) -> _Drawn:
    form = rng.choice(
        (" for {v}", " of {v}", " by {v}", " with {v}", " from {v}", " to {v}", " called {v}")
    )
    return _Drawn(
        rng.choice(_PERSON_KEYS),
        "string",
        form,
        _same(lambda r: r.choice((words.full_name, words.first_name))(r)),
    )


def _counted(rng: Random) -> _Drawn:
    key = rng.choice(_NUMBER_KEYS)
    name = rng.choice((key, key, f"num_{key}", f"number_of_{key}", f"max_{key}"))
    form = rng.choice(
        (" for {v} K", " with {v} K", ", {v} K", " of {v} K", " after {v} K", " in {v} K")
    )
    return _Drawn(name, "integer", form.replace("K", key), _same(lambda r: r.randint(2, 99)))


def _named_number(rng: Random) -> _Drawn:
    key = rng.choice(_NUMBER_NAMES)
    name = (
        key
        if rng.random() < 0.7
        else f"{rng.choice(('max', 'min', 'total', 'new', 'target'))}_{key}"
    )
    form = rng.choice(
        (" with K {v}", " with a K of {v}", ", K {v}", " and K {v}", " at K {v}", " (K {v})")
    )
    if rng.random() < 0.3:
        return _Drawn(
            name,
            "number",
            form.replace("K", _says(name)),
            _same(lambda r: r.choice((words.number(r, 3), r.randint(1, 99) + 0.5))),
        )
    return _Drawn(
        name,
        rng.choice(("integer", "integer", "number")),
        form.replace("K", _says(name)),
        _same(words.number),
    )


def _date(rng: Random) -> _Drawn:
    form = rng.choice((" on {v}", " on {v}", " for {v}", ", {v}", " until {v}", " by {v}"))
    return _Drawn(rng.choice(_DATE_KEYS), "string", form, _same(tool_values.date))


def _time(rng: Random) -> _Drawn:
    form = rng.choice((" at {v}", " at {v}", " from {v}", " until {v}", " for {v}"))
    return _Drawn(rng.choice(_TIME_KEYS), "string", form, _same(tool_values.clock))


def _topic(rng: Random) -> _Drawn:
    form = rng.choice((" about {v}", " about {v}", " on {v}", " for {v}", " with the topic {v}"))
    return _Drawn(
        rng.choice(_TOPIC_KEYS),
        "string",
        form,
        _same(lambda r: r.choice((tool_values.phrase, tool_values.phrase, tool_values.title))(r)),
    )


def _identifier(rng: Random) -> _Drawn:
    key = rng.choice(_ID_KEYS)
    form = rng.choice((" {v}", " with the K {v}", " with K {v}", " number {v}", ", K {v}", " {v}"))
    return _Drawn(key, "string", form.replace("K", _says(key)), _same(tool_values.code))


def _email(rng: Random) -> _Drawn:
    key = rng.choice(
        ("email", "email_address", "to", "recipient", "address", "mail", "contact_email")
    )
    form = rng.choice((" to {v}", " for {v}", " with the email {v}", ", {v}"))
    return _Drawn(key, "string", form, _same(tool_values.email))


def _enum(rng: Random) -> _Drawn:
    source = rng.choice(
        (
            words.ADJECTIVES,
            words.NOUNS,
            words.split("low medium high urgent"),
            words.split("pdf html text csv json"),
            words.split("small medium large"),
            words.split("daily weekly monthly yearly"),
            words.split("asc desc none"),
        )
    )
    choices = tuple(rng.sample(source, min(len(source), rng.randint(2, 5))))
    key = rng.choice(_ENUM_KEYS) if rng.random() < 0.6 else lower_word(rng)
    form = rng.choice(
        (" with K {v}", ", K {v}", " in {v} K", " as {v}", " with the K {v}", " in {v}", " ({v})")
    )
    return _Drawn(
        key, "string", form.replace("K", _says(key)), _same(lambda r: r.choice(choices)), choices
    )


def _flag(rng: Random) -> _Drawn:
    word = rng.choice(_FLAGS)
    key = rng.choice(
        (f"include_{word}", f"with_{word}", word, f"has_{word}", f"show_{word}", f"add_{word}")
    )

    def make(r: Random) -> tuple[Any, str]:
        value = r.random() < 0.5
        return value, f"{'with' if value else 'without'} {word}"

    return _Drawn(key, "boolean", " {v}", make)


def _generic(rng: Random) -> _Drawn:
    key = (
        lower_word(rng)
        if rng.random() < 0.6
        else f"{rng.choice(words.ADJECTIVES)}_{lower_word(rng)}"
    )
    form = rng.choice(
        (" with K {v}", " with the K {v}", ", K {v}", " and K {v}", " where K is {v}", " (K: {v})")
    )
    make = rng.choice(
        (words.made_up, lower_word, tool_values.phrase, words.full_name, tool_values.code)
    )
    return _Drawn(key, "string", form.replace("K", _says(key)), _same(make))


def _list(rng: Random) -> _Drawn:
    key = rng.choice(_LIST_KEYS)
    source = rng.choice((words.NOUNS, words.ADJECTIVES, words.FIRST_NAMES, words.CITIES))

    def make(r: Random) -> tuple[Any, str]:
        items = r.sample(source, r.choice((1, 2, 2, 3, 3, 4)))
        return items, listing(items)

    form = rng.choice((" with {v}", " with the K {v}", " for {v}", ": {v}", ", K: {v}"))
    return _Drawn(key, "array", form.replace("K", _says(key)), make)


def _text(rng: Random) -> _Drawn:
    key = rng.choice(_TEXT_KEYS)
    form = rng.choice(
        (" saying {v}", ": {v}", " with the K '{v}'", ' "{v}"', " with K: {v}", ' with the K "{v}"')
    )
    return _Drawn(key, "string", form.replace("K", _says(key)), _same(words.message))


_KINDS = (
    _place,
    _person,
    _counted,
    _named_number,
    _date,
    _time,
    _topic,
    _identifier,
    _email,
    _enum,
    _flag,
    _generic,
    _list,
    _text,
)
_WEIGHTS = (10, 7, 7, 7, 6, 4, 7, 5, 2, 8, 5, 12, 5, 6)


def _styled(rng: Random, parts: list[str]) -> str:
    """Join the words of a tool's name in one of the usual styles."""
    chance = rng.random()
    if chance < 0.72:
        return "_".join(parts)
    if chance < 0.86:
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    if chance < 0.93:
        return "".join(part.capitalize() for part in parts)
    return "-".join(parts) if chance < 0.97 else f"{parts[-1]}_{'_'.join(parts[:-1])}"


def _thing(rng: Random, held_out: bool) -> list[str]:
    """Draw an object of one or two words. The last word decides whether it is held out."""
    while True:
        head = rng.choice(_OBJECTS)
        if is_held_out(f"tool {head}") == held_out:
            break
    if rng.random() < 0.45:
        return [head]
    first = rng.choice(_OBJECTS if rng.random() < 0.6 else words.NOUNS)
    usable = first != head and not is_held_out(f"tool {first}")
    return [first, head] if usable else [head]


def invent(rng: Random, held_out: bool) -> Family:
    """Invent a family of one tool. Training never names the objects of held-out tools."""
    thing = _thing(rng, held_out)
    is_query = rng.random() < 0.5
    verb = rng.choice(_QUERY_VERBS if is_query else _ACTION_VERBS)
    name_words = [verb, *thing]
    if rng.random() < 0.12 and is_query:
        name_words = [*thing, rng.choice(("info", "lookup", "search", "tool", "finder", "status"))]
    name = _styled(rng, name_words)
    if rng.random() < 0.06:
        name = rng.choice(
            (f"tool_{rng.randint(1, 99)}", lower_word(rng), f"fn{rng.randint(1, 20)}")
        )
        descriptions = (
            f"{verb.capitalize()} the {' '.join(thing)}.",
            f"{verb.capitalize()} a {' '.join(thing)}",
        )
    else:
        spoken = " ".join(thing)
        descriptions = (
            f"{verb.capitalize()} the {spoken}.",
            f"{verb.capitalize()} a {spoken}",
            f"{spoken.capitalize()}",
            f"A tool to {verb} a {spoken}.",
            f"Use this to {verb} the {spoken}.",
            f"Returns the {spoken}.",
        )
    drawn = _parameters(rng)
    parameters = []
    for index, one in enumerate(drawn):
        required = index == 0 or rng.random() < 0.7
        said = (
            _says(one.key).capitalize(),
            f"The {_says(one.key)}.",
            f"{_says(one.key)} of the {thing[-1]}",
        )
        parameters.append(Parameter(f"p{index}", (one.key,), one.type, one.choices, required, said))

    def fill(r: Random) -> tuple[Values, Values]:
        made = {f"p{index}": one.make(r) for index, one in enumerate(drawn)}
        return {slot: value for slot, (value, _) in made.items()}, {
            slot: text for slot, (_, text) in made.items()
        }

    return Family(
        frozenset({" ".join(thing), thing[-1]}),
        (name,),
        descriptions,
        tuple(parameters),
        tuple(_request(rng, " ".join(thing), verb, is_query, drawn, parameters) for _ in range(3)),
        fill,
        lambda r, _: _returned(r, thing[-1]),
        ("p0",) if drawn and drawn[0].type in ("string", "integer") and len(drawn) == 1 else (),
    )


def _parameters(rng: Random) -> list[_Drawn]:
    count = rng.choices((0, 1, 2, 3, 4), (5, 40, 32, 17, 6))[0]
    drawn: dict[str, _Drawn] = {}
    kinds: list[Callable[[Random], _Drawn]] = []
    while len(drawn) < count:
        kind = rng.choices(_KINDS, _WEIGHTS)[0]
        if kind in kinds and kind is not _generic:
            continue
        one = kind(rng)
        if one.key in drawn:
            continue
        kinds.append(kind)
        drawn[one.key] = one
    return list(drawn.values())


def _request(
    rng: Random,
    thing: str,
    verb: str,
    is_query: bool,
    drawn: list[_Drawn],
    parameters: list[Parameter],
) -> str:
    """Write a request that mentions every required parameter and some of the others."""
    phrases, last = [], []
    for index, (one, parameter) in enumerate(zip(drawn, parameters, strict=True)):
        if parameter.required or rng.random() < 0.5:
            phrase = one.phrase.replace("{v}", f"{{p{index}}}")
            # A text or a list may contain any words, so it comes last in the request.
            is_last = one.type == "array" or ":" in phrase or "saying" in phrase
            (last if is_last else phrases).append(phrase)
    phrases.sort(key=lambda phrase: not phrase.startswith(" {"))
    mentioned = "".join(phrases + last)
    form = rng.choice(_ASKED[""] if is_query else _ACTIONS)
    return form.format(o=thing, O=thing.capitalize(), p="\0", v=verb, V=verb.capitalize()).replace(
        "\0", mentioned
    )


def _returned(rng: Random, thing: str) -> tuple[Any, str]:
    """Draw a result of any shape and put it into words."""
    makers: tuple[Callable[[Random], Any], ...] = (
        words.number,
        tool_values.phrase,
        words.made_up,
        tool_values.title,
        tool_values.code,
        tool_values.clock,
        tool_values.date,
        words.full_name,
        words.city,
        lambda r: r.random() < 0.5,
        tool_values.word_list,
        lambda r: r.randint(1, 999) / 10,
        words.message,
    )
    chance = rng.random()
    if chance < 0.2:
        returned: Any = rng.choice(DONE)
        return returned, "Done."
    if chance < 0.4:
        value = rng.choice(makers[:9] + makers[12:])(rng)
        return value if isinstance(value, str) else str(value), sentence(value)
    pool = (
        thing,
        "name",
        "value",
        "result",
        "price",
        "status",
        "total",
        "date",
        "city",
        "count",
        "title",
        "text",
        lower_word(rng),
        f"{rng.choice(words.ADJECTIVES)}_{lower_word(rng)}",
        rng.choice(_OBJECTS),
        rng.choice(_NUMBER_NAMES),
    )
    keys = rng.sample(sorted(set(pool)), rng.choice((1, 1, 1, 2, 2, 3)))
    returned = {key: rng.choice(makers)(rng) for key in keys}
    return returned, sentence(returned)
