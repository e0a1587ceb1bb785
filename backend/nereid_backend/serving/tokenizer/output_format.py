# SPDX-License-Identifier: Apache-2.0
"""Reads the output format that a request requires, such as a JSON schema or a regex."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nereid_backend.errors import RequestError
from nereid_backend.request_field_checks import shown
from nereid_backend.serving.tokenizer.surrogate_pairs import refuse_surrogates

_FIELDS = ("response_format", "structured_outputs", "regex", "ebnf", "json_schema", "grammar")
_FORMAT_TYPES = ("text", "json_object", "json_schema", "structural_tag")
# Maps each key of the field `structured_outputs` to a function. The function converts the value of
# the key to an object in the format of `response_format`.
_STRUCTURED_OUTPUT_FORMS: dict[str, Callable[[Any], Mapping[str, Any]]] = {
    "json": lambda schema: _schema_form("structured_outputs.json", schema),
    "json_object": lambda _: {"type": "json_object"},
    "regex": lambda pattern: {"type": "regex", "pattern": pattern},
    "grammar": lambda grammar: {"type": "grammar", "grammar": grammar},
    "choice": lambda choices: {"type": "choice", "choice": choices},
    "structural_tag": lambda tag: _tag_form("structured_outputs.structural_tag", tag),
}


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The format that a request requires for the generated content.

    Each request field that requires a format is converted to the form of response_format. Example:
    the field `regex: "a+"` becomes `{"type": "regex", "pattern": "a+"}`.

    Attributes:
        field: the name of the request field that requires the format. Error messages begin with
            this name.
        form: the converted object. Its type is json_object, json_schema, structural_tag, regex,
            grammar or choice.
    """

    field: str
    form: Mapping[str, Any]

    @property
    def schema(self) -> object:
        """The JSON schema of the format; `{}` if the format has no schema."""
        if self.form["type"] == "json_object":
            return {"type": "object"}
        inner = self.form.get("json_schema")
        return inner.get("schema", {}) if isinstance(inner, Mapping) else {}

    @property
    def is_strict(self) -> bool:
        """Whether every keyword of the schema must be enforced."""
        inner = self.form.get("json_schema")
        return isinstance(inner, Mapping) and bool(inner.get("strict"))


def read_output_format(fields: Mapping[str, Any]) -> OutputFormat | None:
    """Return the output format that a request requires; None if the output is unconstrained.

    These fields are read: response_format (OpenAI), structured_outputs (vLLM), regex, ebnf and
    json_schema (SGLang), json_schema and grammar (llama.cpp).

    Raises:
        RequestError: a field has a wrong value, the request has more than one of these fields, or
            no JSON text satisfies the schema.
    """
    formats_of_fields = [_read_field(name, fields.get(name)) for name in _FIELDS]
    formats = [output for output in formats_of_fields if output is not None]
    if len(formats) > 1:
        raise RequestError(
            f"{formats[1].field}: the request constrains its output with both {formats[0].field} "
            f"and {formats[1].field}. Send only one of the two."
        )
    if formats and formats[0].schema is False:
        raise RequestError(
            f"{formats[0].field}: the schema is false, which no JSON value satisfies. Send an "
            "object, or true to accept every value."
        )
    return formats[0] if formats else None


def _read_field(name: str, value: Any) -> OutputFormat | None:  # noqa: ANN401 - any JSON value
    """Return the output format that one request field requires; None if there is none.

    Example: the field "regex" with the value "a+" returns an OutputFormat with the form `{"type":
    "regex", "pattern": "a+"}`.
    """
    if value in (None, {}, ""):
        return None  # Some clients send these values instead of leaving the field out.
    match name:
        case "response_format":
            return _read_response_format(value)
        case "structured_outputs":
            return _read_structured_outputs(value)
        case "json_schema":
            return OutputFormat(name, _schema_form(name, value))
        case "regex":
            return OutputFormat(name, {"type": "regex", "pattern": _check_string(name, value)})
        case "ebnf" | "grammar":
            return OutputFormat(name, {"type": "grammar", "grammar": _check_string(name, value)})
    raise AssertionError(f"{name} does not require a format")


def _check_string(name: str, value: object) -> str:
    """Return the value of the field `name`. Raise a RequestError if it is not a string."""
    if not isinstance(value, str):
        raise RequestError(
            f"{name}: the value must be a string, but the request has {shown(value)}."
        )
    return value


def _read_response_format(value: Any) -> OutputFormat | None:  # noqa: ANN401 - any JSON value
    """Return the format that the field `response_format` requires; None if its type is `text`.

    Example: `{"type": "text"}` returns None, because the output is not constrained.
    """
    if not isinstance(value, Mapping):
        raise _wrong_type_error(value)
    format_type = value.get("type")
    if format_type not in _FORMAT_TYPES:
        raise _wrong_type_error(format_type)
    if format_type == "text":
        return None
    if format_type == "json_object":
        return OutputFormat("response_format", _json_object_form(value))
    if format_type == "json_schema":
        return OutputFormat("response_format", _json_schema_form(value))
    # The only remaining type is "structural_tag". The engine reads this format directly, so it is
    # not converted.
    return OutputFormat("response_format", value)


def _wrong_type_error(value: object) -> RequestError:
    """Return the error for a `response_format` without a known type.

    `value` is the type, or the whole `response_format` if it is not an object.
    """
    return RequestError(
        f"response_format: type must be one of {', '.join(_FORMAT_TYPES)}, but the request has "
        f"{shown(value)}."
    )


def _json_object_form(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a response_format of the type json_object.

    In the APIs of llama.cpp and TGI, such an object can contain a JSON schema in the key `schema`
    or `value`. The object is then converted to the type json_schema. Example: `{"type":
    "json_object", "schema": {}}` becomes `{"type": "json_schema", "json_schema": {"schema": {},
    "strict": None}}`. An object without a schema is not changed.
    """
    schema_keys = [key for key in ("schema", "value") if value.get(key) is not None]
    if not schema_keys:
        return value
    schema_key = schema_keys[0]
    schema = value[schema_key]
    if not isinstance(schema, Mapping | bool):
        raise RequestError(
            f"response_format: {schema_key} must be a JSON schema (an object, true or false), but "
            f"the request has {shown(schema)}."
        )
    inner = {"schema": schema, "strict": value.get("strict")}
    return {"type": "json_schema", "json_schema": inner}


def _json_schema_form(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a response_format of the type json_schema to the form of OpenAI's API.

    In OpenAI's API, the schema is inside the object `json_schema`:
    `{"type": "json_schema", "json_schema": {"schema": {}}}`. Other clients send the schema without
    this object: `{"type": "json_schema", "schema": {}}`. The result always has the object.

    Raises:
        RequestError: there is no schema.
    """
    object_with_schema = value.get("json_schema", value)
    if not isinstance(object_with_schema, Mapping):
        raise _no_schema_error(object_with_schema)
    schema = object_with_schema.get("schema")
    if not isinstance(schema, Mapping | bool):
        raise _no_schema_error(schema)
    return {"type": "json_schema", "json_schema": object_with_schema}


def _no_schema_error(value: object) -> RequestError:
    """Return the error for a response_format that contains `value` in place of a JSON schema."""
    return RequestError(
        "response_format: json_schema.schema must be a JSON schema (an object, true or false), but "
        f"the request has {shown(value)}."
    )


def _read_structured_outputs(value: Any) -> OutputFormat | None:  # noqa: ANN401 - any JSON value
    """Return the format that the field `structured_outputs` requires; None if the field is empty.

    A key with the value null or false counts as missing, because clients of vLLM send all keys.
    Example: `{"regex": "a+", "json_object": false}` returns an OutputFormat with the form `{"type":
    "regex", "pattern": "a+"}`.
    """
    if not isinstance(value, Mapping):
        raise RequestError(
            f"structured_outputs: the value must be an object, but the request has {shown(value)}."
        )
    given = {key: item for key, item in value.items() if item is not None and item is not False}
    if not given:
        return None
    _check_structured_output_keys(list(given))
    ((key, item),) = given.items()  # The check above has allowed only one key.
    build_form = _STRUCTURED_OUTPUT_FORMS[key]
    return OutputFormat("structured_outputs", build_form(item))


def _check_structured_output_keys(keys: list[str]) -> None:
    """Raise a RequestError if structured_outputs has an unknown key or more than one key."""
    known_keys = ", ".join(_STRUCTURED_OUTPUT_FORMS)
    unknown_keys = [key for key in keys if key not in _STRUCTURED_OUTPUT_FORMS]
    if unknown_keys:
        raise RequestError(
            f"structured_outputs: this server does not support the key {unknown_keys[0]}. Use one "
            f"of {known_keys}."
        )
    if len(keys) > 1:
        raise RequestError(
            f"structured_outputs: the object must have only one of the keys {known_keys}, but the "
            f"request has {', '.join(keys)}."
        )


def _schema_form(name: str, value: Any) -> Mapping[str, Any]:  # noqa: ANN401 - any JSON value
    """Convert a JSON schema to a response_format object. The schema may be JSON text."""
    schema = _parse_json(name, value)
    if not isinstance(schema, Mapping | bool):
        raise RequestError(
            f"{name}: the value must be a JSON schema (an object, true or false), but the request "
            f"has {shown(schema)}."
        )
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _tag_form(name: str, value: Any) -> Mapping[str, Any]:  # noqa: ANN401 - any JSON value
    """Convert a structural tag to a response_format object. The tag may be JSON text."""
    tag = _parse_json(name, value)
    if not isinstance(tag, Mapping):
        raise RequestError(
            f"{name}: the value must be a structural tag (an object), but the request has "
            f"{shown(tag)}."
        )
    return {**tag, "type": "structural_tag"}


def _parse_json(name: str, value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """If `value` is a text, parse the text as JSON. Return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
        refuse_surrogates(name, value, parsed)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name}: the text is not valid JSON: {error}") from None
    return parsed
