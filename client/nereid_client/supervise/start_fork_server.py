"""Starts the fork server, which creates the engine and worker processes of the Triton models.

These processes import torch and transformers, which takes several seconds of CPU time. The fork
server imports the packages once, while the Triton server is starting, and creates the processes
by forking itself. Without a fork server, each process imports the packages itself.
"""

import importlib.util
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from nereid_client.supervise.child_processes import ChildProcess

ADDRESS_VARIABLE = "_NEREID_FORK_SERVER"
"""The Triton models read the name of the fork server's abstract Unix socket from this environment
variable. If the variable is already set, `nereid serve` starts no fork server."""
# The Triton model that starts the engine process. Every repository with a language model contains
# this Triton model.
_EXECUTOR = "executor"
_PACKAGE = "nereid_backend"
_MODULE = f"{_PACKAGE}.serving.process.forking.fork_server"
_MODULES_TO_IMPORT = (f"{_PACKAGE}.engine.engine", f"{_PACKAGE}.pooling.pooling_engine")
# If this environment variable is set, the server uses a test engine that does not need torch.
_TEST_ENGINE_VARIABLE = "NEREID_ENGINE"


def choose_address(repository: Path, environment: Mapping[str, str]) -> str | None:
    """Return a new address for the socket of the fork server, or None if no fork server is needed.

    The fork server saves the time for importing the engine, so it is useless if the models do not
    import the engine, or if the engine is not installed.
    """
    has_fork_server = ADDRESS_VARIABLE in environment  # another program has started one
    uses_test_engine = bool(environment.get(_TEST_ENGINE_VARIABLE))
    has_engine = (repository / _EXECUTOR).is_dir()
    if has_fork_server or uses_test_engine or not has_engine:
        return None
    is_backend_installed = importlib.util.find_spec(_PACKAGE) is not None
    return f"nereid-{os.getpid()}-{secrets.token_hex(16)}" if is_backend_installed else None


def start_fork_server(
    address: str, environment: Mapping[str, str], log: IO[str], on_line: Callable[[str], None]
) -> ChildProcess:
    """Start the fork server, which imports the engine and then forks the processes of the models.

    The socket accepts connections immediately. The fork server answers the first request after it
    has imported the engine.

    Args:
        address: the address of the socket, as returned by `choose_address`.
        environment: the environment variables of the fork server.
        log: the file to which the output of the fork server is copied.
        on_line: is called with each line of the output that the user should see.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")  # an address that begins with a null byte needs no file
        listener.listen()
        descriptor = listener.fileno()
        command = [sys.executable, "-m", _MODULE, str(descriptor), *_MODULES_TO_IMPORT]
        # The fork server inherits the open socket. This process then closes its copy of the socket
        # at the end of the `with` block.
        return ChildProcess(
            "the fork server", command, environment, log, on_line, files=[descriptor]
        )
