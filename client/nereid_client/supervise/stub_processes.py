"""Finds the Python models of a Triton server that have died.

Server 2.51 goes on when one of its Python stubs dies: its health pages still say ready, what that
model was working on may wait for ever, and nothing is started again. What shows it is the process
table, where the dead stub stays the server's child until the server ends. A stub whose model is
unloaded is waited for at once, so only one that stays dead was not meant to die.

A stub that has no processor for a second while it starts, on a busy machine, is given up as sick:
the server then waits for its end without ending it, for ever, where the stub is well.
"""

import time
from collections.abc import Callable
from pathlib import Path

from nereid_client.supervise.child_processes import (
    children_of,
    command_line,
    is_waiting_for_a_child,
    process_of,
)

_PROGRAM = "triton_python_backend_stub"
_NAME_LENGTH = 15  # of what the kernel keeps
_RESCAN_EVERY_S = 5.0
_DEAD_FOR_S = 0.4
_LOOK_EVERY_S = 1.0
_GIVEN_UP_FOR_S = 5.0


class StubWatch:
    """Follows the stubs of one Triton server.

    Args:
        server: the server's process id, or that of the script that becomes it.
        clock: seconds that never go back.

    Attributes:
        has_crashed: whether the stub that was found dead ended in a way that no program chooses.
    """

    def __init__(self, server: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        self._models: dict[int, str] = {}
        self._dead_since: dict[int, float] = {}
        self._rescan_due = 0.0
        self._look_due = 0.0
        self._waiting_since: float | None = None
        self.has_crashed = False

    def dead_model(self) -> str | None:
        """The name of a model whose stub has died, None while all live."""
        now = self._clock()
        if now >= self._rescan_due:
            self._rescan_due = now + _RESCAN_EVERY_S
            self._rescan()
        for pid, model in list(self._models.items()):
            process = process_of(pid)
            if process is None:  # the server has waited for it: unloaded
                del self._models[pid]
                self._dead_since.pop(pid, None)
            elif process.state != "Z":
                continue
            elif now - self._dead_since.setdefault(pid, now) >= _DEAD_FOR_S:
                self.has_crashed = process.has_crashed
                return model
        return None

    def is_one_given_up(self) -> bool:
        """Whether the server, which is starting, waits for the end of a stub that goes on."""
        now = self._clock()
        if now >= self._look_due:
            self._look_due = now + _LOOK_EVERY_S
            if not (self._models and is_waiting_for_a_child(self._server)):
                self._waiting_since = None
            elif self._waiting_since is None:
                self._waiting_since = now
        return self._waiting_since is not None and now - self._waiting_since >= _GIVEN_UP_FOR_S

    def _rescan(self) -> None:
        for child in children_of(self._server):
            if child.name == _PROGRAM[:_NAME_LENGTH] and child.pid not in self._models:
                self._models[child.pid] = _model_of(command_line(child.pid))


def _model_of(arguments: list[str]) -> str:
    """The model's name: stub /repository/NAME/VERSION/model.py ...; a dead stub has forgotten."""
    return Path(*arguments[1:2]).parent.parent.name or "a model"
