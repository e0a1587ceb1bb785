# SPDX-License-Identifier: Apache-2.0
"""The protocol of an engine: the methods that other modules may call."""

from collections.abc import Callable, Sequence
from typing import Protocol

from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.core.outputs import EngineInfo, EngineStats, RequestUpdate
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.engine.prefix_sessions import PrefixSessions


class StepEngine(Protocol):
    """The interface of the class `Engine`. Tests also use another engine with this interface."""

    @property
    def info(self) -> EngineInfo:
        """A description of the loaded model and of the engine's limits."""

    @property
    def compiled(self) -> list[tuple[str, float, float]]:
        """The requests whose grammar compilation had just finished when the last step began.

        Each item contains the request id, the time at which the compilation was requested, and the
        time at which the engine noticed that it had finished (both by time.monotonic()).
        """

    @property
    def sessions(self) -> PrefixSessions:
        """The sessions of the prefix cache, which can be listed, extended and removed."""

    @property
    def started(self) -> list[tuple[str, float]]:
        """The requests that left the waiting queue in the last step.

        Each item contains the request id, and the start time of the step by time.monotonic().
        """

    def warm_up(self) -> None:
        """Load the libraries for grammars in the background."""

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        images: ImageInputs | None = None,
    ) -> None:
        """Add a request to the waiting queue."""

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Abort a request. If `index` is given, abort only this sequence of the request."""

    @property
    def lora_names(self) -> list[str]:
        """The names of the loaded LoRA adapters."""

    def load_lora(self, name: str, path: str) -> None:
        """Load a LoRA adapter. Replace an existing adapter with the same name."""

    def unload_lora(self, name: str) -> None:
        """Unload a LoRA adapter."""

    def reload(self, path: str = "", progress: Callable[[str], None] | None = None) -> None:
        """Replace the weights; see `Engine.reload`."""

    def step(self) -> list[RequestUpdate]:
        """Compute one step, and return the updates of the sequences that got tokens or ended."""

    def has_work(self) -> bool:
        """Return whether the engine has work to do. If it has, the caller must call `step`."""

    def is_swapping(self) -> bool:
        """Return whether the next step would test or activate a compiled forward pass.

        This work belongs to no request; see `Engine.is_swapping`.
        """

    def stats(self) -> EngineStats:
        """Return the present load of the engine, and the counters since its start."""
