"""POST /v1/load_lora_adapter, /v1/unload_lora_adapter and /v1/reload."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from nereid_client.embeddings.model_choice import pooling_models_of
from nereid_client.errors import ApiError
from nereid_client.middleware.client_keys import current_client
from nereid_client.protocol.operations.lora_requests import LoadLoraRequest, UnloadLoraRequest
from nereid_client.protocol.operations.reload_request import ReloadRequest
from nereid_client.request_context import (
    context_of,
    find_context,
    read_body,
    validate,
)
from nereid_client.routes.operations.triton_parameter import check_parameter

router = APIRouter(tags=["Operation"])


@router.post("/v1/load_lora_adapter", summary="Load a LoRA adapter (vLLM's path)")
async def load_lora_adapter(request: Request) -> Response:
    """Load a LoRA adapter from a folder on the server.

    If an adapter with the same name is loaded, the new adapter replaces this adapter. The setting
    `allow_lora_updates` must allow the change.
    """
    _check_weight_updates_allowed(
        request, "load or unload LoRA adapters", code="lora_updates_disabled"
    )
    body = validate(LoadLoraRequest, await read_body(request))
    # A request with the name of a model or with its alias could never select the adapter.
    pooling_models = pooling_models_of(request)
    pooling_names = {name for target in pooling_models.targets for name in target.names}
    # Without a file that describes several models, only the models themselves know their names.
    pooling_names |= {model.name for model in await pooling_models.all()}
    if body.lora_name in pooling_names or find_context(request, body.lora_name) is not None:
        raise ApiError(
            400,
            f"lora_name must differ from the names and aliases of the models, but the request has "
            f"{body.lora_name!r}. Choose another name.",
            param="lora_name",
        )
    await context_of(request).adapters.load(body.lora_name, body.lora_path)
    return PlainTextResponse(f"The LoRA adapter {body.lora_name!r} is loaded.")


@router.post("/v1/unload_lora_adapter", summary="Unload a LoRA adapter (vLLM's path)")
async def unload_lora_adapter(request: Request) -> Response:
    """Unload a LoRA adapter. Requests that use the adapter continue until they end.

    The setting `allow_lora_updates` must allow the change.
    """
    _check_weight_updates_allowed(
        request, "load or unload LoRA adapters", code="lora_updates_disabled"
    )
    body = validate(UnloadLoraRequest, await read_body(request))
    await context_of(request).adapters.unload(body.lora_name)
    return PlainTextResponse(f"The LoRA adapter {body.lora_name!r} is unloaded.")


@router.post("/v1/reload", summary="Replace the weights of the language model")
async def reload_weights(request: Request) -> dict[str, Any]:
    """Replace the weights of the language model without a restart of the server.

    The response is sent after the change. Running requests finish with the old weights, or end with
    an error if the field `running_requests` is "refuse". Requests that arrive before the change is
    complete wait for the new weights. If the server refuses the new checkpoint, the old weights
    stay in use.

    The setting `allow_lora_updates` must allow the change, and clients cannot use an API key of the
    key file.
    """
    _check_weight_updates_allowed(request, "replace weights", code="weight_updates_disabled")
    _refuse_key_of_key_file()
    body = validate(ReloadRequest, await read_body(request))
    check_parameter(body.path or "", "path")
    context = find_context(request, body.model)
    if context is None:
        raise ApiError(
            404,
            f"The language model {body.model!r} does not exist. Only the weights of a language "
            "model can be replaced, not those of an embedding model, a reranker or an adapter.",
            param="model",
            code="model_not_found",
        )
    # `reload_weights` replaces the weights, and then loads the LoRA adapters again.
    await context.adapters.reload_weights(body.path or "", body.running_requests)
    return {"id": context.settings.model_name, "object": "model", "reloaded": True}


def _refuse_key_of_key_file() -> None:
    """Raise an ApiError 403 if the current client's API key is in the key file.

    Only the key in NEREID_API_KEY allows a client to replace the weights.
    """
    # A client has a name only if its API key is in the key file.
    is_key_of_key_file = bool(current_client.get().name)
    if is_key_of_key_file:
        raise ApiError(
            403,
            "The API keys in the key file do not allow clients to replace weights. Use the key in "
            "NEREID_API_KEY.",
            code="weight_updates_disabled",
        )


def _check_weight_updates_allowed(request: Request, action: str, *, code: str) -> None:
    """Check that clients may change the weights and the LoRA adapters of the language model.

    In spite of its name, the setting `allow_lora_updates` allows these two kinds of changes.
    """
    if not context_of(request).settings.allow_lora_updates:
        raise ApiError(
            403,
            f"The server does not allow clients to {action}. Set NEREID_ALLOW_LORA_UPDATES=true to "
            "allow it.",
            code=code,
        )
