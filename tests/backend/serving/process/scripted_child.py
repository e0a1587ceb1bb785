"""A child process that follows the instructions of a test. It imports neither torch nor numpy.

Its settings decide the result of loading: {"loading": "" | "fails" | "hangs" | "dies"}. The setting
"flag" is the path of a file: while the file exists, loading fails.
"""

import contextlib
import os
import sys
import time
from dataclasses import dataclass

from nereid_backend.errors import EngineError
from nereid_backend.serving.process.channel import ChannelClosedError
from nereid_backend.serving.process.process_entry import connect, load


@dataclass
class Info:
    device: str = "cpu"


class Loaded:
    info = Info()

    def __init__(self, settings, progress):
        progress("loading the script")
        loading = settings.get("loading")
        if loading == "fails" or os.path.exists(settings.get("flag", "")):
            raise EngineError("the script cannot be loaded")
        if loading == "hangs":
            time.sleep(600)
        if loading == "dies":
            os._exit(3)


def follow(channel, kind, *values):
    """Follow one instruction."""
    if kind == "echo":
        channel.send(["echo", *values])
    elif kind == "refuse":
        channel.send(["refused", *values])
    elif kind == "exit":
        os._exit(values[0])
    elif kind == "fail":
        channel.send(["fatal", values[0]])
        os._exit(1)
    elif kind == "sleep":
        time.sleep(values[0])
    elif kind == "linger":
        channel.send(["fatal", values[0]])
        channel.close()
        time.sleep(600)


def main():
    channel = connect(sys.argv)
    with contextlib.suppress(ChannelClosedError):
        if load(channel, Loaded) is not None:
            while True:
                for message in channel.receive(None):
                    if message[0] == "stop":
                        return
                    follow(channel, *message)


if __name__ == "__main__":
    main()
