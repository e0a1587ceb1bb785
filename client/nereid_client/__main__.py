"""`python -m nereid_client`: run the OpenAI frontend for a Triton server that already runs."""

import gc
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any

import uvicorn

from nereid_client.app import create_app
from nereid_client.json_logs import uvicorn_log_config
from nereid_client.middleware.admission_control import Gate
from nereid_client.middleware.http_protocol import protocol_class
from nereid_client.settings import SettingsError, settings_from_flags

# The frontend closes a connection that was idle for this number of seconds. Clients and load
# balancers should close idle connections earlier. Otherwise, the frontend could close a connection
# at the moment when a request arrives on it. Example: httpx, which OpenAI's library uses, closes
# idle connections after 5 s.
_KEEP_ALIVE_S = 75


def main(argv: Sequence[str] | None = None) -> int:
    """Run the frontend until SIGINT or SIGTERM.

    After SIGUSR1, the frontend accepts no new requests. To stop a server without failed requests,
    send SIGUSR1, wait until `num_requests` in /health/ready is 0, and send SIGTERM.

    Returns: 0 after a signal, 2 if a setting is wrong.
    """
    try:
        settings = settings_from_flags(argv)
        app = create_app(settings)
    except SettingsError as error:
        sys.stderr.write(f"nereid_client: {error}\n")
        return 2
    gate: Gate = app.state.gate

    def drain(number: int, frame: object) -> None:  # noqa: ARG001 - signal's signature
        gate.is_draining = True

    signal.signal(signal.SIGUSR1, drain)
    # The objects that exist at the start are needed until the process ends. After the freeze, the
    # garbage collector ignores them, so that its passes are short and do not delay streams.
    gc.collect()
    gc.freeze()
    _raise_descriptor_limit()
    log_config: dict[str, Any] = {}
    if settings.log_format == "json":
        log_config["log_config"] = uvicorn_log_config(settings.log_level)
    uvicorn.run(
        app,
        http=protocol_class(settings.receive_timeout_s),
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        access_log=settings.log_level == "debug",
        **log_config,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
    )
    return 0


def _raise_descriptor_limit() -> None:
    """Allow the largest possible number of file descriptors.

    Each connection needs a file descriptor, and the usual limit of 1024 is soon reached.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


if __name__ == "__main__":
    sys.exit(main())
