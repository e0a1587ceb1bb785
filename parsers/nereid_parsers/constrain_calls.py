"""Builds the grammar nodes that match a model's tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from nereid_parsers.constrain_arguments import (
    nested_arguments,
    python_call,
    tagged_arguments,
)
from nereid_parsers.constrain_nodes import (
    WHITESPACE,
    Node,
    any_text,
    const,
    elements_of,
    json_schema,
    one_of,
    one_or_more,
    optional,
    sequence,
)
from nereid_parsers.constrain_request import Request, ToolSchema
from nereid_parsers.constrain_unquoted_keys import unquoted_key_arguments
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

# The types of `Call.body` that describe a list of tool calls, such as `[f(), g()]`. Every other
# type describes one tool call, or only the arguments of one tool call.
ListBody = JsonArray | PythonCalls

# The text before the arguments of a tool call may contain fields, such as `{id}`. This dict maps
# the name of each field to the regular expression that the text of the field must match.
_HEAD_FIELDS = {"number": "[0-9]{1,3}", "id": "[a-zA-Z0-9]{9}", "word": "[a-z]{1,12}"}
_QUOTED_ID: Node = {"type": "regex", "pattern": '"[a-zA-Z0-9_.:-]{1,40}"'}
# Matches the white space inside an array. Models write arrays on one line or on several lines.
_ARRAY_WHITESPACE: Node = {"type": "regex", "pattern": r"( |\n {0,16})?"}
# Matches one token of JSON text: a string, a bracket, a brace, a comma, a colon, or another token
# such as `12` or `true`.
_JSON_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^"{}\[\],:\s]+')


def section_node(section: ToolSection, request: Request) -> Node:
    """Return the grammar node for all tool calls of a message and the markers around them.

    The tool calls between the markers, here `<calls>` and `</calls>`, are separate texts, or the
    members of one list. Examples of matching texts:

        separate texts   `<calls><call>f{"a": 1}</call><call>g{}</call></calls>`
        a list           `<calls>[{"name": "f", "arguments": {"a": 1}}]</calls>`

    Args:
        section: The declaration of the tool calls. If this declaration contains several variants
            of a tool call, the node matches the first variant. If the first variant is a list, the
            node also matches a JSON object that the second variant declares.
        request: The tools that the model may call, and whether the model may make only one call.
    """
    call = section.calls[0]
    if isinstance(call.body, ListBody):
        items = [_list_or_object(section, call.body, request)]
    else:
        items = [call_node(call, tool) for tool in request.tools]
    # A message can contain several lists only if each list is enclosed in markers, as in
    # `<call>[f()]</call><call>[g()]</call>`.
    has_markers = bool(call.open.strip() and call.close.strip())
    may_repeat = has_markers or not isinstance(call.body, ListBody)
    if request.is_single or not may_repeat:
        content = one_of(*items)
    else:
        # If the declared separator contains only white space, such as one line break, up to two
        # spaces or line breaks are allowed, because the parser skips white space between calls.
        has_text = bool(section.separator.strip())
        content = one_or_more(items, const(section.separator) if has_text else WHITESPACE)
    return sequence(const(section.open), content, const(section.close))


def _list_or_object(section: ToolSection, body: ListBody, request: Request) -> Node:
    """Return the grammar node for a list of tool calls, such as `[{"name": "f", ..}]` or `[f()]`.

    Models of some formats also write a single tool call as a JSON object without the list, such as
    `{"name": "f", ..}`. `section` then contains a second declaration, of this object, and the node
    matches both forms.
    """
    list_call, *other_calls = section.calls
    list_of_calls = list_node(list_call, body, request)
    if not other_calls or not isinstance(other_calls[0].body, JsonObject):
        return list_of_calls
    single_objects = [call_node(other_calls[0], tool) for tool in request.tools]
    return one_of(list_of_calls, *single_objects)


def trigger_of(section: ToolSection) -> str:
    """Return the "trigger": the text that starts the tool calls, such as `<tool_call>`.

    xgrammar lets the model write any text before the trigger. As soon as the model has written the
    trigger, xgrammar enforces a valid tool call.

    Examples:
        `"<tool_calls>"` if this marker opens the section of all tool calls.
        `"<tool_call>"` if the section has no marker, but each tool call has this marker.
        `'{"name": "'` for tool calls without a marker, which are JSON objects with the key `name`.

    Raises:
        ConstraintError: A tool call without a marker cannot be distinguished from content.
    """
    section_marker = section.open.strip()  # The marker before all tool calls, or "".
    if section_marker:
        return section_marker
    call = section.calls[0]  # Constrained output contains only the first variant.
    if call.trigger:  # A marker precedes each tool call.
        return call.trigger
    if isinstance(call.body, JsonObject) and isinstance(call.body.keys, Keys):
        any_name = sequence(const('"'), any_text(), const('"'))
        members = _members_node(call.body.keys, name=any_name, arguments=any_text())
        # The constant text before the first free text, for example `{"name": "`.
        return str(elements_of(sequence(const("{"), members))[0]["value"])
    raise ConstraintError(
        "The format writes tool calls without a marker, so constrained output cannot separate "
        "them from other text. Set tool_choice to 'required', so that the output contains only "
        "tool calls."
    )


def call_node(call: Call, tool: ToolSchema) -> Node:
    """Return the grammar node for one call of `tool`: `<tool_call>{"name": "f", ..}</tool_call>`.

    Example of matching text: `<tool_call>{"name": "f", "arguments": {}}</tool_call>`. `call`
    declares how the tool call is written. If `call` declares a list, use `list_node` instead.
    """
    head = _head_node(call.head, tool.name)
    return sequence(const(call.open), head, _body_node(call.body, tool), const(call.close))


def list_node(call: Call, body: ListBody, request: Request) -> Node:
    """Return the grammar node for a list of tool calls and the markers around the list.

    Example of matching text, if `call` opens with `<tool_call>`, closes with `</tool_call>` and has
    a list of Python calls as body: `<tool_call>[f(a=1), g()]</tool_call>`.

    `body` is the body of `call`.
    """
    # The text before the list contains no function name, because the names are inside the list.
    head = _head_node(call.head, name="")
    if isinstance(body, PythonCalls):
        calls = [python_call(body, tool) for tool in request.tools]
        separator = const(body.separator)
        opening, closing = const(body.open), const(body.close)
    else:
        calls = [_array_member(body, tool) for tool in request.tools]
        separator = sequence(const(","), _ARRAY_WHITESPACE)
        opening = sequence(const("["), _ARRAY_WHITESPACE)
        closing = sequence(_ARRAY_WHITESPACE, const("]"))
    members = one_of(*calls) if request.is_single else one_or_more(calls, separator)
    return sequence(const(call.open), head, opening, members, closing, const(call.close))


def _array_member(array: JsonArray, tool: ToolSchema) -> Node:
    """Return the grammar node for one tool call in a JSON array, such as `{"name": "f", ..}`."""
    json_object = _object_node(array.keys, tool)
    if isinstance(array.keys, NameIsKey):
        return json_object
    return _with_whitespace(json_object)


def _body_node(body: Body, tool: ToolSchema) -> Node:
    """Return the grammar node for the part of a tool call that contains the arguments.

    The body is the text after the header of the tool call and before its closing marker. Examples
    of matching texts: `{"a": 1}` and `{"name": "f", "arguments": {"a": 1}}`. For a body that is a
    list of tool calls, use `list_node` instead.
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
    assert isinstance(body, BareKeyArguments)  # All other types are lists of tool calls.
    return unquoted_key_arguments(body, tool)


def _head_node(head: str, name: str) -> Node:
    """Return the grammar node for the text before the arguments of a tool call: `<function=f>`.

    Example: `_head_node("<function={name}>", "f")` gives `const("<function=f>")`. The model chooses
    the text of a field such as `{id}`, so this field becomes a node with a regular expression.

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
    """Return the grammar node for a tool call in JSON: `{"name": .., "arguments": ..}`.

    Examples of matching texts:

        `{"name": "f", "arguments": {"a": 1}}`
        `{"id": "1", "name": "f", "arguments": {"a": 1}}`   if `keys` declares an optional id
        `{"f": {"a": 1}}`                                   if `keys` is `NameIsKey`

    """
    name = const(json.dumps(tool.name, ensure_ascii=False))
    arguments = json_schema(tool.parameters)
    if isinstance(keys, NameIsKey):
        return sequence(const("{"), name, const(": "), arguments, const("}"))
    members = _members_node(keys, name, arguments)
    is_id_in_outermost_object = keys.id is not None and "." not in keys.id
    if is_id_in_outermost_object and "id" not in keys.order:
        # The optional id may be the first or the last member. The grammar also accepts an
        # object that contains the id twice, as the first and the last member.
        id_member = sequence(const(f"{json.dumps(keys.id)}: "), _QUOTED_ID)
        id_at_start = optional(sequence(id_member, const(", ")))
        id_at_end = optional(sequence(const(", "), id_member))
        members = sequence(id_at_start, members, id_at_end)
    return sequence(const("{"), members, const("}"))


def _members_node(keys: Keys, name: Node, arguments: Node) -> Node:
    """Return the grammar node for the required members of a tool call's JSON object.

    The braces around the members do not belong to the node. Example of matching text:
    `"name": "f", "arguments": {"a": 1}`. `keys.order` defines the order of the members. If this
    order contains the id, the node also matches a member with any id. The node `name` also matches
    the quotes around the name.
    """
    # A path such as "function.name" contains the keys of nested objects.
    members = {"name": (keys.name, name), "arguments": (keys.arguments, arguments)}
    if keys.id is not None:
        members["id"] = (keys.id, _QUOTED_ID)
    return _members_at_paths(dict(members[member] for member in keys.order))


def _members_at_paths(values: Mapping[str, Node]) -> Node:
    """Return the grammar node for the members of a JSON object, separated by commas.

    The keys of `values` are paths, in which dots separate the keys of nested objects. The values
    are the nodes for the JSON text at these paths. Example: the paths `function.name` and
    `function.arguments` give a node that matches `"function": {"name": "f", "arguments": {}}`.
    """
    values_by_key: dict[str, dict[str, Node]] = {}  # Grouped by the first key of the path.
    for path, value in values.items():
        key, _, inner_path = path.partition(".")
        values_by_key.setdefault(key, {})[inner_path] = value
    first, *others = (_member(key, inner_values) for key, inner_values in values_by_key.items())
    return sequence(first, *(sequence(const(", "), member) for member in others))


def _member(key: str, values: Mapping[str, Node]) -> Node:
    """Return the grammar node for one member of a JSON object, such as `"name": "f"`.

    The keys of `values` are paths inside the member's value, as in `_members_at_paths`, and the
    values are the nodes for the texts at these paths. The path "" belongs to the whole value.
    """
    if "" in values:
        value = values[""]
    else:
        value = sequence(const("{"), _members_at_paths(values), const("}"))
    return sequence(const(f"{json.dumps(key)}: "), value)


def _with_whitespace(node: Node) -> Node:
    """Return a copy of `node` that allows white space inside braces, after commas and after colons.

    `node` matches a JSON object, or a part of a JSON object. Example: `const('{"name": ')` gives
    the sequence `{`, white space, `"name":`, white space.
    """
    # White space is added only to constants. Other nodes, such as a schema, define their own white
    # space.
    match node["type"]:
        case "optional":
            return optional(_with_whitespace(node["content"]))
        case "sequence":
            return sequence(*map(_with_whitespace, node["elements"]))
        case "const_string":
            return sequence(*_tokens_with_whitespace(node["value"]))
    return node


def _tokens_with_whitespace(json_text: str) -> list[Node]:
    """Return a node for each token of `json_text`, and nodes for the white space between tokens.

    Example: `{"a": ` gives nodes for `{`, white space, `"a"`, `:` and white space.
    """
    parts: list[Node] = []
    for token in _JSON_TOKENS.findall(json_text):
        if token == "}":
            parts.append(_ARRAY_WHITESPACE)
        parts.append(const(token))
        if token in ("{", ",", ":"):
            parts.append(_ARRAY_WHITESPACE)
    return parts
