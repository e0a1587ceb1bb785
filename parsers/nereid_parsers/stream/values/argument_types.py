"""Reads the types of arguments from JSON schemas, and converts the text of arguments to JSON.

A "JSON type" is one of the names in `ALL_TYPES`.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_TYPE_ALIASES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
}
# If a JSON schema contains one of these keywords, the keyword determines the type of the value.
_TYPE_OF_KEYWORD = (("properties", "object"), ("items", "array"), ("pattern", "string"))
_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}
_FIRST_CHARS_OF_LITERALS = "[{(-+.0123456789'\""
_match_zero_padded_number = re.compile(r"([-]?)0+(\d+(?:\.\d+)?)").fullmatch
_SURROGATE = re.compile("[\ud800-\udfff]")
# The limit for nested schemas.
_MAX_SCHEMA_DEPTH = 8


class _Function(NamedTuple):
    """The name of a function that a tool declares, and the JSON schema of its parameters."""

    name: str
    parameters: Mapping[str, Any]


def _read_function(tool: object) -> _Function | None:
    """Read a member of a tools list. Return None if the member declares no function with a name.

    Example: `{"type": "function", "function": {"name": "f", "parameters": {...}}}` declares the
    function `f`. The inner object alone declares the same function.
    """
    if not isinstance(tool, Mapping):
        return None
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        return None
    name = function.get("name")
    if not isinstance(name, str):
        return None
    # Some clients write the schema of the parameters under the key `input_schema`.
    schema_key = "parameters" if "parameters" in function else "input_schema"
    schema = function.get(schema_key)
    return _Function(name, follow_references(schema) if isinstance(schema, Mapping) else {})


class Tools:
    """The tools that the prompt offers to the model.

    Attributes:
        is_known: Whether the offered tools are known. False if the tools list is empty or None.
        parameters: The JSON schemas of the parameters. The keys are the names of the functions.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Read the OpenAI tools list, or None. Members that are not valid are ignored.

        A member is `{"type": "function", "function": {...}}`, or only the inner object.
        """
        self.is_known = bool(tools)
        self.parameters: dict[str, Mapping[str, Any]] = {}  # By the name of the function.
        # The cached results of `argument_types`. A key consists of the function's name and the
        # argument's name. A value of None means that the argument may have any type.
        self._argument_types: dict[tuple[str, str], frozenset[str] | None] = {}
        for tool in tools or ():
            function = _read_function(tool)
            if function is not None:
                self.parameters[function.name] = function.parameters

    def __contains__(self, name: str) -> bool:
        """Return whether the tools contain a function with this name."""
        return name in self.parameters

    def may_have_argument(self, function: str, key: str) -> bool:
        """Return whether `function` declares the argument `key`, or declares no arguments."""
        properties = self.parameters.get(function, {}).get("properties")
        return key in properties if isinstance(properties, Mapping) else True

    def argument_types(self, function: str, key: str) -> frozenset[str] | None:
        """Return the JSON types, such as "string", that the argument `key` may have.

        Return None if the schema of the function declares no type for this argument. The results
        are cached, because a model may repeat the same argument in many tool calls.
        """
        if not self.is_known:
            return frozenset({"string"})  # Without a schema, every value is read as a string.
        cache_key = (function, key)
        if cache_key not in self._argument_types:
            root = self.parameters.get(function, {})
            schema = self.argument_schema(function, key)
            self._argument_types[cache_key] = json_types_of(schema, root)
        return self._argument_types[cache_key]

    def argument_schema(self, function: str, key: str) -> object:
        """Return the JSON schema of the argument `key`, or None if it is not declared."""
        properties = self.parameters.get(function, {}).get("properties")
        return properties.get(key) if isinstance(properties, Mapping) else None


def json_types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the JSON types that `schema` allows, or None if `schema` does not define the type.

    The types are needed to convert the text of an argument to JSON. Example:
    `{"anyOf": [{"type": "integer"}, {"type": "null"}]}` gives `{"integer", "null"}`.

    `root` contains the definitions to which the references (`$ref`) of `schema` point. A `$ref` to
    its own schema and a schema inside more than `_MAX_SCHEMA_DEPTH` other schemas define no type.
    """
    return _TypeFinder(root).types_of(schema, depth=0)


class _TypeFinder:
    """Finds the JSON types that schemas allow. The references of these schemas point to `root`.

    Each reference is looked up once, because the time would otherwise grow exponentially with the
    number of definitions that refer to each other.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        """Create a finder for schemas whose definitions `root` contains."""
        self._root = root
        # The types of the references that have been looked up. The keys are the references.
        self._known_types: dict[str, frozenset[str] | None] = {}

    def types_of(self, schema: object, depth: int) -> frozenset[str] | None:
        """Return the JSON types that `schema` allows, or None if `schema` does not define the type.

        Example: `{"type": "integer", "nullable": true}` gives `{"integer", "null"}`.

        `depth` is the number of schemas that enclose `schema` or refer to it. If it is greater than
        `_MAX_SCHEMA_DEPTH`, the result is None.
        """
        if not isinstance(schema, Mapping) or depth > _MAX_SCHEMA_DEPTH:
            return None
        types = self._declared_types(schema, depth)
        if types is not None and schema.get("nullable") is True:
            return types | {"null"}
        return types

    def _declared_types(self, schema: Mapping[str, Any], depth: int) -> frozenset[str] | None:
        """Return the JSON types of the first keyword in `schema` that decides the type.

        Return None if no keyword decides, or if the type has an unknown name. Examples, in the
        order of the keywords:

            {"$ref": "#/$defs/City"}    the types of the schema to which the reference points
            {"type": "integer"}         integer
            {"enum": ["a", 1]}          string, integer
            {"const": 1}                integer
            {"anyOf": [...]}            the types of all parts, as for `oneOf`
            {"allOf": [...]}            the types of the first part that declares a type
            {"items": {}}               array, because this keyword applies only to arrays

        `depth` is the number of schemas that enclose `schema` or refer to it.
        """
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._types_of_reference(reference, depth)
        if schema.get("type") is not None:
            return _types_with_names(schema["type"])
        if isinstance(schema.get("enum"), list):
            return frozenset(json_type_of(value) for value in schema["enum"])
        if "const" in schema:
            return frozenset({json_type_of(schema["const"])})
        for keyword, combine_types in _COMBINE_TYPES_OF_PARTS.items():
            parts = schema.get(keyword)
            if isinstance(parts, list):
                return combine_types([self.types_of(part, depth + 1) for part in parts])
        for keyword, json_type in _TYPE_OF_KEYWORD:
            if keyword in schema:
                return frozenset({json_type})
        return None

    def _types_of_reference(self, reference: str, depth: int) -> frozenset[str] | None:
        """Return the JSON types of the schema to which `reference` points.

        Example: if `root["$defs"]["City"]` is `{"type": "string"}`, `#/$defs/City` gives
        `{"string"}`. Return None if this schema defines no type.

        `depth` is the depth of the schema that contains the reference.
        """
        if reference not in self._known_types:
            # If the definition refers to itself, the inner reference finds this result.
            self._known_types[reference] = None
            definition = _resolve(reference, self._root)
            self._known_types[reference] = self.types_of(definition, depth + 1)
        return self._known_types[reference]


def _types_with_names(names: object) -> frozenset[str] | None:
    """Return the JSON types that the keyword `type` names, or None if a name is not known.

    `names` is one name or a list of names. Example: `["int", "null"]` gives `{"integer", "null"}`,
    because clients also write Python's names of types.
    """
    lower_names = [str(name).lower() for name in (names if isinstance(names, list) else [names])]
    types = frozenset(_TYPE_ALIASES.get(name, name) for name in lower_names)
    return types if types <= ALL_TYPES else None


def _first_known(parts: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    """Return the first item of `parts` that is not None, or None if there is no such item.

    The items of `parts` are the types of the schemas in an `allOf`. Usually only one of these
    schemas declares types, for example a reference to another schema.
    """
    return next((types for types in parts if types is not None), None)


def _union(options: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    """Return the union of `options`, which are sets of JSON types.

    The items of `options` are the types of the schemas in an `anyOf`. If an item is None, its
    schema allows any type, so the result is None. The result is also None if `options` is empty.
    """
    union: frozenset[str] = frozenset()
    for types in options:
        if types is None:
            return None
        union |= types
    return union or None


# This dict maps each keyword that contains a list of schemas, such as `anyOf`, to a function. The
# function combines the JSON types of these schemas into one set of types.
_COMBINE_TYPES_OF_PARTS = {"anyOf": _union, "oneOf": _union, "allOf": _first_known}


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    """Return the schema in `root` to which `reference` points, or None if there is no such schema.

    Example: `#/$defs/City` points to `root["$defs"]["City"]`.
    """
    schema: object = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        name = decode_reference_name(part)
        schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema


def decode_reference_name(name: str) -> str:
    """Decode the escape sequences of a name in a `$ref`. Example: "a~1b%20c" returns "a/b c"."""
    return unquote(name).replace("~1", "/").replace("~0", "~")


def follow_references(schema: Any, root: Any = None) -> Any:  # noqa: ANN401 - JSON
    """Replace the `$ref` of a schema by the definition to which the `$ref` refers.

    The caller can then read the keywords of the definition, such as `enum`. The definition may
    itself be a reference. Example: if the definition `C` of `root` is `{"type": "string"}`, the
    schema `{"$ref": "#/$defs/C", "title": "City"}` gives `{"title": "City", "type": "string"}`.
    A reference to no definition or to itself stays unchanged.

    `root` contains the definitions. If `root` is None, `schema` contains them.
    """
    root = schema if root is None else root
    followed: set[str] = set()
    while isinstance(schema, Mapping):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or reference in followed:
            break
        followed.add(reference)
        definition = _resolve(reference, root)
        if not isinstance(definition, Mapping):
            break
        schema = {key: value for key, value in schema.items() if key != "$ref"} | dict(definition)
    return schema


def json_type_of(value: object) -> str:
    """Return the JSON type of a value that `json.loads` returned.

    Example: `json_type_of(None)` returns `"null"`.
    """
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    names = {str: "string", int: "integer", float: "number", list: "array"}
    return names.get(type(value), "object")


def loads(text: str) -> Any:  # noqa: ANN401  # JSON may contain any type
    """Parse JSON text. Strings may contain unescaped control characters.

    Raises:
        ValueError: The text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text, strict=False)
    except RecursionError as error:
        raise ValueError("The JSON text has too many nested arrays or objects") from error


def escape_surrogates(text: str) -> str:
    r"""Write each half of a surrogate pair in `text` as a JSON escape sequence, such as `\ud83d`.

    No encoding can represent half of a surrogate pair, so that the text could not be sent.
    """
    return _SURROGATE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def to_json_text(value: object) -> str:
    """Convert a value to JSON text. Raise ValueError for NaN and Infinity."""
    return escape_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))


def to_json(text: str, types: frozenset[str] | None) -> str:
    """Convert an argument's text to JSON text. If possible, the result has one of the `types`.

    Text that is neither JSON nor a Python literal becomes a JSON string. Examples:

        text      types        result
        `12`      integer      `12`
        `12`      string       `"12"`
        `007`     integer      `7`, because JSON allows no leading zeros
        `True`    boolean      `true`, because Python literals are accepted
        `Paris`   not known    `"Paris"`

    `types` are the JSON types that the schema allows, or None if they are not known.
    """
    literal_text = text.strip()
    may_be_string = types is None or "string" in types
    if not may_be_string:  # If a string is allowed, "007" keeps its zeros.
        literal_text = without_leading_zeros(literal_text)
    literal = _parse_literal(literal_text)  # A JSON value or a Python literal, or None.
    if literal is None or _becomes_string(literal.json_type, types):
        return json.dumps(text, ensure_ascii=False)
    return literal.json_text


def without_leading_zeros(text: str) -> str:
    """Remove leading zeros, which JSON does not allow, from a number. Return other text unchanged.

    Examples: `"007"` gives `"7"`, `"-05.5"` gives `"-5.5"`, and `"0"` and `"0x1"` stay unchanged.
    """
    match = _match_zero_padded_number(text)
    return match.group(1) + match.group(2) if match else text


class _Literal(NamedTuple):
    """The JSON type of a value, such as "integer", and its JSON text, such as `12`."""

    json_type: str
    json_text: str


def _becomes_string(json_type: str, types: frozenset[str] | None) -> bool:
    r"""Return whether a value must be written as a JSON string, for example `12` as `"12"`.

    The model wrote the value between two tags, as in `<p=days>12</p>`. Examples:

        value    allowed types   result
        `"x"`    string          True, because the quotes belong to the string: `"\"x\""`
        `12`     not known       False
        `12`     number          False, because each integer is a number
        `12`     string          True
        `12`     array           True, because the model may have meant the text "12"

    `json_type` is the JSON type of the value, for example "integer".
    """
    if json_type == "string":
        # The model writes strings between tags without quotes. If the value has quotes, the quotes
        # are therefore characters of the string, unless the schema forbids a string.
        return types is None or "string" in types
    if types is None or _fits(json_type, types):
        return False
    if "string" in types:
        return True
    # The value has none of the allowed types. JSON text such as `[1]` was hardly meant as a string.
    return not _is_hardly_string(json_type, types)


def _fits(json_type: str, types: frozenset[str]) -> bool:
    """Return whether a value of the type `json_type` is valid. Each integer is also a number."""
    return json_type in types or (json_type == "integer" and "number" in types)


def _is_hardly_string(json_type: str, types: frozenset[str]) -> bool:
    """Return whether a value that has none of the allowed `types` was hardly meant as a string.

    No result can be valid, because `types` does not contain "string" either. Examples:

        value                  allowed types   result
        `null`, `[1]`, `{}`    integer         True, because ordinary text rarely has this form
        `12`, `true`           array           False, because ordinary text may be `12` or `true`
        `1.5`                  integer         True, because the number is similar to an integer
        `1.5`                  array           False
    """
    if json_type == "number":
        return "integer" in types
    return json_type in ("null", "array", "object")


def _parse_literal(text: str) -> _Literal | None:
    """Parse a JSON value or a Python literal. Return None if `text` is neither.

    Examples: `"True"` gives the type "boolean" and the text `true`. `"{'a': 1}"` gives the type
    "object" and the text `{"a": 1}`. `"Paris"` and `"NaN"` give None.
    """
    json_text = _JSON_WORDS.get(text, text)
    try:
        return _Literal(json_type_of(_loads_strictly(json_text)), json_text)
    except ValueError:
        return _parse_inexact_json(json_text) or _parse_python_literal(text)


def _loads_strictly(text: str) -> Any:  # noqa: ANN401  # JSON may contain any type
    """Parse JSON text. Raise ValueError for NaN, Infinity and unescaped control characters."""

    def refuse(word: str) -> None:
        """Raise ValueError for `word`, such as NaN, which Python accepts but JSON does not."""
        raise ValueError(f"JSON does not allow {word}")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("The JSON text has too many nested arrays or objects") from error


def _parse_inexact_json(text: str) -> _Literal | None:
    r"""Parse JSON text with unescaped control characters in strings, and escape these characters.

    Return None if the text has other errors. Example: `["a<line break>"]` gives `["a\n"]`.
    """
    try:
        value = loads(text)
        return _Literal(json_type_of(value), to_json_text(value))
    except ValueError:
        return None


def _parse_python_literal(text: str) -> _Literal | None:
    """Parse a Python literal, such as `{'a': 1}`. Return None if `text` is not a literal.

    Also return None if JSON cannot represent the value. Example: the set `{1}` gives None.
    """
    if not text or text[0] not in _FIRST_CHARS_OF_LITERALS:
        return None
    try:
        value = _evaluate_literal(text)
        json_text = to_json_text(value)
    except (ValueError, TypeError, RecursionError):
        return None
    return _Literal(json_type_of(value), json_text)


def _evaluate_literal(text: str) -> object:
    """Return the value of a Python literal. Raise ValueError if `text` is not a literal."""
    # Python warns about invalid escape sequences. The model wrote the text, so the warnings are of
    # no use to the operator of the server.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.literal_eval(text)
        except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ValueError("The text is not a Python literal") from error
