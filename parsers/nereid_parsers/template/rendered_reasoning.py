"""Find out in which conversations, and from which message fields, a template renders reasoning."""

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

# Matches a part of a message that the template printed as JSON or as a Python dict.
_PRINTED_PART = re.compile(r"""['"](?:thinking|text|thoughts)\\?['"]\s*:""")
_MAX_SWITCHES_TRIED = 6

# Assistant messages with reasoning, in the order in which they are rendered. Some templates render
# reasoning only in messages with tool calls.
_ANSWERS = (
    AssistantMessage(CONTENT_TEXT, REASONING_TEXT),
    AssistantMessage("", REASONING_TEXT, ONE_CALL),
    AssistantMessage(CONTENT_TEXT, REASONING_TEXT, ONE_CALL),
)


@dataclass(frozen=True, slots=True)
class ReasoningFindings:
    """The result of all comparisons that concern reasoning.

    Attributes:
        part: The reasoning part of the format, or None if no markers were found.
        wrapper: The markers around the content, if a comparison shows them.
        conversation: A conversation whose reasoning the template renders, or None if there is none.
        fields: The message fields from which reasoning is rendered. ("parts",) or ("blocks",) if
            reasoning must be a part of the content, see `InputForm.reasoning`.
        switches: The text that each switch puts after the header in the generation prompt, if that
            text differs from the default. Example: {"enable_thinking=False": "<think></think>"}.
        inner_headers: Headers that the model itself writes between the reasoning and the content.
    """

    part: Reasoning | None = None
    wrapper: Wrapper | None = None
    conversation: Conversation | None = None
    fields: tuple[str, ...] = ()
    switches: dict[str, str] = field(default_factory=dict)
    inner_headers: tuple[str, ...] = ()


def find_rendered_reasoning(turn: ModelTurn) -> ReasoningFindings:
    """Find a conversation in which reasoning is rendered, and the effect of each thinking switch.

    The effect of a thinking switch, such as `enable_thinking=False`, is the text that the switch
    adds to the generation prompt. The result does not contain the markers of reasoning, because
    later comparisons infer the markers.

    Mutates: `turn.prober.form`. The prober then writes the reasoning of a message into the field
    from which the template reads reasoning, for example into `reasoning_content`.

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
        conversation: The conversation.
        place: The place of the reasoning in the message, see `InputForm.reasoning`.
    """

    conversation: Conversation
    place: str


def _find_conversation(turn: ModelTurn) -> _RenderedReasoning | None:
    """Try several conversations until the template renders the reasoning of one of them.

    The conversations differ in the kind of answer, in the setting of the thinking switches (such as
    `enable_thinking`), and in the place of the reasoning in the message, for example in a field or
    in a part of the content. Return None if the template renders no reasoning.
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
    """Return the locations in a message from which the template may read reasoning.

    `InputForm.reasoning` describes the locations. Only a template that contains the word "blocks"
    can read reasoning from blocks.
    """
    mentions_blocks = any("blocks" in literal for literal in turn.prober.template.literals)
    if mentions_blocks:
        return [ALL_REASONING_FIELDS, PARTS, BLOCKS]
    return [ALL_REASONING_FIELDS, PARTS]


def _is_rendered(answer: AssistantMessage, text: str) -> bool:
    """Return whether a template has rendered the reasoning of `answer`.

    The reasoning must precede the content and the tool calls. The result is also False if `text`,
    the rendered answer, contains a part of the message as JSON or as a Python dict, because the
    template then does not expect the reasoning in this place of the message.

    >>> answer = AssistantMessage(CONTENT_TEXT, reasoning=REASONING_TEXT)
    >>> _is_rendered(answer, f"<think>{REASONING_TEXT}</think>{CONTENT_TEXT}")
    True
    >>> _is_rendered(answer, f"{{'thinking': '{REASONING_TEXT}'}}{CONTENT_TEXT}")
    False
    """
    _, reasoning, after = text.partition(REASONING_TEXT)
    if not reasoning or _PRINTED_PART.search(text):
        return False
    # A part of the message that is empty need not be rendered.
    is_content_rendered = not answer.content or CONTENT_TEXT in after
    is_call_rendered = not answer.calls or FIRST_TOOL in after
    return is_content_rendered and is_call_rendered


def _rendered_fields(turn: ModelTurn, conversation: Conversation) -> tuple[str, ...]:
    """Return the message fields from which the template renders reasoning.

    The conversation is rendered once for each field, with the reasoning in this field only.
    Example: ("reasoning_content",) for a template that contains `message.reasoning_content`. If the
    template reads the reasoning from the content of a message, the result is ("parts",) or
    ("blocks",), the name of the form of this content.
    """
    form = turn.prober.form
    is_in_content = form.reasoning in (PARTS, BLOCKS)
    if is_in_content:
        return (form.reasoning,)
    rendered_fields = []
    for field_name in REASONING_FIELDS:
        form_with_field = replace(form, reasoning=field_name)
        text = turn.prober.render(conversation, form_with_field)
        if text is not None and REASONING_TEXT in text:
            rendered_fields.append(field_name)
    return tuple(rendered_fields)


def _effects_of_switches(turn: ModelTurn) -> dict[str, str]:
    """For each thinking switch, return the text that the switch adds to the generation prompt.

    A thinking switch is a template variable such as `enable_thinking`. The generation prompt is the
    text that opens the model's answer. Example: if the only effective switch is `enable_thinking`,
    the result is {"enable_thinking=False": "<think></think>"}.

    `turn.prompts` contains one prompt for each setting of the switches. Settings without an effect
    are omitted. A setting of several switches is also omitted if some of these switches alone have
    the same effect.
    """
    if not turn.prompts:
        return {}
    default, *others = turn.prompts
    effective = [prompt for prompt in others if prompt.after_header != default.after_header]
    # Prompts with fewer switches come first, so that the loop compares larger settings with them.
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
    """Return whether `smaller` has the same text as `prompt`, but only some of its switches.

    The compared text is the text after the header.
    """
    all_switches = {*prompt.switches.variables, prompt.switches.system}
    some_switches = {*smaller.switches.variables, smaller.switches.system}
    has_same_effect = smaller.after_header == prompt.after_header
    return has_same_effect and some_switches <= all_switches
