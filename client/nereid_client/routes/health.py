"""GET /health, /health/ready, /ping and /version: for probes, load balancers and people."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

import nereid_client
from nereid_client.middleware.admission_control import Gate
from nereid_client.request_context import context_of

router = APIRouter()


@router.get("/health", summary="Is the server alive?")
@router.get("/ping", summary="The same, by the name Amazon SageMaker asks for")
async def health(request: Request) -> JSONResponse:
    """200 while the Triton server behind this frontend answers, else 503."""
    return _answer(await context_of(request).backend.is_live(), "the Triton server doesn't answer")


@router.get("/health/ready", summary="Can it take requests?")
async def ready(request: Request) -> JSONResponse:
    """200 once the model is loaded, else 503; also how many requests are in work here."""
    gate: Gate = request.app.state.gate
    if gate.is_draining:
        return _answer(False, "the server is stopping", gate.num_requests)
    is_ready = await context_of(request).backend.is_ready()
    return _answer(is_ready, "the model is not ready", gate.num_requests)


@router.get("/version", summary="Version of this frontend")
async def version() -> dict[str, str]:
    """The package's version."""
    return {"version": nereid_client.__version__}


def _answer(is_well: bool, trouble: str, num_requests: int | None = None) -> JSONResponse:
    told = {} if num_requests is None else {"num_requests": num_requests}
    if is_well:
        return JSONResponse({"status": "ok", **told})
    return JSONResponse({"status": trouble, **told}, status_code=503, headers={"Retry-After": "1"})
