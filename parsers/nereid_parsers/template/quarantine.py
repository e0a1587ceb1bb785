"""Describe the output of models whose chat templates the analysis cannot interpret.

The analysis infers a format by comparing renderings of a template. If the renderings do not show
the format, an entry of `QUARANTINE` declares the format instead. Keep this tuple short. An entry
may match a template of another format. The declared format is then not used, because the inferred
format parses more renderings correctly.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from nereid_parsers.format import Format, Messages, Source
from nereid_parsers.formats.registry import get_format

# Matches the start of a message to all, in one expression of a template: `'>>>' ~ 'all'`.
_MESSAGE_TO_ALL = re.compile(r">>>(?:' ~ ')?all")
# A template that writes `>>>` and the recipient in two expressions contains all these texts. The
# text `'all` is the start of a string, such as 'all\n'. The word "recipient" shows that `all` is a
# recipient.
_TEXTS_OF_TWO_EXPRESSIONS = (">>>", "'all", "recipient")


@dataclass(frozen=True, slots=True)
class QuarantineEntry:
    """A chat template from which the analysis cannot infer the format of the model's output.

    Attributes:
        model: The names of the models that have the template.
        reason: The reason why comparisons of renderings cannot infer the format.
        matches: A function that takes the source of a template, and returns whether this entry
            declares the format of the template.
        format_name: The name of the registered format whose layout declares how a message is
            divided into reasoning, content and tool calls.
    """

    model: str
    reason: str
    matches: Callable[[str], bool]
    format_name: str

    def make_format(self, end_markers: tuple[str, ...]) -> Format:
        """Return the declared format, with the inferred markers that end an assistant message."""
        layout = get_format(self.format_name).layout
        assert isinstance(layout, Messages)
        return Format(
            "recognised",
            layout,
            ends=tuple(end for end in end_markers if end not in layout.ends),
            sources=(Source(f"recognised in its chat template: {self.model}"),),
        )


def writes_harmony(source: str) -> bool:
    """Return whether a chat template writes messages in Harmony, the format of gpt-oss models.

    In Harmony, each message has a channel. Example: `<|channel|>analysis<|message|>` starts a
    message in the channel `analysis`.
    """
    return "<|channel|>analysis" in source and "<|message|>" in source


def writes_recipient_lines(source: str) -> bool:
    r"""Return whether a template starts each message with `>>>`, the recipient and a line break.

    Example: ">>>all\nHello" is content, because its recipient is `all`. The message
    ">>>get_weather\n{..}" is a tool call, because its recipient is a function.

    Two templates of this kind are known. One template writes `>>>all` in one expression, and the
    other template writes `>>>` and `all` in two expressions. Their renderings do not show the
    format, so they are recognised by these texts in their source.
    """
    writes_one_expression = _MESSAGE_TO_ALL.search(source) is not None
    writes_two_expressions = all(text in source for text in _TEXTS_OF_TWO_EXPRESSIONS)
    return writes_one_expression or writes_two_expressions


QUARANTINE = (
    QuarantineEntry(
        model="openai/gpt-oss-20b, openai/gpt-oss-120b",
        reason="The channel of a message depends on the whole conversation, and the recipient of "
        "a call is written in one of two places. A rendering shows only one of them.",
        matches=writes_harmony,
        format_name="gpt_oss",
    ),
    QuarantineEntry(
        model="meetkai/functionary-medium-v3.2, functionary-small-v3.2",
        reason="Content and calls are messages to recipients, and the recipient of content is "
        "'all'. The generation prompt opens the first message, so that the first message is "
        "rendered differently from the messages after it.",
        matches=writes_recipient_lines,
        format_name="functionary_v3_2",
    ),
)


def find_quarantined(source: str) -> QuarantineEntry | None:
    """Return the first entry of `QUARANTINE` that matches the source of a template, or None."""
    return next((entry for entry in QUARANTINE if entry.matches(source)), None)
