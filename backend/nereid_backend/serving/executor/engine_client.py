# SPDX-License-Identifier: Apache-2.0
"""The executor's connection to the engine process: it sends requests and receives updates."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nereid_backend.config import EngineConfig
from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.serving.process.process_handle import ChildProcess, Refusal, Role
from nereid_backend.serving.wire import unpack_update


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """The engine has started to compute a request that was waiting.

    Attributes:
        request_id: the id of the request.
        at: the time of the start, by time.monotonic().
    """

    request_id: str
    at: float


class EngineClient(ChildProcess):
    """The engine process. `start` may be called again after the process has died.

    Several threads may call `submit` and `abort`. Only one thread may call `receive`.

    Attributes:
        info: the fields of EngineInfo, which describe the loaded model.
        stats: the gauges and counters that the engine sent last.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str], None],
        module: str = "nereid_backend.serving.executor.engine_process",
    ) -> None:
        role = Role("engine", module, "engine_start_timeout_s", "engine_hang_timeout_s")
        super().__init__(role, dataclasses.asdict(config), progress)
        self.stats: dict[str, int] = {}

    def start(self, timeout_s: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Start the process and wait until its model is loaded (see ChildProcess.start)."""
        self.stats = {}
        super().start(timeout_s, meanwhile)

    def submit(
        self, request_id: str, token_ids: npt.NDArray[np.int32], params: bytes
    ) -> None:
        """Send a request to the engine.

        Args:
            request_id: the id of the request.
            token_ids: the prompt's tokens, int32, of shape [num_tokens].
            params: the packed sampling parameters.

        Raises:
            EngineDiedError: the engine process is not running.
        """
        self.send(["add", request_id, token_ids.tobytes(), params])

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ask the engine to end a request, or one of its sequences. A last update follows.

        Raises:
            EngineDiedError: the engine process is not running.
        """
        self.send(["abort", request_id, index])

    def receive(self, timeout_s: float) -> list[RequestUpdate | Refusal | RequestStarted]:
        """Return the engine's messages. Wait at most `timeout_s` seconds for the first one.

        Raises:
            EngineDiedError: the process has ended.
        """
        received: list[RequestUpdate | Refusal | RequestStarted] = []
        for kind, *rest in self.messages(timeout_s):
            if kind == "updates":
                received.extend(map(unpack_update, rest[0]))
            elif kind == "stats":
                self.stats = rest[0]
            elif kind == "started":
                received.extend(RequestStarted(*row) for row in rest[0])
            elif kind == "refused":
                received.append(Refusal.from_row(rest))
        return received
