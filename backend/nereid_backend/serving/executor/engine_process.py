# SPDX-License-Identifier: Apache-2.0
"""The engine process. It contains everything that may crash: torch, drivers and kernels.

    python -m nereid_backend.serving.executor.engine_process FD

FD is the inherited end of a socket pair. The first message contains the settings. Further messages:

    stub -> engine    ["add", id, int32 ids as bytes, packed params]  ["abort", id, index or None]
                      ["stop"]
    engine -> stub    ["updates", [row, ...]], a row has the fields of RequestUpdate in their order
                      ["started", [[id, monotonic time], ...]], requests that left the queue
                      ["stats", {name: number}], every 0.1 s during work and when work ends
                      and the messages of every child process (process_entry.py)
"""

import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from nereid_backend.config import EngineConfig
from nereid_backend.errors import CapacityError, EngineError, RequestError
from nereid_backend.serving.process.channel import Channel, ChannelClosedError
from nereid_backend.serving.process.process_entry import connect, error_text, load
from nereid_backend.serving.wire import pack_update, unpack_params
from nereid_backend.step_engine import StepEngine

_STATS_INTERVAL_S = 0.1

log = logging.getLogger("nereid")


MakeEngine = Callable[[EngineConfig, Callable[[str], None]], StepEngine]


def serve(argv: Sequence[str], make: MakeEngine) -> int:
    """Serve one engine over a socket until it stops, and return the exit code.

    Args:
        argv: the command line. argv[1] is the file descriptor of the socket.
        make: builds the engine from its settings.
    """
    channel = connect(argv)
    with contextlib.suppress(ChannelClosedError):
        engine = load(channel, lambda settings, progress: make(EngineConfig(**settings), progress))
        if engine is not None:
            # All objects that exist now are permanent. Without freezing them, each full garbage
            # collection would visit them and delay a step by a fifth of a second.
            gc.collect()
            gc.freeze()
            engine.warm_up()
            return _serve(engine, channel)
    return 1


def _serve(engine: StepEngine, channel: Channel) -> int:
    """Process messages and steps until the message "stop". Return the exit code."""
    channel.send(["stats", engine.stats()._asdict()])
    stats_due = 0.0
    while True:
        # With work to do, only read the messages that have arrived. Without work, wait for one.
        for message in channel.receive(0 if engine.has_work() else None):
            if message[0] == "stop":
                return 0
            _handle(engine, channel, message)
        if engine.has_work():
            try:
                updates = engine.step()
            except Exception as error:
                log.exception("a step of the engine failed, and the engine process ends")
                channel.send(["fatal", error_text(error)])
                return 1
            if engine.started:
                channel.send(["started", engine.started])
            if updates:
                channel.send(["updates", [pack_update(update) for update in updates]])
            now = time.monotonic()
            if now >= stats_due or not engine.has_work():
                channel.send(["stats", engine.stats()._asdict()])
                stats_due = now + _STATS_INTERVAL_S


def _handle(engine: StepEngine, channel: Channel, message: list[Any]) -> None:
    """Handle a message "add" or "abort" of the stub."""
    kind, request_id, *rest = message
    if kind == "abort":
        engine.abort(request_id, *rest)
        return
    token_ids, params = rest
    try:
        prompt = memoryview(token_ids).cast("i")
        engine.add_request(request_id, prompt, unpack_params(params))
    except (RequestError, CapacityError) as error:
        channel.send(["refused", request_id, type(error).__name__, str(error)])
    except Exception as error:
        # An error that one request causes must not end the other requests.
        log.exception("request %s could not be added", request_id)
        channel.send(["refused", request_id, EngineError.__name__, error_text(error)])


def main(argv: Sequence[str] = sys.argv) -> int:
    """Serve the real engine, and return the exit code."""
    # Importing modules creates about a hundred thousand permanent objects and no garbage.
    gc.disable()
    from nereid_backend import Engine

    gc.freeze()
    gc.enable()
    return serve(argv, Engine)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Exit without Python's cleanup. Unloading torch takes a second, and libraries would then log
    # messages before the line that explains the exit.
    os._exit(code)
