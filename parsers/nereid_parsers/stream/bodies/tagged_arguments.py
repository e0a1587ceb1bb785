"""Converts tagged arguments, such as `<parameter=city>Paris</parameter>`, to a JSON object.

A value that can only be a string is written as it arrives. Any other value is stored until its
closing marker has been read, because the text `12` may continue as `12 Main Street`.
"""

from __future__ import annotations

import re
from json.encoder import encode_basestring as quote_json
from typing import NamedTuple

from nereid_parsers.stream.bodies.body_reader import Head, StepReader
from nereid_parsers.stream.bodies.compiled_tags import CompiledTags, MarkerRole, TagOpening
from nereid_parsers.stream.bodies.tagged_value import TaggedValue, types_of_value
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.pattern_matching import NEED_MORE, NeedMore, skip_whitespace
from nereid_parsers.stream.status import BROKEN, DONE
from nereid_parsers.stream.values.python_strings import escape_json

_MISSING_CLOSE = "the closing marker of an argument is missing"


class _ValueEnd(NamedTuple):
    """The end of a value's text, and the position where the next argument may start.

    Example: the text `a</p>` gives `_ValueEnd(1, 5)` if `</p>` is the closing marker of the value.

    Attributes:
        text_end: The position up to which the text belongs to the value.
        next_pos: The position at which the next argument may start, after the closing marker of the
            value. None if the value may continue in the next piece of text.
    """

    text_end: int
    next_pos: int | None


class TaggedReader(StepReader):
    """Reads the arguments of one tool call, such as `<parameter=city>Paris</parameter>`.

    The matched header contains the function's name. Example: if the header names the function `f`
    and `city` is a string, the text `<parameter=city>Paris</parameter></function>` causes these
    calls of the CallWriter: `start("f", "")` in `begin`, `write('{"city": ')` at the opening tag,
    `write('"')`, `write("Paris")` and `write('"')` for the value, and `write("}")` and `end()` at
    `</function>`.
    """

    # The argument value that is being read, and the tags with the name of this argument.
    # `_start_value` sets these attributes at each opening tag.
    _value: TaggedValue
    _value_tags: CompiledTags

    def __init__(self, writer: CallWriter, head: Head, tags: CompiledTags) -> None:
        """Create a reader for the arguments of the function `head.name`.

        `tags` matches the tags around the arguments.
        """
        super().__init__(writer, self._read_tag_or_end)
        self._head = head
        self._tags = tags
        self._keys: set[str] = set()  # The names of the arguments that have been read.

    def begin(self) -> None:
        """Start the tool call whose header, such as `<function=f>`, has been read.

        If the tool call cannot start, set the status BROKEN.
        """
        if not self._start_named_call(self._head):
            self.status = BROKEN

    def _read_tag_or_end(self, text: str, pos: int) -> int | NeedMore:
        """Read the next opening tag. At a marker such as `</function>`, end the tool call.

        The text at `pos` follows the header of the tool call, or the closing marker of a value:

            text at `pos`        effect
            `<parameter=city>`   The key is written, and the next step reads the value.
            `</function>`        The tool call ends. The stop marker stays unread.
            `<param`             The result is NEED_MORE. At the end of the message, this incomplete
                                 tag is skipped.
            `Paris`              The status becomes BROKEN.

        Return the position after the text that was read, or NEED_MORE.
        """
        pos = skip_whitespace(text, pos)
        if pos == len(text):
            return pos
        if self._tags.is_at_stop_marker(text, pos):
            self._end_call()
            return pos
        opening = self._tags.match(text, pos, self.is_final)
        if isinstance(opening, TagOpening):
            self._start_value(opening)
            return opening.end
        if opening is NEED_MORE:  # As in `<param`. Never at the end of the message.
            return NEED_MORE
        if self._is_incomplete_tag_or_stop_marker(text, pos):  # Such as `</func`.
            return len(text) if self.is_final else NEED_MORE
        return self._reject(pos)  # Text between the arguments is not valid.

    def _is_incomplete_tag_or_stop_marker(self, text: str, pos: int) -> bool:
        """Return whether the text at `pos` is an incomplete opening tag or stop marker.

        Examples: the result is True for `<param` and for `</func`, and False for `Paris`. It is
        also True at the end of the message, when no more text can complete the tag.
        """
        if self._tags.may_become_stop_marker(text, pos):
            return True
        return self._tags.match(text, pos, is_final=False) is NEED_MORE

    def _start_value(self, opening: TagOpening) -> None:
        """Write the JSON key of a new argument, and create the object that stores its value.

        Example: for the second argument `<parameter=days>`, `, "days": ` is written.
        """
        function, tools = self._head.name, self.writer.tools
        types = types_of_value(opening.fields, function, tools)
        key = opening.fields["key"].strip()
        self._value_tags = self._tags.for_key(key)
        variant_index = self._tags.variants.index(opening.variant)
        self._value = TaggedValue(
            self._value_tags.variants[variant_index],
            types,
            schema=tools.argument_schema(function, key),
            root=tools.parameters.get(function, {}),
        )
        separator = ", " if self._keys else "{"
        self._keys.add(key)
        self.writer.write(f"{separator}{quote_json(key)}: ")
        self._next_step = self._skip_padding

    def _skip_padding(self, text: str, pos: int) -> int | NeedMore:
        r"""Skip the declared white space before a value. The next step reads the value.

        If the value must be a string, write its opening quote. Example: for the declaration
        `"<parameter={key}>\n"`, the line break before `3` is skipped in `\n3</parameter>`. The
        model may omit this white space.

        Return the position where the value starts, or NEED_MORE if only a part of the white space
        has arrived.
        """
        padding = self._value.tag.padding  # The declared white space before the value.
        has_padding = text.startswith(padding, pos)
        may_become_padding = not self.is_final and padding.startswith(text[pos:])
        if may_become_padding and not has_padding:
            return NEED_MORE
        if self._value.is_declared_as_string():
            self.writer.write('"')
            self._next_step = self._copy_string
        else:
            self._next_step = self._store_value
        return pos + len(padding) if has_padding else pos

    def _find_value_end(self, text: str, pos: int) -> _ValueEnd:
        """Find the end of the current value in the unread text `text[pos:]`.

        A value usually ends at its closing marker. If the model has omitted the closing marker, the
        value ends early, before another marker, and the writer stores a description of this
        deviation. Examples for the closing marker `</p>` and `pos=0`:

            text         result
            `a</p>`      `_ValueEnd(text_end=1, next_pos=5)`
            `a</`        `_ValueEnd(1, None)`: `</` may become the closing marker.
            `ab`         `_ValueEnd(2, None)`: the value may continue.
            `a</call>`   `_ValueEnd(1, 1)`: the value ends early, and `</call>` stays unread.
        """
        tag = self._value.tag
        # `find_possible_end` also finds an incomplete marker, which later text may complete.
        find_marker = tag.find_end if self.is_final else tag.find_possible_end
        marker = find_marker(text, pos)
        while marker is not None:
            if not self._value.is_escaped(text, pos, marker.start()):
                value_end = self._value_end_at(marker, text)
                if value_end is not None:
                    return value_end
            # This marker is a part of the value. The search continues one character later, because
            # another marker may start inside this marker.
            marker = find_marker(text, marker.start(marker.lastgroup or 0) + 1)
        return _ValueEnd(len(text), None)

    def _value_end_at(self, marker: re.Match[str], text: str) -> _ValueEnd | None:
        """Return the end of the value if `marker` ends the value. Return None if it does not.

        The group of `marker` is "close" for the closing marker of the value, and "early" for
        another marker that may end the value. An incomplete marker has no group. If it is not yet
        certain that the value ends, `next_pos` of the result is None.
        """
        text_end = marker.start()  # The match starts with the white space before the marker.
        match marker.lastgroup:
            case None:
                return _ValueEnd(text_end, None)
            case "close":
                return _ValueEnd(text_end, marker.end())
        marker_start = marker.start("early")
        match self._role_of_marker_in_value(text, marker_start):
            case MarkerRole.UNDECIDED:
                return _ValueEnd(text_end, None)
            case MarkerRole.AFTER_VALUE:
                self.writer.add_deviation(_MISSING_CLOSE)
                return _ValueEnd(text_end, marker_start)
        return None

    def _role_of_marker_in_value(self, text: str, pos: int) -> MarkerRole:
        """Decide whether the marker at `pos` is a part of the value or follows the value.

        The closing marker of the value has not been found before `pos`. Either the value contains
        the marker at `pos`, or the model has omitted the closing marker. The marker is a stop
        marker, such as `</function>`, or an opening tag, such as `<parameter=days>`.
        """
        if self._tags.is_at_stop_marker(text, pos):
            return self._value_tags.role_of_stop_marker(text, pos, self.is_final, self.writer.tools)
        return self._role_of_opening_tag(text, pos)

    def _role_of_opening_tag(self, text: str, pos: int) -> MarkerRole:
        """Decide whether an opening tag such as `<parameter=days>` follows the value.

        The tag follows the value if the tool declares the argument `days`, and `days` has not been
        read yet. Otherwise the tag is a part of the value.
        """
        opening = self._tags.match(text, pos, self.is_final)
        if opening is NEED_MORE:
            return MarkerRole.UNDECIDED
        if not isinstance(opening, TagOpening):  # The tag is not valid: `<parameter=>`.
            return MarkerRole.PART_OF_VALUE
        key = opening.fields["key"].strip()
        is_declared = self.writer.tools.may_have_argument(self._head.name, key)
        is_next_argument = is_declared and key not in self._keys
        return MarkerRole.AFTER_VALUE if is_next_argument else MarkerRole.PART_OF_VALUE

    def _copy_string(self, text: str, pos: int) -> int | NeedMore:
        """Write the text of a string as it arrives. At the closing tag, write the closing quote.

        The opening quote has been written before. Example: for the pieces `Pa` and
        `ris</parameter>`, `Pa` and `ris"` are written. After the closing marker, the next step
        reads the next tag.

        Return the position after the text that was read, or NEED_MORE if no text could be read.
        """
        text_end, next_pos = self._find_value_end(text, pos)
        has_new_text = text_end > pos
        if has_new_text:
            self.writer.write(escape_json(text[pos:text_end]))
        if next_pos is not None:  # The value has ended.
            self.writer.write('"')
            self._next_step = self._read_tag_or_end
            return next_pos
        return text_end if has_new_text else NEED_MORE

    def _store_value(self, text: str, pos: int) -> int | NeedMore:
        """Store the text of a value. As soon as the value's type is certain, write the text.

        The text is stored because `12` is a number, but `12 Main Street` is a string. Examples for
        an argument whose type is not known:

            stored text   new text          text that is written
            `1`           `2</parameter>`   `12`, because the closing marker shows the whole value
            none          `Par`             `"Par`, because only a string starts with `P`. The step
                                            `_copy_string` reads the rest of the string.
            none          `1`               none

        Return the position after the text that was read, or NEED_MORE if no text could be read.
        """
        text_end, next_pos = self._find_value_end(text, pos)
        has_new_text = text_end > pos
        if has_new_text:
            self._value.pieces.append(text[pos:text_end])
        if next_pos is not None:  # The value has ended.
            self.writer.write(self._value.to_json())
            self._next_step = self._read_tag_or_end
            return next_pos
        if has_new_text and self._value.can_only_be_string():
            self.writer.write('"' + escape_json(self._value.text))
            self._next_step = self._copy_string
        return text_end if has_new_text else NEED_MORE

    def _end_call(self) -> None:
        """Write the closing brace of the arguments, end the tool call and set the status DONE."""
        self._close_arguments()
        self.writer.end()
        self.status = DONE

    def _close_arguments(self) -> None:
        """Write the closing brace of the arguments, or `{}` if there are no arguments."""
        self.writer.write("}" if self._keys else "{}")

    def end_invalid_call(self) -> None:
        """Write the closing brace of the arguments, and end the invalid tool call.

        Text that belongs to no argument precedes the next tag, as in
        `<parameter=city>Paris</parameter>text<parameter=days>`.
        """
        self._close_arguments()
        self.writer.end("there is text between the arguments")

    def finish(self) -> None:
        """If the message ends inside a tool call, write the stored text and end this tool call.

        Only complete arguments are closed. If the message ends inside a value, the arguments stay
        incomplete, so that the client can recognise that they are cut off:

            end of the message        text that is written
            `..</parameter>`          `}`
            `..<parameter=days>3`     `3`, which has been stored until now
            `..<parameter=city>Par`   nothing, because `"Par` has already been written
        """
        # The next step of the reader shows in which part of the call the message has ended.
        is_between_arguments = self._next_step == self._read_tag_or_end
        is_in_stored_value = self._next_step == self._store_value
        if self.writer.is_open and is_between_arguments:
            self._close_arguments()
        elif self.writer.is_open and is_in_stored_value and self._value.pieces:
            self.writer.write(self._value.to_json())
        super().finish()  # Ends the tool call, with a description of the fault.
