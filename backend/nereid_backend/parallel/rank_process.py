# SPDX-License-Identifier: Apache-2.0
"""The program of every rank except rank 0. The program computes the steps that rank 0 sends.

    python -m nereid_backend.parallel.rank_process FD

FD is the file descriptor of a socket that is connected to rank 0. ranks.py describes the messages.
"""

import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from nereid_backend.fast_imports import importing

with importing():
    import torch

    from nereid_backend.attention.transformers_hook import AttentionHook
    from nereid_backend.config import EngineConfig
    from nereid_backend.model.memory.memory_plan import kv_cache_budget
    from nereid_backend.parallel.plan_messages import PlanDecoder, StepMessage, empty_sequence
    from nereid_backend.parallel.process_group import STARTED, Rank, describe_failure
    from nereid_backend.parallel.shard import Shard, load_shard
    from nereid_backend.paths.model_call import Sizes
    from nereid_backend.step_runner import ForwardPath

_STOP = ("stop",)  # the message with which rank 0 ends this process


class RankService:
    """Handles the messages of rank 0, and computes this rank's part of each step.

    Args:
        config: the settings.
        rank: this process.
        shard: this rank's part of the model.
    """

    def __init__(self, config: EngineConfig, rank: Rank, shard: Shard) -> None:
        self._config = config
        self._rank = rank
        self._shard = shard
        self._path: ForwardPath | None = None
        self._decoder = PlanDecoder()

    def handle(self, kind: str, value: Any) -> None:  # noqa: ANN401 - depends on the message
        """Handle a message of rank 0, which runs the scheduler and the sampler.

        Args:
            kind: the kind of the message: "build" (build the object that runs the model), "budget"
                (compute the size of the KV cache), "step" (compute a forward pass) or "clear"
                (reset the blocks of a sequence).
            value: the argument of the method that handles messages of this kind.
        """
        handlers: dict[str, Callable[[Any], None]] = {
            "build": self._build,
            "budget": self._send_budget,
            "step": self._compute,
            "clear": self._clear,
        }
        handlers[kind](value)

    def _build(self, sizes: Sizes) -> None:
        """Build the object that runs the model. First delete the previous object, if any."""
        self._path = None  # Free the memory of the previous path before the new path is built.
        self._path = self._shard.spec.build(sizes)
        self._decoder = PlanDecoder()

    def _send_budget(self, step_bytes: int) -> None:
        """Compute the size of this rank's KV cache, and send the size to all ranks.

        `step_bytes` is the memory that one step needs, in bytes.
        """
        self._rank.smallest(kv_cache_budget(self._config, self._rank.device, step_bytes))

    def _compute(self, message: StepMessage) -> None:
        """Compute this rank's part of a step."""
        assert self._path is not None, "the first message builds the path"
        self._path.forward(self._decoder.decode(message))

    def _clear(self, blocks: list[int]) -> None:
        """Set blocks of the KV cache to zero."""
        assert self._path is not None, "the first message builds the path"
        sequence = empty_sequence()
        sequence.block_table = blocks
        self._path.clear(sequence)


def main() -> NoReturn:
    """Load this rank's part of the model, and run forward passes until rank 0 ends this process.

    Rank 0 is the process that has started this process. The command line contains the number of a
    file descriptor, through which the two processes exchange messages.

    The process ends here only after an error, so its exit code is 1. If rank 0 sends "stop" or
    ends, the thread that receives messages exits the process.
    """
    # Ctrl-C sends SIGINT to all processes of the group. This process ignores the signal, because
    # rank 0 ends the other ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Hide warnings, because rank 0 logs the same warnings.
    logging.getLogger().setLevel(logging.ERROR)
    connection = Connection(int(sys.argv[1]))
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, messages), daemon=True).start()
    config, rank = messages.get()  # the first message of rank 0
    try:
        connection.send(STARTED)
        _serve(config, rank, messages)
    except Exception as error:  # noqa: BLE001 - the process ends here, and rank 0 logs the reason
        connection.send(describe_failure(error))
    # os._exit ends the process without Python's cleanup, which would wait for the other ranks.
    os._exit(1)


def _serve(config: EngineConfig, rank: Rank, messages: "queue.SimpleQueue[Any]") -> NoReturn:
    """Join the group of all ranks, load this rank's part of the model, and handle all messages."""
    assert config.num_threads is not None, "rank 0 has set the number of threads"
    torch.set_num_threads(config.num_threads)
    rank.join()
    shard = load_shard(config, AttentionHook(), rank, lambda _line: None)
    service = RankService(config, rank, shard)
    with torch.inference_mode():
        while True:
            service.handle(*messages.get())


def _receive(connection: Connection, messages: "queue.SimpleQueue[Any]") -> NoReturn:
    """Put the messages of rank 0 into a queue. Exit the process if rank 0 sends "stop" or ends.

    This function runs in a separate thread, so that the process can exit while the main thread
    waits for another rank. `os._exit` is used, because `sys.exit` would end only this thread.
    """
    first_message = _next_message(connection)
    if first_message != _STOP:
        _config, rank = first_message  # The main thread reads this message from the queue, too.
        messages.put(first_message)
        while (message := _next_message(connection)) != _STOP:
            messages.put(message)
        rank.remove_store()  # the folder through which the ranks find each other
    os._exit(0)


def _next_message(connection: Connection) -> Any:  # noqa: ANN401 - depends on the message
    """Wait for the next message of rank 0, and return it. Return `_STOP` if rank 0 has ended."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return _STOP


if __name__ == "__main__":
    main()
