"""The OpenAI-compatible frontend. START HERE: `create_app` creates the whole application.

A chat completion passes through these modules:

1. middleware/                 limits, API key, request id
2. routes/chat.py              validates the body and calls the backend
3. language_model/             `triton_backend.py` calls the ensemble on the Triton server over gRPC
4. streaming/deltas.py         merges the deltas that arrive while the client is slow
5. streaming/chat_stream.py    converts deltas to OpenAI chunks, or to one whole response
6. streaming/sse.py            sends the chunks as server-sent events
"""

import functools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route

import nereid_client
from nereid_client import playground
from nereid_client.batches.lifespan import batches_lifespan
from nereid_client.database import Database
from nereid_client.embeddings.model_choice import pooling_lifespan
from nereid_client.error_responses import error_response
from nereid_client.errors import (
    ApiError,
    FieldError,
    FrontendError,
    from_field_error,
    to_api_error,
)
from nereid_client.language_model.backend import Backend
from nereid_client.middleware.admission_control import AdmissionControl, Gate
from nereid_client.middleware.allowed_hosts import AllowedHosts, names_to_check
from nereid_client.middleware.api_key import ApiKey
from nereid_client.middleware.body_limit import BodyLimit
from nereid_client.middleware.client_keys import KeyFile
from nereid_client.middleware.foreign_pages import ForeignPages
from nereid_client.middleware.request_ids import RequestIds
from nereid_client.middleware.request_metrics import CountRequests, RequestMetrics
from nereid_client.middleware.running_requests import RunningRequests
from nereid_client.middleware.shared_budget import SharedBudget
from nereid_client.middleware.timeouts import Timeouts
from nereid_client.middleware.tracing import Traces
from nereid_client.middleware.usage import Usages
from nereid_client.openapi import openapi_schema
from nereid_client.responses.background_responses import Responses
from nereid_client.responses.response_store import Limits
from nereid_client.routes import (
    batches,
    chat,
    classify,
    completions,
    embeddings,
    files,
    messages,
    models,
    pooling,
    rerank,
    responses,
    score,
    tei,
    template,
    tokenize,
)
from nereid_client.routes.operations import (
    abort,
    cache,
    health,
    metrics,
    model_control,
    weight_updates,
)
from nereid_client.settings import Settings
from nereid_client.several_models.frontend_models import create_contexts
from nereid_client.workers.forwarding import RunsElsewhereError, forward_to_worker
from nereid_client.workers.shared_limits import RequestsOfWorkers, UsagesOfWorkers, open_database
from nereid_client.workers.worker_place import WorkerPlace

_DESCRIPTION = """\
The OpenAI API for a language model, an embedding model and a reranker on a Triton server, with the
extensions of vLLM and SGLang. Each error has OpenAI's format: `{"error": {"message", "type",
"param", "code"}}`. The routes under `/v1/messages` have the formats of Anthropic's API.
"""

_ROUTERS = [
    module.router
    for module in (
        *(chat, completions, responses, messages, tokenize, files, batches),
        *(embeddings, pooling, rerank, score, classify, tei),
        *(
            models,
            model_control,
            weight_updates,
            cache,
            health,
            metrics,
            abort,
            template,
            playground,
        ),
    )
]

_log = logging.getLogger(__name__)


def create_app(
    settings: Settings,
    make_backend: Callable[[], Backend] | None = None,
    worker: WorkerPlace | None = None,
) -> FastAPI:
    """Create the ASGI application.

    Args:
        settings: the settings of the frontend.
        make_backend: a function that creates the backend after the event loop has started. By
            default, the backend is the Triton server at `settings.grpc_url`.
        worker: the number of this process, and the folder that all frontend processes share. None
            if this is the only frontend process.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        """Create the objects in `app.state` that need an event loop, and close them at shutdown."""
        contexts = create_contexts(settings, app.state.metrics, make_backend)
        app.state.contexts = contexts
        app.state.responses = Responses(
            Limits(
                count=settings.max_stored_responses,
                num_bytes=settings.max_stored_response_bytes,
                age_s=settings.stored_response_age_s,
            ),
            app.state.gate,
            settings.request_timeout_s,
            app.state.metrics,
            worker,
        )
        async with pooling_lifespan(app), batches_lifespan(app):
            yield
        await app.state.responses.close()
        if contexts.control is not None:
            await contexts.control.close()
        for context in contexts.all:
            await context.backend.close()
        if limits_database is not None:
            limits_database.close()

    app = FastAPI(
        title="Nereid",
        version=nereid_client.__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
    )
    limits_database = None if worker is None else open_database(worker.requests_path)
    running, usages = _limit_state(settings, worker, limits_database)
    app.state.worker = worker
    gate = app.state.gate = Gate(running)
    app.state.running_requests = RunningRequests()
    app.state.metrics = RequestMetrics(num_running=lambda: gate.num_requests)
    for router in _ROUTERS:
        app.include_router(router)
    app.add_exception_handler(FrontendError, _on_frontend_error)
    app.add_exception_handler(FieldError, _on_field_error)
    app.add_exception_handler(RunsElsewhereError, forward_to_worker)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_unexpected_error)
    key_file = None
    if settings.api_key_file:
        key_file = KeyFile(Path(settings.api_key_file), usages=usages)
    app.state.key_file = key_file
    _add_middleware(app, settings, key_file)
    app.openapi = functools.partial(_openapi, app)  # type: ignore[method-assign]
    return app


def _limit_state(
    settings: Settings, worker: WorkerPlace | None, database: Database | None
) -> tuple[SharedBudget, Usages]:
    """Return the counter of running requests, and the object that stores each API key's usage.

    If there are several frontend processes, they share the counts and the usage in `database`.
    """
    limit = settings.max_concurrent_requests
    if worker is None or database is None:
        return SharedBudget(limit), Usages()
    return RequestsOfWorkers(limit, database, worker.number), UsagesOfWorkers(database)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI schema. The schema is generated once and then cached."""
    if app.openapi_schema is None:
        app.openapi_schema = openapi_schema(app)
    return app.openapi_schema


def _add_middleware(app: FastAPI, settings: Settings, key_file: KeyFile | None) -> None:
    """Add the middleware. The middleware that is added last is the first to receive a request.

    CountRequests and RequestIds receive a request first, because rejected requests are also counted
    and have an id. AllowedHosts and ForeignPages refuse requests of web pages. ApiKey finds the
    client, whose limits AdmissionControl and BodyLimit then check. BodyLimit is the last, because
    the bodies of rejected requests are not read, and because the time limit includes the time in
    which a body arrives. Traces also records rejected requests, and needs the id of a request.
    """
    metrics = app.state.metrics
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body_bytes,
        # Each worker process counts only the bodies that it receives itself. The limit is therefore
        # divided by the number of worker processes.
        max_total_bytes=settings.max_total_body_bytes // settings.frontend_workers,
        timeout_s=settings.receive_timeout_s,
        metrics=metrics,
    )
    app.add_middleware(
        Timeouts,
        limit_s=settings.request_timeout_s,
        unread_s=settings.unread_timeout_s,
        metrics=metrics,
        running=app.state.running_requests,
    )
    app.add_middleware(AdmissionControl, gate=app.state.gate, metrics=metrics)
    app.add_middleware(ApiKey, key=settings.api_key, key_file=key_file, metrics=metrics)
    app.add_middleware(ForeignPages, origins=settings.origins)
    if settings.origins:
        _add_cors(app, settings.origins)
    host_names = names_to_check(settings)
    if host_names is not None:
        app.add_middleware(AllowedHosts, names=host_names)
    app.add_middleware(Traces)
    app.add_middleware(RequestIds)
    routes = [route for router in _ROUTERS for route in router.routes]
    app.add_middleware(CountRequests, metrics=metrics, routes=routes)


def _add_cors(app: FastAPI, origins: Sequence[str]) -> None:
    """Add the middleware that allows web pages of other origins to send requests.

    A browser first sends an OPTIONS request without an API key. This middleware must answer the
    request before ApiKey rejects it, and is therefore added after ApiKey.
    """
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Request-Id", "Retry-After"],
    )


async def _on_frontend_error(request: Request, error: Exception) -> Response:
    """Return the response for an error that the frontend raised on purpose."""
    assert isinstance(error, FrontendError)  # Starlette calls this function for no other error
    api_error = to_api_error(error)
    request.app.state.metrics.count_refusal(api_error)
    if api_error.status >= 500:
        _log.warning(
            "Request %s failed with status %d: %s",
            request.state.request_id,
            api_error.status,
            error,
            extra={"request_id": request.state.request_id},
        )
    return error_response(api_error, request.scope)


async def _on_field_error(request: Request, error: Exception) -> Response:
    """Return the response for a FieldError that was raised outside of pydantic's validation."""
    assert isinstance(error, FieldError)  # Starlette calls this function for no other error
    return await _on_frontend_error(request, from_field_error(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Return the response for an exception of Starlette, for example for an unknown path."""
    assert isinstance(error, HTTPException)  # Starlette calls this function for no other error
    method, path = request.method, request.url.path
    headers = dict(error.headers or {})
    match error.status_code:
        case 404:
            message = (
                f"{method} {path} is not a route of this server. GET /openapi.json lists all "
                "routes."
            )
        case 405:
            allowed = ", ".join(_allowed_methods(request))
            headers["Allow"] = allowed
            message = f"The path {path} does not allow the method {method}. Use {allowed}."
        case _:
            message = f"{method} {path} failed: {error.detail}"
    return error_response(ApiError(error.status_code, message, headers=headers), request.scope)


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods that the path of a request allows.

    Several routes may have the same path, such as `GET /v1/files` and `POST /v1/files`. Starlette
    reports only the methods of the first of these routes.
    """
    routes = [*request.app.routes, *(route for router in _ROUTERS for route in router.routes)]
    matching = (
        route
        for route in routes
        if isinstance(route, Route) and route.matches(request.scope)[0] != Match.NONE
    )
    return sorted({method for route in matching for method in route.methods or ()})


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    """Return the response for an unexpected exception. Starlette then logs the traceback."""
    request_id = getattr(request.state, "request_id", "unknown")
    message = (
        f"The server has a bug: it failed with an unexpected {type(error).__name__}. The log of "
        f"the frontend has the traceback. The id of this request is {request_id}."
    )
    return error_response(ApiError(500, message, code="internal_error"), request.scope)
