# SPDX-License-Identifier: Apache-2.0
"""The code that every child process runs. The parent process runs process_handle.py.

    python -m MODULE FD

FD is the inherited end of a socket pair. The first message to a child process contains its
settings. The message ["stop"] ends the process. Every child process sends:

    ["progress", line]                       a line for the log about a slow operation
    ["ready", info]  ["failed", message]     the result of loading
    ["refused", id, kind of error, message]  a request was refused
    ["fatal", message]                       the process ends for this reason
"""

import contextlib
import dataclasses
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from nereid_backend.errors import NereidError
from nereid_backend.serving.process.channel import Channel, ChannelClosedError
from nereid_backend.serving.process.inbox import Inbox

_PARENT_POLL_S = 0.5
_IDLE_POLL_S = 0.5
# Python collects garbage if the number of new, undeleted objects exceeds this threshold. A step of
# 256 sequences creates about 2,000 objects, and deletes them before the next step. With Python's
# default threshold of 700, each step would contain a collection that takes 0.1 to 0.3 ms.
_MAX_NEW_OBJECTS = 10_000

log = logging.getLogger("nereid")

Send = Callable[[object], None]


class Service(Protocol):
    """The loaded model of a child process."""

    @property
    def info(self) -> Any:  # noqa: ANN401 - any dataclass
        """A dataclass that describes the loaded model."""

    def start(self) -> None:
        """Prepare for requests. `serve` calls this method once, after it has sent "ready"."""

    def has_work(self) -> bool:
        """Return whether `advance` has work to do."""

    def handle(self, kind: str, values: list[Any]) -> None:
        """Handle the message [kind, *values] of the parent. Any error ends the process."""

    def advance(self) -> None:
        """Do one step of the pending work, and send its results. Any error ends the process."""


MakeService = Callable[[dict[str, Any], Send, Callable[[str], None]], Service]
"""Loads a model. The arguments are the settings of the process, a function that sends a message to
the parent, and a function that reports one line about each slow operation."""


def serve(make: MakeService) -> NoReturn:
    """Load a model by calling `make`, serve the model until the parent sends "stop", and exit.

    The parent process is the process that runs the Triton model. The first argument of the command
    line is the file descriptor of the connection to the parent process.
    """
    faulthandler.enable()
    # Ctrl-C sends SIGINT to all processes of the group, but only the parent decides when a child
    # process stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    code = 1
    with contextlib.suppress(ChannelClosedError):
        settings, *messages = _first_messages(channel)
        service = _load(settings, channel, make)
        if service is not None:
            reduce_garbage_collection()
            service.start()
            code = _run(service, channel, messages)
    sys.stdout.flush()
    # Exit without Python's cleanup for two reasons. First, unloading torch takes one or two
    # seconds, and Triton server does not wait that long. Second, libraries would log messages
    # during the cleanup, after the line that explains the exit.
    os._exit(code)


def reduce_garbage_collection() -> None:
    """Make garbage collections rare and short.

    A process calls this function once, after loading.
    """
    # The objects that exist now are used until the process ends. If they were not frozen, each full
    # garbage collection would visit all these objects. This would delay the computation of the next
    # tokens by a fifth of a second.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_MAX_NEW_OBJECTS)


def error_text(error: Exception) -> str:
    """Return the message of an error. If the error is not a NereidError, prepend the class name.

    Example: ValueError("bad") -> "ValueError: bad".
    """
    return str(error) if isinstance(error, NereidError) else f"{type(error).__name__}: {error}"


def _first_messages(channel: Channel) -> list[Any]:
    """Wait until at least one message has arrived completely, and return all complete messages."""
    messages: list[Any] = []
    while not messages:
        messages = channel.receive(None)  # returns [] if it has received a part of a message
    return messages


def _load(settings: dict[str, Any], channel: Channel, make: MakeService) -> Service | None:
    """Load the model, and report the result to the parent. Return None if an error occurred."""
    try:
        service = make(settings, channel.send, lambda line: channel.send(["progress", line]))
    except Exception as error:  # noqa: BLE001 - the process ends here, and the parent must learn why
        channel.send(["failed", error_text(error)])
        return None
    channel.send(["ready", dataclasses.asdict(service.info)])
    return service


def _run(service: Service, channel: Channel, messages: list[Any]) -> int:
    """Handle messages and compute steps, until the message `stop` arrives or an error occurs.

    `messages` contains the messages that arrived together with the settings.

    Return the exit code of the process: 0 after `stop`, 1 after an error, which the parent
    receives.

    Raises:
        ChannelClosedError: the parent process has ended.
    """
    inbox = Inbox(channel)
    while True:
        try:
            for kind, *values in messages:
                if kind == "stop":
                    return 0
                service.handle(kind, values)
            if service.has_work():
                service.advance()
        except ChannelClosedError:
            raise
        except Exception as error:
            # The model may be unusable after an unexpected error, so the process must end.
            log.exception("a step or a message failed, and the process ends")
            channel.send(["fatal", error_text(error)])
            return 1
        # If there is work, read only the messages that have already arrived. If there is no work,
        # wait for a message, but only for a limited time, because the service can also get work
        # without a message. Example: if a process of tensor parallelism dies, `has_work` returns
        # True, and `advance` then raises the error.
        timeout_s = 0 if service.has_work() else _IDLE_POLL_S
        messages = inbox.receive(timeout_s)


def _exit_with_parent(parent: int) -> None:
    """Exit when the parent process has died, even while a model is being loaded."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)
