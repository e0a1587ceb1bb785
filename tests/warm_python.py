"""Run Python programs in forks of a process that has already imported the client libraries.

Importing `openai`, `anthropic` or `tritonclient` takes 0.5 to 2 s of CPU time, and the tests run
about thirty small programs that use these libraries. A program runs as with `python PROGRAM`,
except that its import statements find the libraries already loaded.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_LIBRARIES = ["anthropic", "httpx", "openai", "pydantic", "tritonclient.grpc", "tritonclient.http"]
# A fork of a process with gRPC threads can crash. Therefore, the processes are forked from a server
# process, which has imported the libraries and has no gRPC threads.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(_LIBRARIES)


def run_python(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a program like `python ARGUMENTS` and return its exit code, stdout and stderr.

    Args:
        arguments: the path of a program and its arguments, or `-c` and the text of a program.
        environment: all environment variables of the program.
        folder: the working directory of the program.
        timeout_s: the time limit in seconds.

    Raises: subprocess.TimeoutExpired if the program has not ended after `timeout_s` seconds.
    """
    with tempfile.TemporaryDirectory() as outputs:
        files = [Path(outputs) / name for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        call = (list(arguments), dict(environment), str(folder), [str(file) for file in files])
        process = CONTEXT.Process(target=_run, args=call, daemon=True)
        process.start()
        process.join(timeout_s)
        code = process.exitcode
        process.kill()
        process.join()
        process.close()
        stdout, stderr = (file.read_text(encoding="utf-8") for file in files)
    command = [sys.executable, *arguments]
    if code is None:
        raise subprocess.TimeoutExpired(command, timeout_s, stdout, stderr)
    return subprocess.CompletedProcess(command, code, stdout, stderr)


def _run(
    arguments: list[str], environment: dict[str, str], folder: str, outputs: list[str]
) -> None:
    """Run the program in the current process, which was forked for this purpose."""
    for descriptor, path in enumerate([os.devnull, *outputs]):
        os.dup2(os.open(path, os.O_RDWR), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path[0] = ""
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")
