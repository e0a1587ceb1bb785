"""The processes that `nereid serve` starts, and their settings."""

from dataclasses import dataclass
from pathlib import Path

from nereid_client.supervise.frontend_client import FrontendClient
from nereid_client.supervise.hang_detection import Probe
from nereid_client.supervise.pooling_models import PoolingModel
from nereid_client.supervise.restart_policy import RestartPolicy

STANDARD_OUTPUT = Path("-")
"""A special value of `ServePlan.log_path`: the log is written to the standard output."""


@dataclass(frozen=True)
class Program:
    """A program that `nereid serve` starts.

    Attributes:
        name: the name of the program, for messages.
        command: the command with its arguments.
        environment: all environment variables of the program.
    """

    name: str
    command: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class ServePlan:
    """The processes that `nereid serve` will start, and their checked settings.

    Attributes:
        server: the Triton server.
        frontend_program: the frontend.
        shm_prefix: the prefix of the names of the server's shared memory regions.
        log_path: the log file of both programs. STANDARD_OUTPUT means the standard output.
        log_format: "text", or "json" for a log with one JSON object on each line.
        model: the folder of the language model's checkpoint.
        pooling_models: the pooling models to serve.
        probes: the test requests that show whether each model still answers.
        frontend: a client of the frontend.
        endpoints: the name and the address of each endpoint, for the message to the user.
        metrics_url: the URL of the Triton server's metrics.
        http_url: the base URL of the Triton server's HTTP endpoint.
        hang_timeout_s: the Triton server is restarted if a model does not answer a test request
            within this number of seconds. 0 means never.
        max_process_memory: the largest number of bytes that a process may use. A process that uses
            more is restarted. 0 means 80 % of the memory of the machine.
        warnings: sentences that are printed at the start.
        restarts: the limits on restarts.
        drain_timeout_s: after a signal to stop, running requests must finish within this number of
            seconds.
        fork_server: the address of the fork server to start (start_fork_server.py), or None.
    """

    server: Program
    frontend_program: Program
    shm_prefix: str
    log_path: Path
    model: Path
    pooling_models: list[PoolingModel]
    probes: list[Probe]
    frontend: FrontendClient
    endpoints: list[tuple[str, str]]
    metrics_url: str
    http_url: str
    hang_timeout_s: float
    max_process_memory: int
    warnings: list[str]
    restarts: RestartPolicy
    drain_timeout_s: float
    log_format: str = "text"
    fork_server: str | None = None

    @property
    def log_name(self) -> str:
        """The name of the log for messages."""
        return "on the standard output" if self.log_path == STANDARD_OUTPUT else str(self.log_path)
