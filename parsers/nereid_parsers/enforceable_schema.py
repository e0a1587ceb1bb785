"""Rewrites JSON schemas, so that xgrammar enforces keywords that it would otherwise ignore.

xgrammar 0.2.8 ignores an `allOf` of several schemas. It also ignores `multipleOf` for numbers and
for integers with bounds, and required properties that `properties` does not contain. It refuses
some forms of older drafts of JSON Schema, such as a list as the value of `items`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nereid_parsers.enforceable_multiple import (
    ANNOTATIONS,
    Schema,
    with_enforced_multiple,
    with_integer_bounds,
)
from nereid_parsers.schema_merging import CannotMergeError, merge_schemas
from nereid_parsers.stream.values.argument_types import decode_reference_name
from nereid_parsers.unenforced_keywords import SCHEMA_MAP_KEYWORDS, VALUE_KEYWORDS

_MAX_DEPTH = 64
# The maximum number of references that are replaced by their definitions in one document. A
# definition may refer twice to a second definition, which may refer twice to a third, and so on.
# Without this limit, the time would grow exponentially with the number of such definitions.
_MAX_REPLACEMENTS = 256


class _Scope(NamedTuple):
    """The root of a JSON schema document, and the references (`$ref`) replaced so far.

    Attributes:
        root: The outermost schema of the document. It contains the definitions to which the keyword
            `$ref` refers, for example `"#/$defs/Address"`.
        replaced_references: The references that were replaced by their definitions. If the
            definitions contain one of these references again, the schema is recursive. The
            reference is then not replaced a second time, so that the rewriting ends.
        allowed_replacements: An iterator with one item for each reference that may still be
            replaced in the document.
    """

    root: object
    replaced_references: frozenset[str]
    allowed_replacements: Iterator[int]


def rewrite_for_xgrammar(schema: object) -> Any:  # noqa: ANN401 - JSON
    """Return a copy of a JSON schema, rewritten so that xgrammar enforces more of the keywords.

    The copy accepts the same values as `schema`, except integers of more than 64 bits (see
    `with_integer_bounds`). The keywords `allOf`, `multipleOf` and `properties`, the bounds of
    integers, and forms of older drafts are rewritten. xgrammar may still ignore other keywords.

    Examples:
        {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 5}]} returns
        {"type": "integer", "minimum": 1, "maximum": 5}.
        {"type": "number", "multipleOf": 2.0} returns {"type": "integer", "multipleOf": 2}.
        {"type": "integer", "multipleOf": 5, "minimum": 7, "maximum": 22} returns
        {"enum": [10, 15, 20]}.
    """
    scope = _Scope(schema, frozenset(), allowed_replacements=iter(range(_MAX_REPLACEMENTS)))
    return _rewrite(schema, scope, depth=0)


def _rewrite(schema: object, scope: _Scope, depth: int) -> Any:  # noqa: ANN401 - JSON
    """Rewrite a schema and its inner schemas, so that xgrammar enforces more of their keywords.

    The schemas of an `allOf` are merged, and then `multipleOf` is rewritten. Example:
    `{"allOf": [{"minimum": 1}, {"maximum": 5}]}` gives `{"minimum": 1, "maximum": 5}`.

    `depth` is the number of lists and objects that enclose `schema`.
    """
    if depth > _MAX_DEPTH:
        return schema
    if isinstance(schema, list):
        return [_rewrite(item, scope, depth + 1) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    merged, inner_scope = _without_all_of(schema, scope)

    def rewrite_inner(inner: object) -> Any:  # noqa: ANN401 - JSON
        """Rewrite a value inside the schema. A value such as 5 is returned unchanged."""
        return _rewrite(inner, inner_scope, depth + 1)

    rewritten: dict[str, Any] = {}
    listed = _with_listed_properties(_in_current_draft(merged))
    rewritten_keywords = with_integer_bounds(with_enforced_multiple(listed))
    for keyword, value in rewritten_keywords.items():
        if keyword in VALUE_KEYWORDS:  # The value contains JSON data, not schemas.
            rewritten[keyword] = value
        elif keyword in SCHEMA_MAP_KEYWORDS and isinstance(value, Mapping):
            # Each key of this dict is a name, such as the name of a property. A property called
            # `enum` is not the keyword `enum`, so its schema is rewritten, too.
            rewritten[keyword] = {name: rewrite_inner(inner) for name, inner in value.items()}
        else:
            rewritten[keyword] = rewrite_inner(value)
    return rewritten


def _in_current_draft(schema: Schema) -> Schema:
    """Rewrite forms of older drafts of JSON Schema, which xgrammar refuses.

    Examples: `{"items": [A, B], "additionalItems": C}` gives `{"prefixItems": [A, B], "items": C}`.
    `{"minimum": 3, "exclusiveMinimum": true}` gives `{"exclusiveMinimum": 3}`.
    """
    rewritten = dict(schema)
    if isinstance(schema.get("items"), list):
        rewritten["prefixItems"] = rewritten.pop("items")
        if "additionalItems" in rewritten:
            rewritten["items"] = rewritten.pop("additionalItems")
    for bound, exclusive_bound in (
        ("minimum", "exclusiveMinimum"),
        ("maximum", "exclusiveMaximum"),
    ):
        if isinstance(schema.get(exclusive_bound), bool):
            is_exclusive = rewritten.pop(exclusive_bound)
            if is_exclusive and bound in rewritten:
                rewritten[exclusive_bound] = rewritten.pop(bound)
    return rewritten


def _with_listed_properties(schema: Schema) -> Schema:
    """Add each required property of an object to `properties`.

    xgrammar does not require a property that `properties` does not contain, and the model usually
    cannot write such a property. The value of such a property must match `additionalProperties`.

    Example: `{"type": "object", "required": ["a"]}` gives
    `{"type": "object", "properties": {"a": {}}, "required": ["a"]}`. The schema is returned
    unchanged if it forbids other properties, or if `patternProperties` may apply to the property.
    """
    required = schema.get("required")
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", {})
    if not isinstance(required, list) or not isinstance(properties, Mapping):
        return schema
    is_object = schema.get("type") == "object" or "properties" in schema
    if not is_object or others is False or "patternProperties" in schema:
        return schema
    missing = [name for name in required if isinstance(name, str) and name not in properties]
    if not missing:
        return schema
    return {**schema, "properties": {**properties, **dict.fromkeys(missing, others)}}


def _without_all_of(schema: Schema, scope: _Scope) -> tuple[Schema, _Scope]:
    """Merge the members of `allOf` into a schema, or return the schema unchanged.

    Also return the scope, with the references that were replaced to build the returned schema.
    Example: `{"allOf": [{"minimum": 1}, {"maximum": 5}], "type": "integer"}` gives
    `{"type": "integer", "minimum": 1, "maximum": 5}`. The schema is returned unchanged if there is
    nothing to merge, or if the members cannot be merged.
    """
    try:
        keywords, members = _split_all_of(schema)
        has_only_annotations = ANNOTATIONS.issuperset(keywords)  # such as `title`
        is_one_reference = (
            len(members) == 1 and isinstance(members[0], Mapping) and "$ref" in members[0]
        )
        if has_only_annotations and is_one_reference and not _is_escaped(members[0]):
            # `{"allOf": [{"$ref": ..}], "title": ..}` becomes `{"$ref": .., "title": ..}`. xgrammar
            # follows a reference itself, so the definition need not be inserted.
            return {**members[0], **keywords}, scope
        return _merge_all_of(schema, scope)
    except (CannotMergeError, TypeError, AttributeError, RecursionError):
        # The schema comes from a client and has not been validated. If the value of a keyword has a
        # wrong type, as in `{"required": 1}`, merging raises a TypeError or an AttributeError. A
        # RecursionError is raised for a long chain of definitions, each of which refers to the next
        # definition.
        return schema, scope


def _merge_all_of(schema: Schema, scope: _Scope) -> tuple[Schema, _Scope]:
    """Merge the members of `allOf`, and the other keywords of a schema, into one schema.

    References in the members are replaced by their definitions. Example: if the definition `T` is
    `{"type": "integer"}`, the schema `{"allOf": [{"$ref": "#/$defs/T"}, {"maximum": 5}]}` gives
    `{"type": "integer", "maximum": 5}`. The scope of the result also contains these references.

    Raises:
        CannotMergeError: The members cannot be merged, or `allOf` is not a list of schemas.
    """
    keywords, members = _split_all_of(schema)
    if not members:
        return schema, scope
    parts = [_flatten_part(part, scope) for part in (keywords, *members)]
    merged = functools.reduce(merge_schemas, [part for part, _ in parts])
    references = frozenset().union(*(part_scope.replaced_references for _, part_scope in parts))
    return merged, scope._replace(replaced_references=references)


def _split_all_of(schema: Schema) -> tuple[dict[str, Any], list[Any]]:
    """Split a schema into its keywords without `allOf`, and the list of the members of `allOf`.

    A `$ref` next to a keyword that restricts the value is moved to the list, because xgrammar
    ignores keywords next to a `$ref`. Example: `{"$ref": "#/$defs/A", "maximum": 5}` gives
    `{"maximum": 5}` and `[{"$ref": "#/$defs/A"}]`. A `$ref` with an escape sequence is moved, too.

    Raises:
        CannotMergeError: `allOf` is not a list, or is empty.
    """
    keywords = {keyword: value for keyword, value in schema.items() if keyword != "allOf"}
    members = schema.get("allOf", [])
    if not isinstance(members, list):
        raise CannotMergeError("the value of allOf is not a list")
    has_only_annotations = ANNOTATIONS.issuperset(keywords.keys() - {"$ref"})
    if "$ref" in keywords and (not has_only_annotations or _is_escaped(keywords)):
        members = [{"$ref": keywords.pop("$ref")}, *members]
    if "allOf" in schema and not members:
        raise CannotMergeError("the list allOf is empty")
    return keywords, members


def _is_escaped(schema: Schema) -> bool:
    """Return whether the `$ref` of a schema contains an escape sequence, such as `~1` or `%20`.

    xgrammar does not decode escape sequences, so the definition is inserted instead.
    """
    return any(sign in str(schema["$ref"]) for sign in "~%")


def _flatten_part(part: object, scope: _Scope) -> tuple[Schema, _Scope]:
    """Rewrite one member of an `allOf`, so that it can be merged with the other members.

    The `$ref` of the member is replaced by the definition, and its `allOf` is merged. Example: if
    the definition `T` is `{"type": "integer"}`, the member `{"$ref": "#/$defs/T"}` gives
    `{"type": "integer"}`.

    Raises:
        CannotMergeError: The member is recursive, or refers to another document, or the members of
            its `allOf` cannot be merged.
    """
    if part is True:  # The schema `{}` also accepts every value.
        return {}, scope
    if not isinstance(part, Mapping):
        raise CannotMergeError("a member of allOf is `false`, or is not a schema")
    without_reference, inner_scope = _replace_reference(part, scope)
    return _merge_all_of(without_reference, inner_scope)


def _replace_reference(schema: Schema, scope: _Scope) -> tuple[Schema, _Scope]:
    """Replace the keyword `$ref` of a schema by the definition to which the keyword refers.

    The definition is merged with the other keywords. Example: if the definition `T` is
    `{"type": "integer"}`, the schema `{"$ref": "#/$defs/T", "minimum": 1}` gives
    `{"minimum": 1, "type": "integer"}`. A schema without `$ref` is returned unchanged. The scope of
    the result also contains the references that are replaced now, including inner references.

    Raises:
        CannotMergeError: The definition does not exist, or contains the same `$ref` again, or too
            many references have been replaced.
    """
    reference = schema.get("$ref")
    if reference is None:
        return schema, scope
    if not isinstance(reference, str):
        raise CannotMergeError("the value of $ref is not a string")
    if reference in scope.replaced_references:
        raise CannotMergeError("the schema is recursive")
    if next(scope.allowed_replacements, None) is None:
        raise CannotMergeError("too many references have been replaced")
    other_keywords = {keyword: value for keyword, value in schema.items() if keyword != "$ref"}
    scope_of_definition = scope._replace(
        replaced_references=scope.replaced_references | {reference}
    )
    # The definition may itself contain references and `allOf`.
    definition = _definition_of(reference, scope.root)
    flat_definition, inner_scope = _flatten_part(definition, scope_of_definition)
    return merge_schemas(other_keywords, flat_definition), inner_scope


def _definition_of(reference: str, root: object) -> object:
    """Return the definition to which a reference such as `#/$defs/Address` refers.

    Examples: "#/$defs/Address" gives `root["$defs"]["Address"]`, and "#/$defs/a~1b%20c" gives
    `root["$defs"]["a/b c"]`.

    Raises:
        CannotMergeError: `root` contains no such definition, or the reference refers to another
            document.
    """
    document, *names = reference.split("/")  # Example: "#", and ["$defs", "Address"].
    is_in_root = document == "#"
    if not is_in_root:
        raise CannotMergeError("the reference refers to another document")
    definition = root
    for escaped_name in names:
        name = decode_reference_name(escaped_name)
        if not isinstance(definition, Mapping) or name not in definition:
            raise CannotMergeError("the reference refers to no definition")
        definition = definition[name]
    return definition
