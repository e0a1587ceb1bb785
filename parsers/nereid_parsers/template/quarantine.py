"""Formats that no comparison reveals, each with the model and the reason. Keep this list short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nereid_parsers.format import Format, Messages, Route, Sections, Source, Stage


@dataclass(frozen=True, slots=True)
class Exceptional:
    """A format that is recognised instead of inferred.

    is_it    looks at the template's source.
    """

    model: str
    reason: str
    is_it: Callable[[str], bool]
    make: Callable[[], Messages | Sections]


def is_harmony(source: str) -> bool:
    """Messages with channels: the markers are spelled out, with a channel called analysis."""
    return "<|channel|>analysis" in source and "<|message|>" in source


def is_recipient_lines(source: str) -> bool:
    """Messages that begin with `>>>` and a recipient's line."""
    return ">>>all" in source.replace("' ~ '", "") or (
        ">>>" in source and "'all" in source and "recipient" in source
    )


def _harmony() -> Messages:
    from nereid_parsers.formats.registry import get_format

    layout = get_format("gpt_oss").layout
    assert isinstance(layout, Messages)
    return layout


def _recipient_lines() -> Messages:
    return Messages(
        start=">>>",
        header_end="\n",
        routes=(Route(Stage.CONTENT, "all"), Route(Stage.CALLS, "{name}")),
    )


QUARANTINE = (
    Exceptional(
        "openai/gpt-oss-20b, openai/gpt-oss-120b",
        "the channel of a message depends on the whole conversation, and a call's recipient is "
        "written in two places: one rendering shows one of them",
        is_harmony,
        _harmony,
    ),
    Exceptional(
        "meetkai/functionary-medium-v3.2, functionary-small-v3.2",
        "content and calls are messages to recipients, 'all' being one of them; the generation "
        "prompt opens the first message, so that it is rendered unlike those that follow",
        is_recipient_lines,
        _recipient_lines,
    ),
)


def exceptional(source: str) -> tuple[Exceptional, Format] | None:
    """The entry that this template's source matches, and its format."""
    for entry in QUARANTINE:
        if entry.is_it(source):
            note = Source(f"recognised in its chat template: {entry.model}")
            return entry, Format("recognised", entry.make(), sources=(note,))
    return None
