# SPDX-License-Identifier: Apache-2.0
"""The common code of child processes. process_handle.py is the parent's side.

The first message to a child process contains its settings. Every child process sends:

    ["progress", line]                       the start of a slow operation of loading
    ["ready", info]  ["failed", message]     the result of loading
    ["refused", id, kind of error, message]  a request was refused
    ["fatal", message]                       the process ends for this reason
"""

import dataclasses
import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from nereid_backend.errors import NereidError
from nereid_backend.serving.process.channel import Channel


class Loaded(Protocol):
    """The object that a child process serves."""

    @property
    def info(self) -> Any:  # noqa: ANN401 - any dataclass
        """A dataclass that describes the loaded model."""


_PARENT_POLL_S = 0.5

LoadedT = TypeVar("LoadedT", bound=Loaded)


def connect(argv: Sequence[str]) -> Channel:
    """Set up this process as a child process, and return the channel to its parent.

    Args:
        argv: the command line. argv[1] is the file descriptor of the channel's socket.
    """
    faulthandler.enable()
    # Ctrl-C reaches all processes of the group, but only the parent decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    return Channel(socket.socket(fileno=int(argv[1])))


def load(
    channel: Channel, make: Callable[[dict[str, Any], Callable[[str], None]], LoadedT]
) -> LoadedT | None:
    """Load the object that this process serves, and report the result to the parent.

    Args:
        channel: the channel from which the settings are received.
        make: creates the object. Its arguments are the settings and a function that reports one
            line about each slow operation.

    Returns:
        The object, or None if an error occurred. The error has then been reported.
    """
    (settings,) = channel.receive(None)
    try:
        loaded = make(settings, lambda line: channel.send(["progress", line]))
    except Exception as error:  # noqa: BLE001 - the process ends here, and the parent must learn why
        channel.send(["failed", error_text(error)])
        return None
    channel.send(["ready", dataclasses.asdict(loaded.info)])
    return loaded


def error_text(error: Exception) -> str:
    """Return the message of an error. For errors of other packages, the class precedes it."""
    return str(error) if isinstance(error, NereidError) else f"{type(error).__name__}: {error}"


def _exit_with_parent(parent: int) -> None:
    """Wait until the parent process has died, then exit, even in the middle of loading."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)
