"""Find the markup before a tool call in a message that has both content and a tool call."""

from __future__ import annotations

from typing import NamedTuple

from nereid_parsers.template.calls.call_renderer import CallRenderer
from nereid_parsers.template.content import strip_reasoning_markers
from nereid_parsers.template.conversation import (
    CONTENT_TEXT,
    FIRST_TOOL,
    ONE_CALL,
    conversation_with_calls,
)
from nereid_parsers.template.markup.difference import text_between
from nereid_parsers.template.markup.markers import leading_marker, markers
from nereid_parsers.template.probe import Prober

# The answer of this conversation has content and a tool call.
_CONTENT_AND_CALL = conversation_with_calls(*ONE_CALL, content=CONTENT_TEXT)


class MarkupBeforeCall(NamedTuple):
    """The markup before the tool call in a message with content and a tool call.

    Attributes:
        turn_markers: The markers, such as `<|end|>` and `<|start|>assistant`, between the turn of
            the content and the turn of the tool call. Empty if the message is one turn.
        content_opening: The text that opens the content, such as `<|note|>`, if it differs from the
            text that opens the content of messages without tool calls. Otherwise, "".
    """

    turn_markers: tuple[str, ...]
    content_opening: str

    def inner_headers(self) -> tuple[str, ...]:
        """Return all this markup as the value of `ToolFindings.inner_headers`."""
        if not self.content_opening:
            return self.turn_markers
        return (*self.turn_markers, self.content_opening)


def find_markup_before_call(renderer: CallRenderer) -> MarkupBeforeCall | None:
    """Render a message with content and a tool call. Return the markup before the tool call.

    The result has two parts:

    - `turn_markers`: Some templates write the content and the tool call as two turns, as in
      "CONTENT<|end|><|start|>assistant<call>..". In this example, the markers are `<|end|>`, which
      ends the first turn, and `<|start|>assistant`, which opens the second turn.
    - `content_opening`: Some templates open the content with `<|note|>` if a tool call follows, but
      with `<|answer|>` in a message without tool calls. In this example, the text is `<|note|>`.

    Return None if the template does not render both the content and the tool call.
    """
    message = renderer.turn.text_after_header(_CONTENT_AND_CALL) or ""
    between = text_between(message, CONTENT_TEXT, FIRST_TOOL)
    if between is None:
        return None
    before_content, _, _ = message.partition(CONTENT_TEXT)
    return MarkupBeforeCall(
        turn_markers=_turn_markers_between(between, renderer.turn.header.strip()),
        content_opening=_opening_only_with_calls(renderer, before_content),
    )


def _opening_only_with_calls(renderer: CallRenderer, before_content: str) -> str:
    """Return the special marker that opens the content if a tool call follows the content, or "".

    The result is "" if the same marker, or no marker, opens the content without a tool call.

    `before_content` is the text before the content of a message with a tool call. The wrapper of
    the renderer contains the texts around the content of messages without tool calls. In these
    examples, `renderer.wrapper.open` is `<|answer|>`:

        before_content   result
        `<|note|>`       `<|note|>`
        `<|answer|>`     "", because this text does not depend on the tool call
    """
    usual_wrapper = renderer.wrapper
    if usual_wrapper is None:
        return ""  # No text opens the content of messages without tool calls.
    opening = strip_reasoning_markers(before_content, renderer.reasoning).strip()
    if not leading_marker(opening):
        return ""  # The text is not a marker, so it belongs to the content.
    return "" if opening == usual_wrapper.open.strip() else opening


def _turn_markers_between(between: str, header: str) -> tuple[str, ...]:
    """If the content and the tool call are in two turns, return the markers between the turns.

    Between two turns, an end marker closes the first turn, and the header opens the second turn.
    The result contains the header and the first end marker, if there is one. The parser removes
    each of these texts, so their order has no meaning. If there is only one turn, the result is ().

    >>> _turn_markers_between("<|end|><|start|>assistant<call>", header="<|start|>assistant")
    ('<|start|>assistant', '<|end|>')
    >>> _turn_markers_between("<call>", header="<|start|>assistant")
    ()
    """
    has_two_turns = bool(header) and header in between
    if not has_two_turns:
        return ()
    end_of_first_turn, _, _ = between.partition(header)
    end_markers = markers(end_of_first_turn)
    return (header, *end_markers[:1])


def record_content_before_call(prober: Prober, before_call: MarkupBeforeCall) -> None:
    """Record for the report how a template writes a message with both content and a tool call.

    The report calls this comparison "T8": a message with a tool call is compared with a message
    with content and the same tool call. `before_call` is the markup before this tool call.

    Mutates: `prober.comparisons`.
    """
    if before_call.turn_markers:  # The markers between the turns of the content and of the call.
        finding = "Content and calls are written as separate turns."
    else:
        finding = "Content is written before the call."
    prober.record(
        "T8 content before a call",
        "The message has content.",
        left=conversation_with_calls(*ONE_CALL),
        right=_CONTENT_AND_CALL,
        finding=finding,
    )
