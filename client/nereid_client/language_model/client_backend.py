"""A backend wrapper that adds the current client to each request and counts the client's tokens."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from nereid_client.language_model.adapters import current_adapter
from nereid_client.language_model.backend import Backend, Generation
from nereid_client.middleware.client_keys import Client, current_client
from nereid_client.middleware.request_metrics import RequestMetrics
from nereid_client.streaming.deltas import Delta, Usage


class ClientBackend:
    """Forwards calls to a backend. Adds the current client's id, weight and priority."""

    def __init__(self, backend: Backend, metrics: RequestMetrics) -> None:
        self._backend = backend
        self._metrics = metrics

    def generate(self, generation: Generation) -> AsyncGenerator[Delta]:
        """Yield the deltas of all choices. See `Backend.generate`.

        Add the current LoRA adapter and the current client to the request. The engine divides its
        time among the clients. Clients with the same `share` count as one client.
        """
        generation = replace(generation, lora_name=current_adapter.get())
        client = current_client.get()
        # `share` is empty if a client has no API key of its own and sends no header X-Client-Id.
        # Such a client has the default weight and no priority, so nothing is added to the request.
        if client.share:
            generation = replace(
                generation,
                client_id=client.share,
                client_weight=client.weight,
                priority=client.priority,
            )
        deltas = self._backend.generate(generation)
        if not client.name:  # only the tokens of clients with a name are counted
            return deltas
        return self._with_counted_tokens(deltas, client)

    async def tokenize(self, generation: Generation) -> list[int]:
        """Return the token ids of the prompt. See `Backend.tokenize`."""
        return await self._backend.tokenize(generation)

    async def detokenize(
        self, request_id: str, token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> str:
        """Convert token ids to text. See `Backend.detokenize`."""
        return await self._backend.detokenize(
            request_id, token_ids, skip_special_tokens=skip_special_tokens
        )

    async def request_limits(self) -> Mapping[str, int]:
        """Return the limits on the size of a request. See `Backend.request_limits`."""
        return await self._backend.request_limits()

    async def change_adapters(self, parameters: Mapping[str, str]) -> list[str]:
        """Load, unload or list LoRA adapters, and return the names of all loaded adapters.

        See `Backend.change_adapters`.
        """
        return await self._backend.change_adapters(parameters)

    async def call_cache(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        """Read or change the prefix cache. See `Backend.call_cache`."""
        return await self._backend.call_cache(parameters)

    async def is_live(self) -> bool:
        """Return whether the server answers."""
        return await self._backend.is_live()

    async def is_ready(self) -> bool:
        """Return whether the language model accepts requests."""
        return await self._backend.is_ready()

    async def close(self) -> None:
        """Close the connection to the server."""
        await self._backend.close()

    async def _with_counted_tokens(
        self, deltas: AsyncGenerator[Delta], client: Client
    ) -> AsyncGenerator[Delta]:
        """Yield the deltas. Then add the tokens of the request to the client's token counters.

        If this generator is closed early, the tokens that the deltas have reported so far count.
        """
        usages: dict[int, Usage] = {}  # the token counts of each choice, by the index of the choice
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    if "usage" in delta:  # counts all tokens of this choice so far
                        usages[delta.get("index", 0)] = delta["usage"]
                    yield delta
        finally:
            self._count_tokens(list(usages.values()), client)

    def _count_tokens(self, usages: Sequence[Usage], client: Client) -> None:
        """Add the tokens of a request to the client's limits and metrics."""
        # Every choice reports the tokens of the prompt, but these tokens are counted only once.
        num_prompt = max((usage["prompt_tokens"] for usage in usages), default=0)
        num_generated = sum(usage["completion_tokens"] for usage in usages)
        client.count_tokens(num_prompt + num_generated)
        self._metrics.count_client_tokens(client.name, num_prompt, num_generated)
