"""Defines the status of a tool call or of a value: incomplete, complete or not valid."""

from __future__ import annotations

from enum import Enum


class Status(Enum):
    """The status of a tool call, or of a value in a tool call: incomplete, complete or not valid.

    MORE    The body is not complete. The reader needs more text.
    DONE    The body is complete.
    BROKEN  The text is not valid in this body.
    """

    MORE = "more"
    DONE = "done"
    BROKEN = "broken"


MORE, DONE, BROKEN = Status.MORE, Status.DONE, Status.BROKEN
