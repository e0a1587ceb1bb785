"""A fake of the frontend's `Backend` that runs the echo model in the test's process."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from nereid_client.errors import BackendError
from nereid_client.language_model.backend import Generation
from nereid_client.streaming.deltas import Delta

from fakes.echo import VOCABULARY_SIZE, Failure, Pause, echo, tokenize


class FakeBackend:
    """A `Backend` that answers with the echo model and records all calls.

    Attributes:
        generations: the arguments of all calls of `generate` and `tokenize`, in order.
        active: the ids of the requests that run now.
        most_active: the largest number of requests that have run at the same time.
        aborted: the ids of the requests that were closed before their end.
        adapters: the loaded LoRA adapters: name -> path.
        reloads: the arguments of each reload of the weights.
        cache_calls, cache_answer: the arguments and the result of `call_cache`.
        limits: the result of `request_limits`.
        is_up: the result of `is_live` and `is_ready`. If `is_up` is false, calls fail like calls
            of a server that cannot be reached.
    """

    def __init__(self) -> None:
        self.generations: list[Generation] = []
        self.active: set[str] = set()
        self.most_active = 0
        self.aborted: list[str] = []
        self.limits: dict[str, int] = {}
        self.is_up = True
        self.is_closed = False
        self.adapters: dict[str, str] = {}
        self.reloads: list[tuple[str, str]] = []
        self.cache_calls: list[dict[str, str]] = []
        self.cache_answer: dict[str, Any] = {"num_sessions": 1, "sessions": []}

    def _check_is_up(self) -> None:
        if not self.is_up:
            raise BackendError("UNAVAILABLE", "the Triton server at fake:1 can't be reached")

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta]:
        """Yield the deltas of the echo model, and record the request in the attributes."""
        self._check_is_up()
        self.generations.append(generation)
        self.active.add(generation.request_id)
        self.most_active = max(self.most_active, len(self.active))
        has_ended = False
        num_running_choices = generation.num_choices
        try:
            for step in echo(
                text_input=generation.text_input,
                input_ids=list(generation.input_ids or ()),
                chat_request=generation.chat_request,
                sampling_parameters=generation.sampling_parameters,
            ):
                if isinstance(step, Failure):
                    has_ended = True
                    raise BackendError(step.code, step.message)
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    continue
                await asyncio.sleep(0)  # let other requests run
                for delta in step:
                    if not generation.with_text:
                        delta = {key: value for key, value in delta.items() if key != "text"}
                    num_running_choices -= "finish_reason" in delta
                    has_ended = num_running_choices == 0
                    yield delta  # type: ignore[misc]
            has_ended = True
        finally:
            if not has_ended:
                self.aborted.append(generation.request_id)
            # Remove the id last, because a test in another thread waits until `active` is empty.
            self.active.discard(generation.request_id)

    async def tokenize(self, generation: Generation) -> list[int]:
        self._check_is_up()
        self.generations.append(generation)
        return tokenize(generation.text_input, generation.chat_request)

    async def change_adapters(self, parameters: dict[str, str]) -> list[str]:
        self._check_is_up()
        if "reload_weights" in parameters:
            self.reloads.append((parameters["reload_weights"], parameters["running_requests"]))
        elif "load_lora" in parameters:
            self.adapters[parameters["load_lora"]] = parameters["lora_path"]
        elif "unload_lora" in parameters:
            if parameters["unload_lora"] not in self.adapters:
                raise BackendError("INVALID_ARGUMENT", "lora_name: no adapter has this name.")
            del self.adapters[parameters["unload_lora"]]
        return list(self.adapters)

    async def call_cache(self, parameters: dict[str, str]) -> dict[str, Any]:
        self.cache_calls.append(dict(parameters))
        return self.cache_answer

    async def detokenize(self, request_id, token_ids, *, skip_special_tokens) -> str:  # type: ignore[no-untyped-def]
        if max(token_ids) >= VOCABULARY_SIZE:
            message = f"input_ids: the vocabulary has {VOCABULARY_SIZE} tokens."
            raise BackendError("INVALID_ARGUMENT", message)
        suffix = "" if skip_special_tokens else "<end>"
        return " ".join(map(str, token_ids)) + suffix

    async def request_limits(self) -> dict[str, int]:
        self._check_is_up()
        return self.limits

    async def is_live(self) -> bool:
        return self.is_up

    async def is_ready(self) -> bool:
        return self.is_up

    async def close(self) -> None:
        self.is_closed = True
