"""Build the grammar nodes for arguments between tags, such as `<p=city>Paris</p>`."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nereid_parsers.constraints.constrain_members import separated_members
from nereid_parsers.constraints.constrain_names import check_name_in_pattern
from nereid_parsers.constraints.constrain_nodes import (
    WHITESPACE,
    Node,
    any_text,
    const,
    json_schema,
    one_of,
    optional,
    sequence,
    tag,
    text_without,
)
from nereid_parsers.constraints.constrain_request import ToolSchema
from nereid_parsers.constraints.constrain_values import ENFORCED_IN_TEXT, Argument, choices_of
from nereid_parsers.errors import ConstraintError
from nereid_parsers.pattern_syntax import escape_braces, split_pattern
from nereid_parsers.stream.values.argument_types import json_types_of
from nereid_parsers.stream.values.json_text import json_type_of
from nereid_parsers.tool_declarations import NestedTags, TaggedArguments

_SCALARS = frozenset({"integer", "number", "boolean", "null"})
# Some models write arguments as XML elements, such as `<city>Paris</city>`. xgrammar supports this
# form only with this prefix before each tag: `]<]minimax[>[<city>Paris]<]minimax[>[</city>`.
_NESTED_PREFIX = "]<]minimax[>["
# A `json_schema` node with this `style` matches nested tags instead of JSON text.
_NESTED_TAGS_STYLE = "minimax_m3_xml"


def pattern_node(text: str, values: Mapping[str, list[str]]) -> Node:
    """Fill in the fields of a pattern, such as `<p={key}>`, and return the node for the result.

    `values` maps the name of each field to the list of texts that may replace the field.

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


def tagged_arguments(
    declaration: TaggedArguments, tool: ToolSchema, texts_after: tuple[str, ...] = ()
) -> Node:
    """Return the grammar node for all arguments of a tool call: `<parameter=a>1</parameter>`.

    The required arguments come first, in the order of the schema. The optional arguments follow in
    the order of the schema.

    Example of matching text: `<parameter=city>Paris</parameter><parameter=days>3</parameter>`.

    `texts_after` are the texts that may follow the arguments, such as `</call>`. If no text closes
    a value, as in `city=Paris; days=3</call>`, the value contains none of these texts.
    """
    ends = _ends_of_free_text(declaration, tool, texts_after)

    def argument(key: str) -> Node:
        """Return the node for the argument `key`, such as `<parameter=city>Paris</parameter>`."""
        return _tagged_value(declaration, Argument(tool, key), ends)

    if not tool.arguments.required_keys and not tool.arguments.optional_keys:
        # Models write a line break in a call without arguments: `<function=f>\n</function>`.
        return WHITESPACE
    if declaration.separator:
        return separated_members(tool.arguments, argument, declaration.separator)
    required = [argument(key) for key in tool.arguments.required_keys]
    optionals = [optional(argument(key)) for key in tool.arguments.optional_keys]
    return sequence(*required, *optionals)


def _ends_of_free_text(
    declaration: TaggedArguments, tool: ToolSchema, texts_after: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the texts that may follow a value without a closing tag: `; days=` and `</call>`.

    A separator such as `; ` ends a value only if the opening tag of another argument follows, so
    the value `a; b` is possible.
    """
    forms = (declaration, *declaration.also)
    tags = [
        form.separator + text
        for form in forms
        for key in (*tool.arguments.required_keys, *tool.arguments.optional_keys)
        for text in _texts_of_opening_tag(form, key)
    ]
    return tuple(dict.fromkeys((*tags, *(text for text in texts_after if text.strip()))))


def _texts_of_opening_tag(form: TaggedArguments, key: str) -> list[str]:
    """Return the text of the opening tag of an argument, up to the first field after the key."""
    before_field, *_ = split_pattern(form.open.replace("{key}", escape_braces(key)))
    return [before_field] if isinstance(before_field, str) else []


def _tagged_value(declaration: TaggedArguments, argument: Argument, ends: tuple[str, ...]) -> Node:
    """Return the grammar node for one tagged argument: `<parameter=city>Paris</parameter>`.

    `declaration` declares the tags. The JSON schema of `argument` determines the value. `ends` are
    the texts that end a value without a closing tag.
    """
    check_name_in_pattern(argument.key, declaration.open, "key")
    tags = declaration.for_key(argument.key)
    schema = argument.schema
    types = json_types_of(schema, root=schema)  # The schema contains its own definitions.
    if types is not None and "string" not in types:
        return _tagged_json(tags, argument.key, schema, types)
    choices = choices_of(schema)  # The values that the schema lists, or None.
    if choices is not None:
        return _tagged_choices(tags, argument.key, choices)
    # The node matches any text, and does not enforce a keyword such as `maxLength`.
    argument.report_unenforced(schema, ENFORCED_IN_TEXT)
    return _tagged_free_text(tags, argument.key, ends)


def _tagged_choices(declaration: TaggedArguments, key: str, choices: list[Any]) -> Node:
    """Return the grammar node for a tagged argument whose value is one of `choices`.

    Example: the choices "fast" and 3 give a node that matches `<p=mode>fast</p>` and
    `<p=mode>3</p>`. The node matches only the first form of the tags that the format declares.
    Every further form would repeat the list of choices, which would make the grammar larger.
    """
    strings = [choice for choice in choices if isinstance(choice, str)]
    other_values = [choice for choice in choices if not isinstance(choice, str)]
    # The opening tag of a string may differ from the opening tag of another value, as in
    # `<p name="mode" string="true">`.
    options: list[Node] = []
    if strings:
        options.append(_tagged_strings(declaration, key, strings))
    if other_values:
        options.append(_tagged_json_values(declaration, key, other_values))
    return one_of(*options)


def _tagged_strings(declaration: TaggedArguments, key: str, strings: list[str]) -> Node:
    """Return the grammar node for a tagged argument that is one of `strings`: `<p=a>fast</p>`."""
    opening = _opening_tag_of_string(declaration, key)
    texts = [const(_escape(declaration, text)) for text in strings]
    return sequence(opening, one_of(*texts), const(declaration.close))


def _tagged_json_values(declaration: TaggedArguments, key: str, values: list[Any]) -> Node:
    """Return the grammar node for a tagged argument that is one of `values`, such as `<p=a>3</p>`.

    The values are not strings, and are written as JSON text.
    """
    form = _forms_of_json(declaration)[-1]  # The last form has no quotes or CDATA.
    opening = _opening_tag_of_json(form, key, types=frozenset(map(json_type_of, values)))
    texts = [const(json.dumps(value, ensure_ascii=False)) for value in values]
    return sequence(opening, one_of(*texts), const(form.close))


def _forms_of_json(declaration: TaggedArguments) -> tuple[TaggedArguments, ...]:
    """Return the forms of the tags in which a model may write a value that is not a string.

    The first form of some formats encloses only strings, because its tags contain the quotes of a
    JSON string, as in `city: "Paris"`. The other forms are then used for JSON text, as in `days: 3`
    and `stay: {"days": 3}`.
    """
    is_only_for_strings = declaration.escapes == "json" and declaration.also
    return declaration.also if is_only_for_strings else (declaration, *declaration.also)


def _escape(declaration: TaggedArguments, text: str) -> str:
    """Replace special characters in `text` with the escape sequences that the format declares.

    Example: if the format declares HTML's escape sequences, `a<b` becomes `a&lt;b`. If the format
    declares none, return `text` unchanged.
    """
    match declaration.escapes:
        case "json":
            return json.dumps(text, ensure_ascii=False)[1:-1]  # The tags contain the quotes.
        case "html":
            return html.escape(text)
    return text


def _tagged_free_text(declaration: TaggedArguments, key: str, ends: tuple[str, ...]) -> Node:
    """Return the grammar node for a tagged argument with any text, such as `<p=city>Paris</p>`.

    Some models enclose only texts with special characters in quotes or CDATA. The format then
    declares two forms, `<p><![CDATA[..]]></p>` and `<p>..</p>`, and the node matches both forms.
    """
    unquoted_forms = [
        form for form in declaration.also if _is_quoted_form(declaration, unquoted=form)
    ]
    return one_of(*(_free_text(form, key, ends) for form in (declaration, *unquoted_forms)))


def _free_text(form: TaggedArguments, key: str, ends: tuple[str, ...]) -> Node:
    """Return the grammar node for an argument with any text, such as `<p=city>Paris</p>`.

    If the format declares no closing tag, the text contains none of the texts `ends`.
    """
    if form.escapes == "json":  # The tags contain the quotes of the string, as in `city="Paris"`.
        before_quote = replace(form, open=form.open.removesuffix('"'))
        opening = _opening_tag_of_string(before_quote, key)
        return sequence(
            opening, json_schema({"type": "string"}), const(form.close.removeprefix('"'))
        )
    opening = _opening_tag_of_string(form, key)
    if not form.close:
        return sequence(opening, text_without(ends))
    return _text_until(opening, form.close)


def _opening_tag_of_string(form: TaggedArguments, key: str) -> Node:
    """Return the grammar node for the tag before a string, such as `<p name="a" string="true">`."""
    # Most tags contain only the field `key`. `pattern_node` ignores fields that a tag lacks.
    return pattern_node(form.open, {"key": [key], "string": ["true"], "type": ["string"]})


def _opening_tag_of_json(form: TaggedArguments, key: str, types: frozenset[str]) -> Node:
    """Return the grammar node for the tag before JSON text, such as `<p name="a" string="false">`.

    `types` contains the JSON types that the value may have. Some tags show the type, as in
    `<p name="a" type="integer">`.
    """
    # Most tags contain only the field `key`. `pattern_node` ignores fields that a tag lacks.
    type_names = _declared_type_names(types)
    return pattern_node(form.open, {"key": [key], "string": ["false"], "type": type_names})


def _text_until(opening: Node, close: str) -> Node:
    r"""Return the grammar node that matches `opening`, then free text, and then `close`.

    White space at the start of `close` is not required, because the parser searches for `close`
    without this white space. Example: if `close` is `"\n</p>\n"`, the free text ends at `</p>`, and
    `"\n"` must follow `</p>`.
    """
    marker = close.strip() or "\n"  # A line break alone may end the value.
    _, _, whitespace_after_marker = close.partition(marker)
    text = tag(sequence(opening, any_text(), const(marker)))
    return sequence(text, const(whitespace_after_marker))


def _is_quoted_form(form: TaggedArguments, *, unquoted: TaggedArguments) -> bool:
    """Return whether `form`, unlike `unquoted`, encloses the value in quotes or CDATA.

    Some templates write a string in quotes or in CDATA only if the string contains special
    characters, so there are two forms of an argument. Example: `<p><![CDATA[..]]></p>` is the
    quoted form of `<p>..</p>`. The text before the quoted value, `<p><![CDATA[`, starts with the
    text before the unquoted value, `<p>`.
    """
    return form.open != unquoted.open and form.open.startswith(unquoted.open)


def _tagged_json(
    declaration: TaggedArguments, key: str, schema: Mapping[str, Any], types: frozenset[str]
) -> Node:
    """Return the grammar node for a tagged argument that cannot be a string: `<p=days>3</p>`.

    The value is JSON text. Instead of true, false and null, the model may also write the Python
    words True, False and None. `types` contains the JSON types that `schema` allows.

    Raises:
        ConstraintError: The value is an array or an object in an attribute.
    """
    _check_type_of_attribute(declaration, key, types)
    # A format may declare several forms of the tags, and the model may write each of them. Models
    # write scalars (numbers, booleans and null) only in the simplest forms.
    all_forms = _forms_of_json(declaration)
    is_scalar = types <= _SCALARS
    forms = _simplest_forms(all_forms) if is_scalar else all_forms
    return one_of(*(_tagged_json_in_form(form, key, schema, types) for form in forms))


def _tagged_json_in_form(
    form: TaggedArguments, key: str, schema: Mapping[str, Any], types: frozenset[str]
) -> Node:
    """Return the grammar node for a tagged argument in one form of the tags: `<p=days>3</p>`.

    The value is JSON text, or a Python word such as `None`. `types` contains the JSON types that
    `schema` allows.
    """
    opening = _opening_tag_of_json(form, key, types)
    # If `form.close` is `\n</p>\n`, `form.closing_marker` is `</p>`. The parser ends the value at
    # the first `</p>`, even without the line breaks. Therefore the value must not contain `</p>`.
    closing_tag = form.closing_marker if form.close else ""
    value = _json_or_python_word(schema, types, closing_tag=closing_tag)
    return sequence(opening, value, const(form.close))


def _check_type_of_attribute(declaration: TaggedArguments, key: str, types: frozenset[str]) -> None:
    """Raise ConstraintError if the value of an attribute may be an array or an object.

    Do nothing if the format does not write arguments as attributes, such as `days="3"`. The JSON
    text of an array or of an object contains quotes. In an attribute, quotes must be written as
    HTML entities, so the value is not JSON text. `types` contains the JSON types of the value.
    """
    if declaration.is_attribute and not types <= _SCALARS:
        raise ConstraintError(
            f'The format writes arguments as attributes, such as {key}="..". Constrained output '
            "supports only attributes that are strings, numbers, booleans or null, but the schema "
            f"of {key!r} allows an array or an object. Use another type, or set tool_choice to "
            "auto."
        )


def _declared_type_names(types: frozenset[str]) -> list[str]:
    """Return the type names that an opening tag, such as `<p type="array">`, may contain.

    Some templates declare the type "number" for every value that is not a string. Example: the
    types {"array"} give ["array", "number"].
    """
    names = sorted(types) if types else ["object"]
    return names if "number" in names else [*names, "number"]


def _simplest_forms(forms: tuple[TaggedArguments, ...]) -> tuple[TaggedArguments, ...]:
    """Return only the forms of the tags that are needed for numbers, booleans and null.

    Two kinds of forms are omitted:

    - Forms that show the type of the value in the opening tag, such as `<p type="{type}">`, if
      there is another form without the type. One form is enough, and makes the grammar smaller.
    - Forms with quotes or CDATA around the value, if there is the same form without them. Models
      quote only values with special characters. Example: of `<p>3</p>` and
      `<p><![CDATA[3]]></p>`, only `<p>3</p>` is returned.
    """
    forms_without_type = [form for form in forms if "{type}" not in form.open]
    possible_forms = tuple(forms_without_type) or forms
    return tuple(form for form in possible_forms if not _has_unquoted_form(form, possible_forms))


def _has_unquoted_form(form: TaggedArguments, forms: tuple[TaggedArguments, ...]) -> bool:
    """Return whether `forms` contains a form that is like `form`, but has no quotes or CDATA.

    Example: `<p>..</p>` is such a form for `<p><![CDATA[..]]></p>`.
    """
    return any(_is_quoted_form(form, unquoted=other) for other in forms)


def _json_or_python_word(
    schema: Mapping[str, Any], types: frozenset[str], closing_tag: str
) -> Node:
    """Return the grammar node for a value: either JSON text or a Python word, such as `None`.

    Models also write the Python words True, False and None for booleans and null. If the schema
    lists the allowed values, the node matches only JSON text. The JSON text must not contain
    `closing_tag`, because the parser ends the value at the first closing tag.
    """
    json_text = json_schema(schema, excludes=closing_tag)
    if "enum" in schema or "const" in schema:
        return json_text
    boolean_words = ["True", "False"] if "boolean" in types else []
    null_words = ["None"] if "null" in types else []
    return one_of(json_text, *(const(word) for word in (*boolean_words, *null_words)))


def nested_arguments(declaration: NestedTags, tool: ToolSchema) -> Node:
    """Return the grammar node for arguments that are nested elements, such as `<city>Paris</city>`.

    The format declares a prefix before each tag, such as `~` in `~<city>Paris~</city>`.

    Raises:
        ConstraintError: The prefix is not `_NESTED_PREFIX`, which is the only prefix that xgrammar
            supports.
    """
    if declaration.tag_prefix != _NESTED_PREFIX:
        raise ConstraintError(
            f"The format begins each tag of the arguments with {declaration.tag_prefix!r}, but "
            f"xgrammar can constrain only tags that begin with {_NESTED_PREFIX!r}."
        )
    # The `style` makes xgrammar match nested tags instead of JSON text.
    return {**json_schema(tool.parameters), "style": _NESTED_TAGS_STYLE}
