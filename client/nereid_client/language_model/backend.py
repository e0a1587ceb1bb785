"""The inputs and the methods of a backend that generates text."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nereid_client.streaming.deltas import Delta


@dataclass(frozen=True)
class Generation:
    """The inputs for one call of the ensemble.

    Exactly one of `text_input`, `input_ids` and `chat_request` contains the prompt.

    Attributes:
        request_id: the id of the request in the logs of the server. The id must be unique among the
            running requests.
        text_input: the prompt as text.
        input_ids: the prompt as token ids.
        chat_request: the prompt as the JSON body of a chat completion.
        sampling_parameters: the sampling parameters for `text_input` or `input_ids`, as JSON text.
        with_text: whether deltas contain the unparsed text in the key `text`.
        num_choices: the number of choices. The stream ends when all choices have ended.
        client_id: the client that sent the request, for fair scheduling. "" if the client is
            unknown.
        client_weight: the weight of the client in fair scheduling.
        priority: replaces the priority in the JSON object, unless `priority` is None.
        lora_name: the LoRA adapter of the request. If it is empty, the field `lora_name` of the
            JSON object selects the adapter.
    """

    request_id: str
    text_input: str | None = None
    input_ids: tuple[int, ...] | None = None
    chat_request: str | None = None
    sampling_parameters: str | None = None
    with_text: bool = False
    num_choices: int = 1
    client_id: str = ""
    client_weight: float = 1.0
    priority: int | None = None
    lora_name: str = ""


class Backend(Protocol):
    """A backend that generates text."""

    def generate(self, generation: Generation) -> AsyncGenerator[Delta]:
        """Yield the deltas of all choices as they arrive. Closing the generator aborts the request.

        Raises: BackendError.
        """
        ...

    async def tokenize(self, generation: Generation) -> list[int]:
        """Return the token ids of the prompt without generating anything.

        Raises: BackendError.
        """
        ...

    async def detokenize(
        self, request_id: str, token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> str:
        """Return the text of token ids.

        Raises: BackendError.
        """
        ...

    async def request_limits(self) -> Mapping[str, int]:
        """Return the limits on the size of a request. The keys are the names of the limits.

        Raises: BackendError.
        """
        ...

    async def change_adapters(self, parameters: Mapping[str, str]) -> list[str]:
        """Load or unload a LoRA adapter, and return the names of all adapters.

        Args:
            parameters: one of these mappings. `{"load_lora": name, "lora_path": folder}` and
                `{"unload_lora": name}` change the adapters. `{"list_loras": "true"}` changes
                nothing. `{"reload_weights": folder, "running_requests": "finish"}` replaces the
                weights of the model.

        Raises: BackendError.
        """
        ...

    async def call_cache(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        """Return the statistics of the prefix cache, prolong a session, or delete a session.

        Args:
            parameters: `{"cache": "statistics"}`, `{"cache": "extend", "prompt_cache_key": key,
                "seconds": number}`, or `{"cache": "drop", "prompt_cache_key": key}`. A call with a
                `client_id` reads or changes only the sessions of this client.

        Raises: BackendError.
        """
        ...

    async def is_live(self) -> bool:
        """Return whether the server answers."""
        ...

    async def is_ready(self) -> bool:
        """Return whether the language model accepts requests."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...
