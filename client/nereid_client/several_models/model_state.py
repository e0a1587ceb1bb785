"""The state of one model that the frontend loads and unloads."""

import asyncio
import time
from dataclasses import dataclass, field

from nereid_client.several_models.models_file import ModelSpec


@dataclass
class ModelState:
    """The state of one model.

    Attributes:
        spec: the description of the model in models.toml.
        is_loaded: whether the model is loaded. None means that the frontend does not know, for
            example after a request failed because the server was not available.
        is_loading: whether the model is being loaded. The memory of the model is then reserved.
        is_unloaded_by_client: whether a client has unloaded the model. Requests then do not load
            the model again.
        is_changed: whether a client has changed the weights or the adapters of the loaded model.
            Only a client can then unload the model, because unloading undoes the change.
        num_running_changes: the number of calls that are changing the weights or the adapters now.
        num_requests: the number of requests that use the model now.
        last_used: the time.monotonic() at which the last request ended or the model was loaded.
        lock: held while the model is loaded or unloaded.
    """

    spec: ModelSpec
    is_loaded: bool | None = None
    is_loading: bool = False
    is_unloaded_by_client: bool = False
    is_changed: bool = False
    num_running_changes: int = 0
    num_requests: int = 0
    last_used: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def must_stay_loaded(self) -> bool:
        """Whether unloading the model now is forbidden.

        True if a request uses the model, if the model is being loaded, unloaded or changed, or if a
        client has changed the model.
        """
        is_used = self.num_requests > 0 or self.num_running_changes > 0 or self.lock.locked()
        return is_used or self.is_changed

    @property
    def can_be_unloaded(self) -> bool:
        """Whether the model is loaded, and may be unloaded to free memory for another model."""
        return bool(self.is_loaded) and not self.must_stay_loaded

    @property
    def is_idle(self) -> bool:
        """Whether the model has been idle for longer than its setting `idle_unload_s`.

        False if the model has no such setting, is unloaded, or must stay loaded.
        """
        limit_s = self.spec.entry.idle_unload_s
        if not limit_s or self.must_stay_loaded or self.is_loaded is False:
            return False
        return time.monotonic() > self.last_used + limit_s

    @property
    def memory_bytes(self) -> int:
        """The estimated memory of the model in bytes. 0 if there is no memory budget."""
        return self.spec.memory.total if self.spec.memory is not None else 0

    @property
    def uses_memory(self) -> bool:
        """Whether the memory of the model currently counts towards the memory budget."""
        return self.is_loading or self.is_loaded is not False
