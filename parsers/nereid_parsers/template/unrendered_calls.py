"""Recognise the tool calls of a model whose chat template does not render tool calls.

Such a template only describes the tools to the model. The registry of formats then supplies the
format of the tool calls, if the markers of a registered format occur in the template or in the
vocabulary.
"""

from __future__ import annotations

import re

from nereid_parsers.format import ToolSection
from nereid_parsers.template.calls.call_renderer import CallRenderer
from nereid_parsers.template.conversation import FIRST_TOOL, ONE_CALL, Conversation
from nereid_parsers.template.difference import markers
from nereid_parsers.template.known_formats import markers_of_phrases, recognise_tool_section
from nereid_parsers.template.probe import Prober

# The markers of tool lists and tool results contain these words. Replacing such a word with "call"
# may give a marker of tool calls: `<|tool_list_start|>` becomes `<|tool_call_start|>`.
_WORD_OF_OTHER_MARKERS = re.compile(r"list|response|result|output")


def guess_tool_section(renderer: CallRenderer) -> ToolSection | None:
    """For a template that renders no complete tool call, guess how the model writes tool calls.

    A tool section declares how a model writes tool calls, for example between
    `<|tool_call_start|>` and `<|tool_call_end|>`. The registry of formats contains the tool
    sections of known models. The result is the registered tool section whose markers occur in the
    template or in the vocabulary, or None if there is no such tool section. The result is also None
    if the template does not offer tools to the model.

    Mutates: `renderer.turn.prober.undecided`. If the template offers tools to the model, a sentence
        that describes the guess is appended for the report.
    """
    prober = renderer.turn.prober
    if not _offers_tools(prober):
        return None
    section = _find_registered_section(renderer)
    prober.undecided.append(_describe_guess(section))
    return section


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
    opening = section.open or section.calls[0].open
    return (
        "The template offers tools but renders no calls. The format of the calls was "
        f"recognised, not inferred: {opening.strip()!r} opens a call."
    )


def _possible_call_markers(prober: Prober) -> set[str]:
    """Return texts from the template and the tokenizer that may be markers of tool calls.

    There are four kinds of such texts: the added tokens of the tokenizer, the markers in the
    template, the markers of a model family that a phrase in the template identifies, and markers
    that are derived from the two previous kinds. Example: if the template contains
    `<|tool_list_start|>`, the result contains this marker and `<|tool_call_start|>`.
    """
    literal_text = "\n".join(prober.template.literals)
    # Some templates contain a phrase, such as "List of tools: [", that identifies the model family.
    # The tool call markers of these families are known.
    template_markers = [*markers(literal_text), *markers_of_phrases(literal_text)]
    # Replace words such as "list" with "call".
    derived_markers = [_WORD_OF_OTHER_MARKERS.sub("call", marker) for marker in template_markers]
    return {*prober.added_tokens, *template_markers, *derived_markers}
