# SPDX-License-Identifier: Apache-2.0
"""The worker process of a pooling model: everything that may crash (torch, a driver) lives here.

    python -m nereid_backend.serving.pooling.pooling_worker FD

FD is the inherited end of a socket pair. The first message is the settings; from then on:

    stub -> worker    ["add", id, field, [[name, value], ...], options]  ["abort", id]  ["stop"]
    worker -> stub    ["done", id, *outcome]
                      ["alive"], while working every 0.25 s: a long job has nothing else to say
                      and what every child says (child_process.py)
"""

import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.serving.pooling.job_progress import Work
from nereid_backend.serving.pooling.jobs import Job
from nereid_backend.serving.process.channel import Channel, ChannelClosedError
from nereid_backend.serving.process.process_entry import connect, error_text, load

if TYPE_CHECKING:
    from nereid_backend.pooling.pooling_engine import PoolingEngine

_ALIVE_INTERVAL_S = 0.25

log = logging.getLogger("nereid")


def main(argv: Sequence[str] = sys.argv) -> int:
    """Serve one model over the socket whose descriptor is the first argument."""
    channel = connect(argv)
    with contextlib.suppress(ChannelClosedError):
        engine = load(channel, _make)
        if engine is not None:
            return _serve(Work(engine, channel.send), channel)
    return 1


def _make(settings: dict[str, Any], progress: Callable[[str], None]) -> "PoolingEngine":
    # Modules make some hundred thousand objects and no garbage.
    gc.disable()
    from nereid_backend.pooling.pooling_engine import PoolingEngine

    gc.freeze()
    gc.enable()
    return PoolingEngine(PoolingConfig(**settings), progress=progress)


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
            channel.send(["fatal", error_text(error)])
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
