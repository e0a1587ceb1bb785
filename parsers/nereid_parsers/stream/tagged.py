"""Tagged arguments: `<parameter=city>Paris</parameter>`, built up into a JSON object.

A value that can only be a string streams as it arrives. Any other waits for its closing marker,
because `12` may yet become `12 Main Street`.
"""

from __future__ import annotations

import re
from json.encoder import encode_basestring as quoted

from nereid_parsers.format import TaggedArguments
from nereid_parsers.stream.body import BROKEN, DONE, MORE, Body, CallSink
from nereid_parsers.stream.lexer import partial
from nereid_parsers.stream.patterns import FAIL, NEED, Pattern, compiled, skip_blanks
from nereid_parsers.stream.schema import to_json

_JSON_STARTS = frozenset('{["-+.0123456789tfnTFNI \t\r\n')
_STRING = frozenset({"string"})
_STRING_OR_NULL = frozenset({"string", "null"})
_NOT_STRINGS = frozenset({"integer", "number", "boolean", "null", "object", "array"})


class TagPlan:
    """One spelling of a tagged value, compiled."""

    __slots__ = ("key", "padding", "value_end")

    def __init__(self, part: TaggedArguments) -> None:
        bare = part.open.rstrip()
        close = part.close.strip()
        self.padding = part.open[len(bare) :]
        self.key: Pattern = compiled(bare)
        before = part.close[: len(part.close) - len(part.close.lstrip())]
        full = f"(?:{re.escape(before)})?{re.escape(close)}"
        awaited = [partial(before + close), partial(close)] if before else [partial(close)]
        first = re.escape(close[0]) + re.escape(before[:1])
        self.value_end = (
            re.compile(f"(?=[{first}])(?:{full}|{'|'.join(awaited)})").search,
            re.compile(full).search,
            close,
        )


class RowPlan:
    """A TaggedArguments part, compiled: how values are spelled, and what ends the row."""

    __slots__ = ("stops", "tags")

    def __init__(self, part: TaggedArguments, stops: tuple[str, ...]) -> None:
        """`stops`: markers that end the body, none of which belongs to it."""
        self.tags = tuple(TagPlan(one) for one in (part, *part.also))
        self.stops = stops

    def match(self, text: str, at: int, final: bool) -> tuple[TagPlan | None, int, dict[str, str]]:
        """The first spelling that fits at `at`, where its value begins (NEED, FAIL), its fields."""
        for tag in self.tags:
            fields: dict[str, str] = {}
            end = tag.key.match(text, at, final, fields)
            if end != FAIL:
                return tag, end, fields
        return None, FAIL, {}


class TaggedBody(Body):
    """Reads a row of tagged values as one call's arguments."""

    __slots__ = (
        "_call_id",
        "_count",
        "_key",
        "_kinds",
        "_name",
        "_parts",
        "_plan",
        "_step",
        "_tag",
    )

    def __init__(self, sink: CallSink, plan: RowPlan, name: str, call_id: str) -> None:
        super().__init__(sink)
        self._plan = plan
        self._tag = plan.tags[0]
        self._name = name
        self._call_id = call_id
        self._step = self._between
        self._count = 0
        self._key = ""
        self._kinds: frozenset[str] | None = None
        self._parts: list[str] = []  # of a value that waits for its end

    def read(self, text: str, at: int) -> int:
        """Read on in the row; see Body.read."""
        if not self.sink.is_open and not self.sink.begin(self._name, self._call_id):
            self.status = BROKEN
            return at
        size = len(text)
        while at < size and self.status is MORE:
            end = self._step(text, at)
            if end < 0:
                return at
            at = end
        return at

    def _between(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        plan = self._plan
        for stop in plan.stops:
            if text.startswith(stop, at):
                self._end()
                return at
        tag, end, fields = plan.match(text, at, self.final)
        if tag is not None and end >= 0:
            self._tag = tag
            self._begin_value(fields)
            return end
        if end == NEED or self._may_stop(text, at):
            return NEED
        if self.final and self._is_cut(text, at):
            return len(text)
        self.status = BROKEN  # text between arguments
        return at

    def _may_stop(self, text: str, at: int) -> bool:
        return not self.final and any(stop.startswith(text[at:]) for stop in self._plan.stops)

    def _is_cut(self, text: str, at: int) -> bool:
        """Whether the text ends in the beginning of a tag, or of what ends the row."""
        begun = self._plan.match(text, at, final=False)[1] == NEED
        return begun or any(stop.startswith(text[at:]) for stop in self._plan.stops)

    def _begin_value(self, fields: dict[str, str]) -> None:
        self._key = fields["key"].strip()
        self._kinds = self.sink.tools.kinds(self._name, self._key)
        if "string" in fields:
            self._kinds = _STRING if fields["string"] == "true" else _NOT_STRINGS
        elif "type" in fields:
            self._kinds = _STRING if fields["type"] in ("string", "str") else _NOT_STRINGS
        head = "{" if not self._count else ", "
        self._count += 1
        self.sink.write(f"{head}{quoted(self._key)}: ")
        self._parts = []
        self._step = self._padding

    def _padding(self, text: str, at: int) -> int:
        padding = self._tag.padding
        if text.startswith(padding, at):
            at += len(padding)
        elif not self.final and padding.startswith(text[at:]):
            return NEED
        if self._kinds == _STRING:
            self.sink.write('"')
            self._step = self._stream
        else:
            self._step = self._wait
        return at

    def _find_end(self, text: str, at: int) -> tuple[int, int]:
        """(where the value ends, where its closing marker ends); the same where it goes on."""
        awaited, full, close = self._tag.value_end
        match = (full if self.final else awaited)(text, at)
        if match is None:
            return len(text), len(text)
        if text.endswith(close, match.start(), match.end()):
            return match.start(), match.end()
        return match.start(), match.start()

    def _stream(self, text: str, at: int) -> int:
        start, end = self._find_end(text, at)
        if start > at:
            self.sink.write(quoted(text[at:start])[1:-1])
        if end > start:
            self.sink.write('"')
            self._step = self._between
            return end
        return start if start > at else NEED

    def _wait(self, text: str, at: int) -> int:
        start, end = self._find_end(text, at)
        if start > at:
            self._parts.append(text[at:start])
        if end > start:
            self.sink.write(to_json("".join(self._parts), self._kinds))
            self._step = self._between
            return end
        if start > at and self._can_only_be_string():
            self.sink.write('"' + quoted("".join(self._parts))[1:-1])
            self._step = self._stream
        return start if start > at else NEED

    def _can_only_be_string(self) -> bool:
        """Whether the value so far rules out every type but string."""
        kinds = self._kinds
        if kinds is not None and "string" not in kinds:
            return False
        if kinds == _STRING_OR_NULL:
            value = "".join(self._parts)
            return not ("null".startswith(value) or "None".startswith(value))
        return bool(self._parts) and self._parts[0][0] not in _JSON_STARTS

    def _end(self) -> None:
        if not self._count:
            self.sink.write("{}")
        else:
            self.sink.write("}")
        self.sink.end()
        self.status = DONE

    def abandon(self) -> bool:
        """Text stands between the arguments: close the object so that it is JSON."""
        self.sink.write("}" if self._count else "{}")
        self.sink.end("text between arguments")
        return True

    def finish(self) -> None:
        """Nothing more comes; what is left unfinished stays so, as with JSON cut off."""
        if not self.sink.is_open:
            super().finish()
            return
        if self._step == self._between:
            self.sink.write("}" if self._count else "{}")
        elif self._step == self._wait and self._parts:
            self.sink.write(to_json("".join(self._parts), self._kinds))
        super().finish()
