"""Converts tagged arguments, such as `<parameter=city>Paris</parameter>`, to a JSON object.

A value that can only be a string is written as it arrives. Any other value is stored until its
closing marker has been read, because the text `12` may continue as `12 Main Street`.
"""

from __future__ import annotations

import re
from json.encoder import encode_basestring as quote_json

from nereid_parsers.stream.bodies.body_reader import Head, StepReader
from nereid_parsers.stream.bodies.compiled_tags import CompiledTags, MarkerRole, TagOpening
from nereid_parsers.stream.bodies.tagged_value import (
    LastPiece,
    OpenPiece,
    Piece,
    TaggedValue,
    types_of_value,
)
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.pattern_matching import NEED_MORE, NeedMore, skip_whitespace
from nereid_parsers.stream.status import BROKEN, DONE
from nereid_parsers.stream.values.python_strings import escape_json

_MAX_CHARS_AFTER_SEPARATOR = 256
_MISSING_CLOSE = "the closing marker of an argument is missing"


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
        self._separator = ""  # The text that may follow the last value, such as `,`, or "".
        # Whether an opening tag has been read, but not the end of its value.
        self._is_in_value = False

    def begin(self) -> None:
        """Start the tool call whose header, such as `<function=f>`, has been read.

        If the tool call cannot start, set the status BROKEN.
        """
        has_started = self._start_named_call(self._head)
        if not has_started:
            self.status = BROKEN

    def _read_tag_or_end(self, text: str, pos: int) -> int | NeedMore:
        """Read the next opening tag. At a marker such as `</function>`, end the tool call.

        The text at `pos` follows the header of the tool call, or the closing marker of a value:

            text at `pos`        effect
            `</function>`        The tool call ends. The stop marker stays unread.
            `<parameter=city>`   The key is written, and the next step reads the value.
            `Paris`              The status becomes BROKEN.
            `<param`             The result is NEED_MORE. At the end of the message, this incomplete
                                 tag is skipped.

        Return the position after the text that was read, or NEED_MORE.
        """
        pos = skip_whitespace(text, pos)
        if pos == len(text):
            return pos
        if self._separator:
            return self._read_separator(text, pos)
        end = self._tags.match_end(text, pos, self.is_final, self.writer.tools)
        if end is NEED_MORE:
            return NEED_MORE
        if isinstance(end, int):  # The arguments end at `pos`.
            self._end_call()
            return pos
        opening = self._tags.match(text, pos, self.is_final)
        if opening is NEED_MORE:
            return NEED_MORE
        if isinstance(opening, TagOpening):
            self._start_value(opening)
            return opening.end
        if self.is_final and self._is_cut_off_tag(text, pos):
            return len(text)
        return self._reject(pos)  # Text between the arguments is not valid.

    def _read_separator(self, text: str, pos: int) -> int | NeedMore:
        """Skip the separator after a value, such as the comma in `a="x", b="y"`, if there is one.

        Return the position after the separator, or NEED_MORE if more text may complete it.
        """
        separator = self._separator
        has_separator = text.startswith(separator, pos)
        may_become_separator = not self.is_final and separator.startswith(text[pos:])
        if may_become_separator and not has_separator:
            return NEED_MORE
        self._separator = ""
        return pos + len(separator) if has_separator else pos

    def _is_cut_off_tag(self, text: str, pos: int) -> bool:
        """Return whether the message ends inside an opening tag or a stop marker.

        Examples: the result is True for `<param` and for `</func`, and False for `Paris`.
        """
        if self._tags.may_become_stop_marker(text, pos):
            return True
        return self._tags.match(text, pos, is_final=False) is NEED_MORE

    def _start_value(self, opening: TagOpening) -> None:
        """Write the JSON key of a new argument, and create the object that stores its value.

        Example: for the second argument `<parameter=days>`, `, "days": ` is written.
        """
        key = opening.fields["key"].strip()
        self._write_key(key)
        function, tools = self._head.name, self.writer.tools
        # The closing tag of some formats contains the key: `</{key}>` becomes `</days>`.
        self._value_tags = self._tags.for_key(key)
        # A format may declare several ways to write a value. The opening tag shows which one is
        # used here. `for_key` keeps the order of these variants.
        value_tag = self._value_tags.variants[opening.variant_index]
        function_schema = tools.parameters.get(function, {})  # {} if the function is not offered.
        self._value = TaggedValue(
            tag=value_tag,
            types=types_of_value(opening.fields, function, tools),
            schema=tools.argument_schema(function, key),
            root=function_schema,
        )
        self._is_in_value = True
        self._next_step = self._skip_padding

    def _write_key(self, key: str) -> None:
        """Write the JSON text before a value: `{"city": ` or, after other values, `, "days": `."""
        separator = ", " if self._keys else "{"
        self._keys.add(key)
        self.writer.write(f"{separator}{quote_json(key)}: ")

    def _skip_padding(self, text: str, pos: int) -> int | NeedMore:
        r"""Skip the padding before a value, and select the step that reads the value.

        The padding is the white space that the format declares before each value. The model may
        omit the padding. Example: for the declaration `"<parameter={key}>\n"`, the line break
        before `3` is skipped in `\n3</parameter>`.

        Return the position where the value starts, or NEED_MORE if only a part of the padding has
        arrived.
        """
        padding = self._value.tag.padding
        has_padding = text.startswith(padding, pos)
        may_become_padding = not self.is_final and padding.startswith(text[pos:])
        if may_become_padding and not has_padding:
            return NEED_MORE
        self._select_value_step()
        return pos + len(padding) if has_padding else pos

    def _select_value_step(self) -> None:
        """Select the step that reads the value. If it must be a string, write the opening quote."""
        if self._value.is_declared_as_string():
            self.writer.write('"')
            self._next_step = self._copy_string
        else:
            self._next_step = self._store_value

    def _find_piece(self, text: str, pos: int) -> Piece:
        """Find the next piece of the current value. The piece starts at `text[pos]`.

        A value usually ends at its closing marker. If the model has omitted the closing marker, the
        value ends before another marker, such as `</call>`. Examples for the closing marker `</p>`
        and `pos=0`:

            text         result
            `a</p>`      `LastPiece(end=1, next_pos=5)`
            `a</call>`   `LastPiece(end=1, next_pos=1, lacks_closing_marker=True)`
            `a</`        `OpenPiece(end=1)`, because `</` may become the closing marker
            `ab`         `OpenPiece(end=2)`
        """
        tag = self._value.tag
        self._value.start_piece(pos)
        # `find_possible_end` also finds an incomplete marker, which later text may complete.
        find_marker = tag.find_end if self.is_final else tag.find_possible_end
        marker = find_marker(text, pos)
        while marker is not None:
            piece = self._piece_before(marker, text, pos)
            if piece is not None:
                return piece
            # The value contains this marker. The search continues after the first character of the
            # marker, because the next marker may overlap this marker.
            marker = find_marker(text, _start_of_marker(marker) + 1)
        return OpenPiece(len(text))

    def _piece_before(self, marker: re.Match[str], text: str, pos: int) -> Piece | None:
        """Return the piece of the value between `pos` and `marker`.

        Return None if the marker is a part of the value and does not end the piece. The group of
        the match shows the kind of the marker:

            "close"   the closing marker of the value, such as `</p>`
            "early"   another marker that may end the value, such as `</call>`
            none      an incomplete marker at the end of the text, such as `</`
        """
        piece_end = marker.start()  # The match starts with the white space before the marker.
        if self._value.is_escaped(text, pos, piece_end):
            return None  # A backslash makes the marker a part of the value, as in `a\"b`.
        if self._value.is_inside_json(text, piece_end):
            return None  # The array or object continues, as in `["a, b=1"]`.
        match marker.lastgroup:
            case "close":
                return self._piece_before_closing_marker(marker, text)
            case "early":
                return self._piece_before_early_end(marker, text)
            case _:  # More text may complete the marker.
                return OpenPiece(piece_end)

    def _piece_before_closing_marker(self, marker: re.Match[str], text: str) -> Piece | None:
        """Return the piece of the value that ends before `marker`, such as `</parameter>`.

        `marker` is the match of the value's closing marker. Return None if `marker` is a part of
        the value. This is possible if the closing marker is a separator, such as `;`. A separator
        ends the value only if another argument or a stop marker follows. Examples:

            `x; b=2`   the last piece `x`, because the argument `b` follows
            `x; y`     None, because `; y` is a part of the value
            `x; `      the piece `x`, after which the value may continue, as in `x; y`
        """
        piece_end = marker.start()  # The match starts with the white space before the marker.
        role = MarkerRole.AFTER_VALUE
        if self._value.tag.is_closed_by_separator:
            role = self._role_of_separator(text, marker.end())
        match role:
            case MarkerRole.PART_OF_VALUE:
                return None
            case MarkerRole.UNDECIDED:
                return OpenPiece(piece_end)
            case MarkerRole.AFTER_VALUE:
                return LastPiece(piece_end, next_pos=marker.end())

    def _role_of_separator(self, text: str, separator_end: int) -> MarkerRole:
        """Decide whether a separator, such as `;`, is a part of the value or follows the value.

        The text after the separator decides. Examples for arguments such as `a=1; b=2`, and the
        stop marker `</call>`:

            text after `;`   result
            ` b=2`           AFTER_VALUE, because another argument follows
            `</call>`        AFTER_VALUE, because the arguments end
            ` y.`            PART_OF_VALUE
            ` b`, `</ca`     UNDECIDED, because more text is required
            none             UNDECIDED. At the end of the message: AFTER_VALUE
        """
        # Only a limited number of characters is examined. Otherwise, a long value with many
        # separators would take quadratic time.
        next_chars = text[separator_end : separator_end + _MAX_CHARS_AFTER_SEPARATOR]
        is_complete = self.is_final or len(next_chars) == _MAX_CHARS_AFTER_SEPARATOR
        text_after = next_chars.lstrip()
        if not text_after:
            return MarkerRole.AFTER_VALUE if is_complete else MarkerRole.UNDECIDED
        end = self._tags.match_end(text_after, 0, is_complete, self.writer.tools)
        if isinstance(end, int):
            return MarkerRole.AFTER_VALUE
        if end is NEED_MORE:
            return MarkerRole.UNDECIDED
        return self._role_of_opening_tag(text_after, 0, is_complete)

    def _piece_before_early_end(self, marker: re.Match[str], text: str) -> Piece | None:
        r"""Return the piece of the value that ends before `marker`, such as `</call>`.

        `marker` is not the closing marker of the value. It may be a part of the value, or follow a
        value whose closing marker is missing. Examples for the closing marker `</p>`:

            `a</call>b</p>`   None, because `</p>` shows that the value contains `</call>`
            `a</call>b`       the piece `a`, after which the value may continue
            `a\n</call>`      the last piece `a`, if the message ends here
        """
        piece_end = marker.start()  # The match includes the white space before the marker.
        marker_start = marker.start("early")
        match self._role_of_marker_in_value(text, marker_start):
            case MarkerRole.PART_OF_VALUE:
                return None
            case MarkerRole.UNDECIDED:
                return OpenPiece(piece_end)
            case MarkerRole.AFTER_VALUE:
                is_faulty = not self._value.tag.is_closed_by_separator
                return LastPiece(piece_end, next_pos=marker_start, lacks_closing_marker=is_faulty)

    def _role_of_marker_in_value(self, text: str, pos: int) -> MarkerRole:
        """Decide whether the marker at `pos` is a part of the value or follows the value.

        The closing marker of the value has not been found before `pos`. Either the value contains
        the marker at `pos`, or the model has omitted the closing marker. The marker is a stop
        marker, such as `</function>`, or an opening tag, such as `<parameter=days>`.
        """
        if self._tags.is_at_stop_marker(text, pos):
            if self._value.tag.is_closed_by_separator:
                return MarkerRole.AFTER_VALUE
            return self._value_tags.role_of_stop_marker(text, pos, self.is_final, self.writer.tools)
        return self._role_of_opening_tag(text, pos, self.is_final)

    def _role_of_opening_tag(self, text: str, pos: int, is_final: bool) -> MarkerRole:
        """Decide whether the opening tag at `pos` is a part of the current value or follows it.

        Example: the tag `<parameter=days>` follows the value if the tool may have an argument
        `days`, and `days` has not been read yet. Otherwise the tag is a part of the value.
        """
        opening = self._tags.match(text, pos, is_final)
        if opening is NEED_MORE:
            return MarkerRole.UNDECIDED
        if not isinstance(opening, TagOpening):  # The tag is not valid: `<parameter=>`.
            return MarkerRole.PART_OF_VALUE
        key = opening.fields["key"].strip()
        if self._value.tag.closing_marker == " " and " " in key:
            return MarkerRole.PART_OF_VALUE  # In `city=New York days=3`, no key starts at `York`.
        may_be_argument = self.writer.tools.may_have_argument(self._head.name, key)
        is_next_argument = may_be_argument and key not in self._keys
        return MarkerRole.AFTER_VALUE if is_next_argument else MarkerRole.PART_OF_VALUE

    def _copy_string(self, text: str, pos: int) -> int | NeedMore:
        """Write the text of a string as it arrives. At the closing marker, write the closing quote.

        The opening quote has been written before. Example: for the pieces `Pa` and
        `ris</parameter>`, `Pa` and `ris"` are written. After the closing marker, the next step
        reads the next tag.

        Return the position after the text that was read, or NEED_MORE if no text could be read.
        """
        piece = self._find_piece(text, pos)
        has_new_text = piece.end > pos
        if has_new_text:
            self.writer.write(escape_json(text[pos : piece.end]))
        if isinstance(piece, LastPiece):
            self.writer.write('"')
            self._end_value(piece)
            return piece.next_pos
        return piece.end if has_new_text else NEED_MORE

    def _store_value(self, text: str, pos: int) -> int | NeedMore:
        """Store the text of a value. As soon as the value's type is certain, write the text.

        The text is stored because `12` is a number, but `12 Main Street` is a string. Examples for
        an argument whose type is not known:

            stored text   new text          text that is written
            none          `1`               none, because the type is not certain
            `1`           `2</parameter>`   `12`, because the value is complete
            none          `Par`             `"Par`, because only a string starts with `P`. The step
                                            `_copy_string` reads the rest of the string.

        Return the position after the text that was read, or NEED_MORE if no text could be read.
        """
        piece = self._find_piece(text, pos)
        has_new_text = piece.end > pos
        if has_new_text:
            self._value.append(text, pos, piece.end)
        if isinstance(piece, LastPiece):
            self.writer.write(self._value.to_json())
            self._end_value(piece)
            return piece.next_pos
        if not has_new_text:
            return NEED_MORE
        if self._value.can_only_be_string():
            self._write_stored_string()
        return piece.end

    def _write_stored_string(self) -> None:
        """Write the opening quote of a string and its stored text. The next step copies the rest.

        Example: for the stored text `Par`, `"Par` is written.
        """
        self.writer.write('"' + escape_json(self._value.text))
        self._value.pieces.clear()
        self._next_step = self._copy_string

    def _end_value(self, last_piece: LastPiece) -> None:
        """Select the step that reads the next tag. Store a deviation if `last_piece` shows one."""
        if last_piece.lacks_closing_marker:
            self.writer.add_deviation(_MISSING_CLOSE)
        self._separator = self._value.tag.separator
        self._is_in_value = False
        self._next_step = self._read_tag_or_end

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
        if self.writer.is_open:
            if not self._is_in_value:
                self._close_arguments()
            elif self._value.pieces:  # Text of the value that has not been written yet.
                self.writer.write(self._value.to_json())
        super().finish()  # Ends the tool call, with a description of the fault.


def _start_of_marker(marker: re.Match[str]) -> int:
    r"""Return the position of a matched marker, after the white space at the start of the match.

    Example: for the match `\n</p>`, the result is the position of `<`. If the marker is incomplete,
    such as `\n</`, the result is the start of the match.
    """
    return marker.start(marker.lastgroup or 0)
