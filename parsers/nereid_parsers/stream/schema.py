"""What a tool's JSON schema says of an argument's type, and bare text read by it."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ALL_KINDS = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_ALIASES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
}
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_MAX_DEPTH = 8


class Tools:
    """The tools that a prompt offers, by name.

    `tools` is the OpenAI list (each `{"type": "function", "function": {...}}`, or the inner object
    alone), or None when it is not known what was offered; an empty list tells as little. What is
    malformed in it is passed over.
    """

    __slots__ = ("_kinds", "is_known", "parameters")

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self.is_known = bool(tools)
        self.parameters: dict[str, Mapping[str, Any]] = {}
        self._kinds: dict[tuple[str, str], frozenset[str] | None] = {}
        for tool in tools or ():
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(name, str) and isinstance(function, Mapping):
                found = function.get("parameters", function.get("input_schema"))
                self.parameters[name] = found if isinstance(found, Mapping) else {}

    def __contains__(self, name: str) -> bool:
        return name in self.parameters

    def kinds(self, function: str, key: str) -> frozenset[str] | None:
        """The JSON types that argument `key` of `function` may have; None where nothing says."""
        cached = (function, key)
        if cached not in self._kinds:
            schema = self.parameters.get(function, {})
            properties = schema.get("properties")
            found = properties.get(key) if isinstance(properties, Mapping) else None
            self._kinds[cached] = json_types_of(found, schema) if found is not None else None
        return self._kinds[cached]


def json_types_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str] | None:
    """The JSON types that a schema allows; None where it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    found = _declared(schema, root, depth)
    if found is not None and schema.get("nullable") is True:
        return found | {"null"}
    return found


def _declared(
    schema: Mapping[str, Any], root: Mapping[str, Any], depth: int
) -> frozenset[str] | None:
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return json_types_of(_resolve(reference, root), root, depth + 1)
    declared = schema.get("type")
    if declared is not None:
        names = declared if isinstance(declared, list) else [declared]
        kinds = {_ALIASES.get(str(name).lower(), str(name).lower()) for name in names}
        return frozenset(kinds) if kinds <= ALL_KINDS else None
    if isinstance(schema.get("enum"), list):
        return frozenset(json_type_of(value) for value in schema["enum"])
    if "const" in schema:
        return frozenset({json_type_of(schema["const"])})
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            return _union(json_types_of(option, root, depth + 1) for option in schema[word])
    if isinstance(schema.get("allOf"), list):
        known = [json_types_of(option, root, depth + 1) for option in schema["allOf"]]
        return next((kinds for kinds in known if kinds is not None), None)
    for word, kind in (("properties", "object"), ("items", "array"), ("pattern", "string")):
        if word in schema:
            return frozenset({kind})
    return None


def _union(options: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    found: frozenset[str] = frozenset()
    for option in options:
        if option is None:
            return None
        found |= option
    return found or None


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    found: object = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def json_type_of(value: object) -> str:
    """The JSON type of a Python value that json.loads gave."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    names = {str: "string", int: "integer", float: "number", list: "array"}
    return names.get(type(value), "object")


def loads(text: str) -> Any:  # noqa: ANN401  # what JSON may hold
    """json.loads, taking raw control characters in strings. Raises: ValueError."""
    try:
        return json.loads(text, strict=False)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def to_json(text: str, kinds: frozenset[str] | None) -> str:
    """Bare argument text as JSON text of one of `kinds`; a JSON string where nothing else fits.

    The text of numbers and containers is kept to the letter where it is JSON already.
    """
    bare = text.strip()
    value = _as_json(bare)
    if value is not None:
        kind, spelled = value
        if kinds is None:
            return spelled if kind != "string" else json.dumps(text, ensure_ascii=False)
        if kind in kinds or (kind == "integer" and "number" in kinds):
            return spelled if kind != "string" else json.dumps(text, ensure_ascii=False)
        if kind == "number" and kinds & {"integer"} and "string" not in kinds:
            return spelled
        if kind == "string" and "string" not in kinds:
            return spelled
        if "string" not in kinds and kind in ("null", "object", "array"):
            return spelled
    return json.dumps(text, ensure_ascii=False)


def _as_json(bare: str) -> tuple[str, str] | None:
    """(kind, JSON text) of text that is JSON or a Python literal; None for anything else."""
    bare = _LITERALS.get(bare, bare)
    try:
        return json_type_of(loads(bare)), bare
    except ValueError:
        pass
    if bare[:1] not in "[{(-+.0123456789'\"" or not bare:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of odd escapes, which are the model's
            value = ast.literal_eval(bare)
        return json_type_of(value), json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
