"""Values written as Python literals or with bare keys, built up into JSON text as they arrive."""

from __future__ import annotations

import re
from dataclasses import dataclass
from json.encoder import encode_basestring as quoted

from nereid_parsers.stream.body import BROKEN, DONE, MORE
from nereid_parsers.stream.patterns import skip_blanks
from nereid_parsers.stream.schema import to_json

_ATOM = re.compile(r"""[^\s,:=\[\](){}'"<>|]*""").match
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0",
    "\n": "", "/": "/", "\\": "\\", "'": "'", '"': '"',
}  # fmt: skip
_CODES = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_MAX_DEPTH = 200
_MAX_ATOM = 4096


@dataclass(frozen=True, slots=True)
class Dialect:
    """How values are spelled.

    quotes    marks around strings; an opening mark closes itself.
    escaped   those of them between which a backslash escapes.
    """

    quotes: tuple[str, ...]
    escaped: tuple[str, ...]


_PYTHON_QUOTES = ('"""', "'''", '"', "'")
PYTHON = Dialect(_PYTHON_QUOTES, escaped=_PYTHON_QUOTES)


class LiteralScan:
    """One value, read in pieces; `read` gives the JSON text of what it took.

    Python's tuples and sets become arrays; a key that is no string becomes one.
    """

    __slots__ = (
        "_dialect",
        "_expects_value",
        "_first",
        "_quote",
        "_stack",
        "_string_end",
        "status",
    )

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._stack: list[str] = []  # closers; "}" of an object that awaits a key, ":" its value
        self._first = True  # no member was written in the innermost container
        self._expects_value = True
        self._quote = ""
        self._string_end = re.compile("")
        self.status = MORE

    def read(self, text: str, at: int, final: bool, out: list[str]) -> int:
        """Read on from `at`, appending JSON text to `out`; up to where text was taken."""
        size = len(text)
        while at < size and self.status is MORE:
            end = (
                self._string(text, at, final, out)
                if self._quote
                else self._token(text, at, final, out)
            )
            if end == at:
                return at
            at = end
        return at

    def _token(self, text: str, at: int, final: bool, out: list[str]) -> int:
        char = text[at]
        if char.isspace():
            return skip_blanks(text, at)
        if self._expects_value:
            return self._value(text, at, final, out)
        if not self._stack:
            self.status = DONE
            return at
        return self._after_value(text, at, out)

    def _after_value(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        inner = self._stack[-1]
        if inner == "}" and char == ":":
            out.append(": ")
            self._stack[-1] = ":"
            self._expects_value = True
        elif char == "," and inner != "}":
            if inner == ":":
                self._stack[-1] = "}"
            self._expects_value = True
        elif char == (inner if inner != ":" else "}") and not (inner == "}" and not self._first):
            self._pop(out)
        else:
            self.status = BROKEN
            return at
        return at + 1

    def _pop(self, out: list[str]) -> None:
        inner = self._stack.pop()
        out.append("}" if inner in ":}" else "]")
        self._first = False
        self._expects_value = False
        if not self._stack:
            self.status = DONE

    def _value(self, text: str, at: int, final: bool, out: list[str]) -> int:
        char = text[at]
        if self._stack and char == (self._stack[-1] if self._stack[-1] != ":" else ""):
            self._pop(out)  # an empty container, or a comma before its end
            return at + 1
        quote = self._find_quote(text, at, final)
        if quote is None:
            return at
        if quote:
            self._separate(out)
            out.append('"')
            self._quote = quote
            hold = "|".join(f"{re.escape(quote[:n])}\\Z" for n in range(len(quote) - 1, 0, -1))
            marks = [re.escape(quote), *([r"\\"] if quote in self._dialect.escaped else [])]
            self._string_end = re.compile("|".join([*marks, *([hold] if hold else [])]))
            return at + len(quote)
        if char in _CLOSERS and len(self._stack) < _MAX_DEPTH:
            if self._stack and self._stack[-1] == "}":
                self.status = BROKEN  # a container for a key
                return at
            self._separate(out)
            out.append("{" if char == "{" else "[")
            self._stack.append(_CLOSERS[char])
            self._first = True
            self._expects_value = True
            return at + 1
        return self._atom(text, at, final, out)

    def _find_quote(self, text: str, at: int, final: bool) -> str | None:
        """The quote that opens here, "" for none, None if that is yet to be seen."""
        for quote in self._dialect.quotes:
            if text.startswith(quote, at):
                return quote
            if not final and len(text) - at < len(quote) and quote.startswith(text[at:]):
                # Two quotes may be an empty string or the start of three.
                return None
        return ""

    def _separate(self, out: list[str]) -> None:
        if self._stack and self._stack[-1] != ":" and not self._first:
            out.append(", ")
        self._first = False
        self._expects_value = False

    def _atom(self, text: str, at: int, final: bool, out: list[str]) -> int:
        match = _ATOM(text, at)
        end = match.end() if match else at
        if end == len(text) and not final:
            if end - at > _MAX_ATOM:
                self.status = BROKEN
            return at
        if end == at:
            self.status = BROKEN
            return at
        self._separate(out)
        atom = text[at:end]
        is_key = bool(self._stack) and self._stack[-1] == "}"
        out.append(quoted(atom) if is_key else to_json(atom, None))
        return end

    def _string(self, text: str, at: int, final: bool, out: list[str]) -> int:
        match = self._string_end.search(text, at)
        start = match.start() if match else len(text)
        if start > at:
            out.append(quoted(text[at:start])[1:-1])
        if match is None:
            return start
        if match.group() == self._quote:
            out.append('"')
            self._quote = ""
            return match.end()
        if match.group() == "\\":
            return self._escape(text, start, final, out)
        if final:
            out.append(quoted(match.group())[1:-1])
            return match.end()
        return start

    def _escape(self, text: str, at: int, final: bool, out: list[str]) -> int:
        if at + 1 == len(text):
            return len(text) if final else at
        char = text[at + 1]
        if char in _CODES:
            digits = text[at + 2 : at + 2 + _CODES[char]]
            if len(digits) < _CODES[char] and not final and _is_hex(digits):
                return at
            if len(digits) == _CODES[char] and _is_hex(digits) and int(digits, 16) <= 0x10FFFF:
                code = int(digits, 16)
                # Half of a pair stays an escape, for alone it is no character.
                is_half = 0xD800 <= code <= 0xDFFF
                out.append(f"\\u{code:04x}" if is_half else quoted(chr(code))[1:-1])
                return at + 2 + _CODES[char]
        out.append(quoted(_ESCAPES.get(char, "\\" + char))[1:-1])
        return at + 2

    def closers(self) -> str:
        """What would close the JSON text written so far."""
        text = '"' if self._quote else ""
        return text + "".join("}" if inner in ":}" else "]" for inner in reversed(self._stack))


def _is_hex(digits: str) -> bool:
    return all(char in "0123456789abcdefABCDEF" for char in digits)
