# SPDX-License-Identifier: Apache-2.0
"""The stub's side of the engine process: requests go to it, updates come back."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nereid_backend.config import EngineConfig
from nereid_backend.core.outputs import RequestUpdate
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.serving.process.process_handle import Child, Refusal, Role
from nereid_backend.serving.wire import unpack_update


@dataclass(frozen=True, slots=True)
class Begun:
    """The engine computes a request that has waited until then, by time.monotonic()."""

    request_id: str
    at: float


class EngineClient(Child):
    """One engine process at a time; `start` may be called again after its death.

    `submit` and `abort` may be called from several threads; `receive` belongs to one.

    Attributes:
        info: what was loaded, the fields of EngineInfo.
        stats: how busy the engine was when it last said so.
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
        """Start the process and wait until its model is loaded; see `Child.start`."""
        self.stats = {}
        super().start(timeout_s, meanwhile)

    def submit(
        self, request_id: str, token_ids: npt.NDArray[np.int32], params: SamplingParams
    ) -> None:
        """Hand a request to the engine.

        Raises:
            EngineDiedError: there is no engine process.
        """
        values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
        self.send(["add", request_id, token_ids.tobytes(), values])

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ask the engine to end a request, or one of its sequences; last updates follow.

        Raises:
            EngineDiedError: there is no engine process.
        """
        self.send(["abort", request_id, index])

    def receive(self, timeout_s: float) -> list[RequestUpdate | Refusal | Begun]:
        """What the engine has said, waiting at most `timeout_s`.

        Raises:
            EngineDiedError: the process has gone.
        """
        answers: list[RequestUpdate | Refusal | Begun] = []
        for kind, *rest in self.messages(timeout_s):
            if kind == "updates":
                answers.extend(map(unpack_update, rest[0]))
            elif kind == "stats":
                self.stats = rest[0]
            elif kind == "begun":
                answers.extend(Begun(*row) for row in rest[0])
            elif kind == "refused":
                answers.append(Refusal.from_row(rest))
        return answers
