"""GET /v1/models and /v1/models/{model_id}."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request

from nereid_client.embeddings.model_choice import pooling_models_of
from nereid_client.error_responses import uses_anthropic_api
from nereid_client.errors import ApiError, BackendError
from nereid_client.request_context import Context, context_of, contexts_of

router = APIRouter(tags=["Operation"])


@router.get("/v1/models", summary="List the served models")
async def list_models(request: Request) -> dict[str, Any]:
    """Return the language model, its LoRA adapters, the embedding model and the reranker."""
    context = context_of(request)
    names = await _served_names(request)
    if uses_anthropic_api(request.scope):
        models = [_anthropic_model(context, name) for name in names]
        return {"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    name_of_alias = _name_of_alias(request)
    models = [_model(context, name, root=name_of_alias.get(name, name)) for name in names]
    return {"object": "list", "data": models}


@router.get("/v1/models/{model_id:path}", summary="Get one served model")
async def get_model(request: Request, model_id: str) -> dict[str, Any]:
    """Return the properties of the served model whose name or alias is `model_id`.

    Clients of Anthropic's API receive the properties in the format of that API.

    If there is no such model, the error names the served models.
    """
    names = await _served_names(request)
    if model_id not in names:
        raise ApiError(
            404,
            f"The model {model_id!r} does not exist. This server serves "
            f"{', '.join(map(repr, names))}.",
            param="model",
            code="model_not_found",
        )
    if uses_anthropic_api(request.scope):
        return _anthropic_model(context_of(request), model_id)
    root = _name_of_alias(request).get(model_id, model_id)  # vLLM's field for the unaliased name
    return _model(context_of(request), model_id, root=root)


async def _served_names(request: Request) -> list[str]:
    """Return the names of all served models. The first name belongs to the language model."""
    contexts = contexts_of(request)
    adapters = [name for context in contexts.all for name in await _adapter_names(context)]
    pooling_models = pooling_models_of(request)
    pooling_names = [model.name for model in await pooling_models.all()]
    aliases = [name for target in pooling_models.targets for name in target.names]
    return list(dict.fromkeys([*contexts.by_name, *adapters, *pooling_names, *aliases]))


def _name_of_alias(request: Request) -> dict[str, str]:
    """Return a dict that maps each alias to the name of the model with this alias."""
    names = {
        alias: context.settings.model_name
        for context in contexts_of(request).all
        for alias in context.aliases
    }
    for target in pooling_models_of(request).targets:
        # The first entry of `names` is the model's name. The other entries are its aliases.
        names |= dict.fromkeys(target.names[1:], *target.names[:1])
    return names


async def _adapter_names(context: Context) -> list[str]:
    """Return the names of the LoRA adapters, or an empty list if the server does not answer."""
    try:
        return await context.adapters.names()
    except BackendError:
        return []


def _model(context: Context, name: str, *, root: str) -> dict[str, Any]:
    """Return a model in OpenAI's format.

    Args:
        context: the context of the default language model.
        name: the name or the alias with which requests select the model.
        root: the name of the model, as in vLLM. It differs from `name` if `name` is an alias.
    """
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "nereid",
        "root": root,
        "parent": None,
    }


def _anthropic_model(context: Context, name: str) -> dict[str, Any]:
    """Return a model in Anthropic's format."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(context.created, UTC).isoformat(),
        "lifecycle": "active",
    }
