"""`python -m nereid_client`: run the OpenAI frontend for a running Triton server."""

import sys
from collections.abc import Sequence

from nereid_client.batches.batch_folder import batch_folder
from nereid_client.settings import SettingsError, settings_from_flags
from nereid_client.workers.worker_place import WorkerPlace


def main(argv: Sequence[str] | None = None) -> int:
    """Run the frontend until SIGINT or SIGTERM.

    After SIGUSR1, the frontend accepts no new requests. To stop a server without failed requests,
    send SIGUSR1, wait until `num_requests` in /health/ready is 0, and send SIGTERM.

    Returns: 0 after a signal, 1 after a failure, 2 if a setting is wrong.
    """
    arguments = sys.argv[1:] if argv is None else argv
    try:
        return _run(arguments)
    except SettingsError as error:
        sys.stderr.write(f"nereid_client: {error}\n")
        return 2


def _run(arguments: Sequence[str]) -> int:
    """Run the frontend, or start several workers that run it, and return the exit code."""
    settings = settings_from_flags(arguments)
    worker = WorkerPlace.from_environment()  # None if no other process has started this process
    batch_folder(settings)  # checks the folder
    # The imports below are inside the function, so that the process that starts the workers does
    # not load the modules of the application.
    if settings.frontend_workers > 1 and worker is None:
        from nereid_client.workers.worker_pool import WorkerPool

        return WorkerPool(settings, [sys.executable, "-m", "nereid_client", *arguments]).run()
    from nereid_client.frontend_process import run_frontend

    run_frontend(settings, worker)
    return 0


if __name__ == "__main__":
    sys.exit(main())
