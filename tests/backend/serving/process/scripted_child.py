"""A child process that follows the instructions of a test. It imports neither torch nor numpy.

The setting "loading" determines what happens while the process loads: "fails" raises an error,
"hangs" sleeps, "dies" ends the process, and without this setting, loading succeeds. The setting
"flag" is the path of a file. While the file exists, loading fails.
"""

import os
import socket
import sys
import time
from dataclasses import dataclass

from nereid_backend.errors import EngineError
from nereid_backend.serving.process.process_entry import serve


@dataclass
class Info:
    device: str = "cpu"


class Script:
    """The service of the child process, which follows each instruction as soon as it arrives."""

    info = Info()

    def __init__(self, settings, send, progress):
        self.send = send
        progress("loading the script")
        loading = settings.get("loading")
        if loading == "fails" or os.path.exists(settings.get("flag", "")):
            raise EngineError("the script cannot be loaded")
        if loading == "hangs":
            time.sleep(600)
        if loading == "dies":
            os._exit(3)
        self.failure = None

    def start(self):
        pass

    def has_work(self):
        return self.failure is not None

    def advance(self):
        raise self.failure

    def handle(self, kind, values):
        if kind == "echo":
            self.send(["echo", *values])
        elif kind == "refuse":
            self.send(["refused", *values])
        elif kind == "exit":
            os._exit(values[0])
        elif kind == "fail":
            self.failure = EngineError(values[0])
        elif kind == "raise":
            raise EngineError(values[0])
        elif kind == "sleep":
            time.sleep(values[0])
        elif kind == "linger":
            self.send(["fatal", values[0]])
            # The kernel closes the connection of a dying process before the process has ended.
            socket.socket(fileno=int(sys.argv[1])).shutdown(socket.SHUT_RDWR)
            time.sleep(600)


if __name__ == "__main__":
    serve(Script)
