"""Render messages with tool calls, and extract the text of the tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from nereid_parsers.format import Reasoning, Wrapper
from nereid_parsers.template.content import strip_reasoning_markers
from nereid_parsers.template.conversation import ProbeCall, conversation_with_calls
from nereid_parsers.template.model_turn import ModelTurn


@dataclass(frozen=True, slots=True)
class CallRenderer:
    """Renders messages with tool calls, and extracts the text of the tool calls.

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
        """Return the text that a model would generate to make the given tool calls.

        The markers of empty reasoning and of empty content before the tool calls are removed.
        Return "" if the template fails to render the tool calls. Example:
        "<think></think><call>..</call>" gives "<call>..</call>".
        """
        text = self.turn.generated_text(conversation_with_calls(*calls)) or ""
        text = strip_reasoning_markers(text, self.reasoning)
        return text if self.wrapper is None else _strip_empty_content(text, self.wrapper)


def _strip_empty_content(text: str, wrapper: Wrapper) -> str:
    """Remove the markers of empty content, such as `<answer></answer>`, from the start of `text`.

    Some templates write the markers of content even if a message has only tool calls. A text that
    starts with other content is returned unchanged.

    >>> _strip_empty_content("<answer></answer><call>..", Wrapper("<answer>", "</answer>"))
    '<call>..'
    >>> _strip_empty_content("<answer>Hi.</answer><call>..", Wrapper("<answer>", "</answer>"))
    '<answer>Hi.</answer><call>..'

    If `wrapper.close` is "", no marker closes the content, and only the opening marker is removed.
    """
    opening = wrapper.open.strip()
    closing = wrapper.close.strip()
    message = text.lstrip()
    if not opening or not message.startswith(opening):
        return text
    after_opening = message.removeprefix(opening)
    if not closing:
        return after_opening
    content = after_opening.lstrip()
    if not content.startswith(closing):
        return text  # The content is not empty.
    return content.removeprefix(closing)
