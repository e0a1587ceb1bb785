"""Run servers with full disks, for engine_faults.py. The disks are small tmpfs file systems."""

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx

from loadtest.bench.markdown_table import short
from loadtest.client.traffic import CHATS
from loadtest.faults.fault_rows import Section
from loadtest.server.served import Served, error_message

_SHM = Path("/dev/shm")
_FLAGS = ("--served-model-name=chat", "--log-level=info")
_RECOVERY_LIMIT_S = 90.0
_PAGE_BYTES = 4096
_FILLED_LATER = "full while serving: /dev/shm"


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of a size such as "64k" at `place`, and unmount it at the end."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> Path:
    """Fill the disk at `place` with one file, and return the path of the file."""
    path = place / "filler"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(_PAGE_BYTES))
    return path


@dataclass(frozen=True)
class Case:
    """A folder of the server that is on a full disk when the server starts.

    The functions return the settings with which `nereid serve` uses the folder of the disk.
    """

    name: str
    environment: Callable[[Path], Mapping[str, str]] = lambda _: {}
    flags: Callable[[Path], list[str]] = lambda _: []


_CASES = (
    Case("kernel cache (XDG_CACHE_HOME)", lambda disk: {"XDG_CACHE_HOME": str(disk)}),
    Case("Hugging Face cache (HF_HOME)", lambda disk: {"HF_HOME": str(disk / "hf")}),
    Case("temporary files (TMPDIR)", lambda disk: {"TMPDIR": str(disk)}),
    Case("log file", flags=lambda disk: [f"--log-file={disk / 'serve.log'}"]),
)


class Result(NamedTuple):
    """The results of one test. `ready_s` is None if the server never answered."""

    description: str
    ready_s: float | None


def run_disks(only: str) -> Section:
    """Run the tests whose name contains `only`, and return the table of their results.

    The section is marked as broken if a server did not recover after a disk was full for a while.
    """
    rows, is_broken = [], False
    for name, test in _tests().items():
        if only in name:
            result = test()
            ready = "never" if result.ready_s is None else f"{result.ready_s:.1f} s"
            rows.append([name, result.description, ready])
            is_broken |= name == _FILLED_LATER and result.ready_s is None
            print(" | ".join(rows[-1]), flush=True)
    return Section.of(("Disk", "What happened", "Ready after"), rows, is_broken)


def _tests() -> dict[str, Callable[[], Result]]:
    """Return the function of each test by the name of the test."""
    tests = {f"full from the start: {case.name}": partial(_start_full, case) for case in _CASES}
    return {
        **tests,
        "full from the start: /dev/shm": _start_with_full_shared_memory,
        _FILLED_LATER: _fill_while_serving,
    }


def _start_full(case: Case) -> Result:
    with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder), "64k") as disk:
        fill(disk)
        (disk / "serve.log").touch()
        return _serve(case.environment(disk), case.flags(disk))


def _start_with_full_shared_memory() -> Result:
    with small_disk(_SHM, "1m"):
        fill(_SHM)
        return _serve({}, [])


def _serve(environment: Mapping[str, str], flags: list[str]) -> Result:
    """Start a server, and send a chat and an embedding request."""
    started = time.monotonic()
    try:
        with Served(None, environment, [*_FLAGS, *flags]) as served:
            ready_s = time.monotonic() - started
            answers = [_ask(served, "chat"), _ask(served, "embedding")]
            num_good = sum(answer.is_good for answer in answers)
            return Result(f"it answered {num_good} of 2 kinds of requests", ready_s)
    except RuntimeError as error:
        message = error_message(str(error)) or str(error)[-200:]
        return Result(f"it did not start: {short(message)}", None)


def _fill_while_serving() -> Result:
    """Fill /dev/shm under a server, send requests, and free the memory again."""
    with small_disk(_SHM, "256m"), Served(None, {}, _FLAGS) as served:
        filler = fill(_SHM)
        answers = [_ask(served, kind, size) for kind in ("chat", "embedding") for size in (1, 3000)]
        filler.unlink()
        description = "; ".join(f"{answer.status} {short(answer.text)}" for answer in answers)
        return Result(description, _recovery_s(served))


def _recovery_s(served: Served) -> float | None:
    """Send chats until one is answered, and return the seconds until then; None after a limit."""
    started = time.monotonic()
    while time.monotonic() - started < _RECOVERY_LIMIT_S:
        if _ask(served, "chat", 3000).is_good:
            return time.monotonic() - started
        time.sleep(0.2)
    return None


class Answer(NamedTuple):
    """The HTTP status of an answer, or 0 without an answer, and a description."""

    status: int
    text: str

    @property
    def is_good(self) -> bool:
        """Whether the request was answered completely."""
        return self.status == 200


def _ask(served: Served, kind: str, size: int = 1) -> Answer:
    """Send a chat of `size` words (at most 400), or an embedding request of `size` texts."""
    if kind == "chat":
        question = "Hi! " * min(size, 400)
        messages = [{"role": "user", "content": question}]
        path, body = CHATS, {"model": "chat", "messages": messages, "max_tokens": 3}
    else:
        text = "Hugo lives in Pinemark. " * 10
        path, body = "/v1/embeddings", {"model": "embed", "input": [text] * size}
    try:
        url = f"{served.frontend_url}{path}"
        answer = httpx.post(url, json=body, timeout=30, trust_env=False)
    except httpx.HTTPError as error:
        return Answer(0, repr(error))
    if answer.status_code == 200:
        return Answer(200, "complete answer")
    return Answer(answer.status_code, str(answer.json()["error"]["message"]))
