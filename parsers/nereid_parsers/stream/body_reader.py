"""The common interface of the classes that read the body of a tool call."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

from nereid_parsers.stream.call_writer import CallWriter

# The reasons in the event at the end of a call.
CUT_OFF = "the text ended inside the call"
BROKEN_ARGUMENTS = "the arguments are not valid JSON"


class Status(Enum):
    """The state of a body, or of a value inside it.

    MORE    The body is not complete. It needs more text.
    DONE    The body is complete.
    BROKEN  The text cannot belong to this body.
    """

    MORE = "more"
    DONE = "done"
    BROKEN = "broken"


MORE, DONE, BROKEN = Status.MORE, Status.DONE, Status.BROKEN


class BodyReader:
    """Reads the body of a call (or a list of calls) and passes the arguments to a CallWriter.

    Attributes:
        writer: The writer that converts the calls into events.
        status: The state of the body.
        last_call_end: The position, in the text that was read last, at which a call of the list
            ended. None if no call of the list ended there. If the text after this position turns
            out not to be a call, it is content.
        is_final: Whether no more text follows.
        is_verbatim: Whether the arguments are the model's own text, rather than JSON that the
            reader composed.
    """

    __slots__ = ("is_final", "last_call_end", "status", "writer")

    is_verbatim: ClassVar[bool] = False

    def __init__(self, writer: CallWriter) -> None:
        self.writer = writer
        self.status = MORE
        self.last_call_end: int | None = None
        self.is_final = False

    def read(self, text: str, pos: int) -> int:
        """Read `text` from `pos` on and set `status`.

        Returns:
            The position up to which the text was read. The caller passes the rest again, together
            with the text that follows it.
        """
        raise NotImplementedError

    def abandon(self) -> bool:
        """Complete the JSON text of the open call and end the call, after text that is not valid.

        Returns:
            Whether the call was ended. Readers that pass on the model's own text return False. The
            rest of the arguments is then passed on unchanged.
        """
        return False

    def finish(self) -> None:
        """End the open call, because the text has ended."""
        if self.writer.is_open:
            self.writer.end(CUT_OFF)
            self.status = DONE
        else:
            self.status = BROKEN
