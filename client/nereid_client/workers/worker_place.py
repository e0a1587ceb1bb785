"""Describes one of several workers: its number, and the files that all workers share."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from starlette.types import Scope

_VARIABLE = "NEREID_FRONTEND_WORKER"


@dataclass(frozen=True)
class WorkerPlace:
    """The number of a worker, and the folder that all workers share.

    Attributes:
        number: the number of this worker. The first worker has the number 0.
        count: how many workers there are.
        folder: the folder with the shared files.
        port: the port on which all workers listen.
    """

    number: int
    count: int
    folder: str
    port: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "WorkerPlace | None":
        """Return the WorkerPlace of this process, or None if the process is not a worker."""
        text = environment.get(_VARIABLE)
        return cls(**json.loads(text)) if text else None

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables for starting the worker's process."""
        return {
            _VARIABLE: json.dumps(asdict(self)),
            # The module prometheus_client reads this variable when it is imported.
            "PROMETHEUS_MULTIPROC_DIR": str(Path(self.folder, "metrics")),
        }

    @property
    def requests_path(self) -> str:
        """The path of the database that stores the running requests and the clients' usage."""
        return str(Path(self.folder, "requests.db"))

    @property
    def responses_path(self) -> str:
        """The path of the database with the stored responses."""
        return str(Path(self.folder, "responses.db"))

    @property
    def others(self) -> list[int]:
        """The numbers of the other workers."""
        return [number for number in range(self.count) if number != self.number]

    def socket_path(self, number: int) -> str:
        """Return the path of the Unix socket on which worker `number` receives requests."""
        return str(Path(self.folder, f"worker-{number}.sock"))


def is_from_worker(scope: Scope) -> bool:
    """Return True if another worker sent the request, and False if a client sent it.

    A request from another worker arrives on a Unix socket. The address of a Unix socket is an
    absolute path, and has no port.
    """
    host, port = scope.get("server") or ("", None)
    return port is None and host.startswith("/")
