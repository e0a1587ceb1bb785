# SPDX-License-Identifier: Apache-2.0
"""The worker process of a pooling model: everything that may crash (torch, a driver) lives here.

    python -m nereid_backend.serving.pooling.worker FD

FD is the inherited end of a socket pair. The first message is the settings; from then on:

    stub -> worker    ["add", id, field, [[name, value], ...], options]  ["abort", id]  ["stop"]
    worker -> stub    ["progress", line]  ["ready", info]  ["failed", message]
                      ["done", id, *outcome]  ["refused", id, kind of error, message]
                      ["alive"], while working every 0.25 s: a long job has nothing else to say
                      ["fatal", message]: the process ends because of this
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
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nereid_backend.errors import NereidError
from nereid_backend.pooling.config import PoolingConfig
from nereid_backend.serving.channel import Channel, ChannelClosedError
from nereid_backend.serving.pooling.jobs import Job
from nereid_backend.serving.pooling.progress import Work

if TYPE_CHECKING:
    from nereid_backend.pooling.engine import PoolingEngine

_ALIVE_INTERVAL_S = 0.25

log = logging.getLogger("nereid")


def main(argv: Sequence[str] = sys.argv) -> int:
    """Serve one model over the socket whose descriptor is the first argument."""
    faulthandler.enable()
    # Ctrl-C reaches the whole process group; the stub says when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    channel = Channel(socket.socket(fileno=int(argv[1])))
    with contextlib.suppress(ChannelClosedError):
        engine = _load(channel)
        if engine is not None:
            return _serve(Work(engine, channel.send), channel)
    return 1


def _exit_with_parent(parent: int) -> None:
    """End this process when its parent has died, whatever it is doing (loading, say)."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _load(channel: Channel) -> "PoolingEngine | None":
    (settings,) = channel.receive(None)
    try:
        # Modules make some hundred thousand objects and no garbage.
        gc.disable()
        from nereid_backend.pooling.engine import PoolingEngine

        gc.freeze()
        gc.enable()
        config = PoolingConfig(**settings[0])
        engine = PoolingEngine(config, progress=lambda line: channel.send(["progress", line]))
    except NereidError as error:
        channel.send(["failed", str(error)])
        return None
    except Exception as error:  # noqa: BLE001 - the process ends here, and the stub must hear why
        channel.send(["failed", f"{type(error).__name__}: {error}"])
        return None
    channel.send(["ready", dataclasses.asdict(engine.info)])
    return engine


def _serve(work: Work, channel: Channel) -> int:
    """Work until told to stop; the process's exit code."""
    alive_due = 0.0
    while True:
        # With work to do, only look for messages; without, wait for one.
        for kind, *rest in channel.receive(0 if work.is_left else None):
            if kind == "stop":
                return 0
            if kind == "abort":
                work.abort(rest[0])
            else:
                request_id, *row = rest
                work.add(request_id, Job(*row))
        try:
            work.advance()
        except ChannelClosedError:
            raise
        except Exception as error:
            log.exception("the worker gives up")
            told = isinstance(error, NereidError)
            channel.send(["fatal", str(error) if told else f"{type(error).__name__}: {error}"])
            return 1
        now = time.monotonic()
        if now >= alive_due:
            channel.send(["alive"])
            alive_due = now + _ALIVE_INTERVAL_S


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Nothing is left to be put in order, and taking torch apart costs a second or two, which a
    # server that shuts down does not have.
    os._exit(code)
