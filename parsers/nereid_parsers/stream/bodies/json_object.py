"""Reads a tool call that is written as one JSON object with the name and the arguments."""

from __future__ import annotations

from collections.abc import Callable

from nereid_parsers.stream.bodies.body_reader import StepReader
from nereid_parsers.stream.bodies.json_keys import CallParts, KeyRole, create_roles
from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.pattern_matching import NEED_MORE, NO_MATCH, NeedMore, skip_whitespace
from nereid_parsers.stream.status import BROKEN, DONE, MORE
from nereid_parsers.stream.values.json_scanner import (
    JsonScanner,
    decode_string,
    match_object_start,
)
from nereid_parsers.tool_declarations import Keys, NameIsKey

# JSON allows only double quotes, but models sometimes write single quotes.
_QUOTES = "\"'"


class ObjectReader(StepReader):
    """Reads a tool call that is one JSON object with the name and the arguments, in any order.

    Each key has a `KeyRole`, which selects the step that reads the value of the key.

    Example: the pieces `{"name": "f", "argu`, `ments": {"a"` and `: 1}}` cause these calls of the
    CallWriter: `start("f", "")`, `write('{"a"')`, `write(': 1}')` and `end()`. If the arguments
    precede the name, the reader stores the arguments until the name has been read.
    """

    __slots__ = (
        "_is_confirmed", "_key", "_on_string", "_outer_keys", "_parts", "_pieces", "_roles",
        "_scanner",
    )  # fmt: skip

    writes_model_text = True

    # The state of the key or value that is being read. The method that selects the step for this
    # key or value also sets its state, so `__init__` sets no values.
    _scanner: JsonScanner  # Finds the end of the key or value.
    _pieces: list[str]  # The pieces of a string, or of a word that may be `null`.
    _on_string: Callable[[str], None]  # The method that receives the decoded string.

    def __init__(self, writer: CallWriter, keys: Keys | NameIsKey, *, is_confirmed: bool) -> None:
        """Create a reader for one JSON object with the name and the arguments of a tool call.

        `keys` declares the keys of the name and of the arguments, or that the name itself is a key,
        as in `{"f": {"a": 1}}`. `is_confirmed` is true if a marker or an earlier tool call shows
        that the object is a tool call. The tool call then starts when the name has been read.
        Otherwise the tool call starts when the name and the start of the arguments have been read.
        """
        super().__init__(writer, first_step=self._read_opening_brace)
        self._is_confirmed = is_confirmed
        # The key of the member that is being read. Example: while the value `"f"` in
        # `{"function": {"name": "f"}}` is read, this key is `name`.
        self._key = ""
        # The keys of the objects that enclose this member: `function` in the same example.
        self._outer_keys: list[str] = []
        # The name, the id and the arguments that have been read.
        self._parts = CallParts()
        # Assigns a role to each key. `_parts` contains the name after it has been read, and thus
        # shows that a second key `name` must be ignored.
        self._roles = create_roles(keys, self._parts, writer, is_confirmed=is_confirmed)

    def finish(self) -> None:
        """End the tool call, because the message has ended.

        If the object is confirmed to be a tool call, and its name has been read, the tool call is
        valid without arguments. Example: `<tool_call>{"name": "f"` gives a call of `f`.
        """
        if self._parts.name is not None and not self.writer.is_open and self._is_confirmed:
            self._start_call()
        super().finish()

    @property
    def has_all_arguments(self) -> bool:
        """Whether the arguments have been read, but not the brace that closes the object."""
        return self._parts.has_all_arguments

    # ---- the structure of the object -------------------------------------------------------------

    def _read_opening_brace(self, text: str, pos: int) -> int:
        """Read the opening brace of the object, or the white space before this brace.

        Return the position after the text that was read.
        """
        if text[pos].isspace():
            return skip_whitespace(text, pos)
        if text[pos] != "{":
            return self._reject(pos)
        self._next_step = self._read_key_or_closing_brace
        return pos + 1

    def _read_key_or_closing_brace(self, text: str, pos: int) -> int:
        """Read one character at a place where a key or the closing brace of an object may follow.

            character at `pos`     effect
            white space or comma   The character and the white space after it are skipped. Several
                                   commas in succession are accepted.
            `}`                    The object is closed.
            quote                  The next step reads the key. The quote stays unread.
            any other              The character is not valid. `status` becomes BROKEN.

        Return the position after the text that was read, or `pos` if the character stays unread.
        """
        char = text[pos]
        if char.isspace() or char == ",":
            return skip_whitespace(text, pos + 1)
        if char == "}":
            return self._close_object(pos)
        if char not in _QUOTES:
            return self._reject(pos)
        self._expect_string(self._set_key)
        return pos

    def _close_object(self, pos: int) -> int:
        """Read the closing brace at `pos`, which closes an inner object or the outermost object.

        Example: in `{"function": {"name": "f"}}`, the first `}` closes the inner object, and the
        second `}` ends the tool call.

        Return the position after the brace, or `pos`, with the status BROKEN, if the object is not
        a tool call.
        """
        is_inner_object = bool(self._outer_keys)
        if is_inner_object:
            self._outer_keys.pop()
            return pos + 1
        return self._end_call(pos)

    def _end_call(self, pos: int) -> int:
        """Read the closing brace of the outermost object at `pos`, and end the tool call.

        If the tool call has no arguments, as in `{"name": "f"}`, the arguments `{}` are written.

        If no tool call has started, the object is content, so the status becomes BROKEN. Examples:

            `{"type": 1}`     The object has no name.
            `{"name": "f"}`   No marker precedes the object, and it has no arguments, so it may be
                              ordinary JSON.

        Return the position after the brace, or `pos` if the object is content.
        """
        if not self.writer.is_open:
            return self._reject(pos)
        if not self._parts.has_arguments:
            self.writer.write("{}")
        self.writer.end()
        self.status = DONE
        return pos + 1

    def _set_key(self, key: str) -> None:
        """Store the key of a member, and select the method that reads the colon after the key.

        White space at the start and at the end of the key is removed.
        """
        self._key = key.strip()
        self._next_step = self._read_colon

    def _read_colon(self, text: str, pos: int) -> int:
        """Read the colon between a key and a value, or the white space before the colon.

        Return the position after the text that was read. Any other text is not valid, so `status`
        becomes BROKEN.
        """
        if text[pos].isspace():
            return skip_whitespace(text, pos)
        if text[pos] != ":":
            return self._reject(pos)
        self._next_step = self._read_value_start
        return pos + 1

    def _read_value_start(self, text: str, pos: int) -> int | NeedMore:
        """Skip the white space before a value. If there is none, start the value at `pos`.

        Return the position after the white space, or the result of `_start_value`.
        """
        if text[pos].isspace():
            return skip_whitespace(text, pos)
        return self._start_value(text, pos)

    def _start_value(self, text: str, pos: int) -> int | NeedMore:
        """Select the method that reads the value at `pos`, based on the role of its key.

        Examples of members:

            `"name": "f"`     The next step reads the string as the function's name.
            `"name": 1`       The number cannot be a name, so `status` becomes BROKEN.
            `"type": 1`       The next step skips the value, because the key is ignored.
            `"function": {`   The brace is read. The next step reads a key of the inner object.

        Return the position after the brace of an inner object. Any other value stays unread, so
        return `pos`, or NEED_MORE if it is not clear yet whether the value contains arguments.
        """
        is_object = text[pos] == "{"
        is_string = text[pos] in _QUOTES
        match self._roles.assign_role(self._path_of_key(), is_object=is_object):
            case KeyRole.ARGUMENTS:
                return self._start_arguments(text, pos)
            case KeyRole.NAMED_ARGUMENTS:
                self._parts.name = self._key
                return self._start_arguments(text, pos)
            case KeyRole.PARENT if is_object:  # An inner object that the format declares.
                return self._enter_object(self._key, pos)
            case KeyRole.WRAPPER:  # An inner object that the format does not declare.
                return self._enter_object("", pos)
            case KeyRole.NAME if is_string:
                self._expect_string(self._handle_name)
            case KeyRole.ID if is_string:
                self._expect_string(self._set_call_id)
            case KeyRole.ID | KeyRole.IGNORED:  # An id that is not a string, as in `"id": 1`.
                self._scanner = JsonScanner()
                self._next_step = self._skip_value
            case KeyRole.NAME | KeyRole.PARENT | KeyRole.INVALID:  # A wrong type: `"name": 1`.
                return self._reject(pos)
        return pos

    def _enter_object(self, outer_key: str, pos: int) -> int:
        """Read the opening brace of an inner object at `pos`. Return the position after the brace.

        `outer_key`, which is the key of the inner object, is appended to `_outer_keys`.
        """
        self._outer_keys.append(outer_key)
        self._next_step = self._read_key_or_closing_brace
        return pos + 1

    def _path_of_key(self) -> str:
        """Return the path of the current key: the keys of all enclosing objects, then this key.

        Example: in `{"function": {"name": "f"}}`, the path of the inner key is `function.name`. The
        key of an enclosing object that the format does not declare is stored as "", and omitted.
        """
        all_keys = (*self._outer_keys, self._key)
        return ".".join(key for key in all_keys if key)

    # ---- strings, and values that are ignored ----------------------------------------------------

    def _expect_string(self, on_string: Callable[[str], None]) -> None:
        """Select the method that reads a string. `on_string` will receive the decoded string."""
        self._on_string = on_string
        self._scanner = JsonScanner()
        self._pieces = []
        self._next_step = self._read_string

    def _read_string(self, text: str, pos: int) -> int:
        """Read a piece of a string. At the end of the string, pass its value to `_on_string`.

        Example: after the two pieces `"get_` and `sum"`, `_on_string` receives `get_sum`. Return
        the position after the piece.
        """
        end = self._scanner.scan(text, pos)
        self._pieces.append(text[pos:end])
        if self._scanner.status is DONE:
            self._on_string(decode_string("".join(self._pieces)))
        return end

    def _skip_value(self, text: str, pos: int) -> int:
        """Skip a piece of an ignored value. Return the position after this piece."""
        end = self._scanner.scan(text, pos)
        self._continue_after_scan()
        return end

    def _continue_after_scan(self) -> None:
        """Update `status` and `_next_step` after `_scanner` has read a piece of a value.

        The effect depends on the value:

            value            effect
            incomplete       The current step also reads the next piece of the value.
            not valid JSON   `status` becomes BROKEN.
            complete         The next step reads the next key or the closing brace.
        """
        if self._scanner.status is MORE:
            return
        if self._scanner.status is BROKEN:
            self.status = BROKEN
            return
        # The members are read one after another, so all values up to here are complete. If one of
        # them contains the arguments, the arguments are complete.
        self._parts.has_all_arguments = self._parts.has_arguments
        self._next_step = self._read_key_or_closing_brace

    # ---- name, id and arguments ------------------------------------------------------------------

    def _handle_name(self, name: str) -> None:
        """Store the function's name, and start the tool call if possible.

        The tool call starts if its arguments precede the name, or if a marker has confirmed that
        the object is a tool call. Otherwise the tool call starts later, with the arguments. If the
        tool call cannot start, the object is not a tool call, so the status becomes BROKEN.
        """
        self._parts.name = name.strip()
        self._next_step = self._read_key_or_closing_brace
        starts_at_name = self._parts.has_arguments or self._is_confirmed
        if starts_at_name:
            has_started = self._start_call()
            if not has_started:
                self.status = BROKEN

    def _set_call_id(self, call_id: str) -> None:
        """Store the id of the tool call, and select the method that reads the next key."""
        self._parts.call_id = call_id
        self._next_step = self._read_key_or_closing_brace

    def _start_call(self) -> bool:
        """Start the tool call, and write the arguments that preceded the name.

        Example: in `{"arguments": {"a": 1}, "name": "f"}`, the arguments `{"a": 1}` are stored in
        `early_arguments` until the name starts the tool call.

        Return whether the tool call has started. If not, the object has no name, or names a
        function that the request does not offer, so the text of the object is content.
        """
        parts = self._parts
        if parts.name is None:
            return False
        has_started = self.writer.start(parts.name, parts.call_id, is_confirmed=self._is_confirmed)
        if not has_started:
            return False
        for piece in parts.early_arguments:
            self.writer.write(piece)
        parts.early_arguments = []
        return True

    def _start_arguments(self, text: str, pos: int) -> int | NeedMore:
        """Select the method that reads the arguments at `pos`, if their first characters are valid.

        If no marker and no earlier tool call confirms that the outer object is a tool call, the
        arguments must be an object. Example: `{"name": "Ann", "arguments": 3}` is content, so the
        status becomes BROKEN.

        Return `pos`, because a later step reads the arguments, or NEED_MORE if more text is
        required to decide whether the value is an object.
        """
        must_be_object = not self._is_confirmed
        if must_be_object:
            object_start = match_object_start(text, pos)
            if object_start is NEED_MORE:
                return NEED_MORE
            if object_start is NO_MATCH:
                return self._reject(pos)
        return self._enter_arguments(text, pos)

    def _enter_arguments(self, text: str, pos: int) -> int:
        """Start the tool call, and select the method that reads the arguments at `pos`.

        There are two cases in which the tool call does not start here:

            `<call>{"name": "f", "arguments": {}}`   The tool call has started at the name, because
                                                     a marker confirms the tool call.
            `{"arguments": {}, "name": "f"}`         The tool call will start at the name.

        Return `pos`. If the request does not offer the named function, the object is content, so
        the status becomes BROKEN.
        """
        is_name_known = self._parts.name is not None
        if is_name_known and not self.writer.is_open:
            has_started = self._start_call()
            if not has_started:
                return self._reject(pos)
        self._parts.has_arguments = True
        self._select_arguments_step(text[pos])
        return pos

    def _select_arguments_step(self, first_char: str) -> None:
        r"""Select the method that reads the arguments, depending on their first character.

        Some models write the arguments as a string that contains JSON, or write `null`:

            first character   arguments        text that the selected method writes
            `"`               `"{\"a\": 1}"`   `{"a": 1}`
            `n`               `null`           `{}`
            any other         `{"a": 1}`       the same text
        """
        match first_char:
            case '"':
                self._expect_string(self._write_decoded_arguments)
            case "n":
                self._scanner = JsonScanner()
                self._pieces = []
                self._next_step = self._read_word_or_null
            case _:
                self._scanner = JsonScanner()
                self._next_step = self._copy_arguments

    def _copy_arguments(self, text: str, pos: int) -> int:
        """Write a piece of the arguments unchanged. Return the position after the piece."""
        end = self._scanner.scan(text, pos)
        if end > pos:
            self._write_or_store(text[pos:end])
        self._continue_after_scan()
        return end

    def _read_word_or_null(self, text: str, pos: int) -> int:
        """Read a piece of a word that starts with `n`. If the whole word is `null`, write `{}`.

        Models write `null` for a call without arguments, but the arguments must be an object.
        Example: for the pieces `nu` and `ll`, `{}` is written after the second piece. Any other
        word is written unchanged. Return the position after the piece.
        """
        end = self._scanner.scan(text, pos)
        self._pieces.append(text[pos:end])
        if self._scanner.status is MORE:  # The word is incomplete.
            return end
        word = "".join(self._pieces)
        self._write_or_store("{}" if word == "null" else word)
        self._continue_after_scan()
        return end

    def _write_decoded_arguments(self, text: str) -> None:
        r"""Write the arguments that a JSON string contains, and select the step for the next key.

        Example: in `{"name": "f", "arguments": "{\"a\": 1}"}`, the arguments are a string. The text
        `{"a": 1}` is written. For an empty string, `{}` is written.
        """
        self._write_or_store(text.strip() or "{}")
        self._parts.has_all_arguments = True
        self._next_step = self._read_key_or_closing_brace

    def _write_or_store(self, text: str) -> None:
        """Write a part of the arguments. If the tool call has not started yet, store the part."""
        if self.writer.is_open:
            self.writer.write(text)
        else:
            self._parts.early_arguments.append(text)
