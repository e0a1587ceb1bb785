"""Find out whether a chat template renders reasoning, and from which fields of a message."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    InputForm,
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
        form: The form of messages from which the template renders reasoning. For example, a field
            of the message contains the reasoning. The caller must render all later messages in this
            form. If the template renders no reasoning, this is the form of the prober.
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

    form: InputForm
    part: Reasoning | None = None
    wrapper: Wrapper | None = None
    conversation: Conversation | None = None
    fields: tuple[str, ...] = ()
    switches: dict[str, str] = field(default_factory=dict)
    inner_headers: tuple[str, ...] = ()


class _ProbeWithReasoning(NamedTuple):
    """A conversation with reasoning, and the form in which its messages are rendered.

    Attributes:
        answer: The last message of the conversation. It has reasoning.
        conversation: The conversation.
        form: The form of the messages. `form.reasoning_place` is the place of the reasoning in a
            message. Example: PARTS, if the reasoning is a part of the content.
    """

    answer: AssistantMessage
    conversation: Conversation
    form: InputForm


def find_rendered_reasoning(turn: ModelTurn) -> ReasoningFindings:
    """Find out whether the template renders reasoning, and how thinking switches change a prompt.

    The result contains a conversation whose reasoning the template renders, the form of its
    messages, the places in a message from which the template reads the reasoning, and the text that
    each setting of a switch adds to a prompt. The attribute `part` of the result, the markers of
    reasoning, is None, because this function does not search for the markers.
    """
    switches = _effects_of_switches(turn.prompts)
    rendered = _find_rendered_probe(turn)
    if rendered is None:  # The template renders no reasoning.
        return ReasoningFindings(turn.prober.form, switches=switches)
    conversation, form = rendered.conversation, rendered.form
    is_part_of_content = form.reasoning_place in (PARTS, BLOCKS)
    if is_part_of_content:
        places: tuple[str, ...] = (form.reasoning_place,)
    else:  # The reasoning was in all fields of the message that a template may read.
        places = _rendered_fields(turn.prober, conversation)
    return ReasoningFindings(form, conversation=conversation, fields=places, switches=switches)


def _find_rendered_probe(turn: ModelTurn) -> _ProbeWithReasoning | None:
    """Find a conversation whose reasoning the template renders before the rest of the answer.

    Return None if the template renders no reasoning.
    """
    for probe in _probes_with_reasoning(turn):
        message = turn.text_after_header(probe.conversation, probe.form)
        if message is not None and _is_rendered_completely(probe.answer, message):
            return probe
    return None


def _probes_with_reasoning(turn: ModelTurn) -> Iterator[_ProbeWithReasoning]:
    """Yield conversations with reasoning, to find one whose reasoning the template renders.

    The answer has content, a tool call, or both. Each answer is combined with the first
    `_MAX_SETTINGS_TRIED` settings of the thinking switches, such as `enable_thinking=True`, and
    with each place of the reasoning, such as a field of the message.
    """
    # `turn.prompts` contains one prompt for each setting of the thinking switches.
    prompts = turn.prompts[:_MAX_SETTINGS_TRIED]
    settings = [prompt.switches for prompt in prompts] or [NO_SWITCHES]
    places = _possible_places(turn.prober)
    for answer, switches, place in product(_ANSWERS, settings, places):
        conversation = Conversation(answer, tools=bool(answer.calls), switches=switches)
        form = replace(turn.prober.form, reasoning_place=place)
        yield _ProbeWithReasoning(answer, conversation, form)


def _possible_places(prober: Prober) -> list[str]:
    """Return the places in a message from which the template may read reasoning.

    Each place is a value of `InputForm.reasoning_place`. The places are tried in the order of the
    result. At first, the reasoning is written to all fields that a template may read, such as
    `reasoning_content`. The other places are inside the content.
    """
    # Templates without the word "blocks" cannot read blocks.
    can_read_blocks = any("blocks" in literal for literal in prober.template.literals)
    if can_read_blocks:
        return [ALL_REASONING_FIELDS, PARTS, BLOCKS]
    return [ALL_REASONING_FIELDS, PARTS]


def _is_rendered_completely(answer: AssistantMessage, text: str) -> bool:
    """Return whether a rendered message contains the reasoning and then the rest of `answer`.

    The rest is the content or the tool calls that `answer` has. Return False if the template has
    printed a part of the message as JSON or as a Python dict, because such a template does not know
    the form of this message.

    >>> answer = AssistantMessage(CONTENT_TEXT, reasoning=REASONING_TEXT)
    >>> _is_rendered_completely(answer, f"<think>{REASONING_TEXT}</think>{CONTENT_TEXT}")
    True
    >>> _is_rendered_completely(answer, f"{{'thinking': '{REASONING_TEXT}'}}{CONTENT_TEXT}")
    False
    """
    if REASONING_TEXT not in text or _PRINTED_PART.search(text) is not None:
        return False
    _, _, after_reasoning = text.partition(REASONING_TEXT)
    is_content_rendered = not answer.content or CONTENT_TEXT in after_reasoning
    are_calls_rendered = not answer.calls or FIRST_TOOL in after_reasoning
    return is_content_rendered and are_calls_rendered


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

    `prompts` contains one prompt for each setting of the switches. The default prompt is first. If
    a=True alone has the same effect as a=True, b=True, the result contains only a=True.
    """
    if not prompts:
        return {}
    default_prompt, *others = prompts
    changed = [prompt for prompt in others if prompt.after_header != default_prompt.after_header]
    # The setting a=True is tried before the setting a=True, b=True, because it has fewer variables.
    by_num_variables = sorted(changed, key=lambda prompt: len(prompt.switches.variables))
    reported: list[GenerationPrompt] = []
    for prompt in by_num_variables:
        if not any(_has_unneeded_switch(prompt, smaller) for smaller in reported):
            reported.append(prompt)
    return {prompt.switches.describe(): prompt.after_header for prompt in reported}


def _has_unneeded_switch(prompt: GenerationPrompt, smaller: GenerationPrompt) -> bool:
    """Return whether `prompt` sets all switches of `smaller`, and ends with the same text.

    Example: `prompt` sets a=True and b=True, and `smaller` sets only a=True. If the two prompts end
    with the same text, b=True is not needed.
    """
    has_same_end = smaller.after_header == prompt.after_header
    switches = {*smaller.switches.variables, smaller.switches.system}
    return has_same_end and switches.issubset({*prompt.switches.variables, prompt.switches.system})
