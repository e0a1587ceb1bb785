"""JSON bodies: arguments alone, an object that holds name and arguments, an array of those.

Arguments pass through as they arrive. JSON is only scanned for its structure: brackets, strings and
escapes, so that a marker inside a string is no marker; what cannot stand in JSON ends the scan.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from nereid_parsers.format import Keys, NameIsKey
from nereid_parsers.stream.body import BROKEN, DONE, MORE, Body, CallSink
from nereid_parsers.stream.patterns import NEED, skip_blanks
from nereid_parsers.stream.schema import loads

_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL).match
_OUTSIDE = re.compile(r"[\s\w.,:+\-]*").match
_SCALAR = re.compile(r"[\w.+\-]*").match
_CLOSER = {"{": "}", "[": "]"}


def _end(run: Callable[[str, int], re.Match[str] | None], text: str, at: int) -> int:
    found = run(text, at)
    return found.end() if found is not None else at  # each of these matches the empty string too


class JsonScan:
    """Where one JSON value ends. Feed it pieces of text; it keeps no text."""

    __slots__ = ("_escaped", "_in_string", "_stack", "status")

    def __init__(self) -> None:
        self._stack = ""
        self._in_string = False
        self._escaped = False
        self.status = MORE

    def scan(self, text: str, at: int) -> int:
        """Read on from `at`; the position behind what belongs to the value."""
        size = len(text)
        if self._escaped and at < size:
            self._escaped = False
            at += 1
        while at < size:
            if self._in_string:
                at = _end(_IN_STRING, text, at)
                if at == size:
                    return at
                if text[at] == "\\":  # the last character: what it escapes is yet to come
                    self._escaped = True
                    return at + 1
                self._in_string = False
                at += 1
                if not self._stack:
                    self.status = DONE
                    return at
            else:
                at = self._structure(text, at)
                if self.status is not MORE:
                    return at
        return at

    def _structure(self, text: str, at: int) -> int:
        at = _end(_OUTSIDE if self._stack else _SCALAR, text, at)
        if at == len(text):
            return at
        char = text[at]
        if char == '"':
            self._in_string = True
        elif char in _CLOSER:
            self._stack += _CLOSER[char]
        elif not self._stack:
            self.status = DONE  # a scalar, ended by what follows it
            return at
        elif char == self._stack[-1]:
            self._stack = self._stack[:-1]
            if not self._stack:
                self.status = DONE
        else:
            self.status = BROKEN
            return at
        return at + 1


class ArgumentsBody(Body):
    """The arguments alone, named by the call's head."""

    is_verbatim = True

    __slots__ = ("_call_id", "_name", "_scan")

    def __init__(self, sink: CallSink, name: str, call_id: str) -> None:
        super().__init__(sink)
        self._name = name
        self._call_id = call_id
        self._scan = JsonScan()

    def read(self, text: str, at: int) -> int:
        """Pass arguments on; see Body.read."""
        sink = self.sink
        if not sink.is_open:
            at = skip_blanks(text, at)
            if at == len(text):
                return at
            if not sink.begin(self._name, self._call_id) or text[at] != "{":
                self.status = BROKEN
                return at
        scan = self._scan
        end = scan.scan(text, at)
        if end > at:
            sink.write(text[at:end])
        if scan.status is not MORE:
            self.status = scan.status
            if scan.status is DONE:
                sink.end()
        return end


_Step = Callable[[str, int], int]


class ObjectBody(Body):
    """One call as a JSON object with name and arguments in it, in any order, perhaps nested."""

    is_verbatim = True

    __slots__ = (
        "_arguments", "_call_id", "_early", "_key", "_keys", "_name", "_piece", "_prefix", "_scan",
        "_step", "_then", "is_sure",
    )  # fmt: skip

    def __init__(self, sink: CallSink, keys: Keys | NameIsKey, is_sure: bool) -> None:
        """`is_sure`: a marker showed that this is a call, so the name is enough to begin it."""
        super().__init__(sink)
        self.is_sure = is_sure
        self._keys = keys
        self._step: _Step = self._open
        self._then: Callable[[str], bool] = self._take_key
        self._prefix: list[str] = []
        self._key = ""
        self._name: str | None = None
        self._call_id = ""
        self._early: list[str] = []  # arguments that came before the name
        self._arguments = False
        self._piece: list[str] = []
        self._scan = JsonScan()

    def read(self, text: str, at: int) -> int:
        """Read on in the object; see Body.read."""
        size = len(text)
        while at < size and self.status is MORE:
            end = self._step(text, at)
            if end == NEED:
                return at
            at = end
        return at

    def finish(self) -> None:
        """Nothing more comes; see Body.finish."""
        if self._name is not None and not self.sink.is_open and self.is_sure:
            self._begin()
        super().finish()

    # Each step reads some text and says which step is next; blanks cost a step of their own.

    def _blank(self, text: str, at: int) -> bool:
        return text[at].isspace()

    def _open(self, text: str, at: int) -> int:
        if self._blank(text, at):
            return skip_blanks(text, at)
        if text[at] != "{":
            return self._break(at)
        self._step = self._before_key
        return at + 1

    def _before_key(self, text: str, at: int) -> int:
        if self._blank(text, at) or text[at] == ",":
            return skip_blanks(text, at + 1)
        if text[at] == "}":
            return self._close_object(at)
        if text[at] != '"':
            return self._break(at)
        self._expect_string(self._take_key)
        return at

    def _close_object(self, at: int) -> int:
        if self._prefix:
            self._prefix.pop()
            return at + 1
        if not self.sink.is_open and not (self.is_sure and self._begin()):
            return self._break(at)
        if not self._arguments:
            self.sink.write("{}")
        self.sink.end()
        self.status = DONE
        return at + 1

    def _take_key(self, key: str) -> bool:
        self._key = key
        self._step = self._colon
        return True

    def _colon(self, text: str, at: int) -> int:
        if self._blank(text, at):
            return skip_blanks(text, at)
        if text[at] != ":":
            return self._break(at)
        self._step = self._value
        return at + 1

    def _value(self, text: str, at: int) -> int:
        if self._blank(text, at):
            return skip_blanks(text, at)
        role = self._role()
        first = text[at]
        if role == "name" and first == '"':
            self._expect_string(self._take_name)
        elif role == "id" and first == '"':
            self._expect_string(self._take_id)
        elif role == "arguments":
            return self._begin_arguments(text, at)
        elif role == "inner" and first == "{":
            self._prefix.append(self._key)
            self._step = self._before_key
            return at + 1
        elif role == "other" or role == "id":
            self._scan = JsonScan()
            self._step = self._skip
        else:
            return self._break(at)
        return at

    def _role(self) -> str:
        keys = self._keys
        if isinstance(keys, NameIsKey):
            if self._name is not None:
                return "broken"
            self._name = self._key
            return "arguments"
        path = ".".join([*self._prefix, self._key])
        if path == keys.name:
            return "name" if self._name is None else "other"
        if path == keys.arguments or path in keys.also:
            return "other" if self._arguments else "arguments"
        if path == keys.id:
            return "id"
        if any(known.startswith(path + ".") for known in (keys.name, keys.arguments)):
            return "inner"
        if self.is_sure or self.sink.is_open or path.split(".")[-1] in keys.extra:
            return "other"
        return "broken"

    def _begin_arguments(self, text: str, at: int) -> int:
        first = text[at]
        if not (self.is_sure or self.sink.is_open):
            # Nothing but its shape says that this is a call, so the shape must be right.
            inside = skip_blanks(text, at + 1)
            if first != "{" or (inside < len(text) and text[inside] not in '"}'):
                return self._break(at)
            if inside == len(text):
                return NEED
        if self._name is not None and not self.sink.is_open and not self._begin():
            return self._break(at)
        self._arguments = True
        if first == '"':
            self._expect_string(self._take_encoded)
        elif first == "n":
            self._piece = []
            self._scan = JsonScan()
            self._step = self._null
        else:
            self._scan = JsonScan()
            self._step = self._pass
        return at

    def _take_name(self, name: str) -> bool:
        self._name = name
        self._step = self._before_key
        if self._arguments or self.is_sure:
            return self._begin()
        return True

    def _take_id(self, call_id: str) -> bool:
        self._call_id = call_id
        self._step = self._before_key
        return True

    def _take_encoded(self, text: str) -> bool:
        """Arguments given as a string of JSON."""
        self._write(text.strip() or "{}")
        self._step = self._before_key
        return True

    def _begin(self) -> bool:
        if self._name is None or not self.sink.begin(self._name, self._call_id, self.is_sure):
            return False
        for piece in self._early:
            self.sink.write(piece)
        self._early = []
        return True

    def _write(self, text: str) -> None:
        if self.sink.is_open:
            self.sink.write(text)
        else:
            self._early.append(text)

    def _pass(self, text: str, at: int) -> int:
        end = self._scan.scan(text, at)
        if end > at:
            self._write(text[at:end])
        return self._after_scan(end)

    def _null(self, text: str, at: int) -> int:
        end = self._scan.scan(text, at)
        self._piece.append(text[at:end])
        if self._scan.status is not MORE:
            spelled = "".join(self._piece)
            self._write("{}" if spelled == "null" else spelled)
        return self._after_scan(end)

    def _skip(self, text: str, at: int) -> int:
        return self._after_scan(self._scan.scan(text, at))

    def _after_scan(self, end: int) -> int:
        if self._scan.status is BROKEN:
            return self._break(end)
        if self._scan.status is DONE:
            self._step = self._before_key
        return end

    def _expect_string(self, then: Callable[[str], bool]) -> None:
        self._then = then
        self._piece = []
        self._scan = JsonScan()
        self._step = self._string

    def _string(self, text: str, at: int) -> int:
        end = self._scan.scan(text, at)
        self._piece.append(text[at:end])
        if self._scan.status is DONE:
            spelled = "".join(self._piece)
            try:
                value = loads(spelled)
            except ValueError:
                value = spelled[1:-1]  # a bad escape: the text as it stands
            if not self._then(value):
                return self._break(end)
        return end

    def _break(self, at: int) -> int:
        self.status = BROKEN
        return at


class ArrayBody(Body):
    """Calls as the members of one JSON array."""

    is_verbatim = True

    __slots__ = ("_inner", "_is_sure", "_keys", "_opened")

    def __init__(self, sink: CallSink, keys: Keys | NameIsKey, is_sure: bool) -> None:
        super().__init__(sink)
        self._keys = keys
        self._is_sure = is_sure
        self._opened = False
        self._inner: ObjectBody | None = None

    def read(self, text: str, at: int) -> int:
        """Read on in the array; see Body.read."""
        size = len(text)
        while at < size and self.status is MORE:
            if self._inner is not None:
                at = self._inner.read(text, at)
                if self._inner.status is MORE:
                    return at
                self.status = BROKEN if self._inner.status is BROKEN else MORE
                if self._inner.status is DONE:
                    self._inner = None
                    self.cut = at
                    self._is_sure = True
            else:
                at = self._between(text, at)
        return at

    def _between(self, text: str, at: int) -> int:
        char = text[at]
        if char.isspace() or (char == "," and self._opened):
            return at + 1
        if char == "[" and not self._opened:
            self._opened = True
        elif char == "]" and self._opened:
            self.status = DONE if self.sink.count or self._is_sure else BROKEN
        elif char == "{" and self._opened:
            self._inner = ObjectBody(self.sink, self._keys, self._is_sure)
            return at
        else:
            self.status = BROKEN
            return at
        return at + 1

    def finish(self) -> None:
        """Nothing more comes; see Body.finish."""
        if self._inner is not None:
            self._inner.finish()
            self.status = self._inner.status
        else:
            self.status = DONE if self._opened and self.sink.count else BROKEN
