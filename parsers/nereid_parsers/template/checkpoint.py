"""Choose the chat format of a checkpoint.

The sources of the format are, in this order: names that the user chose, the checkpoint's
`response_template`, and the checkpoint's chat template. If there is no source, the format is plain
content.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereid_parsers.errors import FormatError, NereidParsersError
from nereid_parsers.format import Format, Sections, Source
from nereid_parsers.formats.registry import get_format
from nereid_parsers.template.analysis import analyze_checkpoint_template
from nereid_parsers.template.report import TemplateAnalysis
from nereid_parsers.template.response.response_template import format_of_response_template

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 64_000_000


@dataclass(frozen=True, slots=True)
class ChosenFormat:
    """The chosen format of a checkpoint, and the reason for the choice.

    Attributes:
        format: The format.
        source: "chosen" (by the user), "response_template", "template" (inferred from the chat
            template) or "plain" (plain content).
        why: Sentences that state the source, and why sources of higher priority could not be used.
        analysis: The analysis of the chat template, or None.
    """

    format: Format
    source: str
    why: str
    analysis: TemplateAnalysis | None = None


@dataclass(frozen=True, slots=True)
class CheckpointText:
    """The chat template, the `response_template` and the tokens that a checkpoint contains.

    Attributes:
        template: The chat template, or None if the checkpoint has no chat template.
        response_template: The declaration of the format for transformers, or None.
        bos_token, eos_token: The tokens of the tokenizer, or "" if the checkpoint does not define
            them.
        added_tokens: The tokens that were added to the tokenizer's vocabulary.
    """

    template: str | None = None
    response_template: dict[str, Any] | None = None
    bos_token: str = ""
    eos_token: str = ""
    added_tokens: frozenset[str] = frozenset()


def read_checkpoint(path: str | Path) -> CheckpointText:
    """Read the chat template and the special tokens from a checkpoint or from a template file.

    These texts show the format in which the model writes its output. A template file contains only
    the chat template.

    The chat template is read from chat_template.jinja, or else from chat_template.json, or else
    from tokenizer_config.json. The order is the same as in transformers. If a file contains several
    named templates, the template "tool_use" is used, or else the template "default".

    Raises:
        FormatError: The path is neither a folder nor a file, or a JSON file is malformed.
    """
    path = Path(path)
    if path.is_file():
        return CheckpointText(_read_text(path))
    if not path.is_dir():
        raise FormatError(
            f"{path} is neither the folder of a checkpoint nor a file with a chat template. "
            "Check the path."
        )
    config = _read_json(path / "tokenizer_config.json")
    response_template = config.get("response_template")
    return CheckpointText(
        template=_select_template(_read_templates(path, config)),
        response_template=response_template if isinstance(response_template, dict) else None,
        bos_token=_token_text(config.get("bos_token")),
        eos_token=_token_text(config.get("eos_token")),
        added_tokens=_added_tokens(config, path),
    )


def _read_templates(path: Path, config: dict[str, Any]) -> object:
    """Return the chat templates of a checkpoint, in the form in which a file contains them.

    See `_select_template` for the possible forms. The result is None if there are no templates.

    Args:
        path: The folder of the checkpoint. Its .jinja files are preferred, and then its file
            chat_template.json.
        config: The content of tokenizer_config.json, which is used if there are no such files.
    """
    json_file = _read_json(path / "chat_template.json")  # This is {} if no file exists.
    templates_in_json = json_file.get("chat_template", config.get("chat_template"))
    return _read_jinja_templates(path) or templates_in_json


def _read_jinja_templates(path: Path) -> dict[str, str]:
    """Read the .jinja files of a checkpoint. Return a dict of template names and sources.

    The files in additional_chat_templates/ have names such as "tool_use". The template in
    chat_template.jinja has the name "default".
    """
    folder = path / "additional_chat_templates"
    templates = {file.stem: _read_text(file) for file in sorted(folder.glob("*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        templates.setdefault("default", _read_text(path / "chat_template.jinja"))
    return templates


def _select_template(templates: object) -> str | None:
    """Return the source of the chat template for requests with tools, or None.

    The value `templates` comes from the files of a checkpoint. It is the source of the only
    template, a dict of names and sources, or a list of objects with a name and a source. The
    template with the name "tool_use" is preferred, then "default", then the first template.

    >>> _select_template({"default": "source of one", "tool_use": "source of another"})
    'source of another'
    >>> _select_template([{"name": "default", "template": "source of one"}])
    'source of one'
    """
    if isinstance(templates, str):
        return templates  # The checkpoint has only one template.
    source_by_name = _sources_by_name(templates)
    names = [name for name in ("tool_use", "default", *source_by_name) if name in source_by_name]
    source = source_by_name[names[0]] if names else None
    return source if isinstance(source, str) else None


def _sources_by_name(templates: object) -> dict[object, object]:
    """Return a dict that maps the name of each template to the source of the template.

    >>> _sources_by_name([{"name": "default", "template": "source of one"}])
    {'default': 'source of one'}

    Args:
        templates: A dict of names and sources, or a list of objects with a name and a source. The
            result is {} for any other value.
    """
    if isinstance(templates, dict):
        return templates
    if not isinstance(templates, list):
        return {}
    entries = [entry for entry in templates if isinstance(entry, dict)]
    return {entry.get("name"): entry.get("template") for entry in entries}


def _token_text(value: object) -> str:
    """Return the text of a token in tokenizer_config.json, or "" if the token has no text.

    >>> _token_text("</s>"), _token_text({"content": "</s>"}), _token_text(None)
    ('</s>', '</s>', '')
    """
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _added_tokens(config: dict[str, Any], path: Path) -> frozenset[str]:
    """Return the texts of the tokens that were added to the vocabulary of the tokenizer.

    Example: {"added_tokens_decoder": {"7": {"content": "<tool_call>"}}} gives {"<tool_call>"}.

    Args:
        config: The content of tokenizer_config.json. It may contain the added tokens.
        path: The folder of the checkpoint. The file tokenizer.json in this folder is read if
            `config` does not contain the added tokens.
    """
    token_by_id = config.get("added_tokens_decoder")
    if isinstance(token_by_id, dict):
        tokens = list(token_by_id.values())
    else:
        tokens = _read_json(path / "tokenizer.json").get("added_tokens") or []
    return frozenset(_token_text(token) for token in tokens)


def _read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        FormatError: The file is longer than MAX_FILE_BYTES.
    """
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise FormatError(f"{path} has {size} bytes, but the limit is {MAX_FILE_BYTES} bytes")
    return path.read_text(encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if the file does not exist or contains no object.

    Raises:
        FormatError: The file is not a valid JSON file, or is too long.
    """
    if not path.is_file():
        return {}
    try:
        data = json.loads(_read_text(path))
    except ValueError as error:
        raise FormatError(f"{path} is not a valid JSON file: {error}") from error
    return data if isinstance(data, dict) else {}


# ---- the choice ---------------------------------------------------------------------------------


def format_for_checkpoint(
    path: str | Path,
    *,
    reasoning: str | None = None,
    tools: str | None = None,
    name: str | None = None,
    chat_template: str | None = None,
) -> ChosenFormat:
    """Choose the format with which the parser reads the output of a checkpoint's model.

    The first available source determines the format: the names that the user chose, the
    checkpoint's response_template, or its chat template. If no source is available, the format is
    plain content, and a warning is logged. An analysis takes about 30 ms, so callers should store
    the result.

    Args:
        path: The folder of the checkpoint, or a file that contains only the chat template.
        reasoning: The name of a registered format, such as "qwen3". The reasoning part of that
            format is used.
        tools: The name of a registered format. The tool section of that format is used. If only
            one of `reasoning` and `tools` is given, the other sources determine the other part.
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
        return _format_of_both_names(reasoning, tools)
    text = read_checkpoint(path)
    if chat_template is not None:
        text = dataclasses.replace(text, template=chat_template)
    file_format = _format_of_files(text)
    has_user_chosen = reasoning is not None or tools is not None
    return _combine(file_format, reasoning, tools) if has_user_chosen else file_format


def _format_of_both_names(reasoning: str, tools: str) -> ChosenFormat:
    """Return the format that combines the parts of two registered formats.

    Raises:
        FormatError: A name is unknown.
    """
    fmt = get_format(reasoning=reasoning, tools=tools)
    why = f"The user chose the formats {reasoning!r} for reasoning and {tools!r} for tools."
    return ChosenFormat(fmt, "chosen", why)


def _combine(file_format: ChosenFormat, reasoning: str | None, tools: str | None) -> ChosenFormat:
    """Replace the reasoning or the tools of `file_format` by the part that the user has chosen.

    Example: reasoning="qwen3" replaces only the reasoning and keeps the tool section of
    `file_format`. If the two formats cannot be combined, the result is the whole chosen format.

    Args:
        file_format: The format that the files of the checkpoint declare or imply.
        reasoning: The name of the registered format whose reasoning part is used, or None.
        tools: The name of the registered format whose tool section is used, or None. Exactly one of
            the two names is given.
    """
    chosen = get_format(reasoning=reasoning, tools=tools)
    why_chosen = f"The user chose the format {reasoning or tools!r}."
    is_reasoning_chosen = reasoning is not None
    combined = _combine_formats(chosen, file_format.format, is_reasoning_chosen=is_reasoning_chosen)
    if combined is None:
        why_whole = "It is used completely, because formats of this kind cannot be combined."
        return ChosenFormat(chosen, "chosen", f"{why_chosen} {why_whole}")
    why = f"{why_chosen} The source of the other parts: {file_format.why}"
    return ChosenFormat(combined, "chosen", why, file_format.analysis)


def _combine_formats(
    chosen: Format, from_files: Format, *, is_reasoning_chosen: bool
) -> Format | None:
    """Combine a chosen format with the format of the files.

    Return None if the layout of one of the formats is not `Sections`, because only sections can be
    combined. For the arguments, see `_combine_sections`.
    """
    if not isinstance(chosen.layout, Sections) or not isinstance(from_files.layout, Sections):
        return None
    layout = _combine_sections(
        chosen.layout, from_files.layout, is_reasoning_chosen=is_reasoning_chosen
    )
    return Format(
        f"{chosen.name}+{from_files.name}",
        layout,
        ends=(*chosen.ends, *from_files.ends),
        turn=from_files.turn,
        sources=(*chosen.sources, *from_files.sources),
    )


def _combine_sections(
    chosen: Sections, from_files: Sections, *, is_reasoning_chosen: bool
) -> Sections:
    """Combine the chosen parts of a format with the parts that the checkpoint declares.

    Args:
        chosen: The parts of the format that the user chose.
        from_files: The parts that the files of the checkpoint declare or imply.
        is_reasoning_chosen: Whether the user chose the reasoning. Otherwise the user chose the
            tools. The registry may also declare reasoning for these tools. This declaration is used
            only if the files show no reasoning.
    """
    if is_reasoning_chosen:
        reasoning = chosen.reasoning
    else:
        reasoning = from_files.reasoning or chosen.reasoning
    return Sections(
        reasoning=reasoning,
        content=chosen.content or from_files.content,
        tools=chosen.tools or from_files.tools,
    )


def _format_of_files(text: CheckpointText) -> ChosenFormat:
    """Return the format that the checkpoint's files declare or imply. The default is plain content.

    The `response_template` declares the format, so it is used first. If it is missing or invalid,
    the format is inferred from the chat template. The attribute `why` of the result contains the
    reason for each source that could not be used.
    """
    if text.response_template is None:
        return _format_of_template(text, problems=[])
    try:
        return _declared_format(text.response_template)
    except FormatError as error:
        problem = _sentence(f"The response_template cannot be used: {error}")
        return _format_of_template(text, [problem])


def _format_of_template(text: CheckpointText, problems: list[str]) -> ChosenFormat:
    """Return the format that the chat template implies, or else the format for plain content.

    Args:
        text: The chat template and the tokens of the checkpoint.
        problems: Sentences that state why other sources of the format cannot be used.
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


def _declared_format(response_template: dict[str, Any]) -> ChosenFormat:
    """Return the format that the `response_template` of a checkpoint declares.

    Raises:
        FormatError: The declaration is invalid.
    """
    fmt = format_of_response_template(response_template)
    why = "The response_template in tokenizer_config.json declares the format."
    return ChosenFormat(fmt, "response_template", why)


def _plain_format(problems: list[str]) -> ChosenFormat:
    """Return the format for plain content, and log a warning with the reasons in `problems`."""
    why = " ".join([*problems, "So all output is returned as plain content."])
    log.warning("The chat format is unknown. Tool calls and reasoning will not be parsed. %s", why)
    plain = Format(
        "plain", Sections(), sources=(Source("the files of the checkpoint declare no format"),)
    )
    return ChosenFormat(plain, "plain", why)


def _sentence(text: str) -> str:
    """Add a full stop to the end of `text`, unless `text` already ends with a full stop."""
    return text if text.endswith(".") else f"{text}."
