"""The routes GET /health, /health/ready, /ping and /version.

The first three routes also accept HEAD requests, because programs such as `wget --spider` send a
HEAD request.
"""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

import nereid_client
from nereid_client.middleware.admission_control import Gate
from nereid_client.request_context import context_of

router = APIRouter(tags=["Operation"])


@router.head("/health", include_in_schema=False)
@router.head("/ping", include_in_schema=False)
@router.get("/health", summary="Check whether the server is alive")
@router.get("/ping", summary="Check whether the server is alive (Amazon SageMaker's path)")
async def health(request: Request) -> JSONResponse:
    """Return 200 if the Triton server answers, else 503."""
    is_live = await context_of(request).backend.is_live()
    return _response(None if is_live else "the Triton server does not answer")


@router.head("/health/ready", include_in_schema=False)
@router.get("/health/ready", summary="Check whether the server accepts requests")
async def ready(request: Request) -> JSONResponse:
    """Return 200 if the language model is loaded, else 503.

    The response also contains the number of requests that are running in this frontend.
    """
    gate: Gate = request.app.state.gate
    if gate.is_draining:
        return _response("the server is stopping", gate.num_requests)
    is_ready = await context_of(request).backend.is_ready()
    return _response(None if is_ready else "the language model is not ready", gate.num_requests)


@router.get("/version", summary="Get the version of the frontend")
async def version() -> dict[str, str]:
    """Return the version of the package nereid-client."""
    return {"version": nereid_client.__version__}


def _response(problem: str | None, num_requests: int | None = None) -> JSONResponse:
    """Return a response with the status 200, or with the status 503 if `problem` is given."""
    counts = {} if num_requests is None else {"num_requests": num_requests}
    if problem is None:
        return JSONResponse({"status": "ok", **counts})
    headers = {"Retry-After": "1"}
    return JSONResponse({"status": problem, **counts}, status_code=503, headers=headers)
