"""POST /v1/reload."""

from typing import Any

from fastapi import APIRouter, Request

from nereid_client.errors import ApiError
from nereid_client.middleware.client_keys import current_client
from nereid_client.protocol.reload_request import ReloadRequest
from nereid_client.request_context import context_of, read_body, select_context, validate

router = APIRouter(tags=["Operation"])


@router.post("/v1/reload", summary="Replace the weights of the language model")
async def reload_weights(request: Request) -> dict[str, Any]:
    """Replace the weights of the language model without a restart of the server.

    The response is sent after the change. Requests that arrive before the change is complete wait
    for the new weights. If the server refuses the new checkpoint, the old weights stay in use.
    """
    _check_permission(request)
    body = validate(ReloadRequest, await read_body(request))
    if not select_context(request, body.model):
        raise ApiError(
            404,
            f"The language model {body.model!r} does not exist. Only the weights of a language "
            "model can be replaced, not those of an embedding model, a reranker or an adapter.",
            param="model",
            code="model_not_found",
        )
    context = context_of(request)
    await context.adapters.reload_weights(body.path or "", body.running_requests)
    return {"id": context.settings.model_name, "object": "model", "reloaded": True}


def _check_permission(request: Request) -> None:
    """Raise an ApiError 403 if the client may not replace the weights."""
    if not context_of(request).settings.allow_lora_updates:
        raise ApiError(
            403,
            "The server does not allow clients to replace weights. Set "
            "NEREID_ALLOW_LORA_UPDATES=true to allow it.",
            code="weight_updates_disabled",
        )
    if current_client.get().name:
        raise ApiError(
            403,
            "The API keys in the key file do not allow clients to replace weights. Use the key in "
            "NEREID_API_KEY.",
            code="weight_updates_disabled",
        )
