"""List the values of the switches, such as `enable_thinking`, that turn thinking on or off.

A thinking switch is a template variable such as `enable_thinking`, or the word "/think" or
"/no_think" in the system message. The analysis renders prompts with these settings, because many
templates write the markers of reasoning only for some settings.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

from nereid_parsers.template.conversation import NO_SWITCHES, Switches
from nereid_parsers.template.sandbox.compile_template import CompiledTemplate

_SWITCH_NAME = re.compile(r"think|reason", re.IGNORECASE)
_NO_SWITCH_NAME = re.compile(
    r"content|prompt|history|start|end_token|begin|text|token|last|index|parts"
)
_EFFORTS = ("high", "low", "none", "enabled", "disabled")
_SYSTEM_SWITCHES = ("/think", "/no_think")
# An analysis could exceed its time limit if it tried all settings of all thinking switches. These
# numbers limit the switches, the values of each switch, and the settings that are tried.
_MAX_NAMES = 4
_MAX_VALUES = 6
_MAX_SETTINGS = 20


def thinking_switches(
    template: CompiledTemplate, fixed_variables: Container[str]
) -> list[Switches]:
    """Return the thinking settings that the analysis tries, such as `enable_thinking=False`.

    A thinking switch turns thinking on or off. It is a template variable such as `enable_thinking`,
    or the word "/think" or "/no_think" in the system message. Example: if `enable_thinking` is the
    only switch of the template, the result contains three settings: no switch is set,
    enable_thinking=True, and enable_thinking=False.

    Args:
        template: The template, which reads the variables.
        fixed_variables: The names of variables that always have the same value. They are no
            switches.
    """
    # The list of names is shortened before the fixed variables are removed. In the opposite order,
    # a later name would replace each fixed variable among the first `_MAX_NAMES`. Fixing one
    # variable would then change which other variables are tried.
    first_names = _thinking_variables(template)[:_MAX_NAMES]
    names = [name for name in first_names if name not in fixed_variables]
    # If there are too many settings, the last ones are omitted. Therefore, the settings that
    # usually have an effect are first.
    settings = [
        NO_SWITCHES,
        *_settings_of_all_variables(names),
        *_settings_of_one_variable(template, names),
        *_settings_of_system_message(template),
    ]
    return settings[:_MAX_SETTINGS]


def _thinking_variables(template: CompiledTemplate) -> list[str]:
    """Return the sorted names of the template's variables that may turn thinking on or off."""
    return sorted(name for name in template.names if _is_thinking_switch(name))


def _settings_of_all_variables(names: list[str]) -> list[Switches]:
    """Return two settings: one with all thinking switches on, and one with all of them off.

    Some templates render reasoning only if several switches, such as `enable_thinking`, are on. The
    result is [] for a single switch, because the settings of one variable contain both values.
    """
    if len(names) < 2:
        return []
    return [Switches(variables=tuple((name, is_on) for name in names)) for is_on in (True, False)]


def _settings_of_one_variable(template: CompiledTemplate, names: list[str]) -> list[Switches]:
    """Return the settings that set one thinking switch, such as `enable_thinking=True`.

    `names` are the names of the template's variables that turn thinking on or off.
    """
    return [
        Switches(variables=((name, value),))
        for name in names
        for value in _possible_values(template, name)
    ]


def _settings_of_system_message(template: CompiledTemplate) -> list[Switches]:
    """Return the settings that write "/think" or "/no_think" into the system message.

    A word that the template does not contain is omitted, because it cannot have an effect.
    """
    template_text = "\n".join(template.literals)
    return [Switches(system=word) for word in _SYSTEM_SWITCHES if word in template_text]


def _is_thinking_switch(name: str) -> bool:
    """Return whether a template variable with this name may turn thinking on or off.

    >>> _is_thinking_switch("enable_thinking"), _is_thinking_switch("reasoning_content")
    (True, False)
    """
    return bool(_SWITCH_NAME.search(name)) and not _NO_SWITCH_NAME.search(name)


def _possible_values(template: CompiledTemplate, name: str) -> list[Any]:
    """Return the values that the analysis tries for a variable that turns thinking on or off.

    The first values are the constants with which the template compares the variable. The usual
    values follow: True and False, or words such as "high" and "low". The result contains at most
    _MAX_VALUES values. Example: the template contains `{% if thinking_mode == "fast" %}`. For the
    variable `thinking_mode`, the result is ["fast", "high", "low", "none", "enabled", "disabled"].
    """
    constants = template.compared.get(name, ())
    compared_values = [value for value in constants if isinstance(value, str | int)]
    takes_words = "effort" in name or "mode" in name  # such as `reasoning_effort`
    usual_values: tuple[Any, ...] = _EFFORTS if takes_words else (True, False)
    return _without_duplicates([*compared_values, *usual_values])[:_MAX_VALUES]


def _without_duplicates(values: list[Any]) -> list[Any]:
    """Return the values without duplicates.

    Values with different texts (`repr`) are different. Python treats 1 and True as equal, but the
    analysis must try both:

    >>> _without_duplicates([1, True, False, True])
    [1, True, False]
    """
    value_by_text = {repr(value): value for value in values}
    return list(value_by_text.values())
