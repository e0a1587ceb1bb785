"""The states of a reader that reads the body of a tool call or a single value."""

from __future__ import annotations

from enum import Enum


class Status(Enum):
    """The state of the body of a tool call, or of a value inside the body.

    MORE    The body is not complete. The reader needs more text.
    DONE    The body is complete.
    BROKEN  The text is not valid in this body.
    """

    MORE = "more"
    DONE = "done"
    BROKEN = "broken"


MORE, DONE, BROKEN = Status.MORE, Status.DONE, Status.BROKEN
