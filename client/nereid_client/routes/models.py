"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from fastapi import APIRouter, Request

from nereid_client.context import Context, context_of

router = APIRouter()


@router.get("/v1/models", summary="The models served here")
async def list_models(request: Request) -> dict[str, Any]:
    """One model for now."""
    return {"object": "list", "data": [_card(context_of(request))]}


@router.get("/v1/models/{model_id:path}", summary="One model")
async def get_model(request: Request, model_id: str) -> dict[str, Any]:
    """The model of that name, or a 404 that names what is served."""
    context = context_of(request)
    context.check_model(model_id)
    return _card(context)


def _card(context: Context) -> dict[str, Any]:
    return {
        "id": context.settings.model_name,
        "object": "model",
        "created": context.created,
        "owned_by": "nereid",
        "root": context.settings.model_name,
        "parent": None,
    }
