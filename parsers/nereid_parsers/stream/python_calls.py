"""Python-style calls and bare-key objects, built up into JSON arguments."""

from __future__ import annotations

import re
from json.encoder import encode_basestring as quoted

from nereid_parsers.format import BareKeyArguments, PythonCalls
from nereid_parsers.stream.body import BROKEN, DONE, MORE, Body, CallSink
from nereid_parsers.stream.literals import PYTHON, Dialect, LiteralScan
from nereid_parsers.stream.patterns import MAX_HEAD, NEED, skip_blanks

_NAME = re.compile(r"[^\W\d][\w.\-]*").match
_KEYWORD = re.compile(r"[^\W\d]\w*").match


class PythonBody(Body):
    """Reads a row of Python-style calls."""

    __slots__ = ("_count", "_is_sure", "_part", "_scan", "_step")

    def __init__(self, sink: CallSink, part: PythonCalls, is_sure: bool) -> None:
        super().__init__(sink)
        self._part = part
        self._is_sure = is_sure
        self._step = self._open if part.open else self._name
        self._count = 0
        self._scan = LiteralScan(PYTHON)

    def read(self, text: str, at: int) -> int:
        """Read on in the row; see Body.read."""
        size = len(text)
        while at < size and self.status is MORE:
            if text[at].isspace() and self._step != self._value:
                at = skip_blanks(text, at)
                continue
            end = self._step(text, at)
            if end == NEED:
                return at
            at = end
        return at

    def _break(self, at: int) -> int:
        self.status = BROKEN
        return at

    def _open(self, text: str, at: int) -> int:
        if not text.startswith(self._part.open, at):
            return self._break(at)
        self._step = self._name
        return at + len(self._part.open)

    def _name(self, text: str, at: int) -> int:
        """A name, its bracket, and enough behind it to know that this is a call."""
        match = _NAME(text, at)
        if match is None:
            return self._break(at)
        bracket = match.end()
        if bracket == len(text):
            return self._await(text, at)
        inside = skip_blanks(text, bracket + 1)
        if text[bracket] != "(":
            return self._break(at)
        if inside >= len(text):
            return self._await(text, at)
        if text[inside] != ")":
            keyword = _KEYWORD(text, inside)
            equals = skip_blanks(text, keyword.end()) if keyword else inside
            if keyword is not None and equals + 1 >= len(text):
                return self._await(text, at)
            if keyword is None or text[equals] != "=" or text.startswith("==", equals):
                return self._break(at)
        name = match.group().removesuffix(self._part.suffix)
        if not self.sink.begin(name, "", self._is_sure):
            return self._break(at)
        self._count = 0
        self._step = self._keyword
        return bracket + 1

    def _await(self, text: str, at: int) -> int:
        return self._break(at) if self.final or len(text) - at > MAX_HEAD else NEED

    def _keyword(self, text: str, at: int) -> int:
        if text[at] == ")":
            return self._end_call(at + 1)
        keyword = _KEYWORD(text, at)
        if keyword is None:
            return self._break(at)
        equals = skip_blanks(text, keyword.end())
        if equals == len(text):
            return self._await(text, at)
        if text[equals] != "=":
            return self._break(at)
        self.sink.write(f"{', ' if self._count else '{'}{quoted(keyword.group())}: ")
        self._count += 1
        self._scan = LiteralScan(PYTHON)
        self._step = self._value
        return equals + 1

    def _value(self, text: str, at: int) -> int:
        out: list[str] = []
        end = self._scan.read(text, at, self.final, out)
        if out:
            self.sink.write("".join(out))
        if self._scan.status is DONE:
            self._step = self._after_value
        elif self._scan.status is BROKEN:
            self.status = BROKEN
        elif end == at:
            return NEED
        return end

    def _after_value(self, text: str, at: int) -> int:
        if text[at] == ",":
            self._step = self._keyword
            return at + 1
        if text[at] == ")":
            return self._end_call(at + 1)
        return self._break(at)

    def _end_call(self, at: int) -> int:
        self.sink.write("}" if self._count else "{}")
        self.sink.end()
        self.cut = at
        self._is_sure = True
        self._step = self._between
        if not self._part.close and not self._part.separator.strip():
            self.status = DONE
        return at

    def _between(self, text: str, at: int) -> int:
        part = self._part
        if part.close and text.startswith(part.close, at):
            self.status = DONE
            return at + len(part.close)
        separator = part.separator.strip()
        if separator and text.startswith(separator, at):
            self._step = self._name
            return at + len(separator)
        return self._break(at)

    def abandon(self) -> bool:
        """Close the arguments so that they are JSON; see Body.abandon."""
        inside = self._scan.closers() if self._step == self._value else ""
        self.sink.write(inside + ("}" if self._count else "{}"))
        self.sink.end("broken arguments")
        return True

    def finish(self) -> None:
        """Nothing more comes; see Body.finish."""
        if self._step == self._between:
            self.status = DONE
            return
        super().finish()


class BareKeyBody(Body):
    """Reads one object with bare keys as a call's arguments."""

    __slots__ = ("_call_id", "_name", "_scan")

    def __init__(self, sink: CallSink, part: BareKeyArguments, name: str, call_id: str) -> None:
        super().__init__(sink)
        self._name = name
        self._call_id = call_id
        others = () if part.quote == '"' else ('"',)  # models fall back to JSON at times
        self._scan = LiteralScan(Dialect((part.quote, *others), escaped=others))

    def read(self, text: str, at: int) -> int:
        """Read on in the object; see Body.read."""
        if not self.sink.is_open:
            at = skip_blanks(text, at)
            if at == len(text):
                return at
            if text[at] != "{" or not self.sink.begin(self._name, self._call_id):
                self.status = BROKEN
                return at
        out: list[str] = []
        end = self._scan.read(text, at, self.final, out)
        if out:
            self.sink.write("".join(out))
        self.status = self._scan.status
        if self.status is DONE:
            self.sink.end()
        return end

    def abandon(self) -> bool:
        """Close the object so that it is JSON; see Body.abandon."""
        self.sink.write(self._scan.closers())
        self.sink.end("broken arguments")
        return True
