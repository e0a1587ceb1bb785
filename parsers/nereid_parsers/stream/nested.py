"""Arguments as nested elements, each tag behind a mark, built up into a JSON object.

`~<items>~<item>~<sku>b1~</sku>~</item>~</items>` (mark `~`) is `{"items": [{"sku": "b1"}]}` where
the schema calls `items` an array, or where its children are called `item`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring as quoted

from nereid_parsers.format import NestedTags
from nereid_parsers.stream.body import BROKEN, DONE, MORE, Body, CallSink
from nereid_parsers.stream.lexer import partial
from nereid_parsers.stream.patterns import NEED, skip_blanks
from nereid_parsers.stream.schema import json_types_of, to_json

_TAG = re.compile(r"<(/?)([^<>/\s][^<>]*)>").match
_MAX_TAG = 512  # characters
_STRING = frozenset({"string"})


@dataclass(slots=True)
class Element:
    """An element that is open: what its schema says, and what it has turned out to be."""

    name: str
    schema: Mapping[str, object]
    kind: str = ""  # "object", "array", "text" (streams) or "wait" (a value of another type)
    count: int = 0


class NestedBody(Body):
    """Reads nested elements as one call's arguments."""

    __slots__ = ("_call_id", "_mark", "_name", "_open", "_parts", "_root", "_search", "_stop")

    def __init__(
        self, sink: CallSink, part: NestedTags, stop: str, name: str, call_id: str
    ) -> None:
        """`stop`: the marker that ends the call; not part of the body."""
        super().__init__(sink)
        self._mark = part.mark
        self._stop = stop
        self._name = name
        self._call_id = call_id
        self._root: Mapping[str, object] = sink.tools.parameters.get(name, {})
        self._open = [Element("", self._root, "object")]
        self._parts: list[str] = []  # of a value that waits for its end
        self._search = re.compile(f"{re.escape(part.mark)}|{partial(part.mark)}").search

    def read(self, text: str, at: int) -> int:
        """Read on among the elements; see Body.read."""
        if not self.sink.is_open and not self.sink.begin(self._name, self._call_id):
            self.status = BROKEN
            return at
        if not self._open[0].count:
            self._open[0].count = 1
            self.sink.write("{")
        size = len(text)
        while at < size and self.status is MORE:
            end = self._step(text, at)
            if end == NEED:
                return at
            at = end
        return at

    def _step(self, text: str, at: int) -> int:
        inner = self._open[-1]
        if inner.kind in ("text", "wait", ""):
            return self._value(inner, text, at)
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        if len(self._open) == 1 and text.startswith(self._stop, at):
            self._end()
            return at
        if not text.startswith(self._mark, at):
            return self._await(text, at, self._mark)
        return self._tag(text, at)

    def _await(self, text: str, at: int, marker: str) -> int:
        if not self.final and marker.startswith(text[at:]):
            return NEED
        self.status = BROKEN
        return at

    def _tag(self, text: str, at: int) -> int:
        match = _TAG(text, at + len(self._mark))
        if match is None:
            if self.final or ">" in text[at + len(self._mark) :] or len(text) - at > _MAX_TAG:
                self.status = BROKEN
                return at
            return NEED
        closing, name = match.groups()
        if closing:
            if len(self._open) == 1 or name != self._open[-1].name:
                self.status = BROKEN
                return at
            self._close_element()
        else:
            self._open_element(name)
        return match.end()

    def _open_element(self, name: str) -> None:
        parent = self._open[-1]
        first = parent.count == (1 if len(self._open) == 1 else 0)
        parent.count += 1
        comma = "" if first else ", "
        key = f"{quoted(name)}: " if parent.kind == "object" else ""
        self.sink.write(comma + key)
        self._open.append(Element(name, self._inner_schema(parent, name)))
        self._parts = []

    def _inner_schema(self, parent: Element, name: str) -> Mapping[str, object]:
        if parent.kind == "array":
            found = parent.schema.get("items")
        else:
            properties = parent.schema.get("properties")
            found = properties.get(name) if isinstance(properties, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def _value(self, inner: Element, text: str, at: int) -> int:
        """The text of an element, or the tag behind which its children stand."""
        match = self._search(text, at)
        start = match.start() if match else len(text)
        is_whole = match is not None and match.group() == self._mark
        if not inner.kind:
            return self._decide(inner, text, at, start, is_whole)
        if start > at:
            self._take(inner, text[at:start])
            return start
        if is_whole:
            return self._tag(text, at)
        if self.final:
            self._take(inner, text[at:])
            return len(text)
        return NEED

    def _decide(self, inner: Element, text: str, at: int, start: int, is_whole: bool) -> int:
        """Text means a value; a tag that opens means children; one that closes, an empty value."""
        blank = skip_blanks(text, at)
        if is_whole and blank == start:
            after = text[start + len(self._mark) :][:2]
            if len(after) < 2 and not self.final:
                return NEED
            if after != "</":
                tag = _TAG(text, start + len(self._mark))
                if tag is None and not self.final and len(text) - start < _MAX_TAG:
                    return NEED
                self._begin_container(inner, tag.group(2) if tag else "")
                return start
        elif blank >= start and not self.final:
            return NEED
        kinds = json_types_of(inner.schema, self._root)
        inner.kind = "text" if kinds == _STRING else "wait"
        if inner.kind == "text":
            self.sink.write('"')
        return at

    def _begin_container(self, inner: Element, child: str) -> None:
        kinds = json_types_of(inner.schema, self._root)
        says_array = kinds is not None and "array" in kinds and "object" not in kinds
        inner.kind = "array" if says_array or (kinds is None and child == "item") else "object"
        self.sink.write("[" if inner.kind == "array" else "{")

    def _take(self, inner: Element, text: str) -> None:
        if inner.kind == "text":
            self.sink.write(quoted(text)[1:-1])
        else:
            self._parts.append(text)

    def _close_element(self) -> None:
        inner = self._open.pop()
        if inner.kind == "text":
            self.sink.write('"')
        elif inner.kind == "wait":
            self.sink.write(self._spelled(inner))
        else:
            self.sink.write("]" if inner.kind == "array" else "}")

    def _spelled(self, inner: Element) -> str:
        kinds = json_types_of(inner.schema, self._root)
        text = "".join(self._parts)
        self._parts = []
        if not text.strip() and kinds is not None and kinds <= {"array", "object"}:
            return "[]" if "array" in kinds else "{}"
        return to_json(text, kinds)

    def _end(self) -> None:
        self.sink.write("}")
        self.sink.end()
        self.status = DONE

    def abandon(self) -> bool:
        """Close what is open so that the arguments are JSON; see Body.abandon."""
        while len(self._open) > 1:
            if not self._open[-1].kind:
                self._open[-1].kind = "wait"
            self._close_element()
        self.sink.write("}")
        self.sink.end("broken elements")
        return True
