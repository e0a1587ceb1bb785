"""Converts arguments in nested tags to JSON: `~<city>Paris~</city>` becomes `{"city": "Paris"}`.

A prefix such as `~` precedes each tag. Example with the prefix `~`: the text
`~<items>~<item>~<sku>b1~</sku>~</item>~</items>` becomes `{"items": [{"sku": "b1"}]}`.

An element such as `items` is an array if the tool's schema declares an array. Without a declared
type, an element is an array if its first child is called `item`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from nereid_parsers.stream.bodies.body_reader import Head, StepReader
from nereid_parsers.stream.bodies.nested_elements import Element, ElementKind
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.lexer import marker_prefix_regex
from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    NeedMore,
    match_marker,
    skip_whitespace,
)
from nereid_parsers.stream.status import BROKEN, DONE
from nereid_parsers.stream.values.argument_types import json_types_of
from nereid_parsers.stream.values.python_strings import escape_json

_match_tag = re.compile(r"<(?P<slash>/?)(?P<name>[^<>/\s][^<>]*)>").match
_CLOSING_TAG_START = "</"
_MAX_TAG_CHARS = 512
_STRING_ONLY = frozenset({"string"})
_CONTAINERS = (ElementKind.OBJECT, ElementKind.ARRAY)
_CLOSING_TEXTS = {ElementKind.STRING: '"', ElementKind.ARRAY: "]", ElementKind.OBJECT: "}"}


class NestedReader(StepReader):
    """Reads the arguments of one tool call. They are nested tags, such as `~<city>Paris~</city>`.

    The matched header contains the function's name. Example: if the header names the function `f`,
    the tag prefix is `~` and `days` is an integer, the text `~<days>3~</days>` causes these calls
    of the CallWriter: `start("f", "")` and `write("{")` in `begin`, `write('"days": ')` at the
    opening tag, and `write("3")` after the closing tag. At the stop marker, the reader calls
    `write("}")` and `end()`.
    """

    def __init__(self, writer: CallWriter, head: Head, tag_prefix: str, stop_marker: str) -> None:
        """Create a reader for nested tags. Each tag has the prefix `tag_prefix`: `~` in `~<city>`.

        `stop_marker` ends the arguments, and is not read by the reader.
        """
        super().__init__(writer, first_step=self._read_piece)  # This method reads all pieces.
        self._head = head
        self._tag_prefix = tag_prefix
        self._stop_marker = stop_marker
        self._root_schema: Mapping[str, object] = writer.tools.parameters.get(head.name, {})
        # The open elements, from the outermost to the innermost. The outermost element contains all
        # arguments and has no tags.
        self._elements = [Element("", self._root_schema, types=None, kind=ElementKind.OBJECT)]
        # Finds the next tag prefix. At the end of the text, also finds an incomplete prefix.
        self._find_prefix = re.compile(
            f"{re.escape(tag_prefix)}|{marker_prefix_regex(tag_prefix)}"
        ).search

    def begin(self) -> None:
        """Start the tool call and write the opening brace of its arguments."""
        if self._start_named_call(self._head):
            self.writer.write("{")
        else:
            self.status = BROKEN

    def _read_piece(self, text: str, pos: int) -> int | NeedMore:
        """Read the next piece of the arguments: either one tag, or the text before the next tag.

        Example: `~<city>`, `Paris` and `~</city>` are three pieces, and `"city": "Paris"` is
        written for them. The kind of the innermost open element decides which text is valid.

        Return the position after the piece, or NEED_MORE.
        """
        innermost = self._elements[-1]
        if innermost.kind is ElementKind.UNKNOWN:  # Only the opening tag has been read.
            is_decided = self._decide_kind(innermost, text, pos)
            return pos if is_decided else NEED_MORE
        if innermost.kind in _CONTAINERS:  # The element contains child elements.
            return self._read_between_children(text, pos)
        return self._read_text_or_tag(innermost, text, pos)

    def _read_between_children(self, text: str, pos: int) -> int | NeedMore:
        """Inside an object or an array, skip white space and read the next tag.

        Examples with the prefix `~` and the stop marker `</call>`:

            text at `pos`   effect
            `</call>`       The marker ends the tool call, if no tag is open. It stays unread.
            `~<city>`       The tag is read.
            `</ca`, `~`     The result is NEED_MORE. At the end of the message, the status becomes
                            BROKEN.
            `Paris`         The status becomes BROKEN, because text between children is not valid.

        Return the position after the text that was read, or NEED_MORE.
        """
        pos = skip_whitespace(text, pos)
        if pos == len(text):
            return pos
        is_tag_open = len(self._elements) > 1  # The outermost element has no tags.
        stop_marker = NO_MATCH if is_tag_open else match_marker(self._stop_marker, text, pos)
        if isinstance(stop_marker, int):  # The result is a position, so the marker matches.
            self._close_arguments()
            self.writer.end()
            self.status = DONE
            return pos
        if text.startswith(self._tag_prefix, pos):
            return self._read_tag(text, pos)
        may_be_completed = stop_marker is NEED_MORE or self._tag_prefix.startswith(text[pos:])
        return NEED_MORE if may_be_completed and not self.is_final else self._reject(pos)

    def _read_tag(self, text: str, pos: int) -> int | NeedMore:
        """Read the tag at `pos`, together with its prefix `~`: for example `~<city>` or `~</city>`.

        An opening tag is valid inside an object or an array. A closing tag must have the name of
        the innermost open element.

        Return the position after the tag, or NEED_MORE if the tag is incomplete. If the tag is not
        valid, return `pos`, with the status BROKEN.
        """
        tag_start = skip_whitespace(text, pos + len(self._tag_prefix))
        tag = _match_tag(text, tag_start)
        if tag is None:
            is_malformed = ">" in text[tag_start:] or len(text) - pos > _MAX_TAG_CHARS
            may_be_completed = not self.is_final and not is_malformed
            return NEED_MORE if may_be_completed else self._reject(pos)
        innermost = self._elements[-1]
        if tag["slash"]:
            if tag["name"] != innermost.name:  # The name of the outermost element is "".
                return self._reject(pos)
            self._close_element()
        else:
            if innermost.kind not in _CONTAINERS:  # As in `~<city>Paris~<name>`.
                return self._reject(pos)
            self._open_element(tag["name"])
        return tag.end()

    def _open_element(self, name: str) -> None:
        """Open the new element `name` inside the innermost element, and write `name` as a JSON key.

        If the previous element has the same name, the values of both elements become one array,
        whose key has been written before. Examples with the prefix `~` before each tag:

            `~<tag>a~</tag>~<days>3~</days>`   `"tag": "a", "days": 3`
            `~<tag>a~</tag>~<tag>b~</tag>`     `"tag": ["a", "b"]`
        """
        parent = self._elements[-1]
        continues_array = parent.has_stored_value_of(name)
        if not continues_array:
            self._write_key(parent, name)
        parent.last_child = name
        schema = parent.child_schema(name)
        types = json_types_of(schema, self._root_schema)
        self._elements.append(Element(name, schema, types, is_key_written=not continues_array))

    def _write_key(self, parent: Element, name: str) -> None:
        """Write the stored values of the previous children, and then the key of the child `name`.

        Example: after `~<tag>a~</tag>`, the text `"a"` and then `, "days": ` is written for the
        child `days`.
        """
        self._write_stored_values(parent)
        self.writer.write(parent.add_key(name))

    def _write_stored_values(self, element: Element) -> None:
        """Write the stored values of the closed children of `element`."""
        json_text = element.take_stored_values()
        if json_text:
            self.writer.write(json_text)

    def _decide_kind(self, element: Element, text: str, pos: int) -> bool:
        """Set `element.kind`, which shows whether the element contains text or child elements.

        The text at `pos`, after the opening tag of the element, decides. No text is read. Examples
        with the prefix `~` before each tag:

            text at `pos`   the element contains
            `Paris`         text
            `~</city>`      text, which is empty
            ` ~<name>`      child elements
            `~`             not known yet

        Return whether the kind was set. It was not set if more text is required.
        """
        # `prefix_start` is the position of the next complete or incomplete tag prefix. If no prefix
        # follows, `prefix_start` is the end of the text, and `is_prefix_complete` is false.
        prefix_start, is_prefix_complete = self._next_prefix(text, pos)
        is_text_before_tag = skip_whitespace(text, pos) < prefix_start
        if is_text_before_tag:
            self._start_text(element)
            return True
        if is_prefix_complete:
            return self._decide_kind_at_tag(element, text, prefix_start)
        # Only white space or the beginning of a prefix, such as `]<` of `]<]`, has arrived. More
        # text decides whether a tag follows. At the end of the message, the element contains text.
        if not self.is_final:
            return False
        self._start_text(element)
        return True

    def _decide_kind_at_tag(self, element: Element, text: str, prefix_start: int) -> bool:
        """Set `element.kind` based on the tag that directly follows the element's opening tag.

        No text is read. Examples: in `~<city>~</city>`, the element contains an empty text. In
        `~<city>~<name>`, the element contains child elements, and the first child is `name`.

        `prefix_start` is the position of the second tag, including the prefix of this tag. Return
        whether the kind was set. It was not set if the second tag is incomplete.
        """
        tag_start = skip_whitespace(text, prefix_start + len(self._tag_prefix))
        if text.startswith(_CLOSING_TAG_START, tag_start):
            self._start_text(element)
            return True
        child_tag = _match_tag(text, tag_start)
        if child_tag is not None:
            self._open_container(element, first_child=child_tag["name"])
            return True
        may_be_completed = not self.is_final and len(text) - prefix_start < _MAX_TAG_CHARS
        if may_be_completed:
            return False
        # The child's tag is malformed, too long or cut off, so the name of the child is not known.
        # The element becomes an object or an array. The method `_read_tag`, which runs next,
        # rejects the tag.
        self._open_container(element, first_child="")
        return True

    def _start_text(self, element: Element) -> None:
        """Set the kind of an element that contains only text: STRING or VALUE.

        If the schema allows only a string, the kind is STRING, and the opening quote is written.
        Otherwise the kind is VALUE, and nothing is written until the element closes.
        """
        if element.types == _STRING_ONLY:
            element.kind = ElementKind.STRING
            self.writer.write('"')
        else:
            element.kind = ElementKind.VALUE

    def _open_container(self, element: Element, first_child: str) -> None:
        """Set `element.kind` to ARRAY or OBJECT, and write the opening bracket of the JSON value.

        Examples: for `~<days>~<item>`, the kind of `days` becomes ARRAY, and `[` is written. For
        `~<city>~<name>`, the kind of `city` becomes OBJECT, and `{` is written.

        `first_child` is the name of the element's first child.
        """
        if not element.is_key_written:
            # `_open_element` wrote no key, because the previous sibling has the same name, and both
            # elements could become the items of one array. An element with children cannot be an
            # item of this array, so the object contains the key twice. Example: for
            # `~<a>1~</a>~<a>~<b>`, `1` and `, "a": ` are written here.
            self._write_key(self._elements[-2], element.name)
            element.is_key_written = True
        element.kind = element.container_kind(first_child)
        self.writer.write("[" if element.kind is ElementKind.ARRAY else "{")

    def _next_prefix(self, text: str, pos: int) -> tuple[int, bool]:
        """Find the next tag prefix, such as `~` in `~<city>`, or an incomplete prefix at the end.

        Return the position of the prefix, and whether the whole prefix has arrived. Examples with
        the tag prefix `]<]` and `pos=0`: `a]<]` gives `(1, True)`, and `a]<` gives `(1, False)`.
        The text `a` contains no prefix and gives `(1, False)`, where 1 is the end of the text.
        """
        match = self._find_prefix(text, pos)
        if match is None:
            return len(text), False
        return match.start(), match.group() == self._tag_prefix

    def _read_text_or_tag(self, element: Element, text: str, pos: int) -> int | NeedMore:
        """If there is a tag at `pos`, read the tag. Otherwise read the text up to the next tag.

        Example with the prefix `~` before each tag: from `Paris~</city>`, the first call reads
        `Paris` as the text of `element`, and the second call reads `~</city>`.

        Return the position after the text or the tag. Return NEED_MORE if the text at `pos` may be
        the beginning of a tag prefix. At the end of the message, this beginning is read as text.
        """
        prefix_start, is_prefix_complete = self._next_prefix(text, pos)
        has_text = prefix_start > pos
        if has_text:
            self._add_text(element, text[pos:prefix_start])
            return prefix_start
        if is_prefix_complete:
            return self._read_tag(text, pos)
        # At `pos` is only the beginning of a tag prefix, for example `]<` if the prefix is `]<]`.
        if not self.is_final:
            return NEED_MORE
        self._add_text(element, text[pos:])
        return len(text)

    def _add_text(self, element: Element, text: str) -> None:
        """If the element is a string, write the text. Otherwise store the text in the element."""
        if element.kind is ElementKind.STRING:
            self.writer.write(escape_json(text))
        else:
            element.text_pieces.append(text)

    def _close_element(self) -> None:
        """Close the innermost open element, and write or store the rest of its JSON value.

        Examples: `"` is written for a string, `]` for an array, and `3` for `~<days>3~</days>`.
        After `~<tag>a~</tag>`, the value `"a"` is stored if the schema allows an array, because
        another `~<tag>` may follow. The two values would then become `["a", "b"]`. The stored
        values are written when a sibling with another name opens (`_open_element`), or when the
        parent closes.
        """
        element = self._elements.pop()
        self._write_stored_values(element)
        if element.kind in _CLOSING_TEXTS:
            self.writer.write(_CLOSING_TEXTS[element.kind])
            return
        parent = self._elements[-1]  # The closed element is no longer in the list.
        value = element.value_as_json()
        schema_allows_array = element.types is None or "array" in element.types
        # Values with the same name in an object may become the items of a new array. If the parent
        # is an array, the value is already an item of an array.
        may_become_item = parent.kind is ElementKind.OBJECT and schema_allows_array
        if may_become_item:
            parent.stored_values.append(value)
        else:  # `_open_element` has written the comma and the key.
            self.writer.write(value)

    def _close_arguments(self) -> None:
        """Write the arguments that are still stored, and then the closing brace."""
        self._write_stored_values(self._elements[0])
        self.writer.write("}")

    def end_invalid_call(self) -> None:
        """Close the open JSON strings, arrays and objects, and end the invalid tool call.

        The written arguments are then valid JSON. Example: inside `~<city>~<name>`, the text
        `""}}` is written, where `""` is the value of the empty element `name`.
        """
        while len(self._elements) > 1:  # The outermost element contains all arguments.
            self._close_element()
        self._close_arguments()
        self.writer.end("the elements of the arguments are not valid")

    def finish(self) -> None:
        """At the end of the message, write the stored values and end the tool call.

        The open elements are incomplete, so they are not closed.
        """
        if self.writer.is_open:
            for element in self._elements:
                self._write_stored_values(element)
        super().finish()
