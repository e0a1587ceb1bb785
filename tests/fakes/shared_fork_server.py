"""Runs one fork server that the servers of several tests share.

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

    The engine and the workers of these servers are child processes of the fork server.

    Raises: AssertionError if such a child process is still alive 60 s after the last test.
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
