"""GET, POST and DELETE /v1/cache."""

from typing import Any

from fastapi import APIRouter, Request

from nereid_client.errors import ApiError
from nereid_client.middleware.client_keys import current_client
from nereid_client.protocol.operations.cache_requests import RETENTION_S, ExtendSessionRequest
from nereid_client.request_context import (
    context_of,
    find_context,
    read_body,
    validate,
)
from nereid_client.routes.operations.triton_parameter import check_parameter

router = APIRouter(tags=["Operation"])


@router.get("/v1/cache", summary="Statistics of the prefix cache")
async def cache_statistics(request: Request, model: str | None = None) -> dict[str, Any]:
    """Return the counters of the prefix cache, and a list of the cache's sessions.

    A session consists of the cached prefixes of all requests with the same `prompt_cache_key`. If a
    client uses a key of the key file, the list contains only the sessions of this client.
    """
    _select_model(request, model)
    statistics = await _call_prefix_cache(request, {"cache": "statistics"})
    return {"object": "cache", "model": context_of(request).settings.model_name, **statistics}


@router.post("/v1/cache", summary="Retain the cached prefixes of a session for a longer time")
async def extend_session(request: Request) -> dict[str, Any]:
    """Retain the cached prefixes of a session for at least the requested time."""
    body = validate(ExtendSessionRequest, await read_body(request))
    check_parameter(body.prompt_cache_key, "prompt_cache_key")
    _select_model(request, body.model)
    seconds = RETENTION_S[body.prompt_cache_retention]
    parameters = {"prompt_cache_key": body.prompt_cache_key, "seconds": str(seconds)}
    answer = await _call_prefix_cache(request, {"cache": "extend", **parameters})
    num_extended_sessions = answer["num_sessions"]
    if not num_extended_sessions:
        raise ApiError(
            404,
            f"No cached prefix has the prompt_cache_key {body.prompt_cache_key!r}. It was never "
            "used, it has expired, or its blocks were evicted.",
            param="prompt_cache_key",
            code="cache_key_not_found",
        )
    return {
        "object": "cache",
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
    }


@router.delete("/v1/cache", summary="Remove cached prefixes")
async def drop_sessions(
    request: Request, prompt_cache_key: str | None = None, model: str | None = None
) -> dict[str, Any]:
    """Remove the cached prefixes of a session, or all cached prefixes.

    Blocks that running requests use stay in the cache. If a client uses a key of the key file, only
    the prefixes of this client's sessions are removed.
    """
    _select_model(request, model)
    check_parameter(prompt_cache_key or "", "prompt_cache_key")
    key = {} if prompt_cache_key is None else {"prompt_cache_key": prompt_cache_key}
    answer = await _call_prefix_cache(request, {"cache": "drop", **key})
    return {"object": "cache", "deleted": True, **answer}


def _select_model(request: Request, model: str | None) -> None:
    """Store the context of the language model `model` in `request.state.context`."""
    context = find_context(request, model)
    if context is None:
        raise ApiError(
            404,
            f"The language model {model!r} does not exist. Only language models have a prefix "
            "cache.",
            param="model",
            code="model_not_found",
        )
    request.state.context = context


async def _call_prefix_cache(request: Request, parameters: dict[str, str]) -> dict[str, Any]:
    """Send a request about the prefix cache to the executor model, and return the answer.

    If the client uses a key of the key file, the call is limited to the sessions of this client.
    """
    client = current_client.get()
    if client.name:
        parameters = {**parameters, "client_id": client.share}
    return await context_of(request).backend.call_cache(parameters)
