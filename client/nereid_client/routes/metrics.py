"""GET /metrics."""

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from nereid_client.middleware.request_metrics import RequestMetrics

router = APIRouter(tags=["Operation"])


@router.get("/metrics", summary="Get the metrics of the frontend", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return the frontend's metrics in the text format of Prometheus.

    The metrics count the requests by route and status, the requests that a limit of the frontend
    refused, and the requests that run now. The metrics of the models are on the port of the
    Triton server's metrics. This route needs no API key, so that Prometheus can read it.
    """
    request_metrics: RequestMetrics = request.app.state.metrics
    return Response(request_metrics.as_text(), media_type=CONTENT_TYPE_LATEST)
