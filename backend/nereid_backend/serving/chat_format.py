# SPDX-License-Identifier: Apache-2.0
"""Chooses the chat format with which a checkpoint's output is parsed."""

from collections.abc import Callable

from nereid_parsers import LENIENT, STRICT, Format, NereidParsersError, get_format
from nereid_parsers.template import format_for_checkpoint

from nereid_backend.errors import ConfigError
from nereid_backend.serving import tensors
from nereid_backend.serving.serving_settings import ServingSettings

OFF = "none"
_POLICIES = {"lenient": LENIENT, "strict": STRICT}


def choose_format(
    settings: ServingSettings, report: Callable[[str], None] = tensors.progress
) -> Format | None:
    """Return the chat format of a checkpoint; None if its output is plain text.

    Args:
        settings: the settings reasoning_parser, tool_parser, parser_policy and model.
        report: called with one line that says how the format was chosen.

    Raises:
        ConfigError: no format has the configured name, or the checkpoint cannot be read.
    """
    fmt = _choose(settings, report)
    policy = _POLICIES.get(settings.parser_policy)
    return fmt if fmt is None or policy is None else fmt.with_policy(policy)


def _choose(settings: ServingSettings, report: Callable[[str], None]) -> Format | None:
    """Return the format that the settings name, or else the format derived from the checkpoint.

    Return None if the settings turn parsing off.
    """
    names = {"reasoning": settings.reasoning_parser, "tools": settings.tool_parser}
    if OFF in names.values():
        # "none" turns off one parser: reasoning or tool calls then stay in the content. The other
        # parser is used only if the settings name it.
        names = {part: name for part, name in names.items() if name not in (OFF, "")}
        if not names:
            report("chat format: none, because reasoning_parser or tool_parser is none")
            return None
    try:
        if len(names) == 1:
            return get_format(**names)
        chosen = format_for_checkpoint(
            settings.model, reasoning=names["reasoning"] or None, tools=names["tools"] or None
        )
    except NereidParsersError as error:
        raise ConfigError(f"reasoning_parser, tool_parser: {error}") from error
    report(f"chat format: {chosen.why}")
    return chosen.format
