"""Determines from the prompt whether the output starts with reasoning or with content."""

from __future__ import annotations

from dataclasses import dataclass

from nereid_parsers.declarations import FormatData, Messages, Opener, Sections, Stage


@dataclass(frozen=True, slots=True)
class StartPoint:
    """The state in which a parser starts.

    Attributes:
        stage: The stage, or None if the output starts inside the header of a message.
        prefill: The beginning of the message that the prompt already contains, or "". The parser
            reads the prefill before the output, and returns no events for the prefill.
        is_prompt_known: Whether a prompt was given. Without a prompt, the true stage is not known.
    """

    stage: Stage | None
    prefill: str = ""
    is_prompt_known: bool = True


def find_start(fmt: FormatData, prompt: str | None) -> StartPoint:
    r"""Return the initial state of a parser for the output that follows `prompt`.

    A prompt may end with the beginning of the model's message, the "prefill". Example: the prompt
    `"..<|im_start|>assistant\n<think>\n"` gives `StartPoint(Stage.CONTENT, prefill="<think>")`. The
    parser starts in the content, and reads the prefill before the output. Then it is in the
    reasoning. The line break after `<think>` is not needed, because it belongs to the marker.

    An empty prompt is treated like None, which means that the prompt is not known, because a
    rendered prompt is never empty.
    """
    if isinstance(fmt.layout, Messages):
        return _find_start_in_messages(fmt, fmt.layout, prompt)
    return _find_start_in_sections(fmt, fmt.layout, prompt)


def _text_after_turn(fmt: FormatData, prompt: str) -> str | None:
    r"""Return the text after the last marker in `prompt` that starts an assistant message.

    `fmt.turn` contains the markers that may open the turn. Return None if the prompt contains none
    of these markers. Example: if the marker is `"<|assistant|>"`, the prompt
    `"..<|assistant|>\n<think>\n"` gives `"\n<think>\n"`.
    """
    turn_markers = [turn.strip() for turn in fmt.turn if turn.strip()]
    ends = [prompt.rindex(marker) + len(marker) for marker in turn_markers if marker in prompt]
    return prompt[max(ends) :] if ends else None


def _find_start_in_sections(fmt: FormatData, layout: Sections, prompt: str | None) -> StartPoint:
    """Return the initial state of a parser for output that is one text, not a list of messages.

    The result contains the "prefill", the beginning of the answer that the prompt contains.
    Examples: the prompt `"..<|assistant|><think>"` has the prefill `<think>`, and the prompt
    `"..<|assistant|>"` has no prefill.
    """
    if not prompt:  # A rendered prompt is never empty, so an empty prompt is not known, either.
        # If the format normally writes `<think>` into the prompt, the output starts in reasoning.
        stage = _stage_without_prefill(layout, is_prompt_known=False)
        return StartPoint(stage, is_prompt_known=False)
    prefill = _text_after_turn(fmt, prompt)
    if prefill is None:  # The prompt contains no declared text that starts an answer.
        prefill = _marker_at_end(layout, prompt)
    if prefill.strip():
        # The prompt contains the beginning of the answer (the "prefill"). The parser starts in the
        # stage CONTENT, and parses the prefill before the output. A prefill such as `<think>`
        # changes the stage to REASONING.
        return StartPoint(Stage.CONTENT, prefill)
    return StartPoint(_stage_without_prefill(layout, is_prompt_known=True))


def _stage_without_prefill(layout: Sections, *, is_prompt_known: bool) -> Stage:
    """Return the part of the message that the model writes first: the reasoning or the content.

    The prompt contains no part of the model's message, as far as is known. The result depends on
    the format's declaration of who writes the opening marker of the reasoning, such as `<think>`:

        opener          the marker is written by       prompt is known   prompt is not known
        FORCED          nobody: reasoning comes first  reasoning         reasoning
        PROMPT          the prompt, if at all          content           reasoning
        MODEL, EITHER   the model, if at all           content           content
        no reasoning                                   content           content
    """
    if layout.reasoning is None:
        return Stage.CONTENT
    match layout.reasoning.opener:
        case Opener.FORCED:
            return Stage.REASONING
        case Opener.PROMPT if not is_prompt_known:
            return Stage.REASONING
        case _:
            return Stage.CONTENT


def _marker_at_end(layout: Sections, prompt: str) -> str:
    r"""Return the marker with which the prompt ends, or "" if the prompt ends with other text.

    The end of the prompt is compared with the markers of the reasoning, of the content and of the
    tool calls. Markers elsewhere in the prompt are ignored, because the texts of users and system
    prompts may mention markers. Example: `"..assistant\n<think>\n"` gives `"<think>"`.
    """
    markers: list[str] = []
    if layout.reasoning is not None:
        markers += [*layout.reasoning.opens, *layout.reasoning.closes]
    if layout.content is not None:
        markers.append(layout.content.open)
    if layout.tools is not None:
        # A trigger is the text that starts a tool call, such as `<tool_call>`.
        markers += [*layout.tools.opens, *(call.trigger for call in layout.tools.calls)]
    visible_markers = [marker.strip() for marker in markers]
    visible_prompt = prompt.rstrip()
    markers_at_end = [marker for marker in visible_markers if visible_prompt.endswith(marker)]
    # If a prompt ends with both `<b>` and `<a><b>`, the result is the longer marker, `<a><b>`.
    return max(markers_at_end, key=len, default="")


def _find_start_in_messages(fmt: FormatData, layout: Messages, prompt: str | None) -> StartPoint:
    """Return the initial state of a parser for output that is a sequence of messages.

    Examples: the prompt `"..<|end|><|start|>assistant"` ends with an unfinished message, so
    `<|start|>assistant` is the prefill. The prompt `"..<|end|>"` has no prefill, so the output
    starts with the header of a message.
    """
    if not prompt:  # A rendered prompt is never empty, so an empty prompt is not known, either.
        return StartPoint(stage=None, is_prompt_known=False)
    prefill = _open_message(fmt, layout, prompt)
    if prefill.strip():
        # The prompt ends with an unfinished message, the "prefill". The parser starts in the stage
        # CONTENT, and parses the prefill before the output. If the prefill starts with the start
        # marker of a message, the parser leaves this stage and reads the header of the message.
        return StartPoint(Stage.CONTENT, prefill)
    return StartPoint(stage=None)  # None means that the output starts with a header.


def _open_message(fmt: FormatData, layout: Messages, prompt: str) -> str:
    """Return the unfinished message at the end of the prompt, or "" if there is no such message.

    The model continues the unfinished message. Examples, for the marker `<|start|>` before each
    message and the marker `<|end|>` after each message:

        end of the prompt               result
        `..<|end|><|start|>assistant`   `<|start|>assistant`
        `..<|start|>user..<|end|>`      "", because the last message is complete
    """
    message_start = layout.start.strip()  # Never empty, because `Messages` rejects this.
    last_start = prompt.rfind(message_start)
    if last_start < 0:  # The prompt contains no message.
        return ""
    if not layout.ends:  # No end marker can show that the last message is complete.
        return _open_message_without_ends(fmt, message_start, prompt)
    last_message = prompt[last_start:]
    is_closed = any(end in last_message for end in layout.ends)
    return "" if is_closed else last_message


def _open_message_without_ends(fmt: FormatData, message_start: str, prompt: str) -> str:
    """Return the unfinished last message of a prompt whose messages have no end markers.

    Without end markers, the prompt does not show whether the last message is complete. Two texts
    show that the model continues a message:

        `..>>>`                The prompt ends with the marker before each message, here `>>>`. The
                               result is this marker.
        `..<|assistant|>Hi`    The prompt contains the text that opens the model's turn, here
                               `<|assistant|>`. The result is the text after it, `Hi`.

    In all other cases, the result is "".
    """
    if prompt.rstrip().endswith(message_start):
        return message_start
    return _text_after_turn(fmt, prompt) or ""
