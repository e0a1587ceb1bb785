# SPDX-License-Identifier: Apache-2.0
"""Request values as they appear in error messages."""

import json

_MAX_SHOWN_CHARS = 80


def shown(value: object) -> str:
    """Return a request value as JSON text, cut to 80 characters.

    Examples: `True` gives `true`, `"hot"` gives `"hot"`, and None gives `no value`, because a
    field with the value null counts as missing.
    """
    if value is None:
        return "no value"
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."
