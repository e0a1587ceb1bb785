"""Render messages with tool calls, and extract the text of the tool calls."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nereid_parsers.format import Reasoning, Wrapper
from nereid_parsers.template.content import strip_reasoning_markers
from nereid_parsers.template.conversation import ProbeCall, conversation_with_calls
from nereid_parsers.template.model_turn import ModelTurn


@dataclass(frozen=True, slots=True)
class CallRenderer:
    """Renders messages with tool calls.

    Attributes:
        turn: The text around the model's answers in the renderings. `turn.prober` renders the
            conversations.
        reasoning: The markers of reasoning, or None.
        wrapper: The markers around the content, or None.
    """

    turn: ModelTurn
    reasoning: Reasoning | None = None
    wrapper: Wrapper | None = None

    def text_of_calls(self, *calls: ProbeCall) -> str:
        """Return the text that a model would generate to make these tool calls.

        The markers of empty reasoning and of empty content before the tool calls are removed.
        Return "" if the template fails to render the tool calls. Example:
        "<think></think><call>..</call>" gives "<call>..</call>".
        """
        text = self.turn.generated_text(conversation_with_calls(*calls)) or ""
        text = strip_reasoning_markers(text, self.reasoning)
        return text if self.wrapper is None else _strip_wrapper(text, self.wrapper)


def _strip_wrapper(text: str, wrapper: Wrapper) -> str:
    """Remove the markers around the content from the start of `text` if the content is empty.

    Some templates write these markers even if a message has only tool calls. If the markers enclose
    content, `text` is returned unchanged. If no marker closes the content, the opening marker is
    removed.

    >>> _strip_wrapper("<answer></answer><call>..", Wrapper("<answer>", "</answer>"))
    '<call>..'
    >>> _strip_wrapper("<answer>Hi.</answer><call>..", Wrapper("<answer>", "</answer>"))
    '<answer>Hi.</answer><call>..'
    """
    opening = wrapper.open.strip()
    closing = wrapper.close.strip()  # "" if no marker closes the content
    if not opening:
        return text
    empty_content = rf"\s*{re.escape(opening)}"
    if closing:
        empty_content += rf"\s*{re.escape(closing)}"
    match = re.match(empty_content, text)
    return text if match is None else text[match.end() :]
