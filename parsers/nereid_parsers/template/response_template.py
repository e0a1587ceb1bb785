r"""transformers' own declaration of how to read a model, `response_template`, as a Format.

The declaration stands in tokenizer_config.json (transformers 5.23, utils/chat_parsing): fields of
a message, each with the literal or regex that opens and closes it, and how its text is read:

    {"start_anchor": "<|im_start|>assistant\n", "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json",
                       "repeats": true, "transform": {"function": "{content}"}},
        "content": {"close": "<|im_end|>"}}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nereid_parsers.errors import FormatError
from nereid_parsers.format import (
    BareKeyArguments,
    Call,
    Format,
    JsonArguments,
    JsonArray,
    JsonObject,
    Keys,
    Reasoning,
    Sections,
    Source,
    TaggedArguments,
    ToolSection,
    Wrapper,
)
from nereid_parsers.template.call_texts import escaped
from nereid_parsers.template.probe import REASONING_FIELDS
from nereid_parsers.template.regex_parts import Blank, Field, Pieces, alternatives

_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_KNOWN_FIELDS = {*REASONING_FIELDS, "content", "tool_calls"}


def format_of_response_template(spec: Mapping[str, Any]) -> Format:
    """The Format that a `response_template` declares.

    Raises: FormatError for a declaration that is malformed, or that says what no Format can.
    """
    fields = spec.get("fields") if isinstance(spec, Mapping) else None
    if not isinstance(fields, Mapping) or not fields or spec.get("version", 1) != 1:
        raise FormatError("response_template: needs version 1 and a dict of fields")
    unknown = set(fields) - _KNOWN_FIELDS
    if unknown:
        raise FormatError(f"response_template: no part of a format holds {sorted(unknown)}")
    named = [name for name in REASONING_FIELDS if name in fields]
    reasoning = _reasoning(fields[named[0]]) if named else None
    wrapper, ends = _content(fields.get("content") or {})
    tools = _tools(fields["tool_calls"]) if "tool_calls" in fields else None
    return Format(
        "response_template",
        Sections(reasoning, wrapper, tools),
        ends=ends,
        turn=_spellings(spec, "start_anchor"),
        sources=(Source("response_template in the checkpoint's tokenizer_config.json"),),
    )


def _spellings(field: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The literals of a field's anchor `key`, from `key` itself or `key_pattern`."""
    literal = field.get(key)
    if isinstance(literal, str):
        return (literal,)
    if isinstance(literal, list):
        return tuple(str(one) for one in literal)
    pattern = field.get(f"{key}_pattern")
    if pattern is None:
        return ()
    found = ["".join(_literal(piece) for piece in pieces) for pieces in alternatives(pattern)]
    return tuple(dict.fromkeys(text.strip() for text in found if text.strip()))


def _literal(piece: str | Blank | Field) -> str:
    if isinstance(piece, Field):
        raise FormatError("response_template: a field stands in a marker that has none")
    return piece if isinstance(piece, str) else ""


def _reasoning(field: Mapping[str, Any]) -> Reasoning:
    opens, closes = _spellings(field, "open"), _spellings(field, "close")
    if not opens or not closes:
        raise FormatError("response_template: reasoning needs a marker at either end")
    return Reasoning(opens[0], closes[0], also_open=opens[1:], also_close=closes[1:])


def _content(field: Mapping[str, Any]) -> tuple[Wrapper | None, tuple[str, ...]]:
    opens, closes = _spellings(field, "open"), _spellings(field, "close")
    if opens:
        return Wrapper(opens[0], closes[0] if closes else ""), closes[1:]
    return None, closes


# ---- calls --------------------------------------------------------------------------------------


def _tools(field: Mapping[str, Any]) -> ToolSection:
    closes = _spellings(field, "close")
    close = closes[0] if closes else ""
    heads = _heads(field)
    is_array = bool(field.get("transform_each")) or not (
        field.get("repeats", False) or field.get("transform")
    )
    calls = tuple(_call(field, opened, head, close, is_array) for opened, head in heads)
    return ToolSection(calls)


def _heads(field: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(marker, head) of every way to open a call."""
    if "open_pattern" not in field:
        opens = _spellings(field, "open")
        if not opens:
            raise FormatError("response_template: tool_calls needs an open marker")
        return [(opened, "") for opened in opens]
    return [_head(pieces) for pieces in alternatives(field["open_pattern"])]


def _head(pieces: Pieces) -> tuple[str, str]:
    while pieces and isinstance(pieces[0], Blank):
        pieces = pieces[1:]
    if not pieces or not isinstance(pieces[0], str):
        raise FormatError("response_template: a call must open with a literal")
    written = [_written(piece) for piece in pieces]
    if any(isinstance(piece, Field) for piece in pieces):
        named = next(n for n, piece in enumerate(pieces) if isinstance(piece, Field))
        first = 1 if named > 1 else 0  # the marker before the head, if the name is not in it
        opened = pieces[0] if first else ""
        return str(opened), "".join(written[first:])
    return "".join(str(_literal(piece)) for piece in pieces), ""


def _written(piece: str | Blank | Field) -> str:
    if isinstance(piece, Field):
        slots = {"name": "{name}", "id": "{id}", "key": "{key}"}
        return slots.get(piece.name, "{word}")
    return escaped(piece) if isinstance(piece, str) else "\n"


def _call(field: Mapping[str, Any], opened: str, head: str, close: str, is_array: bool) -> Call:
    content = field.get("content", "text")
    arguments = field.get("content_args") or {}
    has_name = "{name}" in head
    if content == "xml-inline":
        return Call(_tagged(arguments), open=opened, head=head, close=close)
    if content != "json":
        raise FormatError(f"response_template: no body of a call is {content!r}")
    delimiters = arguments.get("string_delims") or []
    if arguments.get("unquoted_keys") and delimiters:
        if delimiters[0][0] != delimiters[0][1]:
            raise FormatError("response_template: strings open and close with different marks")
        return Call(BareKeyArguments(delimiters[0][0]), open=opened, head=head, close=close)
    if has_name:
        return Call(JsonArguments(), open=opened, head=head, close=close)
    keys = _keys(field.get("transform"))
    body = JsonArray(keys) if is_array else JsonObject(keys)
    return Call(body, open=opened + head.replace("{{", "{"), close=close)


def _keys(transform: object) -> Keys:
    """Which keys of the JSON a transform makes name and arguments from."""
    if isinstance(transform, list) and len(transform) == 1:
        transform = transform[0]
    if transform is None:
        return Keys("function.name", "function.arguments", id="id")
    function = transform.get("function", transform) if isinstance(transform, Mapping) else transform
    if isinstance(function, str):
        lead = _path(function)
        return Keys(".".join((*lead, "name")), ".".join((*lead, "arguments")))
    if not isinstance(function, Mapping):
        raise FormatError(f"response_template: transform {transform!r} makes no call")
    name, arguments = _path(function.get("name")), _path(function.get("arguments"))
    identity = transform.get("id") if isinstance(transform, Mapping) else None
    if not name or not arguments:
        raise FormatError(f"response_template: transform {transform!r} names no key")
    return Keys(
        ".".join(name),
        ".".join(arguments),
        id=".".join(_path(identity)) or None if identity else None,
    )


def _path(placeholder: object) -> tuple[str, ...]:
    """`{content.tool.name}` -> ("tool", "name"); `{content}` -> ()."""
    found = _PLACEHOLDER.fullmatch(placeholder) if isinstance(placeholder, str) else None
    if found is None:
        raise FormatError(f"response_template: {placeholder!r} is not a placeholder")
    path = found.group(1).split(".")
    return tuple(path[1:] if path[0] == "content" else path)


def _tagged(arguments: Mapping[str, Any]) -> TaggedArguments:
    found = alternatives(str(arguments.get("tag_pattern", "")))
    pieces = found[0]
    names = [piece.name for piece in pieces if isinstance(piece, Field)]
    if "key" not in names or "value" not in names or names.index("key") > names.index("value"):
        raise FormatError("response_template: tag_pattern needs a key, then a value")
    at = pieces.index(Field("value"))
    before, behind = pieces[:at], pieces[at + 1 :]
    while before and isinstance(before[0], Blank):
        before = before[1:]
    close = "".join("\n" if isinstance(piece, Blank) else _literal(piece) for piece in behind)
    return TaggedArguments("".join(_written(piece) for piece in before), close)
