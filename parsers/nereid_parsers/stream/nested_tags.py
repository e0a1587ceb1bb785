"""Reads arguments that are written as nested elements, and converts them to a JSON object.

With the mark `~`, the text `~<items>~<item>~<sku>b1~</sku>~</item>~</items>` becomes
`{"items": [{"sku": "b1"}]}`. The element `items` is an array because its children are called
`item`, or because the tool's schema declares an array.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from json.encoder import encode_basestring as quote_json

from nereid_parsers.stream.argument_types import json_types_of, to_json
from nereid_parsers.stream.body_reader import BROKEN, DONE, MORE, BodyReader
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.lexer import marker_prefix_regex
from nereid_parsers.stream.pattern_matching import NEED_MORE, skip_blanks
from nereid_parsers.stream.python_literals import escape_json
from nereid_parsers.tool_declarations import NestedTags

_TAG = re.compile(r"<(/?)([^<>/\s][^<>]*)>").match
_CLOSING_TAG_START = "</"
_MAX_TAG_CHARS = 512
_STRING_ONLY = frozenset({"string"})
# The name of the children that show that an element without a declared type is an array.
_ARRAY_ITEM = "item"


class _Kind(Enum):
    """The kind of an element's value.

    UNDECIDED  Nothing has been read that shows the kind.
    OBJECT     The children are the members of an object.
    ARRAY      The children are the items of an array.
    STRING     The text is a string. It is passed on as it arrives.
    VALUE      The text has another type, or a type that is not known. It is kept until the element
               closes, because its type can only be determined from the complete text.
    """

    UNDECIDED = "undecided"
    OBJECT = "object"
    ARRAY = "array"
    STRING = "string"
    VALUE = "value"


_CONTAINERS = (_Kind.OBJECT, _Kind.ARRAY)


@dataclass(slots=True)
class _Element:
    """An element that has been opened and not closed.

    Attributes:
        name: The name in its tags. "" for the arguments as a whole.
        schema: The JSON schema of its value.
        kind: The kind of its value.
        num_children: The number of children that have been opened.
    """

    name: str
    schema: Mapping[str, object]
    kind: _Kind = _Kind.UNDECIDED
    num_children: int = 0


class NestedReader(BodyReader):
    """Reads nested elements as the arguments of one call, see the example of the module."""

    __slots__ = (
        "_call_id", "_elements", "_find_mark", "_has_opened_object", "_mark", "_name",
        "_root_schema", "_stop_marker", "_value_pieces",
    )  # fmt: skip

    def __init__(
        self, writer: CallWriter, part: NestedTags, stop_marker: str, name: str, call_id: str
    ) -> None:
        """Create a reader.

        Args:
            writer: The writer of the call.
            part: The declaration of the mark before each tag.
            stop_marker: The marker after the body. It ends the body but does not belong to it.
            name: The name of the function.
            call_id: The id of the call, or "".
        """
        super().__init__(writer)
        self._mark = part.mark
        self._stop_marker = stop_marker
        self._name = name
        self._call_id = call_id
        self._root_schema: Mapping[str, object] = writer.tools.parameters.get(name, {})
        # The open elements, from the outermost (the arguments as a whole) to the innermost.
        self._elements = [_Element("", self._root_schema, _Kind.OBJECT)]
        self._has_opened_object = False
        self._value_pieces: list[str] = []  # The text of an element of the kind VALUE.
        mark_or_prefix = f"{re.escape(part.mark)}|{marker_prefix_regex(part.mark)}"
        self._find_mark = re.compile(mark_or_prefix).search

    def read(self, text: str, pos: int) -> int:
        """Read the elements in `text`, see `BodyReader.read`."""
        if not self.writer.is_open and not self.writer.start(self._name, self._call_id):
            self.status = BROKEN
            return pos
        if not self._has_opened_object:
            self._has_opened_object = True
            self.writer.write("{")
        size = len(text)
        while pos < size and self.status is MORE:
            end = self._read_piece(text, pos)
            if end == NEED_MORE:
                return pos
            pos = end
        return pos

    def _read_piece(self, text: str, pos: int) -> int:
        """Read a piece of text or one tag, whichever is at `pos`.

        Example: `~<city>Paris~</city>` is read in three pieces, and `"city": "Paris"` is written.

        Returns:
            The position after the piece, or NEED_MORE.
        """
        element = self._elements[-1]
        if element.kind is _Kind.UNDECIDED:
            return self._decide_kind(element, text, pos)
        if element.kind not in _CONTAINERS:
            return self._read_text(element, text, pos)
        pos = skip_blanks(text, pos)
        if pos == len(text):
            return pos
        if len(self._elements) == 1 and text.startswith(self._stop_marker, pos):
            self._end_call()
            return pos
        if text.startswith(self._mark, pos):
            return self._read_tag(text, pos)
        if not self.is_final and self._mark.startswith(text[pos:]):
            return NEED_MORE
        return self._reject(pos)

    def _reject(self, pos: int) -> int:
        """Set the status BROKEN and return `pos`."""
        self.status = BROKEN
        return pos

    def _read_tag(self, text: str, pos: int) -> int:
        """Read the mark and the tag at `pos`, for example `~<city>` or `~</city>`."""
        tag_start = pos + len(self._mark)
        match = _TAG(text, tag_start)
        if match is None:
            is_malformed = ">" in text[tag_start:] or len(text) - pos > _MAX_TAG_CHARS
            return self._reject(pos) if self.is_final or is_malformed else NEED_MORE
        is_closing, name = match.groups()
        if not is_closing:
            self._open_element(name)
        elif len(self._elements) > 1 and name == self._elements[-1].name:
            self._close_element()
        else:
            return self._reject(pos)
        return match.end()

    def _open_element(self, name: str) -> None:
        """Open a child of the innermost element, and write the comma and key before its value.

        Example: for the second child `days` of an object, `, "days": ` is written.
        """
        parent = self._elements[-1]
        comma = ", " if parent.num_children else ""
        key = f"{quote_json(name)}: " if parent.kind is _Kind.OBJECT else ""
        self.writer.write(comma + key)
        parent.num_children += 1
        self._elements.append(_Element(name, _child_schema(parent, name)))
        self._value_pieces = []

    def _decide_kind(self, element: _Element, text: str, pos: int) -> int:
        """Decide the kind of an element by what follows its opening tag.

        Another opening tag shows that the element has children. Text or the closing tag shows that
        it has none. Examples: `~<city>~<name>` has children, `~<city>Paris` and `~<city>~</city>`
        have none.

        Returns:
            The position at which reading goes on, or NEED_MORE.
        """
        mark_start, is_whole_mark = self._next_mark(text, pos)
        if skip_blanks(text, pos) < mark_start:
            return self._start_text(element, pos)
        if not is_whole_mark:
            return self._start_text(element, pos) if self.is_final else NEED_MORE
        tag_start = mark_start + len(self._mark)
        if text.startswith(_CLOSING_TAG_START, tag_start):
            return self._start_text(element, pos)
        match = _TAG(text, tag_start)
        if match is None and not self.is_final:
            is_short = len(text) - tag_start < len(_CLOSING_TAG_START)
            if is_short or len(text) - mark_start < _MAX_TAG_CHARS:
                return NEED_MORE
        self._open_container(element, match.group(2) if match else "")
        return mark_start

    def _start_text(self, element: _Element, pos: int) -> int:
        """Make the element one without children, and return `pos`."""
        if json_types_of(element.schema, self._root_schema) == _STRING_ONLY:
            element.kind = _Kind.STRING
            self.writer.write('"')
        else:
            element.kind = _Kind.VALUE
        return pos

    def _open_container(self, element: _Element, child_name: str) -> None:
        """Make the element an array or an object, and write the opening bracket.

        Example: without a schema, an element whose first child is called `item` becomes an array.
        """
        types = json_types_of(element.schema, self._root_schema)
        if types is None:
            is_array = child_name == _ARRAY_ITEM
        else:
            is_array = "array" in types and "object" not in types
        element.kind = _Kind.ARRAY if is_array else _Kind.OBJECT
        self.writer.write("[" if is_array else "{")

    def _next_mark(self, text: str, pos: int) -> tuple[int, bool]:
        """Return the position of the next mark, and whether the mark is complete.

        Example: with the mark `]<]`, the text `a]<]` gives `(1, True)`, `a]<` gives `(1, False)`
        and `a` gives `(1, False)`. Without a mark, the position is the end of the text.
        """
        match = self._find_mark(text, pos)
        if match is None:
            return len(text), False
        return match.start(), match.group() == self._mark

    def _read_text(self, element: _Element, text: str, pos: int) -> int:
        """Read the text of an element up to the next mark, or the tag if there is no text.

        Example: from `Paris~</city>`, first `Paris` is read, and then the closing tag.
        """
        mark_start, is_whole_mark = self._next_mark(text, pos)
        if mark_start > pos:
            self._add_text(element, text[pos:mark_start])
            return mark_start
        if is_whole_mark:
            return self._read_tag(text, pos)
        if self.is_final:
            self._add_text(element, text[pos:])
            return len(text)
        return NEED_MORE

    def _add_text(self, element: _Element, text: str) -> None:
        """Write the text of a string, or keep the text of another value."""
        if element.kind is _Kind.STRING:
            self.writer.write(escape_json(text))
        else:
            self._value_pieces.append(text)

    def _close_element(self) -> None:
        """Close the innermost element, and write its value or its closing bracket."""
        element = self._elements.pop()
        if element.kind is _Kind.STRING:
            self.writer.write('"')
        elif element.kind is _Kind.ARRAY:
            self.writer.write("]")
        elif element.kind is _Kind.OBJECT:
            self.writer.write("}")
        else:
            self.writer.write(self._value_as_json(element))

    def _value_as_json(self, element: _Element) -> str:
        """Return the JSON text of an element without children. Example: `3` for `~<days>3~</days>`.

        An empty element is an empty array or object if its schema allows no other type.
        """
        types = json_types_of(element.schema, self._root_schema)
        text = "".join(self._value_pieces)
        self._value_pieces = []
        if not text.strip() and types is not None and types <= {"array", "object"}:
            return "[]" if "array" in types else "{}"
        return to_json(text, types)

    def _end_call(self) -> None:
        """Write the closing brace of the arguments and end the call."""
        self.writer.write("}")
        self.writer.end()
        self.status = DONE

    def abandon(self) -> bool:
        """Close all open elements so that the arguments are JSON, see `BodyReader.abandon`."""
        while len(self._elements) > 1:
            if self._elements[-1].kind is _Kind.UNDECIDED:
                self._elements[-1].kind = _Kind.VALUE
            self._close_element()
        self.writer.write("}")
        self.writer.end("the elements of the arguments are not valid")
        return True


def _child_schema(parent: _Element, name: str) -> Mapping[str, object]:
    """Return the schema of the child `name`. It is empty if the parent's schema declares none."""
    if parent.kind is _Kind.ARRAY:
        schema = parent.schema.get("items")
    else:
        properties = parent.schema.get("properties")
        schema = properties.get(name) if isinstance(properties, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}
