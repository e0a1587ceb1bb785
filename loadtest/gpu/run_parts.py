"""Run the parts of a call in processes with time limits, and write the results after each part."""

import dataclasses
import datetime
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from loadtest.gpu.calls import Call, Part
from loadtest.gpu.environment import ROOT, installed_version
from loadtest.gpu.lines import Rank, parsed

# A part is started only if at least this many seconds of the call remain.
_LEAST_S = 8.0
# The seconds between two checks of the running parts.
_PAUSE_S = 0.1
# A rehearsal may take this many times as long as a call on a GPU, because a CPU interprets the
# kernels.
_REHEARSAL_PATIENCE = 8.0


@dataclass(frozen=True, slots=True)
class PartResult:
    """The results of one finished part.

    Attributes:
        name: the name of the part.
        seconds: the duration.
        lines: the results that the part printed; see lines.py.
        error: a description of the failure; empty if the part succeeded.
    """

    name: str
    seconds: float
    lines: list[dict[str, Any]]
    error: str = ""


@dataclass(slots=True)
class Results:
    """The results of a call so far, and the files in which they are written.

    Attributes:
        call: the name of the call.
        folder: the folder of the files.
        is_rehearsal: whether the parts ran on a CPU at tiny sizes.
        parts: the results of the finished parts.
        left_out: sentences about the parts that did not run.
    """

    call: str
    folder: Path
    is_rehearsal: bool
    parts: list[PartResult] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def patience(self) -> float:
        """The factor by which all time limits are multiplied."""
        return _REHEARSAL_PATIENCE if self.is_rehearsal else 1.0

    @property
    def has_failed(self) -> bool:
        """Whether a part failed, or a kernel differs from its reference."""
        return any(
            part.error or any(line["rank"] == Rank.WRONG for line in part.lines)
            for part in self.parts
        )

    def add(self, part: PartResult) -> None:
        """Add a finished part, print its results, and write the files."""
        self.parts.append(part)
        for line in part.lines:
            print(f"{part.name}: {line['text']}", flush=True)
        if part.error:
            print(f"{part.name}: FAILED: {part.error}", flush=True)
        self.write()

    def write(self) -> None:
        """Write the results so far to CALL.json and CALL.md."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {
            "call": self.call,
            "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
            "is_rehearsal": self.is_rehearsal,
            "seconds": time.monotonic() - self.started,
            "parts": [dataclasses.asdict(part) for part in self.parts],
            "left_out": self.left_out,
        }
        (self.folder / f"{self.call}.json").write_text(json.dumps(content, indent=1) + "\n")
        (self.folder / f"{self.call}.md").write_text(self.markdown())

    def markdown(self) -> str:
        """Return the results as Markdown, the most important lines first."""
        title = f"# {self.call}{', a rehearsal' if self.is_rehearsal else ''}"
        results = [
            f"- **WRONG** {text}" if rank == Rank.WRONG else f"- {text}"
            for rank, text in self._ranked_texts()
        ]
        left_out = [f"- Left out: {text}" for text in self.left_out]
        times = [f"| {part.name} | {part.seconds:.0f} |" for part in self.parts]
        times.append(f"| all | {time.monotonic() - self.started:.0f} |")
        head = ["| part | seconds |", "|---|---|"]
        return "\n".join([title, "", *results, "", *left_out, "", *head, *times, ""])

    def _ranked_texts(self) -> list[tuple[int, str]]:
        """Return the rank and the text of each result and failure, sorted by rank."""
        failures = [(part.name, part.error) for part in self.parts if part.error]
        ranked: list[tuple[int, str]] = [
            (Rank.WRONG, f"{name}: FAILED: {error}") for name, error in failures
        ]
        for part in self.parts:
            ranked += [(line["rank"], f"{part.name}: {line['text']}") for line in part.lines]
        return sorted(ranked, key=lambda pair: pair[0])


@dataclass(slots=True)
class _Running:
    """A part whose process runs."""

    part: Part
    process: "subprocess.Popen[bytes]"
    output: IO[bytes]
    errors: IO[bytes]
    started: float
    end: float

    def is_over(self) -> bool:
        """Return whether the process has ended or its time is up."""
        return self.process.poll() is not None or time.monotonic() > self.end

    def finish(self) -> PartResult:
        """Kill the process if it still runs, close its files, and return the part's results."""
        exit_code = self.process.poll()
        seconds = time.monotonic() - self.started
        self.kill()
        last_line = self._last_line()
        error = ""
        if exit_code is None:
            error = f"still running after {seconds:.0f} s; the last line of its log is: {last_line}"
        elif exit_code != 0:
            error = f"exit code {exit_code}; the last line of its log is: {last_line}"
        lines = parsed(_text_of(self.output))
        if not lines and not error:
            # Programs such as pytest do not print results as JSON, but their last line is a
            # summary.
            lines = [{"rank": Rank.DETAIL, "text": last_line, "data": {}}]
        self.output.close()
        self.errors.close()
        return PartResult(self.part.name, seconds, lines, error)

    def kill(self) -> None:
        """Kill the process and all processes that it started."""
        # The group must be killed before the process is waited for. Afterwards, another process
        # group could have the same id.
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _last_line(self) -> str:
        """Return the last line of the errors, or else of the output."""
        log = f"{_text_of(self.output).strip()}\n{_text_of(self.errors)}".strip()
        return (log.splitlines() or ["-"])[-1][:300]


def run_call(
    call: Call, results: Results, environment: dict[str, str], *, can_run_engine: bool
) -> None:
    """Run the parts of a call, one group after the other.

    Args:
        call: the call.
        results: receives the results of each part as soon as the part ends. Mutated.
        environment: the environment variables of the parts.
        can_run_engine: whether the packages of the engine are installed.
    """
    end = time.monotonic() + call.limit_s * results.patience
    for _, group in itertools.groupby(call.parts, key=lambda part: part.group or part.name):
        runnable = [part for part in group if _can_run(part, results, can_run_engine, end)]
        run_together(runnable, results, environment, end)


def run_together(
    parts: list[Part], results: Results, environment: dict[str, str], end: float
) -> None:
    """Run parts at the same time, and add the results of each part when it ends.

    Args:
        parts: the parts.
        results: receives the results. Mutated.
        environment: the environment variables of the parts.
        end: the time at which all parts are killed, from `time.monotonic`.
    """
    running: list[_Running] = []
    try:
        for part in parts:
            running.append(_start(part, environment, results, end))
        while running:
            for one in list(running):
                if one.is_over():
                    running.remove(one)
                    results.add(one.finish())
            time.sleep(_PAUSE_S)
    finally:
        for one in running:
            one.kill()


def _can_run(part: Part, results: Results, can_run_engine: bool, end: float) -> bool:
    """Return whether a part can run. If not, add the reason to the results."""
    reason = ""
    missing = [name for name in part.packages if installed_version(name) is None]
    if missing:
        reason = f"the package {missing[0]} is missing"
    elif part.needs_engine and not can_run_engine:
        reason = "packages of the engine are missing"
    elif part.prefix and shutil.which(part.prefix[0]) is None:
        reason = f"the program {part.prefix[0]} is not installed"
    elif end - time.monotonic() < _LEAST_S:
        reason = "no time was left"
    if reason:
        results.left_out.append(f"{part.name}: {reason}.")
        results.write()
    return not reason


def _start(part: Part, environment: dict[str, str], results: Results, end: float) -> _Running:
    """Start the process of a part."""
    command = [*part.prefix, sys.executable, "-W", "ignore", "-m", *part.arguments]
    # Each part closes these files when its results are read.
    output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
    now = time.monotonic()
    limit_s = min(part.limit_s * results.patience, end - now)
    print(f"running: {part.name}, for at most {limit_s:.0f} s", flush=True)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=output,
        stderr=errors,
        env={**environment, "NEREID_RESULTS": str(results.folder.resolve())},
        start_new_session=True,
    )
    return _Running(part, process, output, errors, now, now + limit_s)


def _text_of(file: IO[bytes]) -> str:
    """Return a file's text without moving the offset at which the process keeps writing."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
