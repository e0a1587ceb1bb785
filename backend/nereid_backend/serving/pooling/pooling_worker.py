# SPDX-License-Identifier: Apache-2.0
"""The worker process of a pooling model. It contains everything that may crash, such as torch.

    python -m nereid_backend.serving.pooling.pooling_worker FD

FD is the inherited end of a socket pair. The first message contains the settings. Further messages:

    stub -> worker    ["add", id, field, [[name, value], ...], options]  ["abort", id]  ["stop"]
    worker -> stub    ["done", id, *outcome]
                      ["alive"], every 0.25 s during work, because a long job sends nothing else
                      and the messages of every child process (process_entry.py)
"""

import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence

from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.serving.pooling.job_progress import Engine, WorkerJobs
from nereid_backend.serving.pooling.jobs import Job
from nereid_backend.serving.process.channel import Channel, ChannelClosedError
from nereid_backend.serving.process.process_entry import connect, error_text, load

_ALIVE_INTERVAL_S = 0.25

log = logging.getLogger("nereid")

MakeEngine = Callable[[PoolingConfig, Callable[[str], None]], Engine]


def serve(argv: Sequence[str], make: MakeEngine) -> int:
    """Serve one model over a socket until the message "stop", and return the exit code.

    Args:
        argv: the command line. argv[1] is the file descriptor of the socket.
        make: builds the engine from its settings. The second argument reports one line about each
            slow operation.
    """
    channel = connect(argv)
    with contextlib.suppress(ChannelClosedError):
        engine = load(channel, lambda settings, progress: make(PoolingConfig(**settings), progress))
        if engine is not None:
            return _serve(WorkerJobs(engine, channel.send), channel)
    return 1


def _serve(work: WorkerJobs, channel: Channel) -> int:
    """Process messages and jobs until the message "stop". Return the exit code."""
    alive_due = 0.0
    while True:
        # With work to do, only read the messages that have arrived. Without work, wait for one.
        for kind, *rest in channel.receive(0 if work.has_work else None):
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
            log.exception("a step of the worker failed, and the worker process ends")
            channel.send(["fatal", error_text(error)])
            return 1
        now = time.monotonic()
        if now >= alive_due:
            channel.send(["alive"])
            alive_due = now + _ALIVE_INTERVAL_S


def main(argv: Sequence[str] = sys.argv) -> int:
    """Serve the real model, and return the exit code."""
    # Importing modules creates about a hundred thousand permanent objects and no garbage.
    gc.disable()
    from nereid_backend.pooling.pooling_engine import PoolingEngine

    gc.freeze()
    gc.enable()
    return serve(argv, lambda config, progress: PoolingEngine(config, progress=progress))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Exit without Python's cleanup. Unloading torch takes one or two seconds, and Triton server
    # does not wait that long when it shuts down.
    os._exit(code)
