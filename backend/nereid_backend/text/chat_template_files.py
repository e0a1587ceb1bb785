# SPDX-License-Identifier: Apache-2.0
"""Reads the chat templates in the files of a checkpoint."""

import json
from pathlib import Path

from nereid_backend.errors import ModelError
from nereid_backend.request_field_checks import shown

# One template, or several templates by name, such as "default" and "tool_use".
ChatTemplate = str | dict[str, str]

_TOKENIZER_FILE = "tokenizer_config.json"
# The files from which transformers reads the chat template of a processor, but not of a tokenizer.
_PROCESSOR_FILES = ("chat_template.json", "processor_config.json")
_DEFAULT = "default"
# Some editors on Windows write this character at the start of a file.
_BYTE_ORDER_MARK = "\ufeff"


def complete_chat_template(loaded: object, folder: Path) -> ChatTemplate | None:
    """Return the chat template of a checkpoint, or its named templates.

    transformers has read the template `loaded` from the .jinja files, or else from
    tokenizer_config.json. This function corrects `loaded` in three cases:
    - Many checkpoints for images have their chat template only in chat_template.json or
      processor_config.json. Unless there are .jinja files, the template in such a file is returned.
    - A checkpoint has .jinja files in the folder additional_chat_templates, but no
      chat_template.jinja. The template "default" is then read from the JSON files. Example: the
      file additional_chat_templates/tool_use.jinja and the template "A" in tokenizer_config.json
      return {"default": "A", "tool_use": the content of the file}.
    - A template begins with a byte order mark, which would become a part of each prompt. The
      byte order mark is removed.

    Return None if the checkpoint has no chat template.

    Args:
        loaded: the value of `chat_template` of the loaded tokenizer or processor.
        folder: the folder of the checkpoint.

    Raises:
        ModelError: a file is damaged, or a template has a wrong type.
    """
    template = _checked(loaded, folder / _TOKENIZER_FILE)
    has_default_file = (folder / "chat_template.jinja").is_file()
    additional_files = [*folder.glob("additional_chat_templates/*.jinja")]
    if not has_default_file and not additional_files:
        template = _read_json_template(folder, *_PROCESSOR_FILES) or template
    elif isinstance(template, dict) and _DEFAULT not in template:
        others = _read_json_template(folder, *_PROCESSOR_FILES, _TOKENIZER_FILE) or {}
        template = {**({_DEFAULT: others} if isinstance(others, str) else others), **template}
    if isinstance(template, dict):
        return {name: _without_mark(source) for name, source in template.items()}
    return None if template is None else _without_mark(template)


def _read_json_template(folder: Path, *names: str) -> ChatTemplate | None:
    """Return the chat template in the first of the JSON files `names` that contains one.

    Return None if these files contain no template. If a file contains several templates, the result
    maps the names of the templates to their texts.

    Raises:
        ModelError: a file is damaged.
    """
    for path in (folder / name for name in names):
        template = _template_in(path) if path.is_file() else None
        if template is not None:
            return template
    return None


def _template_in(path: Path) -> ChatTemplate | None:
    """Return the chat template in a JSON file; see `_read_json_template`."""
    try:
        template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(template, list):  # objects with a name and a template
            template = {item["name"]: item["template"] for item in template}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"model: {path} cannot be read: {error!r}") from error
    return _checked(template, path)


def _checked(template: object, path: Path) -> ChatTemplate | None:
    """Return `template`. Raise a ModelError if the chat template in `path` has a wrong type.

    A chat template is a text, a dict of texts by name, or None.
    """
    sources = template.values() if isinstance(template, dict) else [template]
    if template is not None and not all(isinstance(source, str) for source in sources):
        raise ModelError(
            f"model: chat_template in {path} must be a text or a list of templates, but it is "
            f"{shown(template)}. Correct the file."
        )
    return template  # type: ignore[return-value]


def _without_mark(source: str) -> str:
    """Return the source of a template without a byte order mark at its start."""
    return source.removeprefix(_BYTE_ORDER_MARK)
