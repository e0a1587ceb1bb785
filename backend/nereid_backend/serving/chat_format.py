# SPDX-License-Identifier: Apache-2.0
"""Which chat format a served checkpoint writes."""

from collections.abc import Callable

from nereid_parsers import LENIENT, STRICT, Format, NereidParsersError, get_format
from nereid_parsers.template import format_for_checkpoint

from nereid_backend.errors import ConfigError
from nereid_backend.serving import tensors
from nereid_backend.serving.serving_settings import ServingSettings

OFF = "none"


_POLICIES = {"lenient": LENIENT, "strict": STRICT}


def choose_format(
    settings: ServingSettings, tell: Callable[[str], None] = tensors.progress
) -> Format | None:
    """The format of a checkpoint under the operator's policy; None where text is not read.

    Args:
        settings: the operator's.
        tell: is told in one line how it was chosen.

    Raises:
        ConfigError: a name that no format has, or a checkpoint whose files cannot be read.
    """
    fmt = _choose(settings, tell)
    policy = _POLICIES.get(settings.parser_policy)
    return fmt if fmt is None or policy is None else fmt.with_policy(policy)


def _choose(settings: ServingSettings, tell: Callable[[str], None]) -> Format | None:
    """The format that the operator names, else what the checkpoint shows; None for plain text."""
    names = {"reasoning": settings.reasoning_parser, "tools": settings.tool_parser}
    if OFF in names.values():
        # What is not to be parsed stays in the content; the other half only by its name.
        names = {part: name for part, name in names.items() if name not in (OFF, "")}
        if not names:
            tell("chat format: none, as the settings say")
            return None
    try:
        if len(names) == 1:
            return get_format(**names)
        chosen = format_for_checkpoint(
            settings.model, reasoning=names["reasoning"] or None, tools=names["tools"] or None
        )
    except NereidParsersError as error:
        raise ConfigError(f"reasoning_parser, tool_parser: {error}") from error
    tell(f"chat format: {chosen.why}")
    return chosen.format
