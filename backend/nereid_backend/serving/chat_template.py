# SPDX-License-Identifier: Apache-2.0
"""The settings chat_template and chat_template_kwargs."""

import json
from pathlib import Path
from typing import Any

from nereid_backend.errors import ConfigError
from nereid_backend.serving.serving_settings import ServingSettings


def read_chat_template(settings: ServingSettings) -> str | None:
    """Read the file that the setting chat_template names, and return the chat template.

    Return None if the setting is empty.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not settings.chat_template:
        return None
    try:
        # Some editors on Windows begin a file with a byte order mark, which utf-8-sig removes.
        return Path(settings.chat_template).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template: the file {settings.chat_template} cannot be read: {error}"
        ) from error


def read_template_defaults(settings: ServingSettings) -> dict[str, Any]:
    """Return the default values of chat template variables. A request can override a default value.

    Raises:
        ConfigError: the setting chat_template_kwargs is not a JSON object.
    """
    text = settings.chat_template_kwargs or "{}"
    try:
        variables = json.loads(text)
    except (ValueError, RecursionError):
        variables = None
    if not isinstance(variables, dict):
        raise ConfigError(
            f"chat_template_kwargs: the value must be a JSON object, but it is {text}"
        )
    return variables
