"""Rewrites JSON schemas, so that xgrammar enforces keywords that it would otherwise ignore.

xgrammar 0.2.8 ignores an `allOf` of several schemas. It also ignores `multipleOf` for numbers and
for integers with bounds, and required properties that `properties` does not contain. It refuses
some forms of older drafts of JSON Schema, such as a list as the value of `items`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from nereid_parsers.constraints.enforceable_multiple import (
    ANNOTATIONS,
    Schema,
    with_enforced_multiple,
    with_integer_bounds,
)
from nereid_parsers.constraints.rewriting_budget import RewritingBudget
from nereid_parsers.constraints.schema_merging import CannotMergeError, merge_schemas
from nereid_parsers.constraints.unenforced_keywords import SCHEMA_MAP_KEYWORDS, VALUE_KEYWORDS
from nereid_parsers.stream.values.argument_types import decode_reference_name

_MAX_DEPTH = 64


class _Scope(NamedTuple):
    """The root of a JSON schema document, and the references (`$ref`) replaced so far.

    Attributes:
        root: The outermost schema of the document. It contains the definitions to which the keyword
            `$ref` refers, for example `"#/$defs/Address"`.
        budget: The references that may still be replaced, and the values that may still be copied.
        replaced_references: The references that were replaced by their definitions, for example
            `"#/$defs/Address"`. If a definition contains one of these references again, the schema
            is recursive. This reference is not replaced, because the replacing would never end.
    """

    root: object
    budget: RewritingBudget
    replaced_references: frozenset[str] = frozenset()

    def with_replaced(self, references: Iterable[str]) -> _Scope:
        """Return a copy of the scope whose `replaced_references` also contain `references`."""
        return self._replace(replaced_references=self.replaced_references.union(references))


class _ScopedSchema(NamedTuple):
    """A schema, and the scope for the schemas inside it.

    The scope contains the references that were replaced to build the schema.
    """

    schema: Schema
    scope: _Scope


class _AllOf(NamedTuple):
    """The parts of a schema that must all accept the value.

    Attributes:
        keywords: The keywords of the schema, without `allOf`.
        members: The members of the list `allOf`, which should be schemas.
    """

    keywords: dict[str, Any]
    members: list[Any]


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
    return _rewrite(schema, _Scope(schema, RewritingBudget()), depth=0)


def _rewrite(value: object, scope: _Scope, depth: int) -> Any:  # noqa: ANN401 - JSON
    """Rewrite a schema and the schemas inside it, so that xgrammar enforces more of the keywords.

    Example: `{"items": {"allOf": [{"minimum": 1}, {"maximum": 5}]}}` gives
    `{"items": {"minimum": 1, "maximum": 5}}`.

    Args:
        value: A schema, a list of schemas, or another value, which is returned unchanged.
        scope: The definitions of the document, and the references that were replaced so far.
        depth: The number of lists and objects that enclose `value`. A value at a depth of more than
            `_MAX_DEPTH` is returned unchanged.
    """
    if depth > _MAX_DEPTH:
        return value
    if isinstance(value, list):
        return [_rewrite(item, scope, depth + 1) for item in value]
    if not isinstance(value, Mapping):
        return value
    # First, the keywords of the schema itself are rewritten, then the schemas in their values.
    # `merged.scope` also lists the references that were replaced when `allOf` was merged.
    merged = _without_all_of(value, scope)
    keywords = _rewrite_keywords(merged.schema)
    return {
        keyword: _rewrite_value(keyword, inner, merged.scope, depth + 1)
        for keyword, inner in keywords.items()
    }


def _rewrite_value(keyword: str, value: object, scope: _Scope, depth: int) -> Any:  # noqa: ANN401
    """Rewrite the schemas in the value of a keyword, for example in the value of `items`.

    `scope` contains the definitions of the document. `depth` is the number of lists and objects
    that enclose `value`.
    """
    if keyword in VALUE_KEYWORDS:  # The value contains JSON data, not schemas, as in `enum`.
        return value
    if keyword in SCHEMA_MAP_KEYWORDS and isinstance(value, Mapping):
        # Each key of this dict is a name, such as the name of a property. A property called `enum`
        # is not the keyword `enum`, so its schema is rewritten, too.
        return {name: _rewrite(inner, scope, depth) for name, inner in value.items()}
    return _rewrite(value, scope, depth)


def _rewrite_keywords(schema: Schema) -> Schema:
    """Rewrite the keywords of a schema, but not the schemas inside it.

    The keywords are rewritten in four steps: forms of older drafts, required properties that are
    not listed in `properties`, `multipleOf`, and the bounds of integers. Example:
    `{"type": "integer", "multipleOf": 5, "minimum": 7, "maximum": 12}` gives `{"enum": [10]}`.
    """
    in_current_draft = _in_current_draft(schema)
    with_properties = _with_listed_properties(in_current_draft)
    with_multiple = with_enforced_multiple(with_properties)
    return with_integer_bounds(with_multiple)


def _in_current_draft(schema: Schema) -> Schema:
    """Replace keywords of older drafts of JSON Schema, because xgrammar refuses these keywords.

    Also remove `properties` and `required` if their value is null. Such a schema is not valid, but
    Anthropic's API accepts it. Examples:

        schema                                     result
        {"items": [A, B], "additionalItems": C}    {"prefixItems": [A, B], "items": C}
        {"minimum": 3, "exclusiveMinimum": true}   {"exclusiveMinimum": 3}
        {"type": "object", "properties": null}     {"type": "object"}
    """
    rewritten = dict(schema)
    for keyword in ("properties", "required"):
        if keyword in rewritten and rewritten[keyword] is None:
            del rewritten[keyword]
    if isinstance(rewritten.get("items"), list):
        rewritten["prefixItems"] = rewritten.pop("items")
        if "additionalItems" in rewritten:
            rewritten["items"] = rewritten.pop("additionalItems")
    for bound, exclusive_bound in (
        ("minimum", "exclusiveMinimum"),
        ("maximum", "exclusiveMaximum"),
    ):
        if isinstance(rewritten.get(exclusive_bound), bool):
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
    unchanged if it neither has the type "object" nor lists properties, if it forbids other
    properties, or if `patternProperties` may apply to the property.
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


def _without_all_of(schema: Schema, scope: _Scope) -> _ScopedSchema:
    """Merge the members of `allOf` into a schema, or return the schema unchanged.

    Example: `{"allOf": [{"minimum": 1}, {"maximum": 5}], "type": "integer"}` gives
    `{"type": "integer", "minimum": 1, "maximum": 5}`. The schema is returned unchanged if there is
    nothing to merge, or if the members cannot be merged.

    `scope` contains the definitions to which the members may refer. The scope of the result also
    contains the references that were replaced to build the returned schema.
    """
    try:
        parts = _split_all_of(schema)
        if _is_annotated_reference(parts):
            # `{"allOf": [{"$ref": ..}], "title": ..}` becomes `{"$ref": .., "title": ..}`. xgrammar
            # follows a reference itself, so the definition need not be inserted.
            return _ScopedSchema({**parts.members[0], **parts.keywords}, scope)
        return _merge_all_of(parts, scope)
    except (CannotMergeError, TypeError, AttributeError, RecursionError):
        # The schema comes from a client and has not been validated. A value of a wrong type, as in
        # `{"required": 1}`, causes a TypeError or an AttributeError. A long chain of definitions,
        # each of which refers to the next definition, causes a RecursionError.
        return _ScopedSchema(schema, scope)


def _is_annotated_reference(parts: _AllOf) -> bool:
    """Return whether a schema consists only of annotations and a reference in its `allOf`.

    An annotation is a keyword that does not restrict the value, such as `title`. Example:
    `{"allOf": [{"$ref": "#/$defs/T"}], "title": "A city"}`. Return False if xgrammar cannot follow
    the reference, because it contains an escape sequence.
    """
    has_only_annotations = ANNOTATIONS.issuperset(parts.keywords)
    if not has_only_annotations or len(parts.members) != 1:
        return False
    (member,) = parts.members
    return isinstance(member, Mapping) and "$ref" in member and not _is_escaped(member)


def _merge_all_of(parts: _AllOf, scope: _Scope) -> _ScopedSchema:
    """Merge the members of an `allOf`, and the other keywords of the schema, into one schema.

    `parts` contains the members and the other keywords. `scope` contains the definitions.
    References in the members are replaced by their definitions. Example: if the definition `T` is
    `{"type": "integer"}`, the schema `{"allOf": [{"$ref": "#/$defs/T"}, {"maximum": 5}]}` gives
    `{"type": "integer", "maximum": 5}`. The scope of the result lists `"#/$defs/T"` in
    `replaced_references`.

    Raises:
        CannotMergeError: The members cannot be merged, or the budget of `scope` is too small.
    """
    if not parts.members:
        return _ScopedSchema(parts.keywords, scope)
    # 1. Replace the references in each part.
    flat_parts = [_flatten_part(part, scope) for part in (parts.keywords, *parts.members)]
    # 2. Merge the parts one after another. Because each step copies the previous result, the values
    # are counted once for each part.
    schemas = tuple(part.schema for part in flat_parts)
    if len(parts.members) > 1:
        scope.budget.spend_copies(schemas, num_copies=len(schemas))
    merged = functools.reduce(merge_schemas, schemas)
    # 3. Collect the references that were replaced in step 1.
    replaced = [name for part in flat_parts for name in part.scope.replaced_references]
    return _ScopedSchema(merged, scope.with_replaced(replaced))


def _split_all_of(schema: Schema) -> _AllOf:
    """Separate the members of the `allOf` of a schema from the other keywords of the schema.

    A `$ref` that must be replaced becomes a member: `{"$ref": "#/$defs/A", "maximum": 5}` gives the
    keywords `{"maximum": 5}` and the members `[{"$ref": "#/$defs/A"}]`.

    Raises:
        CannotMergeError: `allOf` is not a list, or `allOf` is present but there are no members.
    """
    members = schema.get("allOf", [])
    if not isinstance(members, list):
        raise CannotMergeError("the value of allOf is not a list")
    keywords = {keyword: value for keyword, value in schema.items() if keyword != "allOf"}
    if "$ref" in keywords and _must_replace_reference(keywords):
        reference = keywords.pop("$ref")
        members = [{"$ref": reference}, *members]
    if "allOf" in schema and not members:
        raise CannotMergeError("the list allOf is empty")
    return _AllOf(keywords, members)


def _must_replace_reference(keywords: Schema) -> bool:
    """Return whether xgrammar would ignore the `$ref` in `keywords`, or a keyword next to `$ref`.

    Examples: xgrammar ignores `maximum` in `{"$ref": "#/$defs/A", "maximum": 5}`, and cannot follow
    the escaped reference `#/$defs/a~1b`.
    """
    has_restrictions = any(word != "$ref" and word not in ANNOTATIONS for word in keywords)
    return has_restrictions or _is_escaped(keywords)


def _is_escaped(schema: Schema) -> bool:
    """Return whether the `$ref` of a schema contains an escape sequence, such as `~1` or `%20`.

    xgrammar does not decode escape sequences, so the definition is inserted instead.
    """
    return any(sign in str(schema["$ref"]) for sign in "~%")


def _flatten_part(part: object, scope: _Scope) -> _ScopedSchema:
    """Rewrite one member of an `allOf`, so that it can be merged with the other members.

    The `$ref` of the member is replaced by the definition, and the `allOf` of the member is merged.
    Example: if the definition `T` is `{"type": "integer"}`, the member `{"$ref": "#/$defs/T"}`
    gives `{"type": "integer"}`. The scope of the result lists `"#/$defs/T"` in
    `replaced_references`.

    Raises:
        CannotMergeError: The member is not a schema, is recursive, refers to another document, or
            has an `allOf` that cannot be merged.
    """
    if part is True:  # `true` accepts every value, as `{}` does.
        return _ScopedSchema({}, scope)
    if not isinstance(part, Mapping):
        raise CannotMergeError("a member of allOf is `false`, or is not a schema")
    without_reference = _replace_reference(part, scope)
    parts = _split_all_of(without_reference.schema)
    return _merge_all_of(parts, without_reference.scope)


def _replace_reference(schema: Schema, scope: _Scope) -> _ScopedSchema:
    """Replace the keyword `$ref` of a schema by the definition to which the keyword refers.

    The definition is merged with the other keywords, so that the result accepts only values that
    match the definition and the other keywords. Example: if the definition `T` is
    `{"type": "integer"}`, the schema `{"$ref": "#/$defs/T", "minimum": 1}` gives
    `{"minimum": 1, "type": "integer"}`. A schema without `$ref` is returned unchanged.

    The scope of the result lists the replaced references in `replaced_references`: `"#/$defs/T"`,
    and the references that were replaced inside the definition.

    Raises:
        CannotMergeError: The definition does not exist, or contains the same reference again, or
            cannot be merged with the other keywords, or the budget of `scope` is too small.
    """
    reference = schema.get("$ref")
    if reference is None:
        return _ScopedSchema(schema, scope)
    if not isinstance(reference, str):
        raise CannotMergeError("the value of $ref is not a string")
    if reference in scope.replaced_references:
        raise CannotMergeError("the schema is recursive")
    definition = _definition_of(reference, scope.root)
    scope.budget.spend_replacement(definition)
    # The definition may itself contain references and `allOf`. If it contains `reference` again,
    # `_flatten_part` refuses the recursive schema.
    flat_definition = _flatten_part(definition, scope.with_replaced([reference]))
    other_keywords = {keyword: value for keyword, value in schema.items() if keyword != "$ref"}
    merged = merge_schemas(other_keywords, flat_definition.schema)
    return _ScopedSchema(merged, flat_definition.scope)


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
