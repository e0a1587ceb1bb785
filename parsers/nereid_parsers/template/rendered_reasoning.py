"""Find out whether a chat template renders reasoning, and from which fields of a message."""

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
from nereid_parsers.template.probe import Prober

# Some templates print a part of a message as JSON or as a Python dict. This expression matches the
# key in such a text: `'thinking':` in "{'thinking': 'Numbat thinks.'}".
_PRINTED_PART = re.compile(r"""['"](?:thinking|text|thoughts)\\?['"]\s*:""")
# The analysis tries at most this number of settings of the thinking switches. For each setting, it
# renders three answers. For each answer, it tries up to three places for the reasoning, such as the
# field `reasoning_content`. Thus, it renders at most 6 * 3 * 3 = 54 conversations.
_MAX_SETTINGS_TRIED = 6

# Three assistant messages with reasoning. The first message also has content, the second has a tool
# call, and the third has content and a tool call. Some templates render the reasoning of a message
# only if the message has a tool call.
_ANSWERS = (
    AssistantMessage(CONTENT_TEXT, REASONING_TEXT),
    AssistantMessage("", REASONING_TEXT, ONE_CALL),
    AssistantMessage(CONTENT_TEXT, REASONING_TEXT, ONE_CALL),
)


@dataclass(frozen=True, slots=True)
class ReasoningFindings:
    """The findings about how a chat template renders reasoning.

    Attributes:
        part: The reasoning part of the format, with the markers around the reasoning. None if no
            markers were found.
        wrapper: The markers around the content, or None if no comparison shows such markers.
        conversation: A conversation whose reasoning the template renders, or None if the template
            renders no reasoning.
        fields: The message fields from which reasoning is rendered. ("parts",) or ("blocks",) if
            reasoning must be a part of the content, see `InputForm.reasoning_place`.
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


class _RenderedConversation(NamedTuple):
    """A conversation whose reasoning the template renders.

    Attributes:
        conversation: The conversation. The last message has reasoning.
        place: The place in the message from which the template reads the reasoning, as a value of
            `InputForm.reasoning_place`. Example: PARTS, if the reasoning is a part of the content.
    """

    conversation: Conversation
    place: str


def find_rendered_reasoning(turn: ModelTurn) -> ReasoningFindings:
    """Find out whether the template renders reasoning, and how thinking switches change a prompt.

    The result contains a conversation whose reasoning the template renders, the message fields from
    which the template reads the reasoning, and the text that each setting of a switch adds to a
    prompt. The markers of reasoning, the attribute `part` of the result, are still missing.

    Mutates: `turn.prober.form`. From then on, the prober writes the reasoning of a message to the
        place from which the template reads reasoning, for example to the field `reasoning_content`.
    """
    switches = _effects_of_switches(turn.prompts)
    rendered = _find_rendered_conversation(turn)
    if rendered is None:  # The template renders no reasoning.
        return ReasoningFindings(switches=switches)
    conversation, place = rendered
    turn.prober.form = replace(turn.prober.form, reasoning_place=place)
    # If the reasoning is not a part of the content, the template may read several message fields.
    is_in_content = place in (PARTS, BLOCKS)
    fields = (place,) if is_in_content else _rendered_fields(turn.prober, conversation)
    return ReasoningFindings(conversation=conversation, fields=fields, switches=switches)


def _find_rendered_conversation(turn: ModelTurn) -> _RenderedConversation | None:
    """Find a conversation whose reasoning the template renders before the rest of the answer.

    The function renders conversations that differ in three things. It returns the first suitable
    conversation, and the place of the reasoning in its answer:

        the answer      It has content, a tool call, or both. Content alone is tried first.
        the switches    The setting of the thinking switches, such as `enable_thinking=True`.
        the place       The reasoning is in a field of the message, or is a part of the content.

    Return None if the template renders no reasoning.
    """
    # `turn.prompts` contains one prompt for each setting of the thinking switches.
    prompts = turn.prompts[:_MAX_SETTINGS_TRIED]
    settings = [prompt.switches for prompt in prompts] or [NO_SWITCHES]
    places = _possible_places(turn.prober)
    for answer, switches in product(_ANSWERS, settings):
        conversation = Conversation(answer, tools=bool(answer.calls), switches=switches)
        for place in places:
            form = replace(turn.prober.form, reasoning_place=place)
            message = turn.text_after_header(conversation, form)
            if message is not None and _is_rendered_completely(answer, message):
                return _RenderedConversation(conversation, place)
    return None


def _possible_places(prober: Prober) -> list[str]:
    """Return the places in a message from which the template may read reasoning, in trial order.

    Each place is a value of `InputForm.reasoning_place`. At first, the reasoning is written to all
    fields that a template may read, such as `reasoning_content`. The other places are inside the
    content.
    """
    # Templates without the word "blocks" cannot read blocks.
    can_read_blocks = any("blocks" in literal for literal in prober.template.literals)
    if can_read_blocks:
        return [ALL_REASONING_FIELDS, PARTS, BLOCKS]
    return [ALL_REASONING_FIELDS, PARTS]


def _is_rendered_completely(answer: AssistantMessage, text: str) -> bool:
    """Return whether a rendered message contains the reasoning, the content and the tool calls.

    The reasoning must be first. If `answer` has no content or no tool calls, the text need not
    contain any. Return False if the template has printed a part of the message as JSON or as a
    Python dict, because the template then does not expect the reasoning in this field of `answer`.

    >>> answer = AssistantMessage(CONTENT_TEXT, reasoning=REASONING_TEXT)
    >>> _is_rendered_completely(answer, f"<think>{REASONING_TEXT}</think>{CONTENT_TEXT}")
    True
    >>> _is_rendered_completely(answer, f"{{'thinking': '{REASONING_TEXT}'}}{CONTENT_TEXT}")
    False
    """
    _, reasoning, after_reasoning = text.partition(REASONING_TEXT)
    if not reasoning or _PRINTED_PART.search(text):
        return False
    if answer.content and CONTENT_TEXT not in after_reasoning:
        return False
    return not answer.calls or FIRST_TOOL in after_reasoning


def _rendered_fields(prober: Prober, conversation: Conversation) -> tuple[str, ...]:
    """Return the message fields from which the template renders the reasoning of a conversation.

    Example: the result is ("reasoning_content",) for a template that writes
    `{{ message.reasoning_content }}`. The conversation is rendered once for each possible field,
    with the reasoning in this field only.
    """
    rendered_fields = []
    for field_name in REASONING_FIELDS:
        form_with_field = replace(prober.form, reasoning_place=field_name)
        text = prober.render(conversation, form_with_field)
        if text is not None and REASONING_TEXT in text:
            rendered_fields.append(field_name)
    return tuple(rendered_fields)


def _effects_of_switches(prompts: tuple[GenerationPrompt, ...]) -> dict[str, str]:
    """Find the settings that change the end of the prompt. For each of them, return the new end.

    Example: with the setting enable_thinking=False, the prompt ends with the header
    `<|im_start|>assistant` and "<think></think>". The default prompt ends with the header alone.
    The result is {"enable_thinking=False": "<think></think>"}.
    `prompts` contains one prompt for each setting of the switches. The default prompt is first.
    """
    if not prompts:
        return {}
    default, *others = prompts
    effective = [prompt for prompt in others if prompt.after_header != default.after_header]
    # Settings with fewer variables come first, because they make other settings superfluous.
    effective.sort(key=lambda prompt: len(prompt.switches.variables))
    reported: list[GenerationPrompt] = []
    for prompt in effective:
        if not any(_makes_superfluous(other, prompt) for other in reported):
            reported.append(prompt)
    return {prompt.switches.describe(): prompt.after_header for prompt in reported}


def _makes_superfluous(prompt: GenerationPrompt, other: GenerationPrompt) -> bool:
    """Return whether a report that contains `prompt` can leave out `other`.

    The report can leave out `other` if both prompts have the same effect, and `other` sets all
    switches that `prompt` sets. Example: if `a=True` alone has the same effect as `a=True, b=True`,
    only `a=True` is reported.
    """
    has_same_effect = prompt.after_header == other.after_header
    switches = {*prompt.switches.variables, prompt.switches.system}
    return has_same_effect and switches.issubset({*other.switches.variables, other.switches.system})
