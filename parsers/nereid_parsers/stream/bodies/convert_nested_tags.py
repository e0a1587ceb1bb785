"""Converts arguments in nested tags to JSON: `~<city>Paris~</city>` becomes `{"city": "Paris"}`.

A prefix such as `~` precedes each tag. Example with the prefix `~`: the text
`~<items>~<item>~<sku>b1~</sku>~</item>~</items>` becomes `{"items": [{"sku": "b1"}]}`.

An element such as `items` is an array if the tool's schema declares an array. Without a declared
type, an element is an array if its first child is called `item`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from nereid_parsers.stream.bodies.body_reader import Head, StepReader
from nereid_parsers.stream.bodies.nested_elements import Element, ElementKind
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.lexer import marker_prefix_regex
from nereid_parsers.stream.pattern_matching import (
    NEED_MORE,
    NO_MATCH,
    Mismatch,
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
_OPENING_TEXTS = {ElementKind.STRING: '"', ElementKind.ARRAY: "[", ElementKind.OBJECT: "{"}
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
        super().__init__(writer, first_step=self._read_piece)  # The reader has no other step.
        self._head = head
        self._tag_prefix = tag_prefix
        self._stop_marker = stop_marker
        self._root_schema: Mapping[str, object] = writer.tools.parameters.get(head.name, {})
        # The open elements, from the outermost to the innermost. The outermost element contains all
        # arguments and has no tags.
        root = Element(name="", schema=self._root_schema, types=None, kind=ElementKind.OBJECT)
        self._elements = [root]
        self._prefix_regex = _compile_prefix_regex(tag_prefix)

    def begin(self) -> None:
        """Start the tool call and write the opening brace of its arguments."""
        has_started = self._start_named_call(self._head)
        if has_started:
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
            self._determine_kind(innermost, text, pos)
        if innermost.kind is ElementKind.UNKNOWN:
            return NEED_MORE
        if innermost.kind in _CONTAINERS:  # The element contains child elements.
            return self._read_between_children(text, pos)
        return self._read_text_or_tag(innermost, text, pos)

    def _determine_kind(self, element: Element, text: str, pos: int) -> None:
        """Set the kind of `element`, if the text at `pos` shows it, and write the opening text.

        The text at `pos` follows the opening tag. Example: in `~<city>Paris`, the text `Paris`
        shows that the element is a string, so `"` is written.
        """
        element.kind = self._kind_at(element, text, pos)
        if element.kind is not ElementKind.UNKNOWN:
            self._write_opening(element)

    def _read_between_children(self, text: str, pos: int) -> int | NeedMore:
        """Inside an object or an array, skip white space and read the next tag.

        Examples with the prefix `~` before each tag and the stop marker `</call>`:

            text at `pos`      effect
            `</call>`          The tool call ends. The marker stays unread. While a tag is open,
                               the marker is not valid, and the status becomes BROKEN.
            `~<city>`          The tag is read.
            `</ca` or `~`      The result is NEED_MORE, because the text is incomplete.
            `Paris`            The status becomes BROKEN, because text between children is not
                               valid.

        At the end of the message, incomplete text is not valid either. Return the position after
        the text that was read, or NEED_MORE.
        """
        pos = skip_whitespace(text, pos)
        if pos == len(text):
            return pos
        stop_marker_end = self._match_stop_marker(text, pos)  # NO_MATCH while a tag is open.
        if isinstance(stop_marker_end, int):
            self._end_call()
            return pos
        if text.startswith(self._tag_prefix, pos):
            return self._read_tag(text, pos)
        may_become_stop_marker = stop_marker_end is NEED_MORE
        may_become_tag = self._tag_prefix.startswith(text[pos:])
        if (may_become_stop_marker or may_become_tag) and not self.is_final:
            return NEED_MORE
        return self._reject(pos)

    def _match_stop_marker(self, text: str, pos: int) -> int | Mismatch:
        """Match the stop marker at `pos`, such as `</call>`, if no tag is open.

        Return the end of the match, NEED_MORE or NO_MATCH. While a tag is open, the stop marker is
        not valid, so the result is NO_MATCH.
        """
        is_tag_open = len(self._elements) > 1  # The outermost element has no tags.
        return NO_MATCH if is_tag_open else match_marker(self._stop_marker, text, pos)

    def _read_tag(self, text: str, pos: int) -> int | NeedMore:
        """Read the tag at `pos`, together with its prefix `~`: for example `~<city>` or `~</city>`.

        Return the position after the tag, or NEED_MORE if the tag is incomplete. If the tag is not
        valid, return `pos`, with the status BROKEN.
        """
        tag_start = skip_whitespace(text, pos + len(self._tag_prefix))
        tag = _match_tag(text, tag_start)
        if tag is None:
            is_too_long = len(text) - pos > _MAX_TAG_CHARS
            is_malformed = is_too_long or ">" in text[tag_start:]
            if is_malformed or self.is_final:
                return self._reject(pos)
            return NEED_MORE
        is_closing = bool(tag["slash"])
        if not self._is_valid_tag(tag["name"], is_closing=is_closing):
            return self._reject(pos)
        if is_closing:
            self._close_element()
        else:
            self._open_element(tag["name"])
        return tag.end()

    def _is_valid_tag(self, name: str, *, is_closing: bool) -> bool:
        """Return whether the innermost open element may contain the opening or closing tag `name`.

        A closing tag must have the name of the element. An opening tag is valid only in an object
        or an array: in `<city>Paris<name>`, the tag `<name>` is not valid, because `city` contains
        text.
        """
        innermost = self._elements[-1]
        if is_closing:  # The name of the outermost element is "", so no tag closes this element.
            return name == innermost.name
        return innermost.kind in _CONTAINERS

    def _open_element(self, name: str) -> None:
        """Open the new element `name` inside the innermost element, and write `name` as a JSON key.

        Successive elements with the same name share one key, because their values become one array.
        Example: `<tag>a</tag><tag>b</tag>` becomes `"tag": ["a", "b"]`. When the second `<tag>`
        opens, the value `"a"` is still stored, so no second key is written.
        """
        parent = self._elements[-1]
        shares_key = parent.has_stored_value_of(name)
        if not shares_key:
            self._write_key(parent, name)
        parent.last_child = name
        schema = parent.child_schema(name)
        types = json_types_of(schema, self._root_schema)
        self._elements.append(Element(name, schema, types, shares_key=shares_key))

    def _write_key(self, parent: Element, child: str) -> None:
        """Write the stored values of earlier children of `parent`, and then the key `child`.

        Example: if the value `"a"` is stored, `"a", "days": ` is written for the child `days`.
        """
        self._write_stored_values(parent)
        self.writer.write(parent.add_key(child))

    def _write_stored_values(self, element: Element) -> None:
        """Write the stored values of the closed children of `element`."""
        json_text = element.take_stored_values()
        if json_text:
            self.writer.write(json_text)

    def _kind_at(self, element: Element, text: str, pos: int) -> ElementKind:
        """Return the kind of `element`. The text at `pos`, after the opening tag, shows the kind.

        Examples with the prefix `~` before each tag:

            text at `pos`   result
            `Paris`         STRING or VALUE, because the element contains text
            `~</city>`      STRING or VALUE, because the element contains an empty text
            ` ~<name>`      OBJECT or ARRAY, because the element contains child elements
            `~`             UNKNOWN, because more text is required. At the end of the message,
                            STRING or VALUE, because `~` is then text.
        """
        text_end, is_tag_next = self._find_text_end(text, pos)
        has_visible_text = skip_whitespace(text, pos) < text_end
        if has_visible_text:
            return _kind_of_text(element)
        if is_tag_next:
            return self._kind_at_tag(element, text, prefix_start=text_end)
        # Only white space or the beginning of a prefix, such as `]<` of `]<]`, has arrived.
        return _kind_of_text(element) if self.is_final else ElementKind.UNKNOWN

    def _kind_at_tag(self, element: Element, text: str, prefix_start: int) -> ElementKind:
        """Return the kind of `element`, if another tag directly follows its opening tag.

        The other tag has a prefix, which starts at `prefix_start`. Examples with the prefix `~`:

            text at `prefix_start`   result
            `~</city>`               STRING or VALUE, because the element contains an empty text
            `~<name>`                OBJECT or ARRAY, because `name` is the first child
            `~<na`                   UNKNOWN, because more text is required
            `~<>`                    OBJECT or ARRAY, although the tag is malformed
        """
        tag_start = skip_whitespace(text, prefix_start + len(self._tag_prefix))
        if text.startswith(_CLOSING_TAG_START, tag_start):
            return _kind_of_text(element)
        child_tag = _match_tag(text, tag_start)
        if child_tag is not None:
            return element.container_kind(first_child=child_tag["name"])
        may_be_completed = not self.is_final and len(text) - prefix_start < _MAX_TAG_CHARS
        if may_be_completed:
            return ElementKind.UNKNOWN
        # The tag is malformed, too long or cut off, so the tool call must be rejected. If the kind
        # is a container, `_read_between_children` reads this tag next, and rejects the tool call.
        return element.container_kind(first_child=None)

    def _write_opening(self, element: Element) -> None:
        """Write the text that opens the value of an element: `"`, `[` or `{`.

        For an element of kind VALUE, nothing is written until the element closes.
        """
        if element.kind is ElementKind.VALUE:
            return
        if element.shares_key:
            self._write_unshared_key(element)
        self.writer.write(_OPENING_TEXTS[element.kind])

    def _write_unshared_key(self, element: Element) -> None:
        """Write the JSON key of an element that has the name of its previous sibling.

        `_open_element` wrote no key, because the two elements could have become items of one array.
        But an element with children cannot be such an item, so the key is repeated. Example: for
        `<a>1</a><a><b>` (the prefixes are omitted), `1, "a": ` is written for the second `<a>`.
        """
        self._write_key(self._elements[-2], element.name)  # `element` is the innermost element.
        element.shares_key = False

    def _find_text_end(self, text: str, pos: int) -> tuple[int, bool]:
        """Return the end of an element's text, and True if a tag prefix, such as `~`, starts there.

        Examples with the tag prefix `]<]` and `pos=0`:

            text     result
            `a]<]`   (1, True)
            `a]<`    (1, False), because only a part of the prefix has arrived
            `a`      (1, False), because the text contains no prefix
        """
        match = self._prefix_regex.search(text, pos)
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
        text_end, is_tag_next = self._find_text_end(text, pos)
        has_text = text_end > pos
        if has_text:
            self._add_text(element, text[pos:text_end])
            return text_end
        if is_tag_next:
            return self._read_tag(text, pos)
        # Only a part of a tag prefix has arrived: `]<`, if the prefix is `]<]`.
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

        Examples of closed elements:

            string, array, object   The closing `"`, `]` or `}` is written.
            `<tag>3</tag>`          The value `3` is stored in the parent, because another `<tag>`
                                    may follow, and the two values would become an array. The value
                                    is written when a sibling with another name opens, or when the
                                    parent closes.
            `<item>3</item>`        In an array, the value `3` is written.
        """
        element = self._elements.pop()
        self._write_stored_values(element)  # The values of the element's own children.
        parent = self._elements[-1]
        if element.kind in _CLOSING_TEXTS:
            self.writer.write(_CLOSING_TEXTS[element.kind])
        elif element.may_become_item_in(parent):
            parent.stored_values.append(element.value_as_json())
        else:
            self.writer.write(element.value_as_json())

    def _end_call(self) -> None:
        """Write the rest of the arguments, end the tool call and set the status DONE."""
        self._close_arguments()
        self.writer.end()
        self.status = DONE

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


@lru_cache(maxsize=64)
def _compile_prefix_regex(tag_prefix: str) -> re.Pattern[str]:
    """Return a regex that matches the prefix, or an incomplete prefix at the end of a text.

    Example: for the prefix `]<]`, the regex matches `]<]` in `]<]<city>`, and `]<` in `Paris]<`.
    """
    return re.compile(f"{re.escape(tag_prefix)}|{marker_prefix_regex(tag_prefix)}")


def _kind_of_text(element: Element) -> ElementKind:
    """Return the kind of an element that contains text: STRING, or VALUE for any other type.

    STRING means that the schema allows only a string, so its text can be written at once.
    """
    return ElementKind.STRING if element.types == _STRING_ONLY else ElementKind.VALUE
