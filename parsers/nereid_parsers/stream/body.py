"""What every reader of a call's body has in common, and where it puts what it reads."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable
from enum import Enum
from typing import ClassVar

from nereid_parsers.events import ArgumentsDelta, Event, ToolCallEnd, ToolCallStart
from nereid_parsers.format import BrokenArguments, Policy, UnknownTool
from nereid_parsers.stream.schema import Tools, loads

log = logging.getLogger(__name__)


class Status(Enum):
    """How a body stands: it wants more text, it is over, or what came cannot belong to it."""

    MORE = "more"
    DONE = "done"
    BROKEN = "broken"


MORE, DONE, BROKEN = Status.MORE, Status.DONE, Status.BROKEN


def made_up_id() -> str:
    """An id for a call to which the model gave none."""
    return f"call_{uuid.uuid4().hex[:24]}"


class CallSink:
    """Turns what bodies read into events, as the policy says.

    One call at a time: `begin`, any number of `write`, `end`. Where the policy may still drop or
    repair the call, nothing is said before `end`.
    """

    __slots__ = (
        "_call_id", "_drop", "_has_written", "_name", "_new_id", "_on_broken", "_parts",
        "_unknown", "count", "holds", "index", "is_open", "out", "tools",
    )  # fmt: skip

    def __init__(
        self, out: list[Event], tools: Tools, policy: Policy, new_id: Callable[[], str]
    ) -> None:
        self.out = out
        self.tools = tools
        self.is_open = False
        self.index = -1  # of the call that was begun last, among those given out
        self.count = 0  # calls begun, those dropped included
        self._new_id = new_id
        self._on_broken = policy.broken_arguments
        self.holds = policy.broken_arguments is not BrokenArguments.RAW
        self._unknown = policy.unknown_tool
        self._drop = False
        self._name = ""
        self._call_id = ""
        self._parts: list[str] = []
        self._has_written = False

    def begin(self, name: str, call_id: str, is_sure: bool = True) -> bool:
        """Begin a call; False if this is no call after all, and its text is to be content.

        Without `is_sure` only functions that are known to be offered (or all, if that is unknown)
        count as calls.
        """
        known = name in self.tools
        if not name or (not is_sure and not known and self.tools.is_known):
            return False
        self._drop = False
        if not known and self.tools.is_known and self._unknown is not UnknownTool.FORWARD:
            if self._unknown is UnknownTool.CONTENT:
                return False
            log.warning("dropped a call of %r, which is not among the tools", name)
            self._drop = True
        self.is_open = True
        self.count += 1
        self._name = name
        self._call_id = call_id
        self._parts = []
        self._has_written = False
        if not self.holds and not self._drop:
            self._announce()
        return True

    def _announce(self) -> None:
        self.index += 1
        self.out.append(ToolCallStart(self.index, self._call_id or self._new_id(), self._name))

    def write(self, text: str) -> None:
        """More JSON text of the arguments."""
        if self.holds:
            self._parts.append(text)
        elif not self._drop:
            self._has_written = True
            self.out.append(ArgumentsDelta(self.index, text))

    def end(self, reason: str | None = None) -> None:
        """The call is over; `reason` says what was wrong with it."""
        self.is_open = False
        if self._drop:
            return
        if not self.holds:
            if not self._has_written:
                self.out.append(ArgumentsDelta(self.index, "{}"))
            self.out.append(ToolCallEnd(self.index, reason))
            return
        text = "".join(self._parts).strip() or "{}"
        repaired = text if _is_object(text) else _repair(text)
        if repaired is None and self._on_broken is BrokenArguments.REPAIR_OR_DROP:
            log.warning("dropped a call of %r with broken arguments: %.200r", self._name, text)
            return
        self._announce()
        self.out.append(ArgumentsDelta(self.index, text if repaired is None else repaired))
        self.out.append(ToolCallEnd(self.index, reason))

    def cut_held(self, marker: str) -> str | None:
        """Take back what was held from `marker` on, which is no argument; None if absent."""
        if not self.holds or not self.is_open or not marker:
            return None
        text = "".join(self._parts)
        found = text.find(marker)
        if found < 0:
            return None
        self._parts = [text[:found]]
        return text[found:]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _repair(text: str) -> str | None:
    """The object that broken JSON was meant to be, as JSON text; None if that is beyond it."""
    from partial_json_parser import loads as loads_partial

    if not text.lstrip().startswith("{"):
        return None
    try:
        return json.dumps(loads(text), ensure_ascii=False)  # raw control characters, spelled out
    except ValueError:
        pass
    try:
        value = loads_partial(text)
        return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None
    except Exception as error:  # noqa: BLE001  # the library names no base class for what it raises
        log.debug("partial-json-parser: %s", error)
        return None


class Body:
    """Reads a call's body (or a row of calls) and writes it to the sink.

    `status` says how it stands; `cut` is where, in the text last read, the latest call ended (-1:
    not in this text), so that what follows can be given back if it turns out to be no call. `final`
    is set when no more text will come.
    """

    __slots__ = ("cut", "final", "sink", "status")

    is_verbatim: ClassVar[bool] = False  # arguments are the model's own text, not built from it

    def __init__(self, sink: CallSink) -> None:
        self.sink = sink
        self.status = MORE
        self.cut = -1
        self.final = False

    def read(self, text: str, at: int) -> int:
        """Read on from `at`; the position up to which text was taken. The rest is shown again."""
        raise NotImplementedError

    def abandon(self) -> bool:
        """What came cannot belong here: end the open call, if that can be done tidily.

        False where the arguments are the model's own text: its rest is then passed on as it is.
        """
        return False

    def finish(self) -> None:
        """Nothing more comes: end what is open."""
        if self.sink.is_open:
            self.sink.end("cut off")
            self.status = DONE
        else:
            self.status = BROKEN
