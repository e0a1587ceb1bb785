"""Find a conversation whose reasoning a template renders, and the fields that contain reasoning."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

from nereid_parsers.format import Reasoning, Wrapper
from nereid_parsers.template.conversation import (
    ALL_REASONING_FIELDS,
    BLOCKS,
    CONTENT_TEXT,
    FIRST_TOOL,
    NO_SWITCHES,
    ONE_CALL,
    PARTS,
    REASONING_FIELDS,
    REASONING_TEXT,
    AssistantMessage,
    Conversation,
)
from nereid_parsers.template.model_turn import GenerationPrompt, ModelTurn

# Matches the start of a message part that the template has written as JSON or as a Python dict:
# the text `'thinking':` in "{'thinking': 'Numbat thinks.'}".
_PRINTED_PART = re.compile(r"""['"](?:thinking|text|thoughts)\\?['"]\s*:""")
_MAX_SWITCHES_TRIED = 6

# Three assistant messages with reasoning. The first also has content, the second has a tool call,
# and the third has both. Some templates render reasoning only in messages with tool calls.
_ANSWERS = (
    AssistantMessage(CONTENT_TEXT, REASONING_TEXT),
    AssistantMessage("", REASONING_TEXT, ONE_CALL),
    AssistantMessage(CONTENT_TEXT, REASONING_TEXT, ONE_CALL),
)


@dataclass(frozen=True, slots=True)
class ReasoningFindings:
    """The result of all comparisons that concern reasoning.

    Attributes:
        part: The reasoning part of the format, with the markers around the reasoning. None if no
            markers were found.
        wrapper: The markers around the content, or None if no comparison shows such markers.
        conversation: A conversation whose reasoning the template renders, or None if the template
            renders no reasoning.
        fields: The message fields from which reasoning is rendered. ("parts",) or ("blocks",) if
            reasoning must be a part of the content, see `InputForm.reasoning`.
        switches: The effect of each thinking switch: the text after the header in the generation
            prompt. Example: {"enable_thinking=False": "<think></think>"}. Settings with the default
            text are omitted.
        inner_headers: The turn markers that the model writes between the reasoning and the content,
            such as `<|start|>assistant`.
    """

    part: Reasoning | None = None
    wrapper: Wrapper | None = None
    conversation: Conversation | None = None
    fields: tuple[str, ...] = ()
    switches: dict[str, str] = field(default_factory=dict)
    inner_headers: tuple[str, ...] = ()


def find_rendered_reasoning(turn: ModelTurn) -> ReasoningFindings:
    """Find a conversation whose reasoning the template renders, and the effects of switches.

    A thinking switch is a template variable such as `enable_thinking`. The effect of a switch is
    the text that the switch adds to the generation prompt, for example "<think></think>". Later
    comparisons infer the markers of the reasoning, so `part` of the result is None.

    Mutates: `turn.prober.form`. The prober then writes the reasoning of each message into the place
    from which the template reads reasoning, for example into the field `reasoning_content`.

    Args:
        turn: The text around the model's answers. `turn.prober` renders the conversations.
    """
    switches = _effects_of_switches(turn)
    rendered = _find_conversation(turn)
    if rendered is None:  # The template renders no reasoning.
        return ReasoningFindings(switches=switches)
    turn.prober.form = replace(turn.prober.form, reasoning=rendered.place)
    return ReasoningFindings(
        conversation=rendered.conversation,
        fields=_rendered_fields(turn, rendered.conversation),
        switches=switches,
    )


class _RenderedReasoning(NamedTuple):
    """A conversation whose reasoning the template renders.

    Attributes:
        conversation: The conversation, whose last message contains reasoning.
        place: The place of the reasoning in this message, see `InputForm.reasoning`.
    """

    conversation: Conversation
    place: str


def _find_conversation(turn: ModelTurn) -> _RenderedReasoning | None:
    """Return the first of several conversations whose reasoning the template renders, or None.

    Three things are varied: the assistant message (with content, with a tool call, or with both),
    the setting of the thinking switches such as `enable_thinking`, and the place of the reasoning
    in the message. The place is a field of the message, or a part of the content.
    """
    settings = [prompt.switches for prompt in turn.prompts[:_MAX_SWITCHES_TRIED]] or [NO_SWITCHES]
    places = _possible_places(turn)
    for answer, switches, place in product(_ANSWERS, settings, places):
        form = replace(turn.prober.form, reasoning=place)
        conversation = Conversation(answer, tools=bool(answer.calls), switches=switches)
        text = turn.text_after_header(conversation, form)
        if text is not None and _is_rendered(answer, text):
            return _RenderedReasoning(conversation, place)
    return None


def _possible_places(turn: ModelTurn) -> list[str]:
    """Return the places in a message from which the template may read reasoning.

    The places are fields such as `reasoning_content`, a part of the content (PARTS), and a block of
    the content (BLOCKS), see `InputForm.reasoning`. BLOCKS is included only if the template
    contains the word "blocks", because other templates cannot read blocks.
    """
    mentions_blocks = any("blocks" in literal for literal in turn.prober.template.literals)
    if mentions_blocks:
        return [ALL_REASONING_FIELDS, PARTS, BLOCKS]
    return [ALL_REASONING_FIELDS, PARTS]


def _is_rendered(answer: AssistantMessage, text: str) -> bool:
    """Return whether `text`, a rendered assistant message, contains the reasoning of `answer`.

    The reasoning must precede the content and the tool calls. If `text` contains a part of the
    message as JSON or as a Python dict, the result is False. Such a text shows that the template
    does not expect the reasoning in this place of the message.

    >>> answer = AssistantMessage(CONTENT_TEXT, reasoning=REASONING_TEXT)
    >>> _is_rendered(answer, f"<think>{REASONING_TEXT}</think>{CONTENT_TEXT}")
    True
    >>> _is_rendered(answer, f"{{'thinking': '{REASONING_TEXT}'}}{CONTENT_TEXT}")
    False
    """
    _, reasoning, after = text.partition(REASONING_TEXT)
    if not reasoning or _PRINTED_PART.search(text):
        return False
    # Only the content and the tool calls that the message contains must follow the reasoning.
    is_content_rendered = not answer.content or CONTENT_TEXT in after
    is_call_rendered = not answer.calls or FIRST_TOOL in after
    return is_content_rendered and is_call_rendered


def _rendered_fields(turn: ModelTurn, conversation: Conversation) -> tuple[str, ...]:
    """Return the message fields from which the template renders reasoning.

    The conversation, which contains reasoning, is rendered once for each possible field, with the
    reasoning in this field only. Example: the result is ("reasoning_content",) for a template that
    writes `{{ message.reasoning_content }}`. If the template reads the reasoning from a part of the
    content, the result is ("parts",) or ("blocks",).
    """
    form = turn.prober.form
    is_part_of_content = form.reasoning in (PARTS, BLOCKS)
    if is_part_of_content:
        return (form.reasoning,)
    rendered_fields = []
    for field_name in REASONING_FIELDS:
        form_with_field = replace(form, reasoning=field_name)
        text = turn.prober.render(conversation, form_with_field)
        if text is not None and REASONING_TEXT in text:
            rendered_fields.append(field_name)
    return tuple(rendered_fields)


def _effects_of_switches(turn: ModelTurn) -> dict[str, str]:
    """Return the text that each setting of the thinking switches adds to the generation prompt.

    A thinking switch is a template variable such as `enable_thinking`. The generation prompt is the
    text that opens the model's answer. `turn.prompts` contains one generation prompt for each
    setting. Example: {"enable_thinking=False": "<think></think>"} is the result if this setting
    adds "<think></think>" after the header `<|im_start|>assistant`.

    Two kinds of settings are omitted: settings without an effect, and settings of several switches
    if some of these switches alone have an equal effect.
    """
    if not turn.prompts:
        return {}
    default, *others = turn.prompts
    effective = [prompt for prompt in others if prompt.after_header != default.after_header]
    # Settings of fewer switches come first, so that the loop can compare larger settings with them.
    effective.sort(key=lambda prompt: len(prompt.switches.variables))
    reported: list[GenerationPrompt] = []
    for prompt in effective:
        has_superfluous_switches = any(
            _has_same_effect_with_fewer_switches(smaller, prompt) for smaller in reported
        )
        if not has_superfluous_switches:
            reported.append(prompt)
    return {prompt.switches.describe(): prompt.after_header for prompt in reported}


def _has_same_effect_with_fewer_switches(
    smaller: GenerationPrompt, prompt: GenerationPrompt
) -> bool:
    """Return whether `smaller` sets only some switches of `prompt`, but has the text of `prompt`.

    The compared text is `after_header`. Example: `smaller` sets `enable_thinking=False`, `prompt`
    sets this switch and `low_effort=True`, and both prompts end with "<think></think>".
    """
    all_switches = {*prompt.switches.variables, prompt.switches.system}
    some_switches = {*smaller.switches.variables, smaller.switches.system}
    has_same_effect = smaller.after_header == prompt.after_header
    return has_same_effect and some_switches <= all_switches
