"""Runs the application of the frontend in this process."""

import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from nereid_client.app import create_app
from nereid_client.json_logs import uvicorn_log_config
from nereid_client.language_model.backend import Backend
from nereid_client.middleware.admission_control import Gate
from nereid_client.middleware.http_protocol import protocol_class
from nereid_client.settings import Settings, SettingsError
from nereid_client.workers.listening_sockets import listening_sockets
from nereid_client.workers.worker_place import WorkerPlace
from nereid_client.workers.worker_pool import worker_sockets

# The frontend closes a connection that has been idle for this number of seconds. The time must be
# longer than the idle times of clients and load balancers. Otherwise, the frontend could close a
# connection just when a request arrives on it. Example: httpx, which OpenAI's library uses, closes
# idle connections after 5 s.
_KEEP_ALIVE_S = 75

# During a shutdown, running requests may continue for this number of seconds. uvicorn then cancels
# the remaining requests.
_SHUTDOWN_TIMEOUT_S = 5

# prometheus_client stores the metrics of each kind in a file of its own. The metrics of a worker
# need less than 100 KiB, unless there are hundreds of clients.
_METRIC_KINDS = ("counter", "histogram", "gauge_mostrecent")
_METRICS_BYTES = 256 * 1024

_log = logging.getLogger("uvicorn.error")  # uvicorn shows the messages of this logger


def run_frontend(
    settings: Settings,
    worker: WorkerPlace | None = None,
    make_backend: Callable[[], Backend] | None = None,
) -> None:
    """Run the frontend until SIGINT or SIGTERM. After SIGUSR1, the frontend rejects new requests.

    Args:
        settings: the settings of the frontend.
        worker: the number of this process, and the folder that all frontend processes share. None
            if this is the only frontend process.
        make_backend: creates the backend. By default, the backend is the Triton server.

    Raises: SettingsError if a setting is wrong.
    """
    if worker is not None:
        _reserve_space_for_metrics(worker)
    app = create_app(settings, make_backend, worker)
    _reject_requests_after_sigusr1(app.state.gate)
    _exclude_objects_from_garbage_collection()
    _raise_descriptor_limit()
    server = uvicorn.Server(_uvicorn_config(app, settings))
    sockets = _listening_sockets_of_process(settings, worker)
    # After a signal, uvicorn closes the application and then sends the signal to this process.
    # SIGTERM would then kill the process, and the spans that were not exported yet would be lost.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with suppress(KeyboardInterrupt):  # raised by SIGINT
        server.run(sockets)


def _reserve_space_for_metrics(worker: WorkerPlace) -> None:
    """Create the files in which prometheus_client stores the metrics of this process.

    prometheus_client would create files without allocated space, and map them into memory. If the
    disk became full later, the kernel would kill this process when a metric gets a new label.
    """
    for kind in _METRIC_KINDS:
        path = Path(worker.folder, "metrics", f"{kind}_{os.getpid()}.db")
        with suppress(OSError), path.open("ab") as file:  # the disk may be full already
            os.posix_fallocate(file.fileno(), 0, _METRICS_BYTES)


def _reject_requests_after_sigusr1(gate: Gate) -> None:
    """When SIGUSR1 arrives, make `gate` reject new requests. Running requests continue."""

    def drain(number: int, frame: object) -> None:  # noqa: ARG001 - signal's signature
        gate.is_draining = True

    signal.signal(signal.SIGUSR1, drain)
    # WorkerPool starts each worker process with SIGUSR1 blocked. When SIGUSR1 is unblocked here,
    # `drain` is called if the signal has arrived in the meantime.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def _exclude_objects_from_garbage_collection() -> None:
    """Make the garbage collector ignore all objects that exist now.

    These objects are needed until the process ends. Without them, garbage collections are short and
    do not delay streams.
    """
    gc.collect()
    gc.freeze()


def _raise_descriptor_limit() -> None:
    """Raise the limit on open file descriptors to the largest allowed number.

    Each connection needs a file descriptor, and the usual limit of 1024 is soon reached.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def _uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """Return the configuration of uvicorn, which runs the application as an HTTP server."""
    # Without the argument `log_config`, uvicorn writes log lines in its own text format.
    json_logging: dict[str, Any] = {}
    if settings.log_format == "json":
        json_logging = {"log_config": uvicorn_log_config(settings.log_level)}
    return uvicorn.Config(
        app,
        # This protocol class limits the size of a request's headers, the time to receive the
        # headers, and the time in which a client reads nothing.
        http=protocol_class(settings.receive_timeout_s, settings.unread_timeout_s),
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        access_log=settings.log_level == "debug",
        **json_logging,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S,
    )


def _listening_sockets_of_process(
    settings: Settings, worker: WorkerPlace | None
) -> list[socket.socket]:
    """Return the sockets on which this process waits for connections.

    Raises: SettingsError if the address of the frontend is in use.
    """
    if worker is not None:
        # The parent process has already reserved the port `worker.port` for all workers, so no
        # other program can use this port.
        return worker_sockets(worker, settings.host)
    try:
        sockets = listening_sockets(settings.host, settings.port)
    except OSError as error:
        raise SettingsError(
            f"the frontend cannot listen on port {settings.port} of {settings.host}: "
            f"{error.strerror}. Set NEREID_OPENAI_PORT to a free port, or NEREID_OPENAI_HOST to "
            "an address of this machine."
        ) from None
    host = f"[{settings.host}]" if ":" in settings.host else settings.host  # an IPv6 address
    _log.info("The frontend listens on http://%s:%d", host, settings.port)
    return sockets
