"""Backends that load a model when a request needs the model."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from nereid_client.embeddings.pooling_backend import PoolingBackend, PoolingCall, PoolingOutputs
from nereid_client.errors import BackendError
from nereid_client.language_model.backend import Backend, Generation
from nereid_client.several_models.model_control import ModelControl
from nereid_client.streaming.deltas import Delta


class ControlledBackend:
    """The backend of a language model. A request for an unloaded model loads the model."""

    def __init__(self, backend: Backend, name: str, control: ModelControl) -> None:
        self._backend = backend
        self._name = name
        self._control = control

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta]:
        """Yield the deltas of all choices. See `Backend.generate`."""
        async with (
            self._control.using(self._name),
            aclosing(self._backend.generate(generation)) as deltas,
        ):
            async for delta in deltas:
                yield delta

    async def tokenize(self, generation: Generation) -> list[int]:
        """Return the token ids of the prompt. See `Backend.tokenize`."""
        async with self._control.using(self._name):
            return await self._backend.tokenize(generation)

    async def detokenize(
        self, request_id: str, token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> str:
        """Return the text of token ids. See `Backend.detokenize`."""
        async with self._control.using(self._name):
            return await self._backend.detokenize(
                request_id, token_ids, skip_special_tokens=skip_special_tokens
            )

    async def request_limits(self) -> Mapping[str, int]:
        """Return the limits on the size of a request. This call does not load the model.

        Raises: BackendError if the model is not loaded.
        """
        await self._check_loaded()
        return await self._backend.request_limits()

    async def change_adapters(self, parameters: Mapping[str, str]) -> list[str]:
        """Load, unload or list LoRA adapters, and return the names of all loaded adapters.

        See `Backend.change_adapters`.

        This call does not load the model.

        Raises: BackendError.
        """
        await self._check_loaded()
        if "list_loras" in parameters:
            return await self._backend.change_adapters(parameters)
        with self._control.changing(self._name):
            return await self._backend.change_adapters(parameters)

    async def call_cache(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        """Read or change the prefix cache. See `Backend.call_cache`.

        This call does not load the model.

        Raises: BackendError.
        """
        await self._check_loaded()
        return await self._backend.call_cache(parameters)

    async def is_live(self) -> bool:
        """Return whether the server answers."""
        return await self._backend.is_live()

    async def is_ready(self) -> bool:
        """Return True if the model accepts requests, or if a request would load the model."""
        if self._control.is_unloaded(self._name):
            return await self._backend.is_live()
        return await self._backend.is_ready()

    async def close(self) -> None:
        """Close the connection."""
        await self._backend.close()

    async def _check_loaded(self) -> None:
        """Raise a BackendError if the server answers, but the model is not loaded."""
        if not await self._control.is_loaded(self._name) and await self._backend.is_live():
            raise BackendError("UNAVAILABLE", "The model is not loaded.")


class ControlledPooling:
    """The backend of all pooling models. A request for an unloaded model loads the model."""

    def __init__(self, backend: PoolingBackend, control: ModelControl) -> None:
        self._backend = backend
        self._control = control

    async def infer(self, call: PoolingCall) -> PoolingOutputs:
        """Call a model and return its outputs. See `PoolingBackend.infer`."""
        async with self._control.using(call.model):
            return await self._backend.infer(call)

    async def close(self) -> None:
        """Close the connection."""
        await self._backend.close()
