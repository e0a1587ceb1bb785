# SPDX-License-Identifier: Apache-2.0
"""The engine process: everything that may crash (torch, a driver, a kernel) lives here.

    python -m nereid_backend.serving.executor.engine_process FD

FD is the inherited end of a socket pair. The first message is the settings; from then on:

    stub -> engine    ["add", id, int32 ids as bytes, params]  ["abort", id, index or None]
                      ["stop"]
    engine -> stub    ["updates", [row, ...]], the fields of RequestUpdate in their order
                      ["begun", [[id, monotonic time], ...]], requests that left the queue
                      ["stats", {name: number}], while working every 0.1 s and when work ends
                      and what every child says (child_process.py)
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
from nereid_backend.serving.process.process_entry import connect, load, words_of
from nereid_backend.serving.wire import pack_update

_STATS_INTERVAL_S = 0.1

log = logging.getLogger("nereid")


class StepEngine(Protocol):
    """What this process needs of an engine: the real one, or a scripted one for tests."""

    info: EngineInfo

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        """Accept a request."""

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences."""

    def step(self) -> list[RequestUpdate]:
        """What is new."""

    def has_work(self) -> bool:
        """Whether step() has something to do."""

    @property
    def num_running(self) -> int:
        """Sequences that run."""

    @property
    def num_waiting(self) -> int:
        """Sequences that wait."""

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the KV cache."""

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""


MakeEngine = Callable[[EngineConfig, Callable[[str], None]], StepEngine]


def serve(argv: Sequence[str], make: MakeEngine) -> int:
    """Serve one engine over the socket whose descriptor is the first argument."""
    channel = connect(argv)
    with contextlib.suppress(ChannelClosedError):
        engine = load(channel, lambda settings, progress: make(EngineConfig(**settings), progress))
        if engine is not None:
            # What is there now stays. Looking through it again with each full collection stops a
            # step for a fifth of a second.
            gc.collect()
            gc.freeze()
            _warm_up(engine)
            return _serve(engine, channel)
    return 1


def _warm_up(engine: StepEngine) -> None:
    """Let what the first grammar needs be loaded now, beside the first requests."""
    warm_up = getattr(engine, "warm_up", None)
    if warm_up is not None:
        try:
            warm_up()
        except Exception:  # the request that needs it will say what is wrong
            log.exception("what grammars need could not be loaded ahead")


def _serve(engine: StepEngine, channel: Channel) -> int:
    """Work until told to stop; the process's exit code."""
    channel.send(["stats", _stats(engine)])
    stats_due = 0.0
    while True:
        # With work to do, only look for messages; without, wait for one.
        for message in channel.receive(0 if engine.has_work() else None):
            if message[0] == "stop":
                return 0
            _handle(engine, channel, message)
        if engine.has_work():
            try:
                updates = engine.step()
            except Exception as error:
                log.exception("the engine gives up")
                channel.send(["fatal", words_of(error)])
                return 1
            begun = getattr(engine, "begun", None)
            if begun:
                channel.send(["begun", begun])
            if updates:
                channel.send(["updates", [pack_update(update) for update in updates]])
            now = time.monotonic()
            if now >= stats_due or not engine.has_work():
                channel.send(["stats", _stats(engine)])
                stats_due = now + _STATS_INTERVAL_S


def _stats(engine: StepEngine) -> dict[str, int]:
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
        # Whatever is wrong with this request, the others are not affected.
        log.exception("request %s could not be added", request_id)
        channel.send(["refused", request_id, EngineError.__name__, words_of(error)])


def main(argv: Sequence[str] = sys.argv) -> int:
    """Serve the engine."""
    # Modules make some hundred thousand objects and no garbage.
    gc.disable()
    from nereid_backend import Engine

    gc.freeze()
    gc.enable()
    return serve(argv, Engine)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Nothing is left to be put in order; taking torch apart takes a second, and libraries write
    # into the log what they find then, in front of the line that says why.
    os._exit(code)
