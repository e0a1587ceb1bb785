"""Converts Python calls (`f(a=1)`) and objects with unquoted keys (`{a:1}`) to JSON."""

from __future__ import annotations

import re
from json.encoder import encode_basestring as quote_json

from nereid_parsers.stream.bodies.body_reader import BodyReader, Head, StepReader
from nereid_parsers.stream.call_writer import BROKEN_ARGUMENTS, CallWriter
from nereid_parsers.stream.pattern_matching import (
    MAX_HEAD_CHARS,
    NEED_MORE,
    NeedMore,
    skip_whitespace,
)
from nereid_parsers.stream.status import BROKEN, DONE, MORE
from nereid_parsers.stream.values.python_literals import LiteralReader
from nereid_parsers.stream.values.python_strings import KEYWORD, PYTHON, Dialect
from nereid_parsers.tool_declarations import PythonCalls

# Matches the name of a function. The name need not be valid in Python: `3d-render`, `docs:search`.
FUNCTION_NAME = r"\w[\w.\-:/]*"
_match_function_name = re.compile(FUNCTION_NAME).match
_match_keyword = re.compile(KEYWORD).match
# Matches the opening bracket and the start of the arguments: `()` or `(a=1`, but not `(a == 1`.
_match_arguments_start = re.compile(rf"\(\s*(?:\)|{KEYWORD}\s*=[^=])").match
# Matches an incomplete start of the arguments: `(`, `(a` or `(a =`.
_match_incomplete_start = re.compile(rf"(?:\(\s*(?:{KEYWORD}\s*.?)?)?\Z", re.DOTALL).match


class PythonCallsReader(StepReader):
    """Reads tool calls in Python syntax.

    Example: the text `[f(a=1), g()]` causes these calls of the CallWriter: `start("f", "")`,
    `write('{"a": ')`, `write("1")`, `write("}")` and `end()`, and then `start("g", "")`,
    `write("{}")` and `end()`.
    """

    def __init__(self, writer: CallWriter, declaration: PythonCalls, *, is_confirmed: bool) -> None:
        """Create a reader for tool calls in Python syntax, such as `[f(a=1), g()]`.

        `is_confirmed` is true if a marker shows that the text contains tool calls. If it is false,
        `f(a=1)` is a tool call if the request offers the function `f`, and otherwise content.
        """
        first_step = self._read_opening_bracket if declaration.open else self._read_call_start
        super().__init__(writer, first_step)
        self._declaration = declaration
        # The texts between and after the tool calls. "" if the format does not declare them. `read`
        # skips the white space around a separator such as `, `.
        self._separator = declaration.separator.strip()
        self._closing_bracket = declaration.close
        self._is_confirmed = is_confirmed
        self._num_arguments = 0  # The number of arguments of the open tool call.
        self._literal = LiteralReader(PYTHON)  # Converts the current value to JSON.
        self._is_in_value = False  # Whether the next step reads the current value.

    def read(self, text: str, pos: int) -> int:
        """Read the next piece of the tool calls at `text[pos:]`, and update `status`.

        The steps, which are the methods `_read_...`, read the text. White space between two steps
        is skipped. `last_call_end` becomes the end of the last tool call that ends in the piece, or
        None. Example: from `[f(a=1), g(`, everything is read, and `last_call_end` is 7.

        Returns:
            The position up to which the text was read. The caller passes the rest again, together
            with the text that follows.
        """
        self.last_call_end = None
        size = len(text)
        while pos < size and self.status is MORE:
            # White space in a value may be a part of a string, so it is not skipped.
            if text[pos].isspace() and not self._is_in_value:
                pos = skip_whitespace(text, pos)
                continue
            end = self._next_step(text, pos)
            if end is NEED_MORE:
                return pos
            pos = end
        return pos

    def _need_more_or_reject(self, text: str, pos: int) -> int | NeedMore:
        """If later text may complete the name or keyword at `pos`, return NEED_MORE.

        Otherwise set the status BROKEN, and return `pos`. Later text cannot complete the name or
        keyword if the message has ended, or if `text[pos:]` is already too long for a name.
        """
        if self.is_final or len(text) - pos > MAX_HEAD_CHARS:
            return self._reject(pos)
        return NEED_MORE

    def _read_opening_bracket(self, text: str, pos: int) -> int:
        """Read the opening bracket of the list of tool calls, such as `[` in `[f(), g()]`.

        Return the position after the bracket. If the text does not start with the bracket, the
        status becomes BROKEN.
        """
        if not text.startswith(self._declaration.open, pos):
            return self._reject(pos)
        self._next_step = self._read_call_start
        return pos + len(self._declaration.open)

    def _read_call_start(self, text: str, pos: int) -> int | NeedMore:
        """Read a function's name and the opening bracket, such as `f(`, and start the tool call.

        Examples for a request that offers the function `f`:

            text at `pos`      effect
            `f(a=1`, `f()`     The tool call starts. Only `f(` is read.
            `f`, `f(`, `f(a`   The result is NEED_MORE, because `=` may follow.
            `f(x)`, `12`       The status becomes BROKEN, because each argument needs a keyword.
            `g(a=1`            The request does not offer `g`, so the status becomes BROKEN, unless
                               a marker or an earlier tool call shows that this is a tool call.

        Return the position after the text that was read, or NEED_MORE.
        """
        name_match = _match_function_name(text, pos)
        if name_match is None:
            return self._reject(pos)
        bracket_start = name_match.end()
        have_arguments_started = _match_arguments_start(text, bracket_start) is not None
        if not have_arguments_started:
            is_incomplete = _match_incomplete_start(text, bracket_start) is not None  # As in `f(a`.
            return self._need_more_or_reject(text, pos) if is_incomplete else self._reject(pos)
        has_started = self._start_call(name_match.group())
        if not has_started:
            return self._reject(pos)
        return bracket_start + 1

    def _start_call(self, written_name: str) -> bool:
        """Start a call of a function. The model has written the name as `written_name`.

        In some formats, a suffix such as `.call` follows each name: `f.call` is a call of `f`.

        Return whether the tool call has started. If not, the text is content.
        """
        name = written_name.removesuffix(self._declaration.suffix)
        has_started = self.writer.start(name, call_id="", is_confirmed=self._is_confirmed)
        if has_started:
            self._num_arguments = 0
            self._next_step = self._read_keyword_or_end
        return has_started

    def _read_keyword_or_end(self, text: str, pos: int) -> int | NeedMore:
        """Read the keyword and the `=` of the next argument, or the `)` that ends the tool call.

            text at `pos`   effect
            `)`             The tool call ends.
            `city="P`       `city=` is read, and `{"city": ` is written. The next step reads the
                            value.
            `ci`            The result is NEED_MORE, because the keyword may continue. If the
                            message ends here, the status becomes BROKEN.
            `"P`, `city)`   The status becomes BROKEN, because each argument needs a keyword.

        Return the position after the text that was read, or NEED_MORE.
        """
        if text[pos] == ")":
            self._end_call(call_end=pos + 1)
            return pos + 1
        keyword = _match_keyword(text, pos)
        if keyword is None:
            return self._reject(pos)
        equals_pos = skip_whitespace(text, keyword.end())
        if equals_pos == len(text):
            return self._need_more_or_reject(text, pos)
        if text[equals_pos] != "=":
            return self._reject(pos)
        self._start_argument(keyword.group())
        return equals_pos + 1

    def _start_argument(self, keyword: str) -> None:
        """Write the JSON key of an argument, such as `{"city": `. The next step reads the value."""
        text_before_key = ", " if self._num_arguments else "{"
        self.writer.write(f"{text_before_key}{quote_json(keyword)}: ")
        self._num_arguments += 1
        self._literal = LiteralReader(PYTHON)
        self._is_in_value = True
        self._next_step = self._read_value

    def _read_value(self, text: str, pos: int) -> int | NeedMore:
        """Read a piece of an argument's value, and write the piece as JSON.

        Example: for `'Paris'`, `"Paris"` is written. At the end of the value, the next step reads
        the comma or the bracket after the value. If the value is not valid, the valid text before
        the error is written, and the status becomes BROKEN.

        Return the position after the piece, or NEED_MORE if no text could be read.
        """
        end = self._literal.read(text, pos, self.is_final)
        json_text = self._literal.take_json()
        if json_text:
            self.writer.write(json_text)
        if self._literal.status is BROKEN:
            return self._reject(end)
        if self._literal.status is DONE:
            self._is_in_value = False
            self._next_step = self._read_comma_or_end
            return end
        has_read_text = end > pos
        return end if has_read_text else NEED_MORE

    def _read_comma_or_end(self, text: str, pos: int) -> int:
        """Read the `,` between two arguments, or the `)` that ends the tool call.

        Return the position after the character. Any other character is not valid, so the status
        becomes BROKEN.
        """
        if text[pos] == ",":
            self._next_step = self._read_keyword_or_end
            return pos + 1
        if text[pos] == ")":
            self._end_call(call_end=pos + 1)
            return pos + 1
        return self._reject(pos)

    def _end_call(self, call_end: int) -> None:
        """End the tool call, because its closing bracket `)` has been read.

        Example: for `f(a=1)`, `}` is written, and for `f()`, `{}` is written. `call_end` is the
        position after the bracket.
        """
        self.writer.write("}" if self._num_arguments else "{}")
        self.writer.end()
        self.last_call_end = call_end
        # After a complete tool call, the next members of the list are tool calls, too, even if the
        # request does not offer their functions.
        self._is_confirmed = True
        is_in_list = bool(self._separator or self._closing_bracket)
        if is_in_list:
            self._next_step = self._read_between_calls
        else:  # Nothing can follow the tool call.
            self.status = DONE

    def _read_between_calls(self, text: str, pos: int) -> int:
        """Read the separator between two tool calls, or the bracket after all tool calls.

        Example: in `[f(), g()]`, the separator is `,`. After the separator, the next step reads a
        tool call. The bracket `]` sets the status DONE, and any other text sets the status BROKEN.

        Return the position after the separator or the bracket, or `pos` if the text is not valid.
        """
        if self._closing_bracket and text.startswith(self._closing_bracket, pos):
            self.status = DONE
            return pos + len(self._closing_bracket)
        if self._separator and text.startswith(self._separator, pos):
            self._next_step = self._read_call_start
            return pos + len(self._separator)
        return self._reject(pos)

    def end_invalid_call(self) -> None:
        """Close the open strings and brackets of the JSON arguments, and end the invalid tool call.

        Example: inside the value of `f(city="Par`, the text `"}` is written.
        """
        value_end = self._literal.closing_text() if self._is_in_value else ""
        object_end = "}" if self._num_arguments else "{}"
        self.writer.write(value_end + object_end)
        self.writer.end(BROKEN_ARGUMENTS)

    def finish(self) -> None:
        """At the end of the message, end the open tool call.

        If the message ends after a complete tool call, the missing closing bracket is ignored.
        """
        is_between_calls = self._next_step == self._read_between_calls
        if is_between_calls:
            self.status = DONE
        else:
            super().finish()


class UnquotedKeyReader(BodyReader):
    """Reads arguments such as `{city:<q>Paris<q>,days:3}`, an object whose keys have no quotes."""

    def __init__(self, writer: CallWriter, head: Head, quote: str) -> None:
        """Create a reader for the arguments of the function `head.name`.

        `quote` is the text that encloses each string, for example `<q>`.
        """
        super().__init__(writer)
        self._head = head
        # Some models enclose strings in double quotes, as in JSON, instead of using the declared
        # quote. Strings in double quotes contain escape sequences.
        quotes = tuple(dict.fromkeys((quote, '"')))
        dialect = Dialect(quotes, quotes_with_escapes=('"',), allows_unquoted_strings=True)
        self._literal = LiteralReader(dialect, self._types_of)

    def _types_of(self, key: str) -> frozenset[str] | None:
        """Return the JSON types that the tool's schema allows for the argument `key`."""
        return self.writer.tools.argument_types(self._head.name, key)

    def read(self, text: str, pos: int) -> int:
        """Read the next piece of the object, and write this piece as JSON.

        Example: `{city:<q>Paris<q>}` is written as `{"city": "Paris"}`. The opening brace starts
        the tool call. The closing brace ends the tool call, and sets the status DONE. The status
        becomes BROKEN if the text is not valid, or if the request does not offer the function.

        Returns:
            The position up to which the text was read.
        """
        if not self.writer.is_open:
            pos = skip_whitespace(text, pos)
            if pos == len(text):
                return pos
            if text[pos] != "{":
                return self._reject(pos)
            has_started = self._start_named_call(self._head)
            if not has_started:
                return self._reject(pos)
        # `_literal` reads the whole object, including the opening brace.
        end = self._literal.read(text, pos, self.is_final)
        json_text = self._literal.take_json()
        if json_text:
            self.writer.write(json_text)
        self.status = self._literal.status
        if self.status is DONE:
            self.writer.end()
        return end

    def end_invalid_call(self) -> None:
        """Close the open strings and brackets of the JSON object, and end the invalid tool call.

        Example: inside `{city:<q>Par`, the text `"}` is written.
        """
        self.writer.write(self._literal.closing_text())
        self.writer.end(BROKEN_ARGUMENTS)
