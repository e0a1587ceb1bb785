"""A base class of objects that observe a server periodically."""

import threading
from typing import Self


class Periodic:
    """Calls the method `look` every `every_s` seconds in a thread while its `with` block runs."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._has_ended.wait(self._every_s):
            self.look()

    def look(self) -> None:
        """Make one observation of the server, for example of its memory."""
        raise NotImplementedError
