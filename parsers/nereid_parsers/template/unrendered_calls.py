"""Recognise the tool calls of a model whose chat template does not render tool calls.

Such a template only describes the tools to the model. The registry of formats then supplies the
format of the tool calls, if the markers of a registered format occur in the template or in the
vocabulary.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from nereid_parsers.format import ToolSection
from nereid_parsers.template.calls.call_renderer import CallRenderer
from nereid_parsers.template.conversation import FIRST_TOOL, ONE_CALL, Conversation
from nereid_parsers.template.known_formats import markers_of_phrases, recognise_tool_section
from nereid_parsers.template.markup.markers import markers
from nereid_parsers.template.probe import Prober

# The markers of tool lists and tool results contain these words. Replacing such a word with "call"
# may give a marker of tool calls: `<|tool_list_start|>` becomes `<|tool_call_start|>`.
_LIST_OR_RESULT = re.compile(r"list|response|result|output")


class SectionGuess(NamedTuple):
    """A guess of how the model writes tool calls.

    Attributes:
        section: The tool section, which declares how the model writes tool calls. None if no tool
            section is known.
        sentences: Sentences that describe the guess in the report. The tuple is empty if the
            template does not offer tools to the model.
    """

    section: ToolSection | None
    sentences: tuple[str, ...]


def guess_tool_section(renderer: CallRenderer) -> SectionGuess:
    """For a template that renders no complete tool call, guess how the model writes tool calls.

    The registry of formats contains the tool sections of known models. The guess is the registered
    tool section whose markers, such as `<|tool_call_start|>`, occur in the template or in the
    vocabulary. If the template does not offer tools to the model, nothing is guessed.
    """
    if not _offers_tools(renderer.turn.prober):
        return SectionGuess(section=None, sentences=())
    section = _find_registered_section(renderer)
    return SectionGuess(section, sentences=(_describe_guess(section),))


def _offers_tools(prober: Prober) -> bool:
    """Return whether the template lists the available tools in the prompt."""
    prompt = prober.render(Conversation(generation_prompt=True, tools=True)) or ""
    return FIRST_TOOL in prompt


def _find_registered_section(renderer: CallRenderer) -> ToolSection | None:
    """Return the registered tool section whose markers the template or the vocabulary contains.

    Return None if there is no such tool section, or if the template renders the function's name.
    """
    # If the rendering contains the function's name, the template renders tool calls, but the
    # analysis cannot infer how. Guess nothing in this case, because a guess could contradict the
    # template.
    if FIRST_TOOL in renderer.text_of_calls(*ONE_CALL):
        return None
    return recognise_tool_section(_possible_call_markers(renderer.turn.prober))


def _describe_guess(section: ToolSection | None) -> str:
    """Describe, for the report, which tool section was chosen for a template that offers tools.

    `section` is the tool section from the registry of formats, or None if none was chosen.
    """
    if section is None:
        return (
            "The template offers tools but renders no complete call. Calls are returned as content."
        )
    # If no marker opens the tool section, the marker of its first tool call is shown.
    opening = section.open or section.calls[0].open
    return (
        "The template offers tools but renders no calls. The format of the calls was "
        f"recognised, not inferred: {opening.strip()!r} opens a call."
    )


def _possible_call_markers(prober: Prober) -> set[str]:
    """Return texts from the template and the tokenizer that may be markers of tool calls.

    There are four kinds of such texts:

    - the added tokens of the tokenizer
    - the markers in the template, such as `<|tool_list_start|>`
    - the markers of the model family, if a phrase such as "List of tools: [" identifies the family
    - the markers of the two previous kinds, with the word "call" in place of another word:
      `<|tool_call_start|>` is made from `<|tool_list_start|>`
    """
    literal_text = "\n".join(prober.template.literals)
    known_markers = [*markers(literal_text), *markers_of_phrases(literal_text)]
    markers_with_call = [_LIST_OR_RESULT.sub("call", marker) for marker in known_markers]
    return {*prober.added_tokens, *known_markers, *markers_with_call}
