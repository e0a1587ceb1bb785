"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from fastapi import APIRouter, Request

from nereid_client.embeddings.model_choice import pooling_of
from nereid_client.request_context import Context, context_of

router = APIRouter()


@router.get("/v1/models", summary="The models served here")
async def list_models(request: Request) -> dict[str, Any]:
    """The language model, and the embedding model and reranker where they are served."""
    context = context_of(request)
    names = [context.settings.model_name, *await _pooling_names(request)]
    return {"object": "list", "data": [_card(context, name) for name in dict.fromkeys(names)]}


@router.get("/v1/models/{model_id:path}", summary="One model")
async def get_model(request: Request, model_id: str) -> dict[str, Any]:
    """The model of that name, or a 404 that names what is served."""
    context = context_of(request)
    if model_id not in await _pooling_names(request):
        context.check_model(model_id)
    return _card(context, model_id)


async def _pooling_names(request: Request) -> list[str]:
    return [served.name for served in await pooling_of(request).directory.all()]


def _card(context: Context, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "nereid",
        "root": name,
        "parent": None,
    }
