"""Choose the chat format of a checkpoint.

The format comes from the first available source: the names of formats that the user chose, the
checkpoint's `response_template`, or the checkpoint's chat template. If there is no source, all
output is treated as content.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nereid_parsers.errors import FormatError, NereidParsersError
from nereid_parsers.format import Format, Sections, Source
from nereid_parsers.formats.registry import get_format
from nereid_parsers.template.analysis import analyze_checkpoint_template
from nereid_parsers.template.checkpoint_files import CheckpointText, read_checkpoint
from nereid_parsers.template.report import TemplateAnalysis
from nereid_parsers.template.response.response_template import format_of_response_template

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenFormat:
    """The `Format` that was chosen for the output of a checkpoint, and the reason for the choice.

    Attributes:
        format: The format.
        source: "chosen" (by the user), "response_template", "template" (inferred from the chat
            template) or "plain" (all output is content).
        why: Sentences for the user. They state the source, and why no source of higher priority
            could be used.
        analysis: The analysis of the chat template, or None.
    """

    format: Format
    source: str
    why: str
    analysis: TemplateAnalysis | None = None


def format_for_checkpoint(
    path: str | Path,
    *,
    reasoning: str | None = None,
    tools: str | None = None,
    name: str | None = None,
    chat_template: str | None = None,
) -> ChosenFormat:
    """Choose the `Format` with which the parser reads the output of a model.

    A format declares how the output is divided into reasoning, content and tool calls. The first
    available source determines the format:

        name                  The user chose a registered format.
        reasoning, tools      The user chose parts of registered formats. If the user chose only one
                              part, the sources below determine the other parts.
        response_template     This object in tokenizer_config.json declares the format.
        the chat template     The format is inferred from the renderings of the template.
        no source             All output is treated as content, and a warning is logged.

    The analysis of a chat template takes about 30 ms, so callers should store the result.

    Args:
        path: The folder of the checkpoint, or a file that contains only the chat template.
        reasoning: The name of a registered format, such as "qwen3". Only the reasoning part of that
            format is used.
        tools: The name of a registered format. Only the tool section of that format is used.
        name: The name of a registered format. The whole format is used.
        chat_template: The source of a chat template. It replaces the checkpoint's chat template.

    Returns:
        The format, and the reason for the choice.

    Raises:
        FormatError: A name is unknown, or the path is neither a checkpoint nor a template.
    """
    if name is not None:
        return ChosenFormat(get_format(name), "chosen", f"The user chose the format {name!r}.")
    if reasoning is not None and tools is not None:
        fmt = get_format(reasoning=reasoning, tools=tools)
        why = f"The user chose the formats {reasoning!r} for reasoning and {tools!r} for tools."
        return ChosenFormat(fmt, "chosen", why)
    text = read_checkpoint(path)
    if chat_template is not None:
        text = dataclasses.replace(text, template=chat_template)
    from_files = _format_of_files(text)
    if reasoning is not None:
        choice = _UserChoice(reasoning, get_format(reasoning=reasoning), is_for_reasoning=True)
        return _combine_with_files(choice, from_files)
    if tools is not None:
        choice = _UserChoice(tools, get_format(tools=tools), is_for_reasoning=False)
        return _combine_with_files(choice, from_files)
    return from_files


class _UserChoice(NamedTuple):
    """A registered format that the user chose for one part of the output.

    Attributes:
        name: The name of the format, as the user wrote it.
        format: The format.
        is_for_reasoning: True if the user chose the format for the reasoning, and False if the user
            chose the format for the tool calls.
    """

    name: str
    format: Format
    is_for_reasoning: bool


def _combine_with_files(choice: _UserChoice, from_files: ChosenFormat) -> ChosenFormat:
    """Combine the user's format for one part with the format from the files of the checkpoint.

    Example: if the user chose a format for the reasoning, the files of the checkpoint determine how
    tool calls are written. Formats with the layout `Messages` have no separate parts. If one of the
    two formats has this layout, the result is the user's format.
    """
    users_layout, files_layout = choice.format.layout, from_files.format.layout
    if not isinstance(users_layout, Sections) or not isinstance(files_layout, Sections):
        why = (
            f"The user chose the format {choice.name!r}. It is used completely, because formats of "
            "this kind cannot be combined."
        )
        return ChosenFormat(choice.format, "chosen", why)
    layout = _combine_layouts(
        users_layout, files_layout, is_reasoning_chosen=choice.is_for_reasoning
    )
    why = (
        f"The user chose the format {choice.name!r}. "
        f"The source of the other parts: {from_files.why}"
    )
    combined = _join_formats(layout, choice.format, from_files.format)
    return ChosenFormat(combined, "chosen", why, from_files.analysis)


def _join_formats(layout: Sections, users_format: Format, files_format: Format) -> Format:
    """Build a `Format` with a layout that was combined from the layouts of two formats.

    `users_format` is the format that the user chose. `files_format` is the format from the files of
    the checkpoint. The result also combines the markers around messages of the two formats.
    """
    return Format(
        f"{users_format.name}+{files_format.name}",
        layout,
        # The parser removes the markers that end a message. Unused markers do no harm.
        ends=(*users_format.ends, *files_format.ends),
        # The texts that open the model's answer in a prompt. Only the template of the checkpoint
        # writes prompts.
        turn=files_format.turn,
        sources=(*users_format.sources, *files_format.sources),
    )


def _combine_layouts(
    chosen: Sections, from_files: Sections, *, is_reasoning_chosen: bool
) -> Sections:
    """Combine two layouts: one from the user's format, and one from the files of a checkpoint.

    The user chose the format either for its reasoning (`is_reasoning_chosen`) or for its tool
    calls. Parts that the chosen format lacks, such as tool calls, come from the files.
    """
    if is_reasoning_chosen:
        reasoning = chosen.reasoning  # None if the user chose that the model writes no reasoning.
    else:
        # The user chose the format only for its tool calls. For the reasoning, the files of the
        # checkpoint therefore take precedence over the format.
        reasoning = from_files.reasoning or chosen.reasoning
    return Sections(
        reasoning=reasoning,
        content=chosen.content or from_files.content,
        tools=chosen.tools or from_files.tools,
    )


def _format_of_files(text: CheckpointText) -> ChosenFormat:
    """Return the `Format` that a checkpoint declares, or infer a `Format` from its chat template.

    There are three sources, in the order of their priority:

        response_template    This object in tokenizer_config.json declares the format.
        the chat template    The format is inferred from the renderings of the template.
        no source            All output is treated as content.

    If a source exists but cannot be used, the attribute `why` of the result contains the reason. If
    there is no source, a warning is logged.
    """
    if text.response_template is None:
        return _format_of_template(text, problems=[])
    try:
        declared = format_of_response_template(text.response_template)
    except FormatError as error:
        problem = _sentence(f"The response_template cannot be used: {error}")
        return _format_of_template(text, [problem])
    why = "The response_template in tokenizer_config.json declares the format."
    return ChosenFormat(declared, "response_template", why)


def _format_of_template(text: CheckpointText, problems: list[str]) -> ChosenFormat:
    """Infer the `Format` of the model's output from the chat template of a checkpoint.

    If the template is missing or cannot be analysed, return a format in which all output is
    content. `problems` contains sentences that state why other sources of the format cannot be
    used. They are copied into the attribute `why` of the result.
    """
    if text.template is None:
        return _plain_format([*problems, "The checkpoint has no chat template."])
    try:
        analysis = analyze_checkpoint_template(
            text.template, text.bos_token, text.eos_token, added_tokens=text.added_tokens
        )
    except NereidParsersError as error:
        problem = _sentence(f"The chat template cannot be analysed: {error}")
        return _plain_format([*problems, problem])
    why = " ".join([*problems, "The format was inferred from the chat template."])
    return ChosenFormat(analysis.format, "template", why, analysis)


def _plain_format(problems: list[str]) -> ChosenFormat:
    """Return a `Format` that treats all output as content, and log a warning.

    `problems` contains sentences that state why the format could not be read from the files of the
    checkpoint. The warning and the attribute `why` of the result contain these sentences.
    """
    why = " ".join([*problems, "So all output is returned as plain content."])
    log.warning("The chat format is unknown. Tool calls and reasoning will not be parsed. %s", why)
    plain = Format(
        "plain", Sections(), sources=(Source("the files of the checkpoint declare no format"),)
    )
    return ChosenFormat(plain, "plain", why)


def _sentence(text: str) -> str:
    """Add a full stop to the end of `text`, unless `text` already ends with a full stop."""
    return text if text.endswith(".") else f"{text}."
