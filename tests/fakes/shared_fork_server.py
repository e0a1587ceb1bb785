"""A fork server that several servers of the tests use, instead of one fork server for each server.

A fork server imports torch and transformers, which takes four seconds of CPU time. `nereid serve`
starts its own fork server, unless the environment contains the address of another one.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from nereid_client.supervise.start_fork_server import ADDRESS_VARIABLE, start_fork_server


@contextmanager
def run_fork_server() -> Iterator[dict[str, str]]:
    """Run a fork server. Yield the environment variable that makes `nereid serve` use it.

    The engine and the workers of such a server are children of the fork server, not of the server.

    Raises: AssertionError if such a process is left when the context ends.
    """
    address = f"nereid-tests-{os.getpid()}-{secrets.token_hex(8)}"
    with Path(os.devnull).open("w") as log:
        process = start_fork_server(address, os.environ, log, print)
        try:
            yield {ADDRESS_VARIABLE: address}
            _, alive = psutil.wait_procs(psutil.Process(process.pid).children(), timeout=60)
            assert not alive
        finally:
            process.stop(30, lambda timeout: False)
