"""`python -m nereid_client`: run the OpenAI frontend in front of a Triton server that runs."""

import gc
import signal
import sys
from collections.abc import Sequence

import uvicorn

from nereid_client.app import create_app
from nereid_client.middleware.admission_control import Gate
from nereid_client.settings import SettingsError, settings_from_flags

# Longer than clients and balancers keep idle connections (httpx, which OpenAI's library uses: 5 s).
# A server that is the first to close one does so, now and then, as a request arrives on it.
_KEEP_ALIVE_S = 75


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; 2 when a setting is wrong.

    SIGUSR1: take no new requests. Who stops a server sends it first, and SIGTERM once
    /health/ready says that `num_requests` is 0.
    """
    try:
        settings = settings_from_flags(argv)
    except SettingsError as error:
        sys.stderr.write(f"nereid_client: {error}\n")
        return 2
    app = create_app(settings)
    gate: Gate = app.state.gate

    def drain(number: int, frame: object) -> None:  # noqa: ARG001 - signal's signature
        gate.is_draining = True

    signal.signal(signal.SIGUSR1, drain)
    # What stays for good need not be looked through again, in the middle of streams.
    gc.collect()
    gc.freeze()
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        access_log=settings.log_level == "debug",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
