# SPDX-License-Identifier: Apache-2.0
"""Validation of a finished answer against its JSON schema.

This module imports neither torch nor a grammar library.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it ships no types
from referencing import Registry

# A message of jsonschema is cut to this number of characters before it is added to an error.
_MAX_TEXT = 80


def validate_strict(text: str, schema: object) -> str | None:
    """Validate an answer against a JSON schema.

    References to other documents are not fetched. A schema with such a reference is reported as a
    problem. Example: the text `{"a": "x"}` and a schema that requires a number return
    `at $.a: 'x' is not of type 'number'`.

    Args:
        text: the answer, which must be a JSON text.
        schema: the schema as a JSON value.

    Returns:
        A description of the first problem, to be appended to a message after a colon. None if the
        answer matches the schema.
    """
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        return f"the answer is not JSON: {error}"
    if schema is True or schema == {}:
        return None
    try:
        errors = _validator(json.dumps(schema, sort_keys=True)).iter_errors(value)
        first = next(iter(errors), None)
    except Exception as problem:  # noqa: BLE001
        # The schema comes from the client and may not be valid. jsonschema can then raise any
        # exception, so all exceptions are reported as a problem of this answer.
        return f"the answer cannot be checked: {problem}"
    if first is None:
        return None
    message = str(first.message)
    short = message if len(message) <= _MAX_TEXT else message[:_MAX_TEXT] + ".."
    return f"at {first.json_path}: {short}"


@lru_cache(maxsize=256)
def _validator(source: str) -> Any:  # noqa: ANN401 - jsonschema creates its classes at run time
    """Return the validator for a schema. `source` is the schema as JSON text."""
    schema = json.loads(source)
    kind = jsonschema.Draft202012Validator
    if isinstance(schema, Mapping) and "$schema" in schema:
        kind = jsonschema.validators.validator_for(schema, default=kind)
    # An empty registry cannot fetch documents.
    return kind(schema, registry=Registry())


def _reject_constant(name: str) -> None:
    """Raise ValueError for NaN and the infinities, which Python's parser would accept."""
    raise ValueError(f"{name} is not a JSON value")
