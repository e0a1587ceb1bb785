"""Converts the declarations of tool calls to grammar nodes."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from nereid_parsers.constrain_arguments import (
    nested_arguments,
    python_call,
    tagged_arguments,
    unquoted_key_arguments,
)
from nereid_parsers.constrain_nodes import (
    WHITESPACE,
    Node,
    const,
    json_schema,
    one_of,
    optional,
    repeated,
    sequence,
)
from nereid_parsers.constrain_request import ToolSchema
from nereid_parsers.errors import ConstraintError
from nereid_parsers.pattern_syntax import split_pattern
from nereid_parsers.tool_declarations import (
    BareKeyArguments,
    Body,
    Call,
    JsonArguments,
    JsonArray,
    JsonObject,
    Keys,
    NameIsKey,
    NestedTags,
    PythonCalls,
    TaggedArguments,
    ToolSection,
)

# A body of one of these types contains all tool calls of a message. A body of any other type
# contains one tool call.
ListBody = JsonArray | PythonCalls

# The regular expressions for the fields of a tool call's header.
_HEAD_FIELDS = {"number": "[0-9]{1,3}", "id": "[a-zA-Z0-9]{9}", "word": "[a-z]{1,12}"}
_ARGUMENTS_PLACEHOLDER = "\0"  # JSON text never contains this character.
_ID_PLACEHOLDER = '"{id}"'
_NAME_PLACEHOLDER = "{name}"
_QUOTED_ID: Node = {"type": "regex", "pattern": '"[a-zA-Z0-9_.:-]{1,40}"'}
# Matches the white space inside an array. Models write arrays on one line or on several lines.
_ARRAY_WHITESPACE: Node = {"type": "regex", "pattern": r"( |\n {0,16})?"}
_JSON_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^"{}\[\],:\s]+')


def section_node(section: ToolSection, tools: tuple[ToolSchema, ...], *, is_single: bool) -> Node:
    """Return the grammar node for a tool section, which contains all tool calls of a message.

    The node also matches the markers around the section, here `<tool_calls>` and `</tool_calls>`.
    Examples of matching texts:

        one item for each tool call   `<tool_calls><call>f{}</call><call>g{}</call></tool_calls>`
        one item for all tool calls   `<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>`

    Args:
        section: The declaration of the tool calls. If tool calls can be written in several
            variants, the node matches the first variant.
        tools: The tools that the model may call.
        is_single: Whether exactly one tool call is allowed. Otherwise one or more are allowed.
    """
    call = section.calls[0]
    separator = const(section.separator) if section.separator.strip() else WHITESPACE
    if isinstance(call.body, ListBody):
        items = [_list_or_object(section, call.body, tools, is_single=is_single)]
        # If each list has its own markers, some models write one list for each tool call.
        has_own_markers = bool(call.open.strip() and call.close.strip())
        has_one_item = is_single or not has_own_markers
    else:
        items = [call_node(call, tool) for tool in tools]
        has_one_item = is_single
    content = repeated(items, separator, is_single=has_one_item)
    return sequence(const(section.open), content, const(section.close))


def _list_or_object(
    section: ToolSection, body: ListBody, tools: tuple[ToolSchema, ...], *, is_single: bool
) -> Node:
    """Return the grammar node for a list of tool calls, such as `[{"name": "f", ..}]` or `[f()]`.

    A declaration may have several variants, because a model may write tool calls in several forms.
    If the second variant is a JSON object, the node also matches one JSON object without the list,
    such as `{"name": "f", ..}`.

    Args:
        section: The declaration of the tool calls. Its first variant is a list.
        body: The body of the first variant.
        tools: The tools that the model may call.
        is_single: Whether exactly one tool call is allowed. Otherwise one or more are allowed.
    """
    list_variant, *other_variants = section.calls
    list_of_calls = list_node(list_variant, body, tools, is_single=is_single)
    has_object_variant = bool(other_variants) and isinstance(other_variants[0].body, JsonObject)
    if not has_object_variant:
        return list_of_calls
    single_objects = [call_node(other_variants[0], tool) for tool in tools]
    return one_of(list_of_calls, *single_objects)


def trigger_of(section: ToolSection) -> str:
    """Return the text at which a tool call, or the section of all tool calls, starts.

    xgrammar lets the model write any text before this "trigger". After the trigger, xgrammar
    enforces a valid tool call.

    Examples:
        `"<tool_calls>"` if this marker opens the section of all tool calls.
        `"<tool_call>"` if the section has no marker, but each tool call has this marker.
        `'{"name": "'` for tool calls without a marker, which are JSON objects with the key `name`.

    Raises:
        ConstraintError: A tool call without a marker cannot be distinguished from content.
    """
    has_section_marker = bool(section.opens)
    if has_section_marker:
        return section.open.strip()
    call = section.calls[0]
    if call.trigger:
        return call.trigger
    if isinstance(call.body, JsonObject) and isinstance(call.body.keys, Keys):
        return _text_before_name(call.body.keys)
    raise ConstraintError(
        "The format writes tool calls without a marker, so constrained output cannot separate "
        "them from other text. Set tool_choice to 'required', so that the output contains only "
        "tool calls."
    )


def _text_before_name(keys: Keys) -> str:
    """Return the JSON text before the function's name, for example `{"name": "`."""
    text = _object_around_arguments(keys, _NAME_PLACEHOLDER)
    before_name, _, _ = text.before.partition(_NAME_PLACEHOLDER)
    return before_name


def call_node(call: Call, tool: ToolSchema) -> Node:
    """Return the node for one call of `tool`, including the markers and the header of the call.

    If the body of `call` is a list, use `list_node` instead. Example of matching text:
    `<tool_call>{"name": "f", "arguments": {}}</tool_call>`.
    """
    head = _head_node(call.head, tool.name)
    return sequence(const(call.open), head, _body_node(call.body, tool), const(call.close))


def list_node(
    call: Call, body: ListBody, tools: tuple[ToolSchema, ...], *, is_single: bool
) -> Node:
    """Return the grammar node for a list of tool calls and the markers around the list.

    Example of matching text, if `call` opens with `<tool_call>`, closes with `</tool_call>` and has
    a list of Python calls as body: `<tool_call>[f(a=1), g()]</tool_call>`.

    Args:
        call: The declaration of the markers around the list.
        body: The body of `call`.
        tools: The tools that the model may call.
        is_single: Whether the list contains exactly one tool call.
    """
    # The list contains the names of the functions, so the header before the list has no name.
    head = _head_node(call.head, name="")
    members = _list_body_node(body, tools, is_single=is_single)
    return sequence(const(call.open), head, members, const(call.close))


def _list_body_node(body: ListBody, tools: tuple[ToolSchema, ...], *, is_single: bool) -> Node:
    """Return the node for a list of tool calls, such as `[{"name": "f", ..}]` or `[f(a=1)]`."""
    if isinstance(body, PythonCalls):
        calls = [python_call(body, tool) for tool in tools]
        members = repeated(calls, const(body.separator), is_single=is_single)
        return sequence(const(body.open), members, const(body.close))
    objects = [_object_node(body.keys, tool) for tool in tools]
    if isinstance(body.keys, Keys):
        objects = [_with_whitespace(node, _ARRAY_WHITESPACE) for node in objects]
    members = repeated(objects, sequence(const(","), _ARRAY_WHITESPACE), is_single=is_single)
    return sequence(const("["), _ARRAY_WHITESPACE, members, _ARRAY_WHITESPACE, const("]"))


def _body_node(body: Body, tool: ToolSchema) -> Node:
    """Return the grammar node for the body of one tool call, which contains the arguments.

    The body is the text between the markers of the tool call. If the body is a list of tool calls,
    use `_list_body_node` instead.

    Example of matching text: `{"name": "f", "arguments": {}}`.
    """
    match body:
        case JsonObject(keys=keys):
            return _object_node(keys, tool)
        case JsonArguments():
            return json_schema(tool.parameters)
        case TaggedArguments():
            return tagged_arguments(body, tool)
        case NestedTags():
            return nested_arguments(body, tool)
    assert isinstance(body, BareKeyArguments)  # The caller handles lists of tool calls.
    return unquoted_key_arguments(body, tool)


def _head_node(head: str, name: str) -> Node:
    """Return the grammar node for a tool call's header, which is the text before the arguments.

    Example: `_head_node("<function={name}>", "f")` gives `const("<function=f>")`. A field such as
    `{id}`, whose text the model chooses, becomes a regex.

    Args:
        head: The pattern of the header, which may contain fields in braces.
        name: The name of the function.

    Raises:
        ConstraintError: The header has a field whose text is not known.
    """
    nodes: list[Node] = []
    for part in split_pattern(head):
        if isinstance(part, str):
            nodes.append(const(part))
        elif part.field == "name":
            nodes.append(const(name))
        elif part.field in _HEAD_FIELDS:
            nodes.append({"type": "regex", "pattern": _HEAD_FIELDS[part.field]})
        else:
            raise ConstraintError(
                f"The format writes tool calls that begin with {head!r}, but does not define the "
                f"text of the field {{{part.field}}}. Constrained output needs this text."
            )
    return sequence(*nodes)


# ---- JSON objects --------------------------------------------------------------------------------


def _object_node(keys: Keys | NameIsKey, tool: ToolSchema) -> Node:
    """Return the grammar node for a tool call that is a JSON object with name and arguments.

    Example of matching text: `{"name": "f", "arguments": {"a": 1}}`. If `keys` declares an id, the
    object may also contain an id. If `keys` is `NameIsKey`, the text is `{"f": {"a": 1}}`.

    Args:
        keys: The declaration of the object's keys.
        tool: The tool that the model calls.
    """
    arguments = json_schema(tool.parameters)
    if isinstance(keys, NameIsKey):
        name = json.dumps(tool.name, ensure_ascii=False)
        return sequence(const("{" + name + ": "), arguments, const("}"))
    text = _object_around_arguments(keys, tool.name)
    if keys.id is not None and _is_id_optional(keys, keys.id):
        return _object_with_optional_id(keys.id, text.before, arguments, text.after)
    # A required id is a placeholder in the text. `_fill_in_id` replaces the placeholder with a node
    # that matches any id.
    return sequence(*_fill_in_id(text.before), arguments, *_fill_in_id(text.after))


def _is_id_optional(keys: Keys, id_path: str) -> bool:
    """Return whether a tool call's id is optional and is a member of the outer JSON object."""
    is_required = "id" in keys.order
    is_in_inner_object = "." in id_path
    return not is_required and not is_in_inner_object


def _object_with_optional_id(id_key: str, before: str, arguments: Node, after: str) -> Node:
    """Return the grammar node for a JSON object that may contain the id as first or last member.

    Templates write the id at the start or at the end of the object, but models often omit the id.
    Examples of matching texts: `{"id": "1", "name": "f", "arguments": {}}` and
    `{"name": "f", "arguments": {}}`.

    Args:
        id_key: The key of the id.
        before: The JSON text before the arguments, for example `{"name": "f", "arguments": `.
        arguments: The node for the arguments.
        after: The JSON text after the arguments, for example `}`.
    """
    id_member = sequence(const(f"{json.dumps(id_key)}: "), _QUOTED_ID)
    id_first = optional(sequence(id_member, const(", ")))
    id_last = optional(sequence(const(", "), id_member))
    after_brace = before.removeprefix("{")
    return sequence(const("{"), id_first, const(after_brace), arguments, id_last, const(after))


def _fill_in_id(text: str) -> list[Node]:
    """Convert JSON text to nodes. The placeholder `"{id}"` becomes a node that matches any id.

    Example: `{"id": "{id}"}` gives the constant `{"id": `, a regex, and the constant `}`.
    """
    before, placeholder, after = text.partition(_ID_PLACEHOLDER)
    return [const(before), _QUOTED_ID, const(after)] if placeholder else [const(text)]


def _with_whitespace(node: Node, whitespace: Node) -> Node:
    """Return a copy of `node` that allows white space inside braces, after commas and after colons.

    Only constants are changed. Example: `const('{"name":')` gives the sequence `{`, whitespace,
    `"name"`, `:`, whitespace. The white space that a constant already contains is removed. Other
    nodes, such as the schema of the arguments, define their own white space.

    Args:
        node: The node for a JSON object, or for a part of a JSON object.
        whitespace: The node that matches the white space.
    """
    match node["type"]:
        case "optional":
            return optional(_with_whitespace(node["content"], whitespace))
        case "sequence":
            parts = [_with_whitespace(part, whitespace) for part in node["elements"]]
            return sequence(*parts)
        case "const_string":
            return _json_text_with_whitespace(node["value"], whitespace)
    return node


def _json_text_with_whitespace(json_text: str, whitespace: Node) -> Node:
    """Return the grammar node for JSON text, with optional white space between the JSON tokens.

    `whitespace` is the node that matches the white space. The result allows white space inside
    braces, after commas and after colons.

    Example: `{"a":` gives the sequence `{`, whitespace, `"a"`, `:`, whitespace.
    """
    parts: list[Node] = []
    for token in _JSON_TOKENS.findall(json_text):
        if token == "}":
            parts.append(whitespace)
        parts.append(const(token))
        if token in ("{", ",", ":"):
            parts.append(whitespace)
    return sequence(*parts)


class _TextAroundArguments(NamedTuple):
    """The JSON text before the arguments of a tool call, and the JSON text after them."""

    before: str
    after: str


def _object_around_arguments(keys: Keys, name: str) -> _TextAroundArguments:
    """Return the JSON text before the arguments of a tool call, and the JSON text after them.

    Example: the default keys and the name `f` give the texts `{"name": "f", "arguments": ` and `}`.
    `keys.order` defines the order of the members. If `keys.order` contains the id, the result
    contains the placeholder `"{id}"` instead of the id.

    Args:
        keys: The declaration of the object's keys.
        name: The name of the function.
    """
    paths = {"name": keys.name, "arguments": keys.arguments, "id": keys.id or ""}
    values = {
        "name": json.dumps(name, ensure_ascii=False),
        "arguments": _ARGUMENTS_PLACEHOLDER,
        "id": _ID_PLACEHOLDER,
    }
    tree: dict[str, Any] = {}  # such as {"function": {"name": '"f"', "arguments": ..}}
    for member in keys.order:
        _insert(tree, paths[member], values[member])
    before, _, after = _object_text(tree).partition(_ARGUMENTS_PLACEHOLDER)
    return _TextAroundArguments(before, after)


def _insert(tree: dict[str, Any], path: str, value: str) -> None:
    """Insert `value` into nested dicts. The keys of the path are separated by dots.

    Example: the path "function.name" and the value "f" give `{"function": {"name": "f"}}`.

    Mutates: tree.
    """
    *outer_keys, last_key = path.split(".")
    inner = tree
    for key in outer_keys:
        inner = inner.setdefault(key, {})
    inner[last_key] = value


def _object_text(tree: dict[str, Any]) -> str:
    """Convert nested dicts to JSON text. Every value that is not a dict is already JSON text.

    Example: `{"function": {"name": '"f"'}}` gives `{"function": {"name": "f"}}`.
    """
    members = (
        f"{json.dumps(key)}: {_object_text(value) if isinstance(value, dict) else value}"
        for key, value in tree.items()
    )
    return "{" + ", ".join(members) + "}"
