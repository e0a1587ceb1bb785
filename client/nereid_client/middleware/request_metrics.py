"""The metrics of the frontend, in the format of Prometheus.

The Triton server has its own metrics. These metrics cannot count the requests that the frontend
refuses, because the server never receives such requests.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nereid_client.errors import ApiError
from nereid_client.json_logs import REQUEST_FIELDS
from nereid_client.workers.worker_place import is_from_worker

SUPERVISOR_USER_AGENT = "nereid-serve"
"""The user agent of the requests that `nereid serve` sends to the frontend."""
_log = logging.getLogger(__name__)

# If this variable is set, prometheus_client stores the metrics of each process in files.
_FILES_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_CLIENT_CLOSED_REQUEST = 499  # the status 499, which nginx introduced for clients that disconnect
_UNKNOWN_ROUTE = "unknown"
_DURATION_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class RequestMetrics:
    """The Prometheus metrics of the frontend."""

    def __init__(self, num_running: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "nereid_frontend_requests",
            "HTTP requests that the frontend has answered. The status is 499 if the client closed "
            "the connection before the response began. The checks of `nereid serve` are not "
            "counted.",
            ["route", "status"],
            registry=self._registry,
        )
        self._refused = Counter(
            "nereid_frontend_refused_requests",
            "Requests that the frontend refused or ended itself. The label limit is the setting "
            "that refused the request, or one of: overload, draining, x_request_timeout.",
            ["limit", "status"],
            registry=self._registry,
        )
        self._durations = Histogram(
            "nereid_frontend_request_duration_seconds",
            "Time from the arrival of a request to the end of its response.",
            ["route"],
            buckets=_DURATION_BUCKETS_S,
            registry=self._registry,
        )
        self._client_requests = Counter(
            "nereid_frontend_client_requests",
            "Answered HTTP requests of each client in the file api_key_file.",
            ["client", "status"],
            registry=self._registry,
        )
        self._client_tokens = Counter(
            "nereid_frontend_client_tokens",
            "Tokens of each client in the file api_key_file. The label kind is prompt or "
            "generation.",
            ["client", "kind"],
            registry=self._registry,
        )
        self._num_running = num_running
        self._running = Gauge(
            "nereid_frontend_running_requests",
            "Requests that run now, including responses that run in the background.",
            registry=self._registry,
            multiprocess_mode="mostrecent",
        )
        self._server_metrics_up = Gauge(
            "nereid_frontend_server_metrics_up",
            "1 if this page contains the metrics of the Triton server, else 0.",
            registry=self._registry,
            multiprocess_mode="mostrecent",
        )

    def set_server_metrics_up(self, *, is_up: bool) -> None:
        """Record whether the last request for the Triton server's metrics succeeded."""
        self._server_metrics_up.set(is_up)

    def count_request(self, route: str, status: int, duration_s: float) -> None:
        """Count a request that has been answered.

        Args:
            route: the path of the route with its placeholders, such as "/v1/models/{model_id}".
            status: the HTTP status of the response.
            duration_s: the time from the arrival of the request to the end of the response.
        """
        self._requests.labels(route, str(status)).inc()
        self._durations.labels(route).observe(duration_s)

    def count_client_request(self, client: str, status: int) -> None:
        """Count an answered request in the metrics of a client. Ignore clients without a name.

        Only clients in the key file have names, so the number of time series is limited.
        """
        if client:
            self._client_requests.labels(client, str(status)).inc()

    def count_client_tokens(self, client: str, num_prompt: int, num_generated: int) -> None:
        """Count a request's tokens in the metrics of its client. Ignore clients without a name."""
        if client:
            self._client_tokens.labels(client, "prompt").inc(num_prompt)
            self._client_tokens.labels(client, "generation").inc(num_generated)

    def count_refusal(self, error: ApiError) -> None:
        """Count a request that the frontend rejected because of a limit.

        Do nothing if `error.limit` is None, because no limit caused such an error.
        """
        if error.limit is not None:
            self._refused.labels(error.limit, str(error.status)).inc()

    def as_text(self) -> bytes:
        """Return all metrics in the text format of Prometheus.

        With several frontend processes, the counters and histograms are the sums over all
        processes, including the processes that have ended.
        """
        self._running.set(self._num_running())
        if _FILES_VARIABLE not in os.environ:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


class CountRequests:
    """Middleware that counts and logs each request, with the route and the status of the response.

    The health checks of `nereid serve` are not counted, because there are several of them a second
    during a start. If another frontend process has forwarded a request, only the other process
    counts the request.
    """

    def __init__(self, app: ASGIApp, metrics: RequestMetrics, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application and count the request when its response ends."""
        if scope["type"] != "http" or is_from_worker(scope):
            await self._app(scope, receive, send)
            return
        status: int | None = None  # None until a response starts
        arrived = time.monotonic()

        async def send_observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_observed)
        except Exception:
            if status is None:
                status = 500  # Starlette sends this response after all middleware
            raise
        finally:
            if status is None:
                status = _CLIENT_CLOSED_REQUEST
            # The health checks of `nereid serve` are not counted. `is_from_supervisor` recognises
            # them by their user agent, which any client can send. If a request has a key of the key
            # file, its state contains a client. Such a request is always counted, because `nereid
            # serve` never uses a key of the key file.
            if not is_from_supervisor(scope) or scope.get("state", {}).get("client"):
                self._record(scope, status, time.monotonic() - arrived)

    def _record(self, scope: Scope, status: int, duration_s: float) -> None:
        """Count a request whose response has ended, and log the request.

        A successful GET or HEAD request is not logged, because monitoring systems send many such
        requests.
        """
        route = self._path(scope)
        state = scope.get("state", {})
        self._metrics.count_request(route, status, duration_s)
        self._metrics.count_client_request(state.get("client", ""), status)
        if scope["method"] in ("GET", "HEAD") and status < 400:
            return
        facts = {"route": route, "status": status, "duration_s": round(duration_s, 3)}
        ids = {name: state[name] for name in REQUEST_FIELDS if state.get(name)}
        _log.info("%s %s %d", scope["method"], route, status, extra=facts | ids)

    def _path(self, scope: Scope) -> str:
        """Return the path of a request's route, with placeholders such as `{response_id}`.

        The path of the request itself would add a time series for each path that a client invents.
        If a middleware has refused the request, the scope contains no route. The method then
        searches for the route.

        Example: "/v1/responses/resp_1" returns "/v1/responses/{response_id}".
        """
        route: BaseRoute | None = scope.get("route")
        if route is None:
            route = self._matching_route(scope)
        return str(getattr(route, "path_format", _UNKNOWN_ROUTE))

    def _matching_route(self, scope: Scope) -> BaseRoute | None:
        """Return the route that matches the path and the method of a request.

        If there is no such route, return the first route that matches the path, or None.
        """
        first_of_path = None
        for route in self._routes:
            match, _ = route.matches(scope)
            if match == Match.FULL:
                return route
            if match == Match.PARTIAL and first_of_path is None:
                first_of_path = route
        return first_of_path


def is_from_supervisor(scope: Scope) -> bool:
    """Return whether a request comes from `nereid serve`, according to the header User-Agent."""
    return Headers(scope=scope).get("user-agent") == SUPERVISOR_USER_AGENT
