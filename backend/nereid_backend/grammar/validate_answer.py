# SPDX-License-Identifier: Apache-2.0
"""Validates a finished answer against the JSON schema of its request.

The schema comes from a client. A short schema can require exponential time, for example with the
pattern `(a|a)*b` or with definitions that refer twice to each other. The time of a validation is
therefore limited, because all streams of the server wait for it.

This module imports neither torch nor a grammar library.
"""

import functools
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it ships no types
import regex  # type: ignore[import-untyped]  # the module `re` has no time limit
from referencing import Registry

# Error messages quote at most this number of characters of a jsonschema message.
_MAX_TEXT = 80
# The validator of a longer schema is not cached. A validator needs about ten bytes for each
# character of its schema, so 256 validators of schemas with megabytes would fill the memory.
_MAX_CACHED_CHARS = 2**16
# The time limit of a validation in seconds is the sum of `_MIN_TIME_S` and `_TIME_S_PER_CHARACTER`
# for each character of the answer. The validation of usual schemas takes only a small part of this
# time.
_MIN_TIME_S = 1.0
_TIME_S_PER_CHARACTER = 2e-4

# The annotation of the errors that jsonschema returns. The annotation is `Any`, because the library
# jsonschema contains no type annotations.
_Errors = Any
_CURRENT_DRAFT = jsonschema.Draft202012Validator

# The end of the time limit of the running validation, by time.monotonic().
_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


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
    limit_s = _MIN_TIME_S + _TIME_S_PER_CHARACTER * len(text)
    # `_limited` and `_search`, which jsonschema calls, compare the time with `_deadline`.
    token = _deadline.set(time.monotonic() + limit_s)
    try:
        return _first_problem(text, schema)
    except TimeoutError:
        return (
            f"the check of the answer took longer than {limit_s:.1f} s, which is the limit. "
            "Simplify the patterns and the references of the schema"
        )
    finally:
        _deadline.reset(token)


def _first_problem(text: str, schema: object) -> str | None:
    """Describe the first violation of a JSON schema in an answer; None if the answer matches.

    Example: the result for the answer `{"a": "x"}` is `at $.a: 'x' is not of type 'number'`.

    Raises:
        TimeoutError: if the time limit in `_deadline` has expired.
    """
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        return f"the answer is not JSON: {error}"
    if schema is True or schema == {}:
        return None  # These two schemas allow every JSON value.
    try:
        source = json.dumps(schema, sort_keys=True)
        is_small = len(source) <= _MAX_CACHED_CHARS
        validator = _cached_validator(source) if is_small else _validator(source)
        first_error = next(validator.iter_errors(value), None)
    except TimeoutError:
        raise
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


def _validator(source: str) -> Any:  # noqa: ANN401 - jsonschema creates its classes at run time
    """Return the validator for a schema. `source` is the schema as JSON text."""
    schema = json.loads(source)
    validator_class = _default_validator_class()
    if isinstance(schema, Mapping) and "$schema" in schema:
        validator_class = jsonschema.validators.validator_for(schema, default=validator_class)
    # The empty registry prevents the validator from fetching other documents.
    return validator_class(schema, registry=Registry())


_cached_validator = lru_cache(maxsize=256)(_validator)


@lru_cache(maxsize=1)
def _default_validator_class() -> Any:  # noqa: ANN401 - jsonschema creates its classes at run time
    """Return the class of validators for schemas without `$schema`.

    The class implements draft 2020-12, and the forms of older drafts that the grammar libraries
    enforce, too: a list as the value of `items`, and a boolean as the value of `exclusiveMinimum`.
    """
    checks = {
        "items": _check_items,
        "additionalItems": jsonschema.Draft7Validator.VALIDATORS["additionalItems"],
        "exclusiveMinimum": functools.partial(_check_exclusive, "exclusiveMinimum", "minimum"),
        "exclusiveMaximum": functools.partial(_check_exclusive, "exclusiveMaximum", "maximum"),
    }
    return jsonschema.validators.extend(_CURRENT_DRAFT, checks)


def _check_items(validator: object, value: object, instance: object, schema: object) -> _Errors:
    """Check an array against the keyword `items` of a schema.

    If the value of `items` is a list of schemas, draft 7 applies: the first schema is for the first
    item of the array, the second schema is for the second item, and so on. If the value is a single
    schema, draft 2020-12 applies.
    """
    has_one_schema_per_item = isinstance(value, list)
    draft = jsonschema.Draft7Validator if has_one_schema_per_item else _CURRENT_DRAFT
    return draft.VALIDATORS["items"](validator, value, instance, schema)


def _check_exclusive(
    keyword: str,
    bound: str,
    validator: object,
    value: object,
    instance: object,
    schema: Mapping[str, object],
) -> _Errors:
    """Check the keyword `exclusiveMinimum` or `exclusiveMaximum` of a schema.

    In draft 4, the value of the keyword is a boolean, which determines whether `minimum` or
    `maximum` is exclusive. Example: {"minimum": 3, "exclusiveMinimum": true} allows 4, but not 3.

    `bound` is "minimum" or "maximum". jsonschema passes `validator`, `value` (the value of the
    keyword), `instance` (the value to check) and `schema` to each function that checks a keyword.
    """
    is_draft_4 = isinstance(value, bool)
    if not is_draft_4:
        return _CURRENT_DRAFT.VALIDATORS[keyword](validator, value, instance, schema)
    if bound not in schema:
        return None
    # The check of `minimum` in draft 4 reads the value of `exclusiveMinimum` from `schema`, so the
    # check covers both keywords. The same applies to `maximum`.
    check_bound = jsonschema.Draft4Validator.VALIDATORS[bound]
    return check_bound(validator, schema[bound], instance, schema)


def _limited(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that checks the time limit and then calls `check`."""

    @functools.wraps(check)
    def limited_check(*arguments: object) -> Any:  # noqa: ANN401 - errors of jsonschema
        _remaining_s()
        return check(*arguments)

    return limited_check


def _search(pattern: str, text: str) -> Any:  # noqa: ANN401 - a match of `regex`
    """Return the first match of a regular expression in `text`, or None.

    This function replaces `re.search`. After the time limit, it raises a TimeoutError.
    """
    remaining_s = _remaining_s()
    return regex.search(pattern, text, timeout=None if remaining_s == math.inf else remaining_s)


def _remaining_s() -> float:
    """Return the remaining time in seconds. Raise a TimeoutError if no time remains."""
    remaining_s = _deadline.get() - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    return remaining_s


def _limit_keywords() -> None:
    """Make every validator class of jsonschema check the time limit before each keyword.

    The classes are changed instead of extended, because a part of a schema can select another class
    with `$schema`. The backend uses jsonschema only in this module.
    """
    for draft in ("3", "4", "6", "7", "201909", "202012"):
        checks = getattr(jsonschema, f"Draft{draft}Validator").VALIDATORS
        checks.update({name: _limited(check) for name, check in checks.items()})


def _limit_regular_expressions() -> None:
    """Make jsonschema use `_search`, which has a time limit, for regular expressions.

    Several keywords, such as `pattern` and `additionalProperties`, call `re.search`. Therefore, the
    variable `re` in the modules of the keywords gets an object with another function `search`.
    """
    limited_re = SimpleNamespace(**{**vars(re), "search": _search})
    for name in ("_keywords", "_legacy_keywords", "_utils"):
        # A later version of jsonschema may rename these private modules. Then the time limit is
        # still checked before each keyword, but not during a search.
        module = getattr(jsonschema, name, None)
        if module is not None:
            module.re = limited_re


_limit_keywords()
_limit_regular_expressions()


def _reject_constant(name: str) -> None:
    """Raise a ValueError for NaN and infinity, which Python's JSON parser accepts."""
    raise ValueError(f"{name} is not a JSON value")
