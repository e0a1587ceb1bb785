"""What the readers of calls are given, what they give, and what several of them need."""

from __future__ import annotations

from dataclasses import dataclass

from nereid_parsers.format import (
    BareKeyArguments,
    Call,
    JsonArguments,
    NestedTags,
    TaggedArguments,
)
from nereid_parsers.template.difference import MARKER, Row
from nereid_parsers.template.probe import (
    FIRST,
    ID_MARK,
    NUMBER_MARK,
)

NamedBody = JsonArguments | TaggedArguments | BareKeyArguments | NestedTags


@dataclass(frozen=True, slots=True)
class CallTexts:
    """Renderings of calls, each from where the calls begin.

    one         one call of one argument.
    arguments   one call of two arguments.
    number      one call whose argument is the number 41.
    two         two calls of one argument each; "" where only one can be made.
    signs       one call whose argument is SIGNS: text with a line break and signs of markup.
    """

    one: str
    arguments: str
    number: str
    two: str
    signs: str = ""


@dataclass(frozen=True, slots=True)
class FoundCalls:
    """Spellings of a call, and what stands around all of them (`row.open`, `.close`)."""

    form: str
    calls: tuple[Call, ...]
    row: Row


def headed(around: Row, behind_name: str, body: NamedBody) -> tuple[Call, ...]:
    """Calls that are named by a head: `around.item_open`, NAME, `behind_name`."""
    opened, lead = _split_open(around.item_open)
    if (
        isinstance(body, TaggedArguments)
        and opened.strip()
        and body.open.startswith(opened.strip())
    ):
        opened, lead = "", opened + lead  # the marker opens arguments too, so it ends no arguments
    head = f"{escaped(lead)}{{name}}{escaped(behind_name).replace(FIRST, '{name}')}"
    marks = {NUMBER_MARK: "{number}", ID_MARK: "{id}"}
    for mark, slot in marks.items():
        head = head.replace(mark, slot)
    if "functions.{name}:{number}" not in head:
        return (Call(body, open=opened, head=head, close=around.item_close),)
    # The template prints the id that it is given: "functions." was ours, and may be missing.
    identity = "functions.{name}:{number}"
    heads = dict.fromkeys((head, head.replace("functions.{name}", "{name}", 1)))
    heads[head.replace(identity, "{name}", 1)] = None
    ids = [identity, "{name}:{number}", "{id}"]
    return tuple(
        Call(body, open=opened, head=one, close=around.item_close, id=spelled)
        for one, spelled in zip(heads, ids, strict=False)
    )


def _split_open(opened: str) -> tuple[str, str]:
    """(marker before the call, what of the head stands before the name)."""
    match = MARKER.match(opened.lstrip())
    if match is None:
        bare = opened.lstrip()
        return (opened[: len(opened) - len(bare)], bare) if bare else ("", "")
    lead = len(opened) - len(opened.lstrip()) + match.end()
    rest = opened[lead:]
    end = lead + len(rest) - len(rest.lstrip())
    return opened[:end], opened[end:]


def escaped(text: str) -> str:
    """Text as a literal of a pattern."""
    return text.replace("{", "{{").replace("}", "}}")


def in_order(text: str, *words: str) -> bool:
    """Whether the words stand in the text, one behind the other."""
    at = 0
    for word in words:
        at = text.find(word, at)
        if at < 0:
            return False
        at += len(word)
    return True


def cut(text: str, word: str) -> tuple[str, str]:
    """What stands before the first occurrence of `word`, and behind it."""
    before, _, behind = text.partition(word)
    return before, behind
