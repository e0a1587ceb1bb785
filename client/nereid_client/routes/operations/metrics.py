"""GET /metrics."""

import asyncio

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from nereid_client.middleware.request_metrics import RequestMetrics
from nereid_client.request_context import context_of, contexts_of
from nereid_client.supervise.frontend_client import fetch
from nereid_client.vllm_metric_names import with_vllm_names

router = APIRouter(tags=["Operation"])

_TIMEOUT_S = 3.0  # Prometheus waits 10 s by default


@router.get("/metrics", summary="Get the metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return the metrics of the frontend and of the Triton server in the format of Prometheus.

    The frontend's metrics count the requests by route and status, the requests and tokens of each
    client, the requests that a limit of the frontend refused, and the requests that run now. The
    server's metrics are included if the setting metrics_url has their URL. This route needs no API
    key, so that Prometheus can read the metrics.
    """
    request_metrics: RequestMetrics = request.app.state.metrics
    settings = context_of(request).settings
    server_page = ""
    if settings.metrics_url:
        server_page = await _server_page(settings.metrics_url, request_metrics)
    if settings.metrics_names == "vllm":
        # Without --config, the Triton server always calls the language model "llm".
        names = {"llm": settings.model_name}
        for context in contexts_of(request).all:
            names[context.settings.ensemble] = context.settings.model_name
        server_page = with_vllm_names(server_page, names)
    page = request_metrics.as_text() + server_page.encode()
    return Response(page, media_type=CONTENT_TYPE_LATEST)


async def _server_page(url: str, request_metrics: RequestMetrics) -> str:
    """Return the metrics of the Triton server, or "" if the server does not answer."""
    answer = await asyncio.to_thread(fetch, url, _TIMEOUT_S)
    is_up = answer.status == 200
    request_metrics.set_server_metrics_up(is_up=is_up)
    return answer.text if is_up else ""
