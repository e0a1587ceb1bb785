# SPDX-License-Identifier: Apache-2.0
"""What child processes have in common: their side of what child.py begins.

The first message is the settings. What the other side hears of every child:

    ["progress", line]                       a slow step of loading
    ["ready", info]  ["failed", message]     how loading ended
    ["refused", id, kind of error, message]  a request was not taken
    ["fatal", message]                       the process ends because of this
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
    """What a child process serves."""

    @property
    def info(self) -> Any:  # noqa: ANN401 - a dataclass, whichever
        """What was loaded."""


LoadedT = TypeVar("LoadedT", bound=Loaded)


def connect(argv: Sequence[str]) -> Channel:
    """Make this process a child; the channel whose descriptor is the first argument."""
    faulthandler.enable()
    # Ctrl-C reaches the whole process group; the stub says when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    return Channel(socket.socket(fileno=int(argv[1])))


def load(
    channel: Channel, make: Callable[[dict[str, Any], Callable[[str], None]], LoadedT]
) -> LoadedT | None:
    """Make what this process serves, and say what came of it.

    Args:
        channel: brings the settings.
        make: gets them, and what to call with one line for each slow step.

    Returns:
        What was made; None where that failed.
    """
    (settings,) = channel.receive(None)
    try:
        loaded = make(settings, lambda line: channel.send(["progress", line]))
    except Exception as error:  # noqa: BLE001 - the process ends here, and the stub must hear why
        channel.send(["failed", words_of(error)])
        return None
    channel.send(["ready", dataclasses.asdict(loaded.info)])
    return loaded


def words_of(error: Exception) -> str:
    """What to tell of an error: its message, with its kind unless that is our own."""
    return str(error) if isinstance(error, NereidError) else f"{type(error).__name__}: {error}"


def _exit_with_parent(parent: int) -> None:
    """End this process when its parent has died, whatever it is doing (loading, say)."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
