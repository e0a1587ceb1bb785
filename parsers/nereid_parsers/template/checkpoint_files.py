"""Read the chat template and the special tokens from the files of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereid_parsers.errors import FormatError

MAX_FILE_BYTES = 64_000_000


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

    In a checkpoint, the chat template is in a .jinja file, or else in chat_template.json,
    processor_config.json or tokenizer_config.json, as in transformers. If there are several named
    templates, the template "tool_use" is used, or else the template "default".

    Raises:
        FormatError: The path is neither a folder nor a file, the operating system does not allow
            this program to read a file, or a JSON file is malformed.
    """
    try:
        return _read_checkpoint(Path(path))
    except OSError as error:
        raise FormatError(
            f"{error.filename or path} cannot be read ({error.strerror}). Check the path and its "
            "permissions."
        ) from error


def _read_checkpoint(path: Path) -> CheckpointText:
    """Read the texts of a checkpoint or a template file; see `read_checkpoint`."""
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


def _read_templates(path: Path, tokenizer_config: dict[str, Any]) -> dict[Any, object]:
    """Read the chat templates of a checkpoint, as a dict from the name to the source of a template.

    The templates are those of the first source that contains any: the .jinja files,
    chat_template.json, processor_config.json, or tokenizer_config.json, whose content is
    `tokenizer_config`. If the .jinja files contain no template "default", further templates are
    read from the first JSON file that contains any. The result is {} if there are no templates.

    Raises:
        FormatError: chat_template.json is not a valid JSON file, even if it is not used, or a file
            is too long.
    """
    jinja_templates = _read_jinja_files(path)
    # This file is always read, so that an invalid file is reported even if it is not used.
    json_file = _read_json(path / "chat_template.json")  # {} if there is no such file.
    if "default" in jinja_templates:
        return jinja_templates
    templates = _templates_by_name(tokenizer_config.get("chat_template"))
    for config in (json_file, _read_json(path / "processor_config.json")):
        if config.get("chat_template") is not None:
            templates = _templates_by_name(config["chat_template"])
            break
    return {**templates, **jinja_templates}


def _read_jinja_files(path: Path) -> dict[Any, object]:
    """Read the .jinja files of a checkpoint, as a dict from the name to the source of a template.

    The template in chat_template.jinja has the name "default". The name of a template in the folder
    additional_chat_templates is the name of its file, such as "tool_use". If this folder contains a
    file default.jinja, chat_template.jinja is not used.
    """
    files = sorted((path / "additional_chat_templates").glob("*.jinja"))
    templates: dict[Any, object] = {file.stem: _read_text(file) for file in files}
    default_file = path / "chat_template.jinja"
    if default_file.is_file():
        templates.setdefault("default", _read_text(default_file))
    return templates


def _templates_by_name(value: object) -> dict[Any, object]:
    """Convert the value of "chat_template" in a JSON file into a dict of names and sources.

    In such a file, the value is the source of the only template, a list of objects, or a dict:

    >>> _templates_by_name("source of the template")
    {'default': 'source of the template'}
    >>> _templates_by_name([{"name": "tool_use", "template": "source of the template"}])
    {'tool_use': 'source of the template'}

    A value of another form gives {}.
    """
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        return {entry.get("name"): entry.get("template") for entry in entries}
    return value if isinstance(value, dict) else {}


def _select_template(templates: dict[Any, object]) -> str | None:
    """Select the chat template for requests with tools. Return the source of this template.

    The template with the name "tool_use" is selected, or else the template "default", or else the
    first template.

    >>> _select_template({"default": "source of one", "tool_use": "source of another"})
    'source of another'

    The result is None if there are no templates, or if the selected source is not a string, because
    the file of the checkpoint is malformed.
    """
    names = [name for name in ("tool_use", "default", *templates) if name in templates]
    if not names:
        return None
    source = templates[names[0]]
    return source if isinstance(source, str) else None


def _token_text(value: object) -> str:
    """Return the text of a token from tokenizer_config.json, or "" if `value` is not a token.

    In this file, a token is a string, or an object with the key "content".

    >>> _token_text("</s>"), _token_text({"content": "</s>"}), _token_text(None)
    ('</s>', '</s>', '')
    """
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _added_tokens(config: dict[str, Any], path: Path) -> frozenset[str]:
    """Return the texts of the tokens that were added to the vocabulary of the tokenizer.

    Example: {"added_tokens_decoder": {"7": {"content": "<tool_call>"}}} gives {"<tool_call>"}. If
    `config`, the content of tokenizer_config.json, does not contain the added tokens, they are read
    from the file tokenizer.json in the folder `path`.
    """
    token_by_id = config.get("added_tokens_decoder")
    if isinstance(token_by_id, dict):
        tokens = list(token_by_id.values())
    else:  # In tokenizer.json, the tokens are a list.
        tokens = _read_json(path / "tokenizer.json").get("added_tokens") or []
    return frozenset(_token_text(token) for token in tokens)


def _read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        FormatError: The file is longer than MAX_FILE_BYTES, cannot be read, or is not UTF-8.
    """
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise FormatError(f"{path} has {size} bytes, but the limit is {MAX_FILE_BYTES} bytes")
        # Some editors on Windows begin a file with a byte order mark, which utf-8-sig removes.
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise FormatError(
            f"{path} cannot be read ({error.strerror}). Check its permissions."
        ) from error
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{path} is not a text in UTF-8 ({error}). Give a file with a chat template, or "
            "convert the file to UTF-8."
        ) from error


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
