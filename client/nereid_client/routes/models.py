"""GET /v1/models and /v1/models/{model_id}."""

from typing import Any

from fastapi import APIRouter, Request

from nereid_client.embeddings.model_choice import pooling_of
from nereid_client.request_context import Context, context_of

router = APIRouter(tags=["Operation"])


@router.get("/v1/models", summary="List the served models")
async def list_models(request: Request) -> dict[str, Any]:
    """Return the language model, and the embedding model and the reranker if they are served."""
    context = context_of(request)
    names = [context.settings.model_name, *await _pooling_names(request)]
    return {"object": "list", "data": [_model(context, name) for name in dict.fromkeys(names)]}


@router.get("/v1/models/{model_id:path}", summary="Get one served model")
async def get_model(request: Request, model_id: str) -> dict[str, Any]:
    """Return the model of this name, or a 404 that names the served model."""
    context = context_of(request)
    if model_id not in await _pooling_names(request):
        context.check_model(model_id)
    return _model(context, model_id)


async def _pooling_names(request: Request) -> list[str]:
    return [served.name for served in await pooling_of(request).directory.all()]


def _model(context: Context, name: str) -> dict[str, Any]:
    """Return a model in OpenAI's format."""
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "nereid",
        "root": name,
        "parent": None,
    }
