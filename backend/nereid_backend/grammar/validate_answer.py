# SPDX-License-Identifier: Apache-2.0
"""Validates a finished answer against the JSON schema of its request.

This module imports neither torch nor a grammar library.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it ships no types
from referencing import Registry

# Error messages quote at most this number of characters of a jsonschema message.
_MAX_TEXT = 80


def describe_violation(text: str, schema: object) -> str | None:
    """Describe how an answer violates a JSON schema. Return None if the answer matches the schema.

    Example: the text is `{"a": "x"}`, and the schema requires a number for `a`. The result is
    `at $.a: 'x' is not of type 'number'`. References to other documents are not fetched, so a
    schema with such a reference is reported as a problem.

    Args:
        text: the answer, which must be a JSON text.
        schema: the schema as a JSON value.

    Returns:
        A description of the first problem, in a form that fits after a colon, or None.
    """
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        return f"the answer is not JSON: {error}"
    if schema is True or schema == {}:
        return None  # These two schemas allow every JSON value.
    try:
        validator = _validator(json.dumps(schema, sort_keys=True))
        first_error = next(validator.iter_errors(value), None)
    except Exception as error:  # noqa: BLE001
        # The schema comes from the client and may be invalid, so jsonschema can raise any
        # exception. Every exception is reported as a problem of this answer.
        return f"the answer cannot be checked: {error}"
    return None if first_error is None else _description(first_error)


def _description(error: Any) -> str:  # noqa: ANN401 - jsonschema ships no types
    """Return the path and the shortened message of a jsonschema error.

    Example: `at $.a: 'x' is not of type 'number'`.
    """
    message = str(error.message)
    if len(message) > _MAX_TEXT:
        message = message[:_MAX_TEXT] + ".."
    return f"at {error.json_path}: {message}"


@lru_cache(maxsize=256)
def _validator(source: str) -> Any:  # noqa: ANN401 - jsonschema creates its classes at run time
    """Return the validator for a schema. `source` is the schema as JSON text."""
    schema = json.loads(source)
    validator_class = jsonschema.Draft202012Validator
    if isinstance(schema, Mapping) and "$schema" in schema:
        validator_class = jsonschema.validators.validator_for(schema, default=validator_class)
    # The empty registry prevents the validator from fetching other documents.
    return validator_class(schema, registry=Registry())


def _reject_constant(name: str) -> None:
    """Raise a ValueError for NaN and infinity, which Python's JSON parser accepts."""
    raise ValueError(f"{name} is not a JSON value")
