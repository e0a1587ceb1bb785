"""Determines from the prompt whether the output starts with reasoning or with content."""

from __future__ import annotations

from dataclasses import dataclass

from nereid_parsers.declarations import FormatData, Messages, Opener, Sections, Stage

# The value of `StartPoint.stage` for an output that starts inside the header of a message. The
# header, which the parser has not read yet, determines the stage of the message.
_STAGE_IN_HEADER = None


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

    A prompt may end with the beginning of the model's message, the "prefill". The stage in the
    result is the stage before the prefill. The parser reads the prefill first, and then the output.
    Example: the prompt `"..<|im_start|>assistant\n<think>\n"` gives
    `StartPoint(Stage.CONTENT, prefill="<think>")`. The parser starts in the content, then reads the
    prefill, which opens the reasoning, and then reads the output as reasoning.

    If the prompt is None or empty, the prompt is not known. A rendered prompt is never empty.
    """
    if isinstance(fmt.layout, Sections):
        return _find_start_in_sections(fmt, fmt.layout, prompt)
    return _find_start_in_messages(fmt, fmt.layout, prompt)


def _find_start_in_messages(fmt: FormatData, layout: Messages, prompt: str | None) -> StartPoint:
    """Return the initial state of a parser for a format in which each message has a header.

    Examples for the marker `<|start|>` before each message and `<|end|>` after each message:

        end of the prompt               start of the output
        `..<|end|>`                     inside a header
        `..<|end|><|start|>assistant`   after the prefill `<|start|>assistant`

    The parser reads the prefill before the output. If the prompt is None or empty, the prompt is
    not known, and the output starts inside a header.
    """
    if not prompt:
        return StartPoint(_STAGE_IN_HEADER, is_prompt_known=False)
    prefill = _unfinished_message(fmt, layout, prompt)
    if not prefill.strip():
        return StartPoint(_STAGE_IN_HEADER)
    return _start_before_prefill(prefill)


def _start_before_prefill(prefill: str) -> StartPoint:
    """Return the state of a parser before it reads the prefill, such as `<think>`.

    The stage of this state is CONTENT. When the parser then reads a marker in the prefill, such as
    `<think>` or `<|start|>`, the stage changes.
    """
    return StartPoint(Stage.CONTENT, prefill)


def _find_start_in_sections(fmt: FormatData, layout: Sections, prompt: str | None) -> StartPoint:
    """Return the initial state of a parser for a format in which messages have no headers.

    If the prompt already contains the beginning of the answer, the parser reads this beginning (the
    "prefill") before the output. Example: the prompt `"..<|assistant|><think>"` has the prefill
    `<think>`. If the prompt ends with `<|assistant|>`, the answer has not started, so the format
    decides whether the output starts with reasoning or with content.

    If the prompt is None or empty, the prompt is not known.
    """
    if not prompt:
        stage = _stage_without_prefill(layout, is_prompt_known=False)
        return StartPoint(stage, is_prompt_known=False)
    prefill = _prefill_of(fmt, layout, prompt)
    if not prefill.strip():
        return StartPoint(_stage_without_prefill(layout, is_prompt_known=True))
    return _start_before_prefill(prefill)


def _prefill_of(fmt: FormatData, layout: Sections, prompt: str) -> str:
    r"""Return the beginning of the answer that the prompt already contains, or "".

    Example: the prompt `"..<|assistant|>\n<think>\n"` gives `"\n<think>\n"`, because the format
    declares that `<|assistant|>` starts the answer. If the prompt contains no such marker, the
    start of the answer is not known. Then only a marker at the end of the prompt is returned.
    """
    text_after_turn = _text_after_turn(fmt, prompt)
    return _marker_at_end(layout, prompt) if text_after_turn is None else text_after_turn


def _text_after_turn(fmt: FormatData, prompt: str) -> str | None:
    r"""Return the text after the last marker in `prompt` that starts an assistant message.

    `fmt.turn` contains the markers that may open the turn. Return None if the prompt contains none
    of these markers. Example: if the marker is `"<|assistant|>"`, the prompt
    `"..<|assistant|>\n<think>\n"` gives `"\n<think>\n"`.
    """
    turn_markers = [turn.strip() for turn in fmt.turn if turn.strip()]
    ends = [prompt.rindex(marker) + len(marker) for marker in turn_markers if marker in prompt]
    return prompt[max(ends) :] if ends else None


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
    visible_prompt = prompt.rstrip()
    visible_markers = [marker.strip() for marker in markers if marker.strip()]
    markers_at_end = [marker for marker in visible_markers if visible_prompt.endswith(marker)]
    # If a prompt ends with both `<b>` and `<a><b>`, the result is the longer marker, `<a><b>`.
    return max(markers_at_end, key=len, default="")


def _unfinished_message(fmt: FormatData, layout: Messages, prompt: str) -> str:
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
    if not layout.ends:
        return _continued_message(fmt, message_start, prompt)
    last_message = prompt[last_start:]
    is_closed = any(end in last_message for end in layout.ends)
    return "" if is_closed else last_message


def _continued_message(fmt: FormatData, message_start: str, prompt: str) -> str:
    """Return the beginning of the model's message at the end of the prompt, or "".

    The format has no markers that end messages, so the last message may be complete. The model
    continues this message only in two cases. Examples for the marker `>>>` before each message, and
    the marker `<|assistant|>` that starts the model's turn:

        end of the prompt     result
        `..>>>`               `>>>`, because the last message has only started
        `..<|assistant|>Hi`   `Hi`, because the model's turn has started
        any other text        ""

    `message_start` is the marker before each message. This marker is never empty.
    """
    if prompt.rstrip().endswith(message_start):
        return message_start
    return _text_after_turn(fmt, prompt) or ""
