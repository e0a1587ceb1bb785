"""Finds stub processes that have died, and stub processes that the server wrongly considers dead.

The Triton server runs each Python model in a stub process.

Triton server 2.51 does not notice that a stub process has died. Its health routes still report that
the server is ready, requests to the model may wait forever, and the stub is not restarted. In the
process table, the dead stub stays a zombie until the server ends. If the server unloads a model, it
reaps the stub at once, so a stub that stays a zombie has died unexpectedly.

Triton server 2.65 and later remove a dead stub from the process table when a client asks whether
the stub's model is ready. These versions then report that the model is not ready, but do not
restart the stub. If the stub of a loaded model disappears, it has therefore died, unless the server
can unload models.

If a starting stub receives no CPU time for a second, the server assumes that the stub has died. The
server then waits for the end of the stub. The stub is still running, so the server waits forever.
"""

import time
from collections.abc import Callable
from pathlib import Path

from nereid_client.supervise.child_processes import (
    Process,
    children_of,
    command_line,
    is_waiting_for_a_child,
    process_of,
)

_PROGRAM = "triton_python_backend_stub"
_NAME_LENGTH = 15  # the kernel keeps 15 characters of a process name
_RESCAN_EVERY_S = 5.0
_ZOMBIE_S = 0.4  # a stub that is a zombie for this many seconds is reported as dead
_DISAPPEARED_S = 2.0  # a stub that disappeared this many seconds ago is reported as dead
_CHECK_EVERY_S = 1.0
_HANGS_AFTER_S = 5.0


class StubWatch:
    """Observes the stub processes that one Triton server starts.

    Attributes:
        are_models_loaded: whether all models have answered. Until then, a stub can end because its
            model rejects a setting.
        has_stub_crashed: whether a signal ended the dead stub that was found. False if the stub
            exited.
    """

    def __init__(
        self,
        server: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        can_unload: bool = False,
    ) -> None:
        """Create the object. The first call of `detect_dead_model` finds the stub processes.

        Args:
            server: the process id of the server, or of the script that becomes the server by exec.
            clock: a function that returns a time in seconds. The time never decreases.
            can_unload: whether the server can unload models, which ends their stubs.
        """
        self.are_models_loaded = False  # the supervisor sets it when all models have answered
        self.has_stub_crashed = False  # `detect_dead_model` sets it when it finds a dead stub
        self._server = server
        self._clock = clock
        self._can_unload = can_unload

        # The state of `detect_dead_model`.
        self._models: dict[int, str] = {}  # maps the process id of a stub to the name of its model
        # Maps the process id of each dead stub to the time at which the supervisor found that it is
        # dead.
        self._dead_since: dict[int, float] = {}
        self._rescan_due = 0.0  # the time of the next search for new stubs

        # The state of `detect_hang`.
        self._check_due = 0.0  # the time at which the state of the server is read again
        # The time at which the server started to wait for a stub process. If the server is not
        # waiting, the value is None.
        self._waiting_since: float | None = None

    def detect_dead_model(self) -> str | None:
        """Observe the stub processes. If one has died, return the name of its model, else None.

        A stub is a process that runs one Python model. The Triton server starts the stubs. The
        supervisor calls this method repeatedly.

        Mutates: the record of the observed stubs. If a stub has died, also `has_stub_crashed`.
        """
        now = self._clock()
        if now >= self._rescan_due:
            self._rescan_due = now + _RESCAN_EVERY_S
            self._find_new_stubs()
        for pid, model in list(self._models.items()):
            process = process_of(pid)
            if self._has_died(pid, process, now):
                # `has_crashed` depends on the exit status, which only the process table entry of a
                # zombie contains. If the entry has disappeared, the reason of the death is unknown.
                self.has_stub_crashed = process is not None and process.has_crashed
                return model
        return None

    def _has_died(self, pid: int, process: Process | None, now: float) -> bool:
        """Return whether a stub process has been dead for some time.

        A stub that has ended is a zombie until its parent, the Triton server, reaps it. Afterwards
        the stub has disappeared, and `process` is None.

        Mutates: `_dead_since`, which records the time of the first call that finds the stub dead.
            If the server itself may have ended the stub, the stub is not observed any more.
        """
        if process is not None and not process.is_zombie:
            return False
        has_disappeared = process is None
        # The server itself ends a stub in two cases: the server unloads the stub's model, or the
        # stub cannot load its model.
        may_have_been_ended = self._can_unload or not self.are_models_loaded
        if has_disappeared and may_have_been_ended:
            self._forget(pid)
            return False
        # When the server stops, its stubs disappear shortly before the server itself. This is no
        # failure, so a stub that has disappeared counts as dead only after a longer time.
        limit_s = _DISAPPEARED_S if has_disappeared else _ZOMBIE_S
        return now - self._dead_since.setdefault(pid, now) >= limit_s

    def _forget(self, pid: int) -> None:
        """Stop observing the stub process with the id `pid`."""
        del self._models[pid]
        self._dead_since.pop(pid, None)

    def detect_hang(self) -> bool:
        """Observe the Triton server, and return whether it hangs during its start.

        The server hangs if it waits at least `_HANGS_AFTER_S` seconds for the end of a stub process
        that keeps running. Calls within `_CHECK_EVERY_S` seconds use the same observation.

        Mutates: `_check_due` and `_waiting_since`, if the server is observed again.
        """
        now = self._clock()
        if now >= self._check_due:
            self._check_due = now + _CHECK_EVERY_S
            self._update_waiting_since(now)
        if self._waiting_since is None:  # the server does not wait for a stub process
            return False
        return now - self._waiting_since >= _HANGS_AFTER_S

    def _update_waiting_since(self, now: float) -> None:
        """Record when the server starts to wait for a stub. Reset this time after the wait."""
        is_waiting = bool(self._models) and is_waiting_for_a_child(self._server)
        if not is_waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now

    def _find_new_stubs(self) -> None:
        """Search for new stub processes of the server, and add them to `_models`."""
        for child in children_of(self._server):
            if child.name == _PROGRAM[:_NAME_LENGTH] and child.pid not in self._models:
                self._models[child.pid] = _model_of(command_line(child.pid))


def _model_of(arguments: list[str]) -> str:
    """Return the name of the model that a stub process runs.

    Example: ["stub", "/repository/llm/1/model.py"] returns "llm". A dead stub has no command line.
    """
    return Path(*arguments[1:2]).parent.parent.name or "a model"
