"""Runs a comparison of one type of model in a child process with limits, and stores its result."""

import dataclasses
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ResultT = TypeVar("ResultT")


def run_in_child(
    examine: Callable[[ResultT], None], result: ResultT, max_seconds: int, max_bytes: int
) -> ResultT:
    """Call `examine(result)` in a child process, and return the result.

    Args:
        examine: a function that stores its outcome in its argument.
        result: a dataclass with the attributes `type`, `status`, `reason` and `seconds`.
        max_seconds: the limit on the wall time of the process.
        max_bytes: the limit on the address space of the process.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(max_seconds)
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
        start = time.monotonic()
        try:
            examine(result)
        except BaseException as error:  # noqa: BLE001 - any error is this type's result
            result.reason = f"{type(error).__name__}: {str(error).strip()[-300:]}"
        result.seconds = round(time.monotonic() - start, 1)
        os.write(writer, json.dumps(dataclasses.asdict(result)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    _, wait_status = os.waitpid(child, 0)
    if not text:
        exit_code = os.waitstatus_to_exitcode(wait_status)
        return dataclasses.replace(
            result, status="wrong", reason=f"its process ended with {exit_code}"
        )
    return type(result)(**json.loads(text))


def load_results(path: Path, result_class: type[ResultT]) -> dict[str, ResultT]:
    """Return the latest result of each type from the file of earlier runs."""
    if not path.is_file():
        return {}
    results = [result_class(**json.loads(line)) for line in path.read_text().splitlines()]
    return {result.type: result for result in results}


def append_result(path: Path, result: ResultT) -> None:
    """Append a result to the file as one line of JSON."""
    with path.open("a") as file:
        file.write(json.dumps(dataclasses.asdict(result)) + "\n")
