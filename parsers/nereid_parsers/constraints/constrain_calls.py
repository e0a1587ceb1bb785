"""Builds the grammar nodes that match a model's tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from nereid_parsers.constraints.constrain_names import check_name_in_pattern
from nereid_parsers.constraints.constrain_nodes import (
    WHITESPACE,
    Node,
    const,
    joined,
    json_schema,
    one_of,
    one_or_more,
    optional,
    sequence,
)
from nereid_parsers.constraints.constrain_python_calls import python_call
from nereid_parsers.constraints.constrain_request import Request, ToolSchema
from nereid_parsers.constraints.constrain_tagged_arguments import nested_arguments, tagged_arguments
from nereid_parsers.constraints.constrain_unquoted_keys import unquoted_key_arguments
from nereid_parsers.errors import ConstraintError
from nereid_parsers.pattern_syntax import first_literal, split_pattern
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
# Matches the white space between two JSON tokens in a list of tool calls. Models write such a list
# on one line or on several lines.
_WHITESPACE_IN_LIST: Node = {"type": "regex", "pattern": r"( |\n {0,16})?"}
# Matches one token of JSON text: a string, a bracket, a brace, a comma, a colon, or another token
# such as `12` or `true`.
_JSON_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^"{}\[\],:\s]+')


def section_node(section: ToolSection, request: Request) -> Node:
    """Return the grammar node for all tool calls of a message and the markers around them.

    The tool calls between the markers, here `<calls>` and `</calls>`, follow one another, or are
    the members of one list. Examples of matching texts:

        one after another   `<calls><call>f{"a": 1}</call><call>g{}</call></calls>`
        a list              `<calls>[{"name": "f", "arguments": {"a": 1}}]</calls>`

    Args:
        section: The declaration of the tool calls. If this declaration contains several variants
            of a tool call, the node matches the first variant. If the first variant is a list, the
            node also matches a JSON object that the second variant declares.
        request: The tools that the model may call, and whether the model may make only one call.
    """
    first_variant = section.calls[0]
    if isinstance(first_variant.body, ListBody):
        calls = _lists(section, first_variant, request)  # or the object of the second variant
    else:
        calls = _separate_calls(section, first_variant, request)
    return sequence(const(section.open), calls, const(section.close))


def _separate_calls(section: ToolSection, call: Call, request: Request) -> Node:
    """Return the grammar node for tool calls that follow each other without forming a list.

    Example of matching text: `<call>f{"a": 1}</call><call>g{}</call>`. `call` declares how one tool
    call is written. `section` declares the separator.
    """
    texts_between_calls = (section.separator, section.close, first_literal(call.head))
    calls = [call_node(call, tool, texts_between_calls) for tool in request.tools]
    return _one_call_or_more(calls, _separator(section), request)


def _lists(section: ToolSection, call: Call, request: Request) -> Node:
    """Return the grammar node for one list of tool calls, or for several lists.

    A message can contain several lists only if markers enclose each list, as in
    `<call>[f()]</call><call>[g()]</call>`, or if a list is a single call, as in `await f()`.
    `call` declares the list and its markers. `section` declares the separator.
    """
    list_of_calls = _list_or_object(section, call, request)
    has_markers = bool(call.open.strip() and call.close.strip())
    is_single_call = isinstance(call.body, PythonCalls) and not call.body.separator
    if not has_markers and not is_single_call:
        return list_of_calls
    return _one_call_or_more([list_of_calls], _separator(section), request)


def _one_call_or_more(calls: list[Node], separator: Node, request: Request) -> Node:
    """Return the grammar node for one of `calls`, or for several of them if the request allows it.

    Example: if `calls` match `f()` and `g()`, and the separator matches `,`, the node matches
    `f(),g()`. If the model may make only one call, the node matches only `f()` and `g()`.
    """
    return one_of(*calls) if request.is_single else one_or_more(calls, separator)


def _separator(section: ToolSection) -> Node:
    """Return the grammar node for the text between two tool calls, such as `; `."""
    if section.separator.strip():
        return const(section.separator)
    # If the declared separator contains only white space, such as one line break, up to two spaces
    # or line breaks are allowed, because the parser skips white space between calls.
    return WHITESPACE


def _list_or_object(section: ToolSection, list_call: Call, request: Request) -> Node:
    """Return the grammar node for a list of tool calls, such as `[{"name": "f", ..}]` or `[f()]`.

    Models of some formats also write a single tool call as a JSON object without the list, such as
    `{"name": "f", ..}`. The node then matches both forms. `list_call` declares the list, and
    `section` declares whether models write the object.
    """
    list_of_calls = list_node(list_call, request)
    object_call = _single_object(section)
    if object_call is None:
        return list_of_calls
    single_objects = [call_node(object_call, tool) for tool in request.tools]
    return one_of(list_of_calls, *single_objects)


def _single_object(section: ToolSection) -> Call | None:
    """Return the declaration of a single tool call that is a JSON object: `{"name": "f", ..}`.

    `section` declares several variants of tool calls. Only the second variant is used, because the
    first variant is a list. Return None if there is no second variant, or if it is no JSON object.
    """
    second_variant = section.calls[1] if len(section.calls) > 1 else None
    if second_variant is None or not isinstance(second_variant.body, JsonObject):
        return None
    return second_variant


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
        return _start_of_object(call.body.keys)
    raise ConstraintError(
        "The format writes tool calls without a marker, so constrained output cannot separate "
        "them from other text. Set tool_choice to 'required', so that the output contains only "
        "tool calls."
    )


def _start_of_object(keys: Keys) -> str:
    """Return the text at the start of a tool call's JSON object, before the first value.

    Examples: `{"name": "` if the name of the function is the first value, and `{"arguments": ` if
    the arguments are the first value. If the path of the name is `function.name`, the text is
    `{"function": {"name": "`. If the type is the first value, the text contains this value:
    `{"type": "function"`.
    """
    first_member = keys.order[0]
    if first_member == "type":
        return '{"type": "function"'
    keys_of_path = keys.path_of(first_member).split(".")
    start = "".join(f"{{{json.dumps(key)}: " for key in keys_of_path)
    return start + '"' if first_member == "name" else start


def call_node(call: Call, tool: ToolSchema, texts_after: tuple[str, ...] = ()) -> Node:
    """Return the grammar node for one call of `tool`: `<tool_call>{"name": "f", ..}</tool_call>`.

    Example of matching text: `<tool_call>{"name": "f", "arguments": {}}</tool_call>`. `call`
    declares how the tool call is written. If `call` declares a list, use `list_node` instead.
    `texts_after` are the texts that may follow a tool call without a closing marker.
    """
    head = _head_node(call.head, tool.name)
    close = call.for_name(tool.name).close
    texts_after_arguments = (close,) if close.strip() else texts_after
    body = _body_node(call.body, tool, texts_after_arguments)
    return sequence(const(call.open), head, body, const(close))


def list_node(call: Call, request: Request) -> Node:
    """Return the grammar node for a list of tool calls and the markers around the list.

    Example of matching text, if `call` opens with `<tool_call>`, closes with `</tool_call>` and has
    a list of Python calls as body: `<tool_call>[f(a=1), g()]</tool_call>`.

    Raises:
        TypeError: `call` does not declare a list.
    """
    match call.body:
        case PythonCalls() as python_calls:
            calls = _python_list(python_calls, request)
        case JsonArray() as array:
            calls = _json_list(array, request)
        case _:
            raise TypeError(f"{call.body} does not declare a list of tool calls")
    # The text before the list contains no function name, because the names are inside the list.
    head = _head_node(call.head, name="")
    return sequence(const(call.open), head, calls, const(call.close))


def _python_list(declaration: PythonCalls, request: Request) -> Node:
    """Return the grammar node for a list of Python calls, such as `[f(a=1), g()]`.

    If the format declares no separator, the list is a single call, such as `f(a=1)`.
    """
    calls = [
        python_call(declaration, each) for tool in request.tools for each in tool.alternatives()
    ]
    if declaration.separator:
        members = _one_call_or_more(calls, const(declaration.separator), request)
    else:
        members = one_of(*calls)
    return sequence(const(declaration.open), members, const(declaration.close))


def _json_list(array: JsonArray, request: Request) -> Node:
    """Return the grammar node for a JSON array of tool calls, such as `[{"name": "f", ..}]`."""
    calls = [_array_member(array, tool) for tool in request.tools]
    separator = sequence(const(","), _WHITESPACE_IN_LIST)
    members = _one_call_or_more(calls, separator, request)
    return sequence(const("["), _WHITESPACE_IN_LIST, members, _WHITESPACE_IN_LIST, const("]"))


def _array_member(array: JsonArray, tool: ToolSchema) -> Node:
    """Return the grammar node for one tool call in a JSON array, such as `{"name": "f", ..}`."""
    json_object = _object_node(array.keys, tool)
    if isinstance(array.keys, NameIsKey):
        return json_object
    return _with_whitespace(json_object)


def _body_node(body: Body, tool: ToolSchema, texts_after: tuple[str, ...]) -> Node:
    """Return the grammar node for the part of a tool call that contains the arguments.

    The body is the text after the header of the tool call and before its closing marker. Examples
    of matching texts: `{"a": 1}` and `{"name": "f", "arguments": {"a": 1}}`. `texts_after` are the
    texts that may follow the arguments.

    Raises:
        TypeError: The body is a list of tool calls, for which `list_node` returns the node.
    """
    match body:
        case JsonObject(keys=keys):
            return _object_node(keys, tool)
        case JsonArguments():
            return json_schema(tool.parameters)
        case TaggedArguments():
            tools = tool.alternatives()
            return one_of(*(tagged_arguments(body, each, texts_after) for each in tools))
        case NestedTags():
            return nested_arguments(body, tool)
        case BareKeyArguments():
            return one_of(*(unquoted_key_arguments(body, each) for each in tool.alternatives()))
        case JsonArray() | PythonCalls():
            raise TypeError(f"{body} declares a list of tool calls")


def _head_node(head: str, name: str) -> Node:
    """Return the grammar node for the text before the arguments of a tool call: `<function=f>`.

    Example: `_head_node("<function={name}>", "f")` gives `const("<function=f>")`. The model chooses
    the text of a field such as `{id}`, so this field becomes a node with a regular expression.

    Raises:
        ConstraintError: The header has a field whose text is not known, or the parser cannot read
            the name.
    """
    nodes: list[Node] = []
    for part in split_pattern(head):
        if isinstance(part, str):
            nodes.append(const(part))
        elif part.field == "name":
            check_name_in_pattern(name, head, "name")
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
    required_members = _members_node(keys, name, arguments)
    id_key = _key_of_optional_id(keys)
    if id_key is None:
        return sequence(const("{"), required_members, const("}"))
    return sequence(const("{"), _with_optional_id(required_members, id_key), const("}"))


def _key_of_optional_id(keys: Keys) -> str | None:
    """Return the key of the optional id in the JSON object of a tool call, such as "id".

    Return None if the object has no id, or if `keys.order` already contains the required id. Also
    return None if the path of the id contains a dot, because the id is then in an inner object.
    """
    is_in_inner_object = keys.id is not None and "." in keys.id
    is_required = "id" in keys.order
    return None if is_in_inner_object or is_required else keys.id


def _with_optional_id(members: Node, id_key: str) -> Node:
    """Return the grammar node for `members`, with an optional id as the first or last member.

    Examples of matching texts: `"name": "f"`, `"id": "1", "name": "f"`, `"name": "f", "id": "1"`.
    For simplicity, the node also matches a text with both ids.
    """
    id_member = sequence(const(f"{json.dumps(id_key)}: "), _QUOTED_ID)
    id_at_start = optional(sequence(id_member, const(", ")))
    id_at_end = optional(sequence(const(", "), id_member))
    return sequence(id_at_start, members, id_at_end)


def _members_node(keys: Keys, name: Node, arguments: Node) -> Node:
    """Return the grammar node for the required members of a tool call's JSON object.

    The braces around the members do not belong to the node. Example of matching text:
    `"name": "f", "arguments": {"a": 1}`. `keys.order` defines the order of the members. If this
    order contains the id, the node also matches a member with any id. The node `name` also matches
    the quotes around the name.
    """
    nodes = {
        "name": name,
        "arguments": arguments,
        "id": _QUOTED_ID,
        "type": const('"function"'),
    }
    return _members_at_paths({keys.path_of(member): nodes[member] for member in keys.order})


def _members_at_paths(node_by_path: Mapping[str, Node]) -> Node:
    """Return the grammar node for the members of a JSON object, separated by commas.

    The keys of `node_by_path` are paths, in which dots separate the keys of nested objects. The
    values are the nodes for the JSON text at these paths. Example: the paths `function.name` and
    `function.arguments` give a node that matches `"function": {"name": "f", "arguments": {}}`.
    """
    nodes_by_key: dict[str, dict[str, Node]] = {}  # Grouped by the first key of the path.
    for path, node in node_by_path.items():
        key, _, inner_path = path.partition(".")  # `inner_path` is "" if the path is only one key.
        nodes_by_key.setdefault(key, {})[inner_path] = node
    members = [_member(key, node_by_inner_path) for key, node_by_inner_path in nodes_by_key.items()]
    return joined(members, ", ")


def _member(key: str, node_by_inner_path: Mapping[str, Node]) -> Node:
    """Return the grammar node for one member of a JSON object, such as `"name": "f"`.

    The keys of `node_by_inner_path` are paths inside the member's value, as in `_members_at_paths`.
    The values are the nodes for the JSON text at these paths. The path "" belongs to the whole
    value.
    """
    if "" in node_by_inner_path:
        value = node_by_inner_path[""]
    else:
        value = sequence(const("{"), _members_at_paths(node_by_inner_path), const("}"))
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
    """Return a node for each token of a part of a JSON object, and nodes for white space.

    White space is allowed before `}`, and after `{`, commas and colons. Example: `{"a": ` gives
    nodes for `{`, white space, `"a"`, `:` and white space.
    """
    nodes: list[Node] = []
    for token in _JSON_TOKENS.findall(json_text):
        if token == "}":
            nodes.append(_WHITESPACE_IN_LIST)
        nodes.append(const(token))
        if token in ("{", ",", ":"):
            nodes.append(_WHITESPACE_IN_LIST)
    return nodes
