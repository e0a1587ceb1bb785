"""The base classes of the readers that read the arguments of a tool call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from nereid_parsers.stream.call_writer import CallWriter
from nereid_parsers.stream.pattern_matching import NEED_MORE, NeedMore
from nereid_parsers.stream.status import BROKEN, DONE, MORE

# Descriptions of faults in a tool call. The event at the end of a faulty tool call contains the
# description.
CUT_OFF = "the text ended inside the call"
BROKEN_AFTER_ARGUMENTS = "the text after the arguments is not valid JSON"

# A method that reads a text from a given position on. It returns the position at which it stopped,
# or NEED_MORE if more text is required.
Step = Callable[[str, int], int | NeedMore]


@dataclass(frozen=True, slots=True)
class Head:
    """The text before the arguments of a tool call, or before the content of a message.

    Attributes:
        end: The position after the header.
        name: The name of the function, or "" if the header contains no name.
        call_id: The id of the tool call, or "" if the header contains no id.
    """

    end: int
    name: str = ""
    call_id: str = ""


class BodyReader:
    """Reads the text of one or several tool calls, and passes the arguments to a `CallWriter`.

    The body is the text after the header of the tool call, for example `{"city": "Paris"}`. In some
    formats, the body is a list of tool calls.

    The parser calls `begin` once, and then `read` for each piece of text while `status` is MORE.
    There are two ways to end a tool call before its body is complete:

    - The message ends while the status is MORE. The parser calls `finish`.
    - The status becomes BROKEN while a tool call is open. The parser calls `end_invalid_call`, or
      writes the rest of the invalid arguments unchanged if `writes_model_text` is true.

    Attributes:
        writer: The writer that converts the tool calls into events.
        status: The state of the body.
        last_call_end: The end of the last tool call that has ended in the text passed to `read`, if
            the body is a list of tool calls. The text after this position is another tool call or
            content. None if no tool call of a list has ended in this text.
        is_final: Whether no more text follows.
        writes_model_text: Whether the reader writes the arguments exactly as the model wrote them.
            False if the reader converts the arguments to JSON.
    """

    __slots__ = ("is_final", "last_call_end", "status", "writer")

    writes_model_text: ClassVar[bool] = False

    def __init__(self, writer: CallWriter) -> None:
        """Create a reader that passes the tool calls to `writer`."""
        self.writer = writer
        self.status = MORE
        self.last_call_end: int | None = None
        self.is_final = False

    def begin(self) -> None:
        """If the text before the arguments already identifies a tool call, start the tool call.

        If the tool call cannot start, set the status BROKEN. The parser then returns the text of
        the tool call as content. Most readers do nothing in `begin`, because they start the tool
        call when they read the body.
        """

    def read(self, text: str, pos: int) -> int:
        """Read the next part of the arguments, which starts at `text[pos]`, and set `status`.

        Returns:
            The position up to which the text was read. The caller passes the rest of the text to
            `read` again, together with the text that follows.
        """
        raise NotImplementedError

    def _start_named_call(self, head: Head) -> bool:
        """Start a call of the function `head.name`.

        Return whether the tool call has started. If not, for example because the request does not
        offer the function, the text of the tool call is content.
        """
        return self.writer.start(head.name, head.call_id)

    def _reject(self, pos: int) -> int:
        """Set the status to BROKEN, because the text at `pos` is not valid. Return `pos`."""
        self.status = BROKEN
        return pos

    @property
    def has_all_arguments(self) -> bool:
        """Whether all arguments of the open tool call have been read.

        The tool call is still open, because other text must follow the arguments. Example: in
        `{"name": "f", "arguments": {"a": 1}, "id"`, the arguments are complete.
        """
        return False

    def end_invalid_call(self) -> None:
        """Complete the JSON text of the arguments, and end the invalid tool call.

        Example: after the arguments `{"a": 1`, the reader writes `}`. The parser calls this method
        only if `writes_model_text` is false.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """End the open tool call, because the message has ended.

        If no tool call is open, set the status BROKEN.
        """
        if self.writer.is_open:
            self.writer.end(CUT_OFF)
            self.status = DONE
        else:
            self.status = BROKEN


class StepReader(BodyReader):
    """Reads a tool call in steps. A step is a method that reads text and selects the next step."""

    __slots__ = ("_next_step",)

    def __init__(self, writer: CallWriter, first_step: Step) -> None:
        """Create a reader that starts with `first_step`."""
        super().__init__(writer)
        self._next_step = first_step

    def read(self, text: str, pos: int) -> int:
        """Read the text from `pos` on, until the tool call ends or more text is required.

        Return the position up to which the text was read. The caller passes the rest of the text
        again, together with the text that follows.
        """
        size = len(text)
        while pos < size and self.status is MORE:
            end = self._next_step(text, pos)
            if end is NEED_MORE:
                return pos
            pos = end
        return pos
