"""Builds the grammar nodes for arguments that are not written as one JSON object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nereid_parsers.constrain_nodes import (
    WHITESPACE,
    Node,
    any_text,
    const,
    json_schema,
    one_of,
    optional,
    repeated,
    separated_tags,
    sequence,
)
from nereid_parsers.constrain_request import ToolSchema
from nereid_parsers.errors import ConstraintError
from nereid_parsers.pattern_syntax import split_pattern
from nereid_parsers.stream.values.argument_types import json_types_of
from nereid_parsers.tool_declarations import (
    BareKeyArguments,
    NestedTags,
    PythonCalls,
    TaggedArguments,
)

# xgrammar can constrain nested elements only if `NestedTags.tag_prefix` is `_NESTED_PREFIX`.
_NESTED_PREFIX = "]<]minimax[>["
_NESTED_STYLE = "minimax_m3_xml"
_STRING_ONLY = frozenset({"string"})
_SCALARS = frozenset({"integer", "number", "boolean", "null"})
# If the schema of a string has one of these keywords, the string must be in double quotes, because
# the regex for single-quoted strings cannot enforce the keyword.
_STRING_KEYWORDS = ("enum", "const", "pattern", "format", "minLength", "maxLength")
_SINGLE_QUOTED = r"""'([^'\\\n]|\\['"\\nrt])*'"""
# If all arguments of a tool are optional, the size of the node that enforces their order grows with
# the square of the number of arguments. If there are more than `_MAX_ORDERED_MEMBERS` arguments,
# the node does not enforce their order.
_MAX_ORDERED_MEMBERS = 6


def pattern_node(text: str, values: Mapping[str, list[str]]) -> Node:
    """Return the grammar node for a pattern whose fields have the given values.

    A pattern is a text with fields in braces. `values` maps the name of each field to the list of
    its possible values.

    Example: `pattern_node("<parameter={key}>", {"key": ["city"]})` gives
    `const("<parameter=city>")`.

    Raises:
        ConstraintError: A field of the pattern is not a key of `values`.
    """
    nodes: list[Node] = []
    for part in split_pattern(text):
        if isinstance(part, str):
            nodes.append(const(part))
        elif part.field in values:
            nodes.append(one_of(*(const(value) for value in values[part.field])))
        else:
            raise ConstraintError(
                f"The format writes tool calls with the pattern {text!r}, but does not define the "
                f"text of the field {{{part.field}}}. Constrained output needs this text."
            )
    return sequence(*nodes)


# ---- tagged values -------------------------------------------------------------------------------


def tagged_arguments(declaration: TaggedArguments, tool: ToolSchema) -> Node:
    """Return the node for all tagged arguments of a tool call.

    Required arguments precede optional arguments. Otherwise, the arguments are in the order of the
    schema.

    Example of matching text: `<parameter=city>Paris</parameter><parameter=days>3</parameter>`.
    """
    nodes = [_tagged_value(declaration, key, tool.argument(key)) for key in tool.required_keys]
    for key in tool.optional_keys:
        nodes.append(optional(_tagged_value(declaration, key, tool.argument(key))))
    return sequence(*nodes) if nodes else WHITESPACE


def _tagged_value(declaration: TaggedArguments, key: str, schema: Mapping[str, Any]) -> Node:
    """Return the node for one tagged value, for example `<parameter=city>Paris</parameter>`."""
    types = json_types_of(schema, schema)
    if types is None or "string" in types:
        return _tagged_text(declaration, key, schema)
    return _tagged_json(declaration, key, schema, types)


def _tagged_text(declaration: TaggedArguments, key: str, schema: Mapping[str, Any]) -> Node:
    """Return the grammar node for an argument's value and its tags. The value may be a string.

    If the schema lists the allowed strings, the node matches only these strings. Otherwise the
    value may be any text. Example of matching text: `<parameter=city>Paris</parameter>`.

    Args:
        declaration: The declaration of the tags.
        key: The name of the argument.
        schema: The JSON schema of the argument.
    """
    # Some opening tags declare the type, as in `<p name="a" string="true">` or `type="string"`.
    field_values = {"key": [key], "string": ["true"], "type": ["string"]}
    choices = _string_choices(schema)
    if choices is not None:
        opening = pattern_node(declaration.open, field_values)
        value = one_of(*(const(choice) for choice in choices))
        return sequence(opening, value, const(declaration.close))
    options: list[Node] = []
    for variant in (declaration, *_unquoted_variants(declaration)):
        opening = pattern_node(variant.open, field_values)
        options.append(_text_until(opening, variant.close))
    return one_of(*options)


def _string_choices(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the strings that the keyword `enum` allows, or None if the schema has no such list."""
    choices = schema.get("enum")
    if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
        return choices
    return None


def _unquoted_variants(declaration: TaggedArguments) -> list[TaggedArguments]:
    """Return the variants in `declaration.also` in which a string is written without quotes.

    Some formats quote a string with CDATA only if the string contains special characters. The text
    before an unquoted value (`<p>`) is then a prefix of the text before a quoted value
    (`<p><![CDATA[`). Example: for the declaration of `<p><![CDATA[..]]></p>`, the variant
    `<p>..</p>` is returned.
    """
    return [
        variant for variant in declaration.also if _is_unquoted_variant_of(variant, declaration)
    ]


def _is_unquoted_variant_of(variant: TaggedArguments, quoted: TaggedArguments) -> bool:
    """Return whether `variant.open` is a prefix of `quoted.open`, but not the whole `quoted.open`.

    Example: the result is True if `variant.open` is `<v>` and `quoted.open` is `<v>"`.
    """
    return variant.open != quoted.open and quoted.open.startswith(variant.open)


def _tagged_json(
    declaration: TaggedArguments, key: str, schema: Mapping[str, Any], types: frozenset[str]
) -> Node:
    """Return the grammar node for an argument's value and its tags. The value cannot be a string.

    A boolean or null may also be written as in Python (True, False, None). Example of matching
    text: `<parameter=days>3</parameter>`.

    Args:
        declaration: The declaration of the tags.
        key: The name of the argument.
        schema: The JSON schema of the argument.
        types: The JSON types that the schema allows.
    """
    # Some opening tags declare the type, as in `<p name="a" string="false">` or `type="integer"`.
    field_values = {"key": [key], "string": ["false"], "type": _declared_type_names(types)}
    variants = (declaration, *declaration.also)
    if types <= _SCALARS:
        variants = _scalar_variants(variants)
    python_words = [const(word) for word in _python_words(schema, types)]
    options: list[Node] = []
    for variant in variants:
        opening = pattern_node(variant.open, field_values)
        # The parser ends a value at the closing tag, so the value must not contain this tag.
        json_value = json_schema(schema, excludes=variant.close.strip())
        value = one_of(json_value, *python_words)
        options.append(sequence(opening, value, const(variant.close)))
    return one_of(*options)


def _declared_type_names(types: frozenset[str]) -> list[str]:
    """Return the type names that the opening tag of a value with one of `types` may contain.

    Some templates declare the type "number" for every value that is not a string. Example: the
    types {"array"} give ["array", "number"].
    """
    names = sorted(types) if types else ["object"]
    return names if "number" in names else [*names, "number"]


def _python_words(schema: Mapping[str, Any], types: frozenset[str]) -> list[str]:
    """Return the Python words, such as `None`, that a model may write instead of JSON words.

    Example: the types {"boolean"} give ["True", "False"]. The result is [] if the schema lists the
    allowed values, because the model must write these values as JSON.
    """
    if "enum" in schema or "const" in schema:
        return []
    boolean_words = ["True", "False"] if "boolean" in types else []
    null_words = ["None"] if "null" in types else []
    return [*boolean_words, *null_words]


def _scalar_variants(variants: tuple[TaggedArguments, ...]) -> tuple[TaggedArguments, ...]:
    """Return those variants of a tag that can contain a number, a boolean or null.

    These values contain no special characters, so models never quote these values. Example: of the
    variants that open with `<p>` and with `<p><![CDATA[`, only the variant with `<p>` is returned.

    In some variants, the opening tag declares the type of the value (`{type}`). If there are also
    variants without a type, the variants with a type are omitted, so that the grammar stays small.
    """
    untyped = tuple(variant for variant in variants if "{type}" not in variant.open)
    candidates = untyped if untyped else variants
    return tuple(variant for variant in candidates if not _is_quoted(variant, variants))


def _is_quoted(variant: TaggedArguments, all_variants: tuple[TaggedArguments, ...]) -> bool:
    """Return whether `variant.open` starts with the shorter `open` text of another variant.

    Example: `<v>"` starts with `<v>`.
    """
    return any(_is_unquoted_variant_of(other, variant) for other in all_variants)


def _text_until(opening: Node, close: str) -> Node:
    r"""Return the node that matches the constant `opening`, free text and `close`, in this order.

    White space at the start of `close` is not required, because the parser searches for `close`
    without this white space. Example: if `close` is `"\n</p>\n"`, the free text ends at `</p>`, and
    `"\n"` must follow `</p>`.
    """
    marker = close.strip()
    whitespace_after_marker = close.lstrip().removeprefix(marker)
    text = {"type": "tag", "begin": opening["value"], "content": any_text(), "end": marker}
    return sequence(text, const(whitespace_after_marker))


# ---- nested elements, Python calls, objects with unquoted keys -----------------------------------


def nested_arguments(declaration: NestedTags, tool: ToolSchema) -> Node:
    """Return the grammar node for arguments that are written as nested elements.

    Example of matching text, with the prefix `~` instead of the real prefix:
    `~<city>Paris~</city>`. xgrammar supports only the tag prefix of one model family.

    Raises:
        ConstraintError: xgrammar does not support the prefix of the tags.
    """
    if declaration.tag_prefix != _NESTED_PREFIX:
        raise ConstraintError(
            f"The format begins each tag of the arguments with {declaration.tag_prefix!r}, but "
            f"xgrammar can constrain only tags that begin with {_NESTED_PREFIX!r}."
        )
    return {**json_schema(tool.parameters), "style": _NESTED_STYLE}


def python_call(declaration: PythonCalls, tool: ToolSchema) -> Node:
    """Return the node for one tool call in Python syntax, for example `f(city="Paris", days=3)`."""

    def argument(key: str) -> Node:
        """Return the node for `key=value`."""
        return sequence(const(f"{key}="), _python_value(tool.argument(key)))

    arguments = _comma_separated(tool, argument, ", ")
    return sequence(const(f"{tool.name}{declaration.suffix}("), arguments, const(")"))


def _python_value(schema: Mapping[str, Any]) -> Node:
    """Return the grammar node for a Python literal, which is a value in a call such as `f(a=True)`.

    Examples of matching texts: `True` for a boolean, `None` for null, `"Paris"` or `'Paris'` for a
    string, and JSON for all other values. Inside a list or a dict, the node matches the JSON words
    true, false and null instead of the Python words. The parser accepts the words of JSON and of
    Python.
    """
    types = json_types_of(schema, schema)
    if types == frozenset({"boolean"}):
        return one_of(const("True"), const("False"))
    if types == frozenset({"null"}):
        return const("None")
    if types is not None and "null" in types:
        schema_without_null = {**schema, "type": sorted(types - {"null"})}
        return one_of(const("None"), json_schema(schema_without_null))
    has_string_keywords = any(keyword in schema for keyword in _STRING_KEYWORDS)
    if types == _STRING_ONLY and not has_string_keywords:
        return one_of(json_schema(schema), {"type": "regex", "pattern": _SINGLE_QUOTED})
    return json_schema(schema)


def unquoted_key_arguments(declaration: BareKeyArguments, tool: ToolSchema) -> Node:
    """Return the node for an object with unquoted keys, for example `{city:<q>Paris<q>,days:3}`."""

    def member(key: str) -> Node:
        """Return the node for `key:value`."""
        return sequence(const(f"{key}:"), _unquoted_key_value(declaration, tool.argument(key)))

    return sequence(const("{"), _comma_separated(tool, member, ","), const("}"))


def _unquoted_key_value(declaration: BareKeyArguments, schema: Mapping[str, Any]) -> Node:
    """Return the grammar node for a value in an object with unquoted keys, as in `{city: 3}`.

    Examples of matching texts with the quote `<q>`: `<q>a<q>` for a string, `[<q>a<q>,<q>b<q>]` for
    an array, `{city:<q>Paris<q>}` for an object, and JSON for all other values.
    """
    quote = declaration.quote
    choices = _string_choices(schema)
    if choices is not None:
        return one_of(*(const(f"{quote}{choice}{quote}") for choice in choices))
    types = json_types_of(schema, schema)
    if types is None or "string" in types:
        return {"type": "tag", "begin": quote, "content": any_text(), "end": quote}
    if types == frozenset({"array"}):
        declared_schema = schema.get("items")
        item_schema = declared_schema if isinstance(declared_schema, Mapping) else {}
        item = _unquoted_key_value(declaration, item_schema)
        items = repeated([item], const(","), is_single=False)
        return sequence(const("["), optional(items), const("]"))
    if types == frozenset({"object"}):
        # The members of an object are written in the same way as the arguments of a tool.
        object_as_tool = ToolSchema(name="", parameters=schema)
        return unquoted_key_arguments(declaration, object_as_tool)
    return json_schema(schema)


def _comma_separated(tool: ToolSchema, member_node: Callable[[str], Node], separator: str) -> Node:
    """Return the grammar node for the arguments of `tool`, separated by `separator`.

    The model may omit optional arguments. Example: for the required argument a and the
    optional arguments b and c, the matching texts are `a`, `a,b`, `a,c` and `a,b,c`. Without a
    required argument, `b,c`, `b`, `c` and the empty text match. If there are many optional
    arguments and no required argument, the arguments may occur in any order.

    Args:
        tool: The tool whose arguments are the members.
        member_node: A function that returns the node for the argument with the given name.
        separator: The text between two members.
    """
    required = [member_node(key) for key in tool.required_keys]
    optional_members = [member_node(key) for key in tool.optional_keys]
    if not required:
        return _list_of_optional(optional_members, separator)
    first_required, *other_required = required
    required_followers = [sequence(const(separator), node) for node in other_required]
    optional_followers = _optional_followers(optional_members, separator)
    return sequence(first_required, *required_followers, *optional_followers)


def _list_of_optional(members: list[Node], separator: str) -> Node:
    """Return the grammar node for a list in which each member is optional.

    The list may be empty. Example: the members a and b match the empty text, `a`, `b` and `a,b`.
    If there are many members, the node does not enforce their order, because the node would be too
    large.
    """
    if not members:
        return const("")
    if len(members) > _MAX_ORDERED_MEMBERS:
        return optional(separated_tags(members, separator))
    # Any member can be the first member of the list, so there is one option for each member.
    options: list[Node] = []
    for index, first in enumerate(members):
        later_members = members[index + 1 :]
        options.append(sequence(first, *_optional_followers(later_members, separator)))
    return optional(one_of(*options))


def _optional_followers(members: list[Node], separator: str) -> list[Node]:
    """For each member, return an optional node that matches the separator and then the member."""
    return [optional(sequence(const(separator), member)) for member in members]
