"""One program that the supervisor starts and restarts."""

import time
from typing import IO

from nereid_client.console import say
from nereid_client.supervise.child_processes import ChildProcess
from nereid_client.supervise.restart_policy import RestartPolicy, Restarts
from nereid_client.supervise.serve_plan import Program
from nereid_client.supervise.stub_processes import StubWatch


class SupervisedProgram:
    """One program (the Triton server or the frontend) that the supervisor starts and restarts.

    Args:
        program: the program, which the constructor starts.
        policy: the limits on restarts.
        log: the log file.

    Attributes:
        child: the child process that was started last.
        stubs: observes the stub processes of this child.
        restart_at: the time of time.monotonic() at which the program is restarted. None if no
            restart is planned.
        restarts: counts the restarts.
    """

    def __init__(self, program: Program, policy: RestartPolicy, log: IO[str]) -> None:
        self._program = program
        self._log = log
        self.name = program.name
        self.restarts = Restarts(policy)
        self.start()

    def start(self) -> None:
        """Start the program."""
        self.restart_at: float | None = None
        program = self._program
        self.child = ChildProcess(
            program.name, program.command, program.environment, self._log, say
        )
        can_unload = any("--model-control-mode" in word for word in program.command)
        self.stubs = StubWatch(self.child.pid, can_unload=can_unload)

    @property
    def is_restart_due(self) -> bool:
        """Whether a restart is planned and its time has come."""
        return self.restart_at is not None and time.monotonic() >= self.restart_at

    def failure(self) -> str | None:
        """Return the reason why the program must be restarted, or None if it still works."""
        if self.child.exit_code is not None:
            return self.child.describe_end()
        if self.child.crash_line is not None:
            return f"{self.name} crashed ({self.child.crash_line})"
        model = self.stubs.detect_dead_model()
        return f"{self.name}: the process of the model {model} died" if model else None

    @property
    def has_crashed(self) -> bool:
        """Whether the program crashed.

        A program that rejects a setting or a checkpoint has not crashed.

        On a busy machine, Triton server 2.51 can fail in three ways while it starts its stub
        processes: the server aborts, a stub process dies, or the server abandons a stub process.
        """
        stubs = self.stubs
        return self.child.has_crashed or stubs.has_stub_crashed or stubs.detect_hang()
