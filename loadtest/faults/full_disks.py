"""Run servers with full disks, for engine_faults.py. The disks are small tmpfs file systems."""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from loadtest.bench.markdown_table import short, table
from loadtest.server.served import Served

_SHM = Path("/dev/shm")
_FLAGS = ("--served-model-name=chat", "--log-level=info")


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
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 4096)
    return path


@dataclass(frozen=True)
class Case:
    """A folder of the server that is on a full disk when the server starts.

    Attributes:
        name: the name in the report.
        settings: a function that returns environment variables for the folder of the disk.
        flags: a function that returns flags of `nereid serve` for the folder of the disk.
    """

    name: str
    settings: Callable[[Path], Mapping[str, str]] = lambda _: {}
    flags: Callable[[Path], list[str]] = lambda _: []


_CASES = (
    Case("kernel cache (XDG_CACHE_HOME)", lambda disk: {"XDG_CACHE_HOME": str(disk)}),
    Case("Hugging Face cache (HF_HOME)", lambda disk: {"HF_HOME": str(disk / "hf")}),
    Case("temporary files (TMPDIR)", lambda disk: {"TMPDIR": str(disk)}),
    Case("log file", flags=lambda disk: [f"--log-file={disk / 'serve.log'}"]),
)


def run_disks(only: str) -> tuple[str, bool]:
    """Return the table of full disks, and whether a server did not recover."""
    rows, is_broken = [], False
    for case in _CASES:
        title = f"full from the start: {case.name}"
        if only in title:
            with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder), "64k") as disk:
                fill(disk)
                (disk / "serve.log").touch()
                rows.append([title, *_serve(case.settings(disk), case.flags(disk))])
    title = "full from the start: /dev/shm"
    if only in title:
        with small_disk(_SHM, "1m"):
            fill(_SHM)
            rows.append([title, *_serve({}, [])])
    title = "full while serving: /dev/shm"
    if only in title:
        with small_disk(_SHM, "256m"):
            rows.append([title, *_fill_while_serving()])
            is_broken |= not rows[-1][-1].endswith("s")
    for row in rows:
        print(" | ".join(row), flush=True)
    return table(["Disk", "What happened", "Ready after"], rows) if rows else "", is_broken


def _serve(settings: Mapping[str, str], flags: list[str]) -> list[str]:
    started = time.monotonic()
    try:
        with Served(None, settings, [*_FLAGS, *flags]) as served:
            ready_s = time.monotonic() - started
            answers = [_ask(served, "chat"), _ask(served, "embedding")]
            good = sum(status == 200 for status, _ in answers)
            return [f"it answered {good} of 2 kinds of requests", f"{ready_s:.1f} s"]
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.startswith("nereid serve: ")]
        return [f"it did not start: {short((lines or [str(error)[-200:]])[0])}", "never"]


def _fill_while_serving() -> list[str]:
    with Served(None, {}, list(_FLAGS)) as served:
        filler = fill(_SHM)
        seen = [_ask(served, kind, size) for kind in ("chat", "embedding") for size in (1, 3000)]
        filler.unlink()
        freed = time.monotonic()
        while (answer := _ask(served, "chat", 3000))[0] != 200 and time.monotonic() - freed < 90:
            time.sleep(0.2)
        answers = "; ".join(f"{status} {short(text)}" for status, text in seen)
        again = f"{time.monotonic() - freed:.1f} s" if answer[0] == 200 else "never"
        return [answers, again]


def _ask(served: Served, kind: str, size: int = 1) -> tuple[int, str]:
    words = "Hugo lives in Pinemark. " * 10
    if kind == "chat":
        body = {"model": "chat", "messages": [{"role": "user", "content": "Hi! " * min(size, 400)}]}
        path, body = "/v1/chat/completions", body | {"max_tokens": 3}
    else:
        path, body = "/v1/embeddings", {"model": "embed", "input": [words] * size}
    try:
        url = f"http://127.0.0.1:{served.openai_port}{path}"
        answer = httpx.post(url, json=body, timeout=30, trust_env=False)
    except httpx.HTTPError as error:
        return 0, repr(error)
    if answer.status_code == 200:
        return 200, "complete answer"
    return answer.status_code, str(answer.json()["error"]["message"])
