"""The OpenAI-compatible frontend: START HERE. This file reads as a table of contents.

A request goes: middleware.py, admission.py and deadlines.py -> routes/chat.py (decode) ->
backends.py (call the ensemble over gRPC) -> deltas.py (merge what queues up) -> chat_stream.py
(encode) -> sse.py (send).
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import nereid_client
from nereid_client.errors import ApiError, FrontendError, to_api_error
from nereid_client.middleware import body_limit as middleware
from nereid_client.middleware.admission_control import Admission, Gate
from nereid_client.middleware.timeouts import Deadlines
from nereid_client.request_context import Context
from nereid_client.responses.background_responses import Responses
from nereid_client.responses.response_store import Limits
from nereid_client.routes import chat, completions, health, models, pooling, responses, tokenize
from nereid_client.settings import Settings
from nereid_client.triton_backend import Backend, TritonBackend

_log = logging.getLogger(__name__)


def create_app(settings: Settings, make_backend: Callable[[], Backend] | None = None) -> FastAPI:
    """The ASGI application.

    Args:
        settings: see `Settings`.
        make_backend: called once the event loop runs; the Triton server's by default.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        backend = (
            make_backend() if make_backend else TritonBackend(settings.grpc_url, settings.ensemble)
        )
        app.state.context = Context(settings, backend)
        app.state.responses = Responses(
            Limits(
                count=settings.max_stored_responses,
                num_bytes=settings.max_stored_response_bytes,
                age_s=settings.stored_response_age_s,
            ),
            app.state.gate,
            settings.request_timeout_s,
        )
        yield
        await app.state.responses.close()
        await backend.close()

    app = FastAPI(title="Nereid", version=nereid_client.__version__, lifespan=lifespan)
    app.state.gate = Gate(settings.max_concurrent_requests)
    for route in (chat, completions, responses, pooling, tokenize, models, health):
        app.include_router(route.router)
    app.add_exception_handler(FrontendError, _on_frontend_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)

    # The last one added sees a request first.
    app.add_middleware(middleware.BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(
        Deadlines, limit_s=settings.request_timeout_s, unread_s=settings.unread_timeout_s
    )
    app.add_middleware(Admission, gate=app.state.gate)
    if settings.api_key:
        app.add_middleware(middleware.ApiKey, key=settings.api_key)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(middleware.RequestIds)
    return app


async def _on_frontend_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, FrontendError):
        raise error
    answer = to_api_error(error)
    if answer.status >= 500:
        _log.warning("request %s failed: %s", request.state.request_id, error)
    return middleware.error_response(answer)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own errors: no such path, wrong method."""
    if not isinstance(error, HTTPException):
        raise error
    message = f"{request.method} {request.url.path}: {error.detail}"
    return middleware.error_response(
        ApiError(error.status_code, message, headers=dict(error.headers or {}))
    )


async def _on_bug(request: Request, error: Exception) -> Response:
    """Anything else is our mistake; Starlette logs the traceback after this answer."""
    request_id = getattr(request.state, "request_id", "unknown")
    message = f"internal error ({type(error).__name__}); request id {request_id}"
    return middleware.error_response(ApiError(500, message, code="internal_error"))
