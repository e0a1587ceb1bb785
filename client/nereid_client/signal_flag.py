"""A flag that the handler of a signal can set safely."""

import queue
from contextlib import suppress


class SignalFlag:
    """A flag that is set once, by the handler of a signal, and that the main thread waits for.

    A `threading.Event` is not suitable. Python calls the handler in the main thread, between any
    two steps of `Event.wait`. If `wait` holds the lock of the event at this moment, `Event.set`
    waits for the lock forever. `queue.SimpleQueue.put` may interrupt `SimpleQueue.get` (see the
    documentation of the module `queue`).
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wake_ups: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        """Return whether the flag has been set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag, and end a running call of `wait`."""
        self._is_set = True
        self._wake_ups.put(None)

    def wait(self, timeout: float) -> bool:
        """Wait until the flag is set, for at most `timeout` seconds. Return whether it is set."""
        if not self._is_set:
            with suppress(queue.Empty):
                self._wake_ups.get(timeout=max(timeout, 0))
        return self._is_set
