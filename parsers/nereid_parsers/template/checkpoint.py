"""Choose the chat format of a checkpoint.

The format comes from the first available source: the names of formats that the user chose, the
checkpoint's `response_template`, or the checkpoint's chat template. If there is no source, all
output is treated as content.
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
            template) or "plain" (all output is content).
        why: Sentences for the user. They state the source, and why no source of higher priority
            could be used.
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
        response_template: The object in tokenizer_config.json that declares the format of the
            output for transformers, or None.
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

    The format of the model's output is inferred from these texts. A template file contains only the
    chat template.

    In a checkpoint, the chat template is in a .jinja file, or else in chat_template.json, or else
    in tokenizer_config.json, as in transformers. If there are several named templates, the template
    "tool_use" is used, or else the template "default".

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
    """Return the chat templates of a checkpoint from the first file that contains templates.

    The files are, in this order: the .jinja files, chat_template.json, tokenizer_config.json. The
    result is the source of the only template, a dict of names and sources, or a list of objects
    with a name and a source. It is None if there are no templates.

    Args:
        path: The folder of the checkpoint.
        config: The content of tokenizer_config.json.
    """
    json_file = _read_json(path / "chat_template.json")  # {} if there is no such file
    jinja_templates = _read_jinja_templates(path)
    if jinja_templates:
        return jinja_templates
    if "chat_template" in json_file:
        return json_file["chat_template"]
    return config.get("chat_template")


def _read_jinja_templates(path: Path) -> dict[str, str]:
    """Read the .jinja files of a checkpoint. Return a dict of template names and sources.

    The name of a template in additional_chat_templates/ is the name of its file, such as
    "tool_use". The template in chat_template.jinja has the name "default".
    """
    folder = path / "additional_chat_templates"
    templates = {file.stem: _read_text(file) for file in sorted(folder.glob("*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        templates.setdefault("default", _read_text(path / "chat_template.jinja"))
    return templates


def _select_template(templates: object) -> str | None:
    """Return the source of the chat template for requests with tools, or None.

    The template "tool_use" is used, or else the template "default", or else the first template.

    >>> _select_template({"default": "source of one", "tool_use": "source of another"})
    'source of another'
    >>> _select_template([{"name": "default", "template": "source of one"}])
    'source of one'

    Args:
        templates: A value from the files of a checkpoint. It is the source of the only template, a
            dict of names and sources, or a list of objects with a name and a source. For any other
            value, the result is None.
    """
    if isinstance(templates, str):
        return templates  # The checkpoint has only one template.
    source_by_name = _sources_by_name(templates)
    possible_names = ("tool_use", "default", *source_by_name)
    existing_names = [name for name in possible_names if name in source_by_name]
    source = source_by_name[existing_names[0]] if existing_names else None
    return source if isinstance(source, str) else None


def _sources_by_name(templates: object) -> dict[object, object]:
    """Return a dict that maps the name of each chat template to the source of this template.

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
    """Return the text of a token, or "" if `value` is not a token.

    In tokenizer_config.json, a token is a text or an object with the key "content".

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
        config: The content of tokenizer_config.json.
        path: The folder of the checkpoint. If `config` does not contain the added tokens, they are
            read from the file tokenizer.json in this folder.
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
    """Return the JSON object in a file. Return {} if the file is missing or contains no object.

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
    response_template of the checkpoint, or the chat template of the checkpoint. If no source is
    available, all output is treated as content, and a warning is logged. The analysis of a chat
    template takes about 30 ms, so callers should store the result.

    Args:
        path: The folder of the checkpoint, or a file that contains only the chat template.
        reasoning: The name of a registered format, such as "qwen3". Only the reasoning part of that
            format is used. The other sources determine the other parts.
        tools: The name of a registered format. Only the tool section of that format is used. The
            other sources determine the other parts.
        name: The name of a registered format. The whole format is used, and the other sources are
            ignored.
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
    """Combine the reasoning part of one registered format with the tool section of another format.

    Args:
        reasoning: The name of the format with the reasoning part.
        tools: The name of the format with the tool section.

    Raises:
        FormatError: A name is unknown.
    """
    fmt = get_format(reasoning=reasoning, tools=tools)
    why = f"The user chose the formats {reasoning!r} for reasoning and {tools!r} for tools."
    return ChosenFormat(fmt, "chosen", why)


def _combine(file_format: ChosenFormat, reasoning: str | None, tools: str | None) -> ChosenFormat:
    """Replace the reasoning or the tool section of `file_format` by a part that the user chose.

    The user chose either a reasoning part or a tool section, so exactly one of `reasoning` and
    `tools` is not None. Example: reasoning="qwen3" replaces only the reasoning part. If the chosen
    format cannot be combined with `file_format`, the result is the whole chosen format.

    Args:
        file_format: The format from the files of the checkpoint.
        reasoning: The name of the registered format with the chosen reasoning part, or None.
        tools: The name of the registered format with the chosen tool section, or None.
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
    """Combine a format that the user chose with the format from the files of a checkpoint.

    Only formats whose layout is `Sections` consist of parts that can be combined. Return None if
    one of the two formats has another layout.

    Args:
        chosen: The format that the user chose.
        from_files: The format from the files of the checkpoint.
        is_reasoning_chosen: Whether the user chose the reasoning part. Otherwise the user chose the
            tool section.
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
    """Combine the parts of a format that the user chose with the parts from the files.

    Args:
        chosen: The parts of the format that the user chose.
        from_files: The parts of the format from the files of the checkpoint.
        is_reasoning_chosen: Whether the user chose the reasoning part. Otherwise the user chose the
            tool section.
    """
    if is_reasoning_chosen:
        reasoning = chosen.reasoning
    else:
        # A registered format with a tool section may also contain reasoning. The user did not
        # choose this reasoning, so the files have priority.
        reasoning = from_files.reasoning or chosen.reasoning
    return Sections(
        reasoning=reasoning,
        content=chosen.content or from_files.content,
        tools=chosen.tools or from_files.tools,
    )


def _format_of_files(text: CheckpointText) -> ChosenFormat:
    """Return the format that the files of a checkpoint show.

    A valid `response_template` declares the format. Without a valid `response_template`, the format
    is inferred from the chat template. If the template cannot be analysed, all output is treated as
    content. The attribute `why` of the result states why a source could not be used.
    """
    if text.response_template is None:
        return _format_of_template(text, problems=[])
    try:
        return _declared_format(text.response_template)
    except FormatError as error:
        problem = _sentence(f"The response_template cannot be used: {error}")
        return _format_of_template(text, [problem])


def _format_of_template(text: CheckpointText, problems: list[str]) -> ChosenFormat:
    """Infer the format from the chat template of a checkpoint.

    If the template is missing or cannot be analysed, return a format in which all output is
    content.

    Args:
        text: The chat template and the tokens of the checkpoint.
        problems: Sentences that state why other sources of the format cannot be used. They are
            copied into the attribute `why` of the result.
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
    """Return a format in which all output is content, and log a warning.

    Args:
        problems: Sentences that state why no source shows the format. The warning and the attribute
            `why` of the result contain these sentences.
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
