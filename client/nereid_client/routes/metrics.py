"""GET /metrics."""

import asyncio

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from nereid_client.middleware.request_metrics import RequestMetrics
from nereid_client.request_context import context_of
from nereid_client.supervise.frontend_client import fetch

router = APIRouter(tags=["Operation"])

_TIMEOUT_S = 3.0  # Prometheus waits 10 s by default


@router.get("/metrics", summary="Get the metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return the metrics of the frontend and of the Triton server in the format of Prometheus.

    The frontend's metrics count the requests by route and status, the requests that a limit of the
    frontend refused, and the requests that run now. The server's metrics are included if the
    setting metrics_url has their URL. This route needs no API key, so that Prometheus can read it.
    """
    request_metrics: RequestMetrics = request.app.state.metrics
    url = context_of(request).settings.metrics_url
    server_page = b""
    if url:
        answer = await asyncio.to_thread(fetch, url, _TIMEOUT_S)
        request_metrics.set_server_metrics_up(is_up=answer.status == 200)
        if answer.status == 200:
            server_page = answer.text.encode()
    return Response(request_metrics.as_text() + server_page, media_type=CONTENT_TYPE_LATEST)
