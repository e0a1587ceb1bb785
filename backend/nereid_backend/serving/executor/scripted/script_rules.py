# SPDX-License-Identifier: Apache-2.0
"""Reads the script of the scripted engine.

The docstring of scripted_engine.py describes the format of the script.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nereid_backend.errors import ConfigError

# If the text of a fault begins with this prefix, the fault only keeps the CPU busy for some
# seconds. Example: the fault "busy 2" keeps the CPU busy for 2 seconds. Any other fault ends the
# engine process.
_BUSY_PREFIX = "busy "


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the script. It applies to requests whose prompt contains the text in `when`.

    The docstring of scripted_engine.py describes the fields. `token_ids` contains either one output
    that all sequences of a request share, or one output for each sequence.
    """

    when: str
    token_ids: tuple[tuple[int, ...], ...]
    tokens_per_step: int = 1
    delay_ms: float = 0.0
    num_cached_tokens: int = 0
    ends: bool = True
    error: str = ""
    is_refused: bool = False
    fault: str = ""

    @property
    def busy_s(self) -> float | None:
        """The number of seconds for which the fault uses the CPU; None for any other fault.

        Example: the fault "busy 2" gives 2.0.
        """
        if not self.fault.startswith(_BUSY_PREFIX):
            return None
        return float(self.fault.removeprefix(_BUSY_PREFIX))


def read_script(path: Path, encode: Callable[[str], list[int]]) -> list[Rule]:
    """Return the rules of the script at `path`.

    Args:
        path: a JSON file.
        encode: converts text to token ids.

    Raises:
        ConfigError: the script cannot be read, or a rule has an unknown key or no key `when`.
    """
    try:
        return _parse_rules(path.read_text(encoding="utf-8"), encode)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"script: the file {path} cannot be read as a list of rules: {error}"
        ) from error


def _parse_rules(text: str, encode: Callable[[str], list[int]]) -> list[Rule]:
    """Return the rules in the JSON text of a script.

    Raises:
        ConfigError: a rule has an unknown key.
        ValueError: the text is not JSON.
        AttributeError: a rule is not an object.
        TypeError: the JSON value is not a list, or a rule lacks the key `when`, which is a required
            argument of `Rule`.
    """
    entries = json.loads(text)
    for entry in entries:
        _check_keys(entry)
    return [_rule(entry, encode) for entry in entries]


def _check_keys(entry: dict[str, Any]) -> None:
    """Raise a ConfigError if an entry of the script has an unknown key."""
    known_keys = {field.name for field in fields(Rule)} | {"text"}
    unknown_keys = sorted(entry.keys() - known_keys)
    if unknown_keys:
        raise ConfigError(
            f"script: a rule has the unknown key {unknown_keys[0]!r}. The known keys are "
            f"{', '.join(sorted(known_keys))}."
        )


def _rule(entry: dict[str, Any], encode: Callable[[str], list[int]]) -> Rule:
    """Convert one entry of the script to a Rule.

    The output is given as `text` or as `token_ids`. Each of these keys contains either one output
    for all sequences of a request, or a list with one output for each sequence.
    """
    text = entry.get("text")
    if text is not None:
        texts = text if isinstance(text, list) else [text]
        outputs = [encode(text_of_sequence) for text_of_sequence in texts]
    else:
        outputs = _as_list_of_outputs(entry.get("token_ids") or [])
    other_fields = {key: entry[key] for key in entry.keys() - {"text", "token_ids"}}
    return Rule(token_ids=tuple(tuple(output) for output in outputs), **other_fields)


def _as_list_of_outputs(token_ids: list[Any]) -> list[list[int]]:
    """Return a list with the token ids of each output. `token_ids` is the value in the script.

    Examples: one output [5, 6] becomes [[5, 6]]. Two outputs [[5], [6, 7]] are returned unchanged.
    """
    contains_several_outputs = bool(token_ids) and isinstance(token_ids[0], list)
    return token_ids if contains_several_outputs else [token_ids]
