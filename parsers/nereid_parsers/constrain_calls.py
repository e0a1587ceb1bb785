"""Structural-tag nodes for calls: each part of format.py, as xgrammar holds the model to it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereid_parsers.errors import ConstraintError
from nereid_parsers.format import (
    BareKeyArguments,
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
    pattern,
)
from nereid_parsers.stream.schema import kinds_of

Node = dict[str, Any]

_FIELDS = {"number": "[0-9]{1,3}", "id": "[a-zA-Z0-9]{9}", "word": "[a-z]{1,12}"}
_NESTED_MARK = "]<]minimax[>["  # the one for which xgrammar has a style
BLANKS: Node = {"type": "regex", "pattern": r"[ \n]{0,2}"}
_SPACE: Node = {"type": "regex", "pattern": r"( |\n {0,16})?"}
_ID: Node = {"type": "regex", "pattern": '"[a-zA-Z0-9_.:-]{1,40}"'}
_JSON_PIECES = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^"{}\[\],:\s]+')
_STRING = frozenset({"string"})
_LIMITS = ("enum", "const", "pattern", "format", "minLength", "maxLength")  # of a string
_SINGLE_QUOTED = r"""'([^'\\\n]|\\['"\\nrt])*'"""
_MAX_OPTIONAL = 12  # optional arguments after which those in the middle must come in order


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool as a constraint sees it."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False

    @classmethod
    def of(cls, tool: Mapping[str, Any]) -> ToolSchema:
        """Read one member of the OpenAI tools list. Raises: ConstraintError if it has no name."""
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise ConstraintError(f"tools: {dict(tool)!r} has no name")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        return cls(name, parameters, bool(function.get("strict") or tool.get("strict")))

    def argument(self, key: str) -> Mapping[str, Any]:
        """One argument's schema, able to resolve the references of the whole."""
        schema = self.parameters["properties"][key]
        shared = {
            word: self.parameters[word]
            for word in ("$defs", "definitions")
            if word in self.parameters
        }
        return {**shared, **schema} if isinstance(schema, Mapping) else {}

    @property
    def keys(self) -> tuple[list[str], list[str]]:
        """(required, optional) arguments, in the schema's order."""
        properties = self.parameters.get("properties")
        names = list(properties) if isinstance(properties, Mapping) else []
        required = self.parameters.get("required")
        needed = set(required) if isinstance(required, list) else set()
        return [n for n in names if n in needed], [n for n in names if n not in needed]


# ---- nodes ---------------------------------------------------------------------------------------


def const(text: str) -> Node:
    """Exactly this text."""
    return {"type": "const_string", "value": text}


def any_text(excludes: tuple[str, ...] = ()) -> Node:
    """Free text, up to whatever follows it, in which `excludes` may not stand."""
    found = list(dict.fromkeys(text.strip() for text in excludes if text.strip()))
    return {"type": "any_text", "excludes": found} if found else {"type": "any_text"}


def json_schema(schema: object, excludes: str = "") -> Node:
    """JSON that fits a schema; one blank at a time, or white space might never end."""
    node: Node = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
    return {**node, "excludes": [excludes]} if excludes else node


def sequence(*parts: Node) -> Node:
    """Parts in a row; constants that touch are joined, empty ones vanish."""
    flat: list[Node] = []
    for part in parts:
        for one in part["elements"] if part["type"] == "sequence" else [part]:
            if one["type"] == "const_string":
                if not one["value"]:
                    continue
                if flat and flat[-1]["type"] == "const_string":
                    flat[-1] = const(flat[-1]["value"] + one["value"])
                    continue
            flat.append(one)
    return flat[0] if len(flat) == 1 else {"type": "sequence", "elements": flat}


def one_of(*options: Node) -> Node:
    """Any of the options."""
    return options[0] if len(options) == 1 else {"type": "or", "elements": list(options)}


def optional(part: Node) -> Node:
    """The part, or nothing."""
    return {"type": "optional", "content": part}


def tag(node: Node) -> Node:
    """The same as a tag: constants at its two ends become begin and end."""
    parts = node["elements"] if node["type"] == "sequence" else [node]
    begin = parts[0]["value"] if parts[0]["type"] == "const_string" else ""
    inner = parts[1:] if begin else parts
    end = inner[-1]["value"] if inner and inner[-1]["type"] == "const_string" else ""
    inner = inner[:-1] if end else inner
    content = sequence(*inner) if inner else const("")
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def without_blanks(node: Node) -> Node:
    """The same without the blanks at its two ends."""
    parts = list(node["elements"]) if node["type"] == "sequence" else [node]
    if parts[0]["type"] == "const_string":
        parts[0] = const(parts[0]["value"].lstrip())
    if parts[-1]["type"] == "const_string":
        parts[-1] = const(parts[-1]["value"].rstrip())
    return sequence(*parts)


def _row(items: list[Node], separator: str | Node, is_single: bool) -> Node:
    """One or more of the items, with a separator between; just one if `is_single`."""
    one = one_of(*items)
    if is_single:
        return one
    between = const(separator) if isinstance(separator, str) else separator
    more = {"type": "star", "content": sequence(between, one)}
    return sequence(one, more)


# ---- calls ---------------------------------------------------------------------------------------


def section_tag(section: ToolSection, tools: tuple[ToolSchema, ...], is_single: bool) -> Node:
    """At least one call, with the section's markers around them."""
    call = section.calls[0]
    between: str | Node = section.separator if section.separator.strip() else BLANKS
    if isinstance(call.body, JsonArray | PythonCalls):
        calls = _call(call, tools, is_single)
        if len(section.calls) > 1 and isinstance(section.calls[1].body, JsonObject):
            calls = one_of(calls, *(_call(section.calls[1], (tool,), True) for tool in tools))
        if call.open.strip() and call.close.strip():  # each call may stand in a row of its own
            calls = _row([calls], between, is_single)
    else:
        each = [_call(call, (tool,), True) for tool in tools]
        calls = _row(each, between, is_single)
    return sequence(const(section.open), calls, const(section.close))


def call_tag(call: Call, tools: tuple[ToolSchema, ...], is_single: bool = False) -> Node:
    """One call of one of the tools; for arrays, the row of them."""
    return tag(_call(call, tools, is_single))


def trigger_of(section: ToolSection) -> str:
    """What shows, in free text, that calls begin."""
    if section.opens:
        return section.open.strip()
    call = section.calls[0]
    if call.trigger:
        return call.trigger
    if isinstance(call.body, JsonObject) and isinstance(call.body.keys, Keys):
        return _skeleton(call.body.keys, "\n")[0].partition("\\n")[0]
    raise ConstraintError("a call without any marker cannot be told from free text")


def _call(call: Call, tools: tuple[ToolSchema, ...], is_single: bool) -> Node:
    body = call.body
    around = (const(call.open), *_head(call.head, tools[0].name))
    if isinstance(body, JsonArray):
        # Whole arrays are written on one line or on many.
        objects = [_object(body.keys, tool, _SPACE) for tool in tools]
        rows = _row(objects, sequence(const(","), _SPACE), is_single)
        inner = sequence(const("["), _SPACE, rows, _SPACE, const("]"))
    elif isinstance(body, PythonCalls):
        written = [_python(body, tool) for tool in tools]
        row = _row(written, body.separator, is_single or not (body.close or body.separator.strip()))
        inner = sequence(const(body.open), row, const(body.close))
        if not body.close and not body.separator.strip() and not is_single:
            inner = _row(written, body.separator, False)
    elif isinstance(body, JsonObject):
        inner = _object(body.keys, tools[0])
    elif isinstance(body, JsonArguments):
        inner = json_schema(tools[0].parameters)
    elif isinstance(body, TaggedArguments):
        inner = _tagged(body, tools[0])
    elif isinstance(body, NestedTags):
        inner = _nested(body, tools[0])
    else:
        inner = _bare_keys(body, tools[0])
    return sequence(*around, inner, const(call.close))


def _head(head: str, name: str) -> list[Node]:
    nodes: list[Node] = []
    for part in pattern(head):
        if isinstance(part, str):
            nodes.append(const(part))
        elif part.field == "name":
            nodes.append(const(name))
        elif part.field in _FIELDS:
            nodes.append({"type": "regex", "pattern": _FIELDS[part.field]})
        else:
            raise ConstraintError(f"head {head!r}: it is not known how {part.field} is written")
    return nodes


def _object(keys: Keys | NameIsKey, tool: ToolSchema, space: Node | None = None) -> Node:
    """The object of one call; `space` is what may stand between its parts, else as JSON does."""
    if isinstance(keys, NameIsKey):
        return sequence(
            const("{" + json.dumps(tool.name, ensure_ascii=False) + ": "),
            json_schema(tool.parameters),
            const("}"),
        )
    before, after = _skeleton(keys, tool.name)
    parts: list[Node]
    if keys.id and '"{id}"' not in before + after and "." not in keys.id:
        # Templates write it in either place, models often not at all.
        name = json.dumps(keys.id)
        first = optional(sequence(const(f"{name}: "), _ID, const(", ")))
        last = optional(sequence(const(f", {name}: "), _ID))
        parts = [const("{"), first, const(before[1:]), json_schema(tool.parameters), last]
        parts.append(const(after))
    else:
        parts = [*_with_id(before), json_schema(tool.parameters), *_with_id(after)]
    return sequence(*parts) if space is None else sequence(*(_spaced(p, space) for p in parts))


def _with_id(text: str) -> list[Node]:
    before, found, after = text.partition('"{id}"')
    return [const(before), _ID, const(after)] if found else [const(text)]


def _spaced(node: Node, space: Node) -> Node:
    """The same with `space` where JSON's punctuation may have blanks."""
    if node["type"] == "optional":
        return optional(_spaced(node["content"], space))
    if node["type"] == "sequence":
        return sequence(*(_spaced(part, space) for part in node["elements"]))
    if node["type"] != "const_string":
        return node
    parts: list[Node] = []
    for piece in _JSON_PIECES.findall(node["value"]):
        around = {"{": (False, True), "}": (True, False), ",": (False, True), ":": (False, True)}
        is_before, is_behind = around.get(piece, (False, False))
        parts += [*([space] if is_before else []), const(piece), *([space] if is_behind else [])]
    return sequence(*parts)


def _skeleton(keys: Keys, name: str) -> tuple[str, str]:
    """The object's text before and behind the arguments, the id as {id}."""
    paths = {"name": keys.name, "arguments": keys.arguments, "id": keys.id or ""}
    values = {"name": json.dumps(name, ensure_ascii=False), "arguments": "\0", "id": '"{id}"'}
    tree: dict[str, Any] = {}
    for role in keys.order:
        at = tree
        *outer, last = paths[role].split(".")
        for part in outer:
            at = at.setdefault(part, {})
        at[last] = values[role]
    before, _, after = _written(tree).partition("\0")
    return before, after


def _written(tree: dict[str, Any]) -> str:
    members = (
        f"{json.dumps(key)}: {_written(value) if isinstance(value, dict) else value}"
        for key, value in tree.items()
    )
    return "{" + ", ".join(members) + "}"


# ---- arguments that are not JSON -----------------------------------------------------------------


def _tagged(part: TaggedArguments, tool: ToolSchema) -> Node:
    required, others = tool.keys
    nodes: list[Node] = []
    for key in [*required, *others]:
        node = _tagged_value(part, key, tool.argument(key))
        nodes.append(node if key in required else optional(node))
    return sequence(*nodes) if nodes else BLANKS


def _tagged_value(part: TaggedArguments, key: str, schema: Mapping[str, Any]) -> Node:
    kinds = kinds_of(schema, schema)
    is_text = kinds is None or "string" in kinds
    names = ["string"] if is_text else sorted(kinds or {"object"})
    if not is_text and "number" not in names:
        names.append("number")  # some templates call all that is no string so
    fields = {"key": [key], "string": ["true" if is_text else "false"], "type": names}
    opening = _opening(part.open, fields)
    choices = schema.get("enum")
    if is_text and isinstance(choices, list) and all(isinstance(one, str) for one in choices):
        return sequence(opening, one_of(*map(const, choices)), const(part.close))
    if not is_text:
        written = [
            sequence(
                _opening(one.open, fields),
                _json_or_python(schema, kinds or frozenset(), one.close.strip()),
                const(one.close),
            )
            for one in (part, *part.also)
        ]
        return one_of(*written)
    opener = opening["value"] if opening["type"] == "const_string" else ""
    plain = [one for one in part.also if opener and part.open.startswith(one.open)]
    texts = [_text(_opening(one.open, fields), one.close) for one in (part, *plain)]
    return one_of(*texts)


def _json_or_python(schema: Mapping[str, Any], kinds: frozenset[str], excludes: str) -> Node:
    """A bare value: as JSON, or where Python has another word for it, with that word."""
    words = ["True", "False"] * ("boolean" in kinds) + ["None"] * ("null" in kinds)
    if not words or "enum" in schema or "const" in schema:
        return json_schema(schema, excludes=excludes)
    return one_of(json_schema(schema, excludes=excludes), *map(const, words))


def _text(opening: Node, closed: str) -> Node:
    """Text between its tags; it ends at the bare marker, for that is where the parser ends it."""
    end = closed.strip()
    begin = opening["value"] if opening["type"] == "const_string" else ""
    text = {"type": "tag", "begin": begin, "content": any_text(), "end": end}
    rest = const(closed.lstrip()[len(end) :])
    return sequence(text, rest) if begin else sequence(opening, text, rest)


def _opening(form: str, fields: Mapping[str, list[str]]) -> Node:
    """What opens a value: a pattern in which each field has one or more values."""
    nodes: list[Node] = []
    for piece in pattern(form):
        if isinstance(piece, str):
            nodes.append(const(piece))
        elif piece.field in fields:
            nodes.append(one_of(*map(const, fields[piece.field])))
        else:
            raise ConstraintError(f"{form!r}: it is not known how {piece.field} is written")
    return sequence(*nodes)


def _nested(part: NestedTags, tool: ToolSchema) -> Node:
    if part.mark != _NESTED_MARK:
        raise ConstraintError(
            f"nested elements behind the mark {part.mark!r} cannot be constrained"
        )
    return {**json_schema(tool.parameters), "style": "minimax_m3_xml"}


def _python(part: PythonCalls, tool: ToolSchema) -> Node:
    pairs = {key: _python_value(tool.argument(key)) for keys in tool.keys for key in keys}
    required, others = tool.keys
    arguments = _separated(
        [sequence(const(f"{key}="), pairs[key]) for key in required],
        [sequence(const(f"{key}="), pairs[key]) for key in others],
        ", ",
    )
    return sequence(const(f"{tool.name}{part.suffix}("), arguments, const(")"))


def _python_value(schema: Mapping[str, Any]) -> Node:
    """A Python literal. Inside containers true, false and null are written as JSON does."""
    kinds = kinds_of(schema, schema)
    if kinds == frozenset({"boolean"}):
        return one_of(const("True"), const("False"))
    if kinds is not None and "null" in kinds:
        return one_of(const("None"), json_schema({**schema, "type": sorted(kinds - {"null"})}))
    if kinds == _STRING and not any(word in schema for word in _LIMITS):
        return one_of(json_schema(schema), {"type": "regex", "pattern": _SINGLE_QUOTED})
    return json_schema(schema)


def _bare_keys(part: BareKeyArguments, tool: ToolSchema) -> Node:
    pairs = [
        [sequence(const(f"{key}:"), _bare_value(part, tool.argument(key))) for key in keys]
        for keys in tool.keys
    ]
    return sequence(const("{"), _separated(pairs[0], pairs[1], ","), const("}"))


def _bare_value(part: BareKeyArguments, schema: Mapping[str, Any]) -> Node:
    kinds = kinds_of(schema, schema)
    text = {"type": "tag", "begin": part.quote, "content": any_text(), "end": part.quote}
    choices = schema.get("enum")
    if isinstance(choices, list) and all(isinstance(one, str) for one in choices):
        return one_of(*(const(f"{part.quote}{one}{part.quote}") for one in choices))
    if kinds is None or "string" in kinds:
        return text
    if kinds == frozenset({"array"}):
        item = schema.get("items")
        inner = _bare_value(part, item if isinstance(item, Mapping) else {})
        return sequence(const("["), optional(_row([inner], ",", False)), const("]"))
    if kinds == frozenset({"object"}):
        return _bare_keys(part, ToolSchema("", schema))
    return json_schema(schema)


def _separated(required: list[Node], others: list[Node], separator: str) -> Node:
    """Required members, then any of the others in order, a separator between each two."""
    comma = const(separator)
    if required:
        nodes = [required[0]]
        nodes += [sequence(comma, node) for node in required[1:]]
        nodes += [optional(sequence(comma, node)) for node in others]
        return sequence(*nodes)
    if not others:
        return const("")
    starts = [
        sequence(first, *(optional(sequence(comma, node)) for node in others[number + 1 :]))
        for number, first in enumerate(others[:_MAX_OPTIONAL])
    ]
    return optional(one_of(*starts))
