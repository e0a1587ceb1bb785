# SPDX-License-Identifier: Apache-2.0
"""Which chat format a served checkpoint writes."""

from nereid_parsers import Format, NereidParsersError, get_format

from nereid_backend.errors import ConfigError
from nereid_backend.serving.settings import ServingSettings

OFF = "none"


def choose_format(settings: ServingSettings) -> Format | None:
    """The format that the operator names, else the one that the checkpoint shows; None for plain.

    Raises:
        ConfigError: a name that no format has.
    """
    names = {"reasoning": settings.reasoning_parser, "tools": settings.tool_parser}
    chosen = {part: name for part, name in names.items() if name and name != OFF}
    try:
        if chosen:
            return get_format(**chosen)
        if OFF in names.values():
            return None
        return None
    except NereidParsersError as error:
        raise ConfigError(f"{' and '.join(f'{p}_parser' for p in names)}: {error}") from error
