"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from nereid_client.errors import ApiError
from nereid_client.protocol.lora_requests import LoadLoraRequest, UnloadLoraRequest
from nereid_client.request_context import context_of, read_body, validate

router = APIRouter(tags=["Operation"])


@router.post("/v1/load_lora_adapter", summary="Load a LoRA adapter (vLLM's path)")
async def load_lora_adapter(request: Request) -> Response:
    """Load a LoRA adapter from a folder on the server.

    If an adapter with the same name is loaded, the new adapter replaces this adapter.
    """
    _check_permission(request)
    body = validate(LoadLoraRequest, await read_body(request))
    if body.lora_name == context_of(request).settings.model_name:
        raise ApiError(
            400,
            f"lora_name must differ from the name of the language model, but the request has "
            f"{body.lora_name!r}. Choose another name.",
            param="lora_name",
        )
    await context_of(request).adapters.load(body.lora_name, body.lora_path)
    return PlainTextResponse(f"The LoRA adapter {body.lora_name!r} is loaded.")


@router.post("/v1/unload_lora_adapter", summary="Unload a LoRA adapter (vLLM's path)")
async def unload_lora_adapter(request: Request) -> Response:
    """Unload a LoRA adapter. Requests that use the adapter continue until they end."""
    _check_permission(request)
    body = validate(UnloadLoraRequest, await read_body(request))
    await context_of(request).adapters.unload(body.lora_name)
    return PlainTextResponse(f"The LoRA adapter {body.lora_name!r} is unloaded.")


def _check_permission(request: Request) -> None:
    """Raise an ApiError 403 if the setting allow_lora_updates is false."""
    if not context_of(request).settings.allow_lora_updates:
        raise ApiError(
            403,
            "The server does not allow clients to load or unload LoRA adapters. Set "
            "NEREID_ALLOW_LORA_UPDATES=true to allow it.",
            code="lora_updates_disabled",
        )
