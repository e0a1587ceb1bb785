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

    As in vLLM, `max_model_len` is the largest number of tokens of a request to the model. It is
    null if the model has not been loaded yet.

    Clients of Anthropic's API receive the list in the format of that API, and can request a part of
    the list with `limit` (1 to 1000, default all models), `after_id` and `before_id`.
    """
    context = context_of(request)
    lengths = await _max_lengths(request)
    names = list(lengths)
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
        _openai_model(name, context.created, name_of_alias.get(name, name), length)
        for name, length in lengths.items()
    ]
    return {"object": "list", "data": models}


@router.get("/v1/models/{model_id:path}", summary="Get one served model")
async def get_model(request: Request, model_id: str) -> dict[str, Any]:
    """Return the properties of the served model whose name or alias is `model_id`.

    Clients of Anthropic's API receive the properties in the format of that API.

    If there is no such model, the error names the served models.
    """
    if not model_id:  # the path is /v1/models/
        return await list_models(request)
    lengths = await _max_lengths(request)
    if model_id not in lengths:
        raise ApiError(
            404,
            f"The model {model_id!r} does not exist. This server serves "
            f"{', '.join(map(repr, lengths))}.",
            param="model",
            code="model_not_found",
        )
    if uses_anthropic_api(request.scope):
        return _anthropic_model(context_of(request), model_id)
    root = _name_of_alias(request).get(model_id, model_id)  # vLLM's field for the unaliased name
    return _openai_model(model_id, context_of(request).created, root, lengths[model_id])


def _page(names: Sequence[str], query: _PageQuery) -> tuple[Sequence[str], bool]:
    """Return the names on a page, and whether another page follows in the direction of paging.

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


async def _max_lengths(request: Request) -> dict[str, int | None]:
    """Return the max_model_len of each served model, by the name or the alias of the model.

    The first name belongs to the language model. The length is None if it is not known, because the
    model has not been loaded yet or the server does not answer.
    """
    contexts = contexts_of(request)
    lengths = {name: await _max_length(context) for name, context in contexts.by_name.items()}
    for context in contexts.all:
        for name in await _adapter_names(context):
            lengths.setdefault(name, await _max_length(context))
    pooling_models = pooling_models_of(request)
    for model in await pooling_models.all():
        lengths.setdefault(model.name, model.info.get("max_model_len"))
    for target in pooling_models.targets:
        for alias in target.names:
            lengths.setdefault(alias, lengths.get(target.names[0]))
    return lengths


async def _max_length(context: Context) -> int | None:
    """Return the max_model_len of a language model, or None if the server does not answer."""
    limits = await context.limits.get()
    return None if limits is None else limits.max_model_len


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


def _openai_model(name: str, created: int, root: str, max_model_len: int | None) -> dict[str, Any]:
    """Return a model in OpenAI's format, with further fields of vLLM.

    Args:
        name: the name or the alias with which requests select the model.
        created: the time in seconds since 1970 that the API returns for all models.
        root: the name of the model. It differs from `name` if `name` is an alias.
        max_model_len: the largest number of tokens of a request, or None if it is not known.
    """
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "nereid",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
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
