"""Reads the types of arguments from the JSON schemas of tools.

A "JSON type" is one of the names in `ALL_TYPES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from nereid_parsers.stream.values.json_text import json_type_of

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
        """Store the functions that `tools` declares, and ignore members that are not valid.

        `tools` is the list of tools in the form of the OpenAI API, or None if there is no list. A
        member is `{"type": "function", "function": {...}}`, or only the inner object.
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
        if not isinstance(properties, Mapping) or key in properties:
            return True
        return self.argument_schema(function, key) is not None

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
        """Return the JSON schema of the argument `key`, or None if no schema is declared.

        If several parts of an `anyOf` declare the argument, the result is an `anyOf` of their
        schemas.
        """
        schemas = _schemas_of_property(self.parameters.get(function, {}), key)
        if not schemas:
            return None
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _schemas_of_property(root: Mapping[str, Any], key: str) -> list[object]:
    """Return the schemas of a property in the schema of an object, and in the parts of the schema.

    The parts are the members of `allOf`, `anyOf` and `oneOf`. Example: for the property a, the
    schema `{"anyOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {}}}]}` gives
    `[{"type": "string"}]`. `root` also contains the definitions to which the parts may refer.
    """
    schemas: list[object] = []
    unread: list[object] = [root]
    visited: set[object] = set()  # A recursive schema, and a part of several parts, is read once.
    while unread:
        part = unread.pop()
        if not isinstance(part, Mapping):
            continue
        reference = part.get("$ref")
        identity = reference if isinstance(reference, str) else id(part)
        if identity in visited:
            continue
        visited.add(identity)
        schema = follow_references(part, root)
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            schemas.append(properties[key])
        for keyword in _COMBINE_TYPES_OF_PARTS:
            parts = schema.get(keyword)
            unread += reversed(parts) if isinstance(parts, list) else []
    return schemas


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
        """Create a finder. `root` contains the definitions to which the schemas refer."""
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
        """Return the JSON types that `schema` declares with one of the keywords below.

        If `schema` contains several of these keywords, the first one in this order decides. Return
        None if `schema` contains none, or if the type has an unknown name. Examples:

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
