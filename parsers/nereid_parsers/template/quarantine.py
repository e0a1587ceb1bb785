"""Formats that cannot be inferred by comparing renderings. Their templates are recognised instead.

Each entry names the models and the reason. Keep this list short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nereid_parsers.format import Format, Messages, Route, Sections, Source, Stage


@dataclass(frozen=True, slots=True)
class QuarantineEntry:
    """The format of a template that is recognised by its source.

    Attributes:
        model: The models that have the template.
        reason: Why comparisons cannot infer the format.
        matches: Takes the source of a template and returns whether it is this template.
        make_layout: Returns the layout of the format.
    """

    model: str
    reason: str
    matches: Callable[[str], bool]
    make_layout: Callable[[], Messages | Sections]


def is_harmony(source: str) -> bool:
    """Return whether a template writes messages with channels.

    Example: `<|channel|>analysis<|message|>` starts a message in the channel `analysis`.
    """
    return "<|channel|>analysis" in source and "<|message|>" in source


def is_recipient_lines(source: str) -> bool:
    r"""Return whether a template starts each message with `>>>` and a line with its recipient.

    Example: ">>>all\nHello" is content, and ">>>get_weather\n{..}" is a tool call.
    """
    without_concatenation = source.replace("' ~ '", "")
    if ">>>all" in without_concatenation:
        return True
    return ">>>" in source and "'all" in source and "recipient" in source


def _harmony_layout() -> Messages:
    from nereid_parsers.formats.registry import get_format

    layout = get_format("gpt_oss").layout
    assert isinstance(layout, Messages)
    return layout


def _recipient_lines_layout() -> Messages:
    return Messages(
        start=">>>",
        header_end="\n",
        routes=(Route(Stage.CONTENT, "all"), Route(Stage.CALLS, "{name}")),
    )


QUARANTINE = (
    QuarantineEntry(
        model="openai/gpt-oss-20b, openai/gpt-oss-120b",
        reason="The channel of a message depends on the whole conversation, and the recipient of "
        "a call is written in one of two places. A rendering shows only one of them.",
        matches=is_harmony,
        make_layout=_harmony_layout,
    ),
    QuarantineEntry(
        model="meetkai/functionary-medium-v3.2, functionary-small-v3.2",
        reason="Content and calls are messages to recipients, and the recipient of content is "
        "'all'. The generation prompt opens the first message, so that the first message is "
        "rendered differently from the messages after it.",
        matches=is_recipient_lines,
        make_layout=_recipient_lines_layout,
    ),
)


def find_quarantined(source: str) -> tuple[QuarantineEntry, Format] | None:
    """Return the entry of QUARANTINE that matches a template, and its format; None if none does."""
    for entry in QUARANTINE:
        if entry.matches(source):
            note = Source(f"recognised in its chat template: {entry.model}")
            return entry, Format("recognised", entry.make_layout(), sources=(note,))
    return None
