"""GET /v1/models and /v1/models/{model_id}."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from nereid_client.embeddings.model_choice import pooling_models_of
from nereid_client.error_responses import uses_anthropic_api
from nereid_client.errors import ApiError, BackendError, shown
from nereid_client.request_context import Context, context_of, contexts_of, validate

router = APIRouter(tags=["Operation"])


class _PageQuery(BaseModel):
    """The query parameters that select a page of the list in Anthropic's API."""

    limit: Annotated[int, Field(ge=1, le=1000)] | None = None
    after_id: str | None = None
    before_id: str | None = None


@router.get("/v1/models", summary="List the served models")
async def list_models(request: Request) -> dict[str, Any]:
    """Return the language model, its LoRA adapters, the embedding model and the reranker.

    Clients of Anthropic's API receive the list in the format of that API, and can request a part of
    the list with `limit` (1 to 1000, default all models), `after_id` and `before_id`.
    """
    context = context_of(request)
    names = await _served_names(request)
    if uses_anthropic_api(request.scope):
        query = validate(_PageQuery, dict(request.query_params))
        page, has_more = _page(names, query)
        return {
            "data": [_anthropic_model(context, name) for name in page],
            "has_more": has_more,
            "first_id": page[0] if page else None,
            "last_id": page[-1] if page else None,
        }
    name_of_alias = _name_of_alias(request)
    models = [
        _openai_model(name, context.created, root=name_of_alias.get(name, name)) for name in names
    ]
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
    return _openai_model(model_id, context_of(request).created, root=root)


def _page(names: Sequence[str], query: _PageQuery) -> tuple[Sequence[str], bool]:
    """Return the names on a page, and whether there are more names in the direction of the query.

    Example: for the names "a", "b" and "c", the query `before_id=c&limit=1` returns (["b"], True).
    """
    for param, name in (("after_id", query.after_id), ("before_id", query.before_id)):
        if name is not None and name not in names:
            raise ApiError(
                404,
                f"The parameter {param!r} must be the id of a model, but it is {shown(name)}",
                param=param,
            )
    begin = 0 if query.after_id is None else names.index(query.after_id) + 1
    end = len(names) if query.before_id is None else names.index(query.before_id)
    selected = names[begin:end]
    limit = query.limit or len(names)
    page = selected[:limit] if query.before_id is None else selected[-limit:]
    return page, len(page) < len(selected)


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


def _openai_model(name: str, created: int, *, root: str) -> dict[str, Any]:
    """Return a model in OpenAI's format.

    Args:
        name: the name or the alias with which requests select the model.
        created: the time in seconds since 1970 that the API returns for all models.
        root: the name of the model, as in vLLM. It differs from `name` if `name` is an alias.
    """
    return {
        "id": name,
        "object": "model",
        "created": created,
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
