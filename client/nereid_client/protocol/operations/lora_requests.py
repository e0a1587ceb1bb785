"""The bodies of `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter` (vLLM's routes)."""

from typing import Annotated, Any

from pydantic import Field

from nereid_client.protocol.request_body import RequestBody

# A text must not contain a NUL character, because the Triton server would cut the text off there.
_Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]


class LoadLoraRequest(RequestBody):
    """The body of `POST /v1/load_lora_adapter`."""

    lora_name: _Text
    """The name with which requests select the adapter. An adapter with this name is replaced."""
    lora_path: _Text
    """The adapter's folder on the server, in the layout of the library PEFT."""
    load_inplace: bool | None = None
    """Accepted without effect, because an adapter with the same name is always replaced."""


class UnloadLoraRequest(RequestBody):
    """The body of `POST /v1/unload_lora_adapter`."""

    lora_name: _Text
    """The name of the adapter."""
    lora_int_id: Any = None
    """Accepted without effect."""
