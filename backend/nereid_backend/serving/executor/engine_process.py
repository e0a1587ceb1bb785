# SPDX-License-Identifier: Apache-2.0
"""The engine process. It contains everything that may crash: torch, drivers and kernels.

    python -m nereid_backend.serving.executor.engine_process FD

FD is the inherited end of a socket pair. The first message contains the settings. Further messages:

    stub -> engine    ["add", id, int32 ids as bytes, params]  ["abort", id, index or None]
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
from typing import Any, Protocol

import numpy as np

from nereid_backend.config import EngineConfig
from nereid_backend.core.outputs import EngineInfo, RequestUpdate
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.errors import CapacityError, EngineError, RequestError
from nereid_backend.serving.process.channel import Channel, ChannelClosedError
from nereid_backend.serving.process.process_entry import connect, error_text, load
from nereid_backend.serving.wire import pack_update

_STATS_INTERVAL_S = 0.1

log = logging.getLogger("nereid")


class StepEngine(Protocol):
    """The interface of an engine: the real one, or the scripted one for tests."""

    info: EngineInfo

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        """Add a request to the waiting queue."""

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences."""

    def step(self) -> list[RequestUpdate]:
        """Compute one step and return the updates of all requests."""

    def has_work(self) -> bool:
        """Return whether `step` has work to do."""

    @property
    def num_running(self) -> int:
        """The number of running sequences."""

    @property
    def num_waiting(self) -> int:
        """The number of waiting sequences."""

    @property
    def num_free_blocks(self) -> int:
        """The number of free blocks of the KV cache."""

    @property
    def num_preemptions(self) -> int:
        """The number of preemptions since the start."""


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
            _warm_up(engine)
            return _serve(engine, channel)
    return 1


def _warm_up(engine: StepEngine) -> None:
    """Load the grammar libraries now, so that the first request with a grammar need not wait."""
    warm_up = getattr(engine, "warm_up", None)
    if warm_up is not None:
        try:
            warm_up()
        except Exception:  # the first request that needs it reports the same error
            log.exception("the grammar libraries could not be loaded at startup")


def _serve(engine: StepEngine, channel: Channel) -> int:
    """Process messages and steps until the message "stop". Return the exit code."""
    channel.send(["stats", _stats(engine)])
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
            started = getattr(engine, "begun", None)
            if started:
                channel.send(["started", started])
            if updates:
                channel.send(["updates", [pack_update(update) for update in updates]])
            now = time.monotonic()
            if now >= stats_due or not engine.has_work():
                channel.send(["stats", _stats(engine)])
                stats_due = now + _STATS_INTERVAL_S


def _stats(engine: StepEngine) -> dict[str, int]:
    """Return the engine's gauges and counters by name."""
    counts = {
        name: getattr(engine, name)
        for name in (
            "num_prefix_cache_queries",
            "num_prefix_cache_hits",
            "num_proposed_tokens",
            "num_accepted_tokens",
        )
        if hasattr(engine, name)
    }
    return counts | {
        "num_requests_running": engine.num_running,
        "num_requests_waiting": engine.num_waiting,
        "kv_cache_blocks_used": engine.info.num_blocks - engine.num_free_blocks,
        "kv_cache_blocks": engine.info.num_blocks,
        "num_preemptions": engine.num_preemptions,
    }


def _handle(engine: StepEngine, channel: Channel, message: list[Any]) -> None:
    """Handle a message "add" or "abort" of the stub."""
    kind, request_id, *rest = message
    if kind == "abort":
        engine.abort(request_id, *rest)
        return
    token_ids, params = rest
    try:
        prompt = np.frombuffer(token_ids, dtype=np.int32).tolist()
        engine.add_request(request_id, prompt, SamplingParams(**params))
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
