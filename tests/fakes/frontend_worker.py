"""A program that runs the frontend with the echo model in several processes.

When a test starts the program, it runs a `WorkerPool`. The pool starts the same program again for
each worker process.
"""

import sys

from nereid_client.frontend_process import run_frontend
from nereid_client.settings import settings_from_flags
from nereid_client.workers.worker_place import WorkerPlace
from nereid_client.workers.worker_pool import WorkerPool

from fakes.fake_backend import FakeBackend

if __name__ == "__main__":
    settings = settings_from_flags()
    place = WorkerPlace.from_environment()
    if place is None:
        command = [sys.executable, "-m", "fakes.frontend_worker", *sys.argv[1:]]
        sys.exit(WorkerPool(settings, command).run())
    run_frontend(settings, place, FakeBackend)
