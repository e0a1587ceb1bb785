# SPDX-License-Identifier: Apache-2.0
"""Whether a finished answer fits its schema. Imports neither torch nor a grammar library."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it ships no types
from referencing import Registry

_MAX_TEXT = 80


def validate_strict(text: str, schema: object) -> str | None:
    """What is wrong with a text that must be JSON and fit a schema; None if nothing is.

    References outside of the schema are not fetched; they are a problem.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return f"is no JSON: {error}"
    if schema is True or schema == {}:
        return None
    try:
        errors = _validator(json.dumps(schema, sort_keys=True)).iter_errors(value)
        found = next(iter(errors), None)
    except Exception as problem:  # noqa: BLE001 - jsonschema raises what patterns and references do
        return f"cannot be checked: {problem}"
    if found is None:
        return None
    message = str(found.message)
    short = message if len(message) <= _MAX_TEXT else message[:_MAX_TEXT] + ".."
    return f"{found.json_path}: {short}"


@lru_cache(maxsize=256)
def _validator(source: str) -> Any:  # noqa: ANN401 - jsonschema's classes are made at run time
    schema = json.loads(source)
    kind = jsonschema.Draft202012Validator
    if isinstance(schema, Mapping) and "$schema" in schema:
        kind = jsonschema.validators.validator_for(schema, default=kind)
    return kind(schema, registry=Registry())  # without a way to fetch anything


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
