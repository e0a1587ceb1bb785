"""Loads models on demand, and unloads idle models, while the Triton server runs."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from nereid_client.embeddings.pooling_backend import PoolingTarget
from nereid_client.errors import ApiError, BackendError
from nereid_client.several_models.model_memory import format_bytes
from nereid_client.several_models.model_state import ModelState
from nereid_client.several_models.models_file import ModelSpec

_IDLE_CHECK_EVERY_S = 0.5
_UNLOAD_CHECK_EVERY_S = 0.05
# The frontend waits at most this number of seconds for an unloaded model to free its memory.
_UNLOAD_TIMEOUT_S = 30.0

_log = logging.getLogger(__name__)


class Repository(Protocol):
    """The model repository of a Triton server with --model-control-mode=explicit."""

    async def load_model(self, name: str) -> None:
        """Load a model. For an ensemble, also load the models that the ensemble calls.

        Raises: BackendError.
        """
        ...

    async def unload_model(self, name: str) -> None:
        """Unload a model. For an ensemble, also unload the models that the ensemble calls.

        Raises: BackendError.
        """
        ...

    async def is_model_ready(self, name: str) -> bool:
        """Return whether a model accepts requests."""
        ...

    async def uses_memory(self, names: Sequence[str]) -> bool:
        """Return whether any of the models is loaded, is being loaded or is being unloaded.

        Raises: BackendError.
        """
        ...


class ModelControl:
    """Loads and unloads the models of a file models.toml.

    A method's argument `model` is the name of a model in the model repository.

    Args:
        specs: the models.
        repository: the model repository of the Triton server.
        memory_budget: the largest memory of all loaded models together, in bytes. None means no
            limit.
    """

    def __init__(
        self, specs: Sequence[ModelSpec], repository: Repository, memory_budget: int | None = None
    ) -> None:
        self._repository = repository
        self._memory_budget = memory_budget
        # The task that frees and reserves memory for a model holds this lock.
        self._memory_lock = asyncio.Lock()
        self._states = {spec.triton_name: ModelState(spec) for spec in specs}
        self._idle_task: asyncio.Task[None] | None = None
        if any(spec.entry.idle_unload_s for spec in specs):
            self._idle_task = asyncio.create_task(self._unload_idle_models())

    @property
    def specs(self) -> list[ModelSpec]:
        """The models."""
        return [state.spec for state in self._states.values()]

    @property
    def pooling_targets(self) -> list[PoolingTarget]:
        """The embedding models and rerankers."""
        return [
            PoolingTarget(spec.kind, spec.triton_name, spec.names)
            for spec in self.specs
            if spec.kind != "llm"
        ]

    async def prepare(self, model: str) -> None:
        """Load a model, unless the model is already loaded.

        Raises: ApiError 503 if the model cannot be loaded, 404 if a client has unloaded it.
        """
        state = self._states[model]
        if not state.is_loaded:
            await self._load_for_request(state)

    def is_unloaded(self, model: str) -> bool:
        """Return True if a model is unloaded, and False if it is loaded or its state is unknown."""
        return self._states[model].is_loaded is False

    async def is_loaded(self, model: str) -> bool:
        """Return whether a model is loaded. If its state is unknown, query the server."""
        state = self._states[model]
        if state.is_loaded is None:
            is_ready = await self._repository.is_model_ready(model)
            return is_ready if state.is_loaded is None else state.is_loaded
        return state.is_loaded

    @asynccontextmanager
    async def using(self, model: str) -> AsyncIterator[None]:
        """Load a model if necessary. The model stays loaded until the `async with` block ends.

        If the block fails because the model is not available, `is_loaded` becomes None, so that the
        next request queries the server.

        Raises: ApiError 503 if the model cannot be loaded, 404 if a client has unloaded it.
        """
        await self.prepare(model)
        state = self._states[model]
        state.num_requests += 1
        try:
            yield
        except BackendError as error:
            if error.code in ("UNAVAILABLE", "NOT_FOUND"):
                state.is_loaded = None
            raise
        finally:
            state.num_requests -= 1
            state.last_used = time.monotonic()

    @contextmanager
    def changing(self, model: str) -> Iterator[None]:
        """Keep a model loaded while the `with` block changes its weights or its adapters.

        After the block, the model stays loaded until a client unloads it. If the block raises a
        BackendError, the server has refused the change, and the model may be unloaded again.
        """
        state = self._states[model]
        state.num_running_changes += 1
        is_refused = False
        try:
            yield
        except BackendError:
            is_refused = True
            raise
        finally:
            state.num_running_changes -= 1
            if not is_refused:  # a cancelled call may have changed the model, too
                state.is_changed = True

    async def load(self, spec: ModelSpec) -> None:
        """Load a model. The route `/v1/models/{model_id}/load` calls this method.

        Raises: BackendError if the model cannot be loaded.
        """
        state = self._states[spec.triton_name]
        async with state.lock:
            await self._load(state)
            state.is_unloaded_by_client = False

    async def unload(self, spec: ModelSpec) -> None:
        """Wait for the running requests of a model, and then unload the model.

        After this call, requests to the model fail until `load` is called.

        Raises: BackendError.
        """
        state = self._states[spec.triton_name]
        async with state.lock:
            await self._unload(state)
            state.is_unloaded_by_client = True

    async def close(self) -> None:
        """Stop the task that unloads idle models."""
        if self._idle_task is not None:
            self._idle_task.cancel()
            await asyncio.wait({self._idle_task})

    async def _load_for_request(self, state: ModelState) -> None:
        """Load a model for a request, or wait until another request has loaded the model.

        Raises: ApiError 404 if a client has unloaded the model, 503 if it cannot be loaded.
        """
        async with state.lock:
            if state.is_unloaded_by_client:
                raise ApiError(
                    404,
                    f"The model {state.spec.name!r} is unloaded. POST "
                    f"/v1/models/{state.spec.name}/load loads it.",
                    code="model_unloaded",
                )
            # `is_loaded` can be false although the model is loaded: if the server restarts after a
            # crash, it loads the models that it loaded at its first start.
            if not state.is_loaded and await self._is_ready(state):
                state.is_loaded = True
            if state.is_loaded:
                return
            try:
                await self._load(state)
            except BackendError as error:
                raise ApiError(
                    503,
                    f"The model {state.spec.name!r} cannot be loaded: {error.message}",
                    code="model_not_loaded",
                    headers={"Retry-After": "10"},
                ) from None

    async def _load(self, state: ModelState) -> None:
        """Load a model. If the memory budget requires it, unload idle models first.

        If the model is already loaded, the server loads the model's files again. The model then
        needs no further memory.

        Mutates: `state`. If the call is cancelled, `is_loaded` becomes None, which means unknown.
        """
        started = time.monotonic()
        if self._memory_budget is not None and not state.is_loaded:
            await self._reserve_memory(state, self._memory_budget)
        try:
            await self._repository.load_model(state.spec.triton_name)
        except asyncio.CancelledError:
            state.is_loaded = None  # the server may still finish loading
            raise
        finally:
            state.is_loading = False
        state.is_loaded = True
        state.is_changed = False
        state.last_used = time.monotonic()
        _log.info("Loaded the model %s in %.1f s", state.spec.name, state.last_used - started)

    async def _reserve_memory(self, state: ModelState, budget: int) -> None:
        """Free memory for a model, and count the memory of the model from now on."""
        async with self._memory_lock:
            await self._free_memory_for(state, budget)
            state.is_loading = True  # the memory of a model counts while the model is loading

    async def _unload(self, state: ModelState) -> None:
        """Wait for the running requests of a model, and then unload the model.

        The caller must hold `state.lock`.

        Mutates: `state`. If the call fails or is cancelled, `is_loaded` becomes None, which means
            unknown.
        """
        # From now on, a new request waits for `state.lock` in `_load_for_request`, so the number of
        # running requests can only decrease.
        state.is_loaded = False
        try:
            while state.num_requests:
                await asyncio.sleep(_UNLOAD_CHECK_EVERY_S)
            await self._repository.unload_model(state.spec.triton_name)
        except BaseException:
            state.is_loaded = None  # the model may still be loaded, and use memory
            raise
        _log.info("Unloaded the model %s", state.spec.name)

    async def _free_memory_for(self, state: ModelState, budget: int) -> None:
        """Unload idle models until the memory budget has enough free memory for another model.

        The idle models are unloaded in the order in which their last requests ended. The caller
        must hold `_memory_lock`.

        Raises: BackendError if the models that must stay loaded leave too little memory.
        """
        others = [other for other in self._states.values() if other is not state]
        # `is_loaded` can be false although the model is loaded: if the server restarts after a
        # crash, it loads the models that it loaded at its first start.
        for other in others:
            if not other.is_loaded and not other.lock.locked():
                other.is_loaded = await self._is_ready(other)
        while _used_memory(others) + state.memory_bytes > budget:
            candidates = [other for other in others if other.can_be_unloaded]
            if not candidates:
                raise BackendError("UNAVAILABLE", _too_little_memory(state, others, budget))
            longest_idle = min(candidates, key=lambda other: other.last_used)
            await self._unload_for_memory(longest_idle)

    async def _is_ready(self, state: ModelState) -> bool:
        return await self._repository.is_model_ready(state.spec.triton_name)

    async def _unload_for_memory(self, state: ModelState) -> None:
        """Unload an idle model, and wait until its processes have ended."""
        # The caller has checked that the lock is free. No other task can acquire the lock first,
        # because acquiring a free lock does not switch tasks.
        async with state.lock:
            await self._unload(state)
            names = [state.spec.triton_name, *state.spec.steps.values()]
            deadline = time.monotonic() + _UNLOAD_TIMEOUT_S
            while await self._repository.uses_memory(names) and time.monotonic() < deadline:
                await asyncio.sleep(_UNLOAD_CHECK_EVERY_S)

    async def _unload_idle_models(self) -> None:
        """Unload each model that has been idle for longer than its setting `idle_unload_s`."""
        while True:
            await asyncio.sleep(_IDLE_CHECK_EVERY_S)
            for state in self._states.values():
                if state.is_idle:
                    async with state.lock:
                        if state.is_loaded is None:
                            await self._query_idle(state)
                        else:
                            await self._unload_idle(state)

    async def _query_idle(self, state: ModelState) -> None:
        """Ask the server whether an idle model is loaded. The caller must hold `state.lock`.

        The idle time begins again, because the server may have just loaded the model.
        """
        if await self._is_ready(state):
            state.is_loaded = True
        state.last_used = time.monotonic()

    async def _unload_idle(self, state: ModelState) -> None:
        """Unload an idle model. If the server refuses, the idle time of the model begins again.

        The caller must hold `state.lock`.
        """
        try:
            await self._unload(state)
        except BackendError as error:
            _log.warning("The idle model %s stays loaded: %s", state.spec.name, error)
            state.last_used = time.monotonic()


def _used_memory(states: Iterable[ModelState]) -> int:
    """Return the total estimated memory, in bytes, of the models that currently use memory."""
    return sum(state.memory_bytes for state in states if state.uses_memory)


def _too_little_memory(state: ModelState, others: Sequence[ModelState], budget: int) -> str:
    """Return the error message for a model that does not fit into the memory budget."""
    used = [other.spec for other in others if other.uses_memory]
    sizes = ", ".join(f"{spec.name} {spec.memory.describe()}" for spec in used if spec.memory)
    memory = state.spec.memory
    assert memory is not None  # every model has an estimate if there is a budget
    return (
        f"The model needs {memory.describe()}, but memory_budget is {format_bytes(budget)}, and "
        f"models with running requests or changed weights use {sizes}. Try again later, or raise "
        "memory_budget."
    )
