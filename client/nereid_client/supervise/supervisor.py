"""Runs what `nereid serve` started: announces it, starts what died again, drains it and ends it."""

import contextlib
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nereid_client.console import CliError, complain, say
from nereid_client.supervise.child_processes import Child, adopt_orphans, end_descendants
from nereid_client.supervise.hang_detection import HangWatch
from nereid_client.supervise.pooling_models import Pooler, PoolerWarmUp
from nereid_client.supervise.restart_policy import RestartPolicy, Restarts
from nereid_client.supervise.stub_processes import StubWatch
from nereid_client.supervise.unfinished_requests import num_unfinished
from nereid_client.supervise.warmup import Frontend, WarmUp

SERVER_EXIT_TIMEOUT_S = 5
_TICK_S = 0.05
_PROGRESS_EVERY_S = 10.0
_FRONTEND_GRACE_S = 8.0
_LEFTOVER_GRACE_S = 3.0
_ORPHAN_GRACE_S = 1.0
_DRAIN_LOOK_EVERY_S = 0.1
_LAST_ANSWERS_S = 1.0  # for a model that gives up to say so to those who wait


@dataclass(frozen=True)
class Program:
    """A program to run, and what its environment is."""

    name: str
    command: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Plan:
    """What will be started, checked already.

    Attributes:
        server, frontend_program: the two programs.
        shm_prefix: what the names of the server's shared memory begin with.
        log_path: where both write.
        model: the language model's checkpoint.
        poolers: what is served beside it.
        frontend: where the OpenAI API will be.
        doors: name and address of each door, for people.
        metrics_url: the server's page of metrics.
        generate_url: where the Triton server takes a request by HTTP.
        hang_timeout_s: a server that does nothing for so long is started again; 0: never.
        restarts: how often what died is started again.
        drain_timeout_s: what runs at a stop may take this long to finish.
    """

    server: Program
    frontend_program: Program
    shm_prefix: str
    log_path: Path
    model: Path
    poolers: list[Pooler]
    frontend: Frontend
    doors: list[tuple[str, str]]
    metrics_url: str
    generate_url: str
    hang_timeout_s: float
    restarts: RestartPolicy
    drain_timeout_s: float


class Part:
    """One of the two programs: the child that runs it, and when it is due to be started again.

    Attributes:
        child: the last one that was started.
        due: when the next one is to be started; None while one runs.
        restarts: how often that happened.
    """

    def __init__(self, program: Program, policy: RestartPolicy, log: IO[str]) -> None:
        self._program = program
        self._log = log
        self.name = program.name
        self.restarts = Restarts(policy)
        self.due: float | None = None
        self.start()

    def start(self) -> None:
        """Start it now."""
        self.due = None
        program = self._program
        self.child = Child(program.name, program.command, program.environment, self._log, say)
        self.stubs = StubWatch(self.child.pid)

    def failure(self) -> str | None:
        """Why it has to be started again; None while all is well."""
        if self.child.exit_code is not None:
            return self.child.describe_end()
        if self.child.crash is not None:
            return f"{self.name} crashed ({self.child.crash})"
        model = self.stubs.dead_model()
        return f"{self.name}: the process of {model} died" if model else None

    @property
    def is_worth_another_start(self) -> bool:
        """Whether it failed in a way that no setting and no checkpoint explains.

        Server 2.51 can abort in the start-up of its stubs on a busy machine, give up one of them,
        or lose it.
        """
        stubs = self.stubs
        return self.child.has_crashed or stubs.has_crashed or stubs.is_one_given_up()


class Supervisor:
    """Runs a plan until a signal comes, or something fails that can't be mended."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._parts: list[Part] = []
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._started = time.monotonic()
        self._next_progress_s = _PROGRESS_EVERY_S
        self._is_announced = False
        self._hang: HangWatch | None = None

    def run(self) -> int:
        """0 after a signal, 1 after a failure, 2 for a refused setting; nothing is left."""
        with _open_log(self._plan.log_path) as log, self._signals():
            adopt_orphans()
            try:
                return self._serve(log)
            finally:
                self._end_all()

    def _serve(self, log: IO[str]) -> int:
        plan = self._plan
        for path in (plan.model, *(pooler.path for pooler in plan.poolers)):
            say(f"nereid: serving {path}")
        say(f"nereid: starting tritonserver and the OpenAI API; their log: {plan.log_path}")
        for program in (plan.server, plan.frontend_program):
            self._parts.append(Part(program, plan.restarts, log))
        self._warm_up()
        while not self._stop.wait(_TICK_S):
            code = self._mend()
            if code is not None:
                return code
            self._start_what_is_due()
            self._tell_progress()
        if self._is_announced:
            self._drain()
        say("nereid: stopping")
        return 0

    def _warm_up(self) -> None:
        self._warming: WarmUp | None = WarmUp(self._plan.frontend)
        self._beside = PoolerWarmUp(self._plan.frontend, self._plan.poolers)
        self._warming.start()
        self._beside.start()

    def _watch_for_hangs(self) -> None:
        plan = self._plan
        if self._hang is not None:
            self._hang.stop()
        if plan.hang_timeout_s > 0:
            self._hang = HangWatch(
                plan.frontend, plan.metrics_url, plan.generate_url, plan.hang_timeout_s
            )
            self._hang.start()

    def _tell_progress(self) -> None:
        warming, beside = self._warming, self._beside
        if warming is None:
            return
        elapsed_s = time.monotonic() - self._started
        if warming.curl and beside.is_done:
            self._warming = None
            if self._is_announced:
                say(f"nereid: everything answers again after {elapsed_s:.1f} s")
            else:
                self._is_announced = True
                self._watch_for_hangs()
                self._announce([warming.curl, *beside.curls], elapsed_s)
        elif elapsed_s >= self._next_progress_s:
            self._next_progress_s += _PROGRESS_EVERY_S
            say(f"nereid: {warming.stage} ({elapsed_s:.0f} s)")

    def _mend(self) -> int | None:
        """Look for what has failed and arrange its restart; an exit code when that can't be."""
        for part in self._parts:
            if part.due is not None:
                continue
            what = part.failure()
            if what is None and part is self._parts[0]:
                what = self._failure_of_server(part)
            if what is None:
                continue
            # Before the first "ready" it is a wrong setting, unless the program itself broke.
            is_worth_it = self._is_announced or part.is_worth_another_start
            wait_s = part.restarts.next_wait_s() if is_worth_it else None
            if wait_s is None:
                return self._report(what, part)
            soon = "now" if wait_s == 0 else f"in {wait_s:g} s"
            complain(f"nereid: {what}; it is started again {soon} ({part.restarts.describe()})")
            self._clear(part)
            part.due = time.monotonic() + wait_s
        return None

    def _failure_of_server(self, server: Part) -> str | None:
        """What is wrong with a server whose processes all live."""
        if self._is_announced and time.monotonic() - server.child.refused_at > _LAST_ANSWERS_S:
            # One of its models has given up and refuses every request from now on.
            return f"{server.name}: {server.child.refusals[0]}"
        if self._warming is not None and server.stubs.is_one_given_up():
            return f"{server.name} waits for the end of a process that goes on"
        if self._warming is not None and (self._warming.failure or self._beside.failure):
            return self._warming.failure or self._beside.failure
        return self._hang.finding if self._hang is not None else None

    def _clear(self, part: Part) -> None:
        """End what is left of a part, so that it can start afresh."""
        part.child.kill()  # what it was working on may wait for ever: its callers learn it now
        others = [other.child.pid for other in self._parts if other is not part]
        end_descendants(_ORPHAN_GRACE_S, self._hurry.wait, keep=others)
        if part is self._parts[0]:
            self._remove_shared_memory()

    def _start_what_is_due(self) -> None:
        for part in self._parts:
            if part.due is None or time.monotonic() < part.due:
                continue
            part.start()
            if part is self._parts[0]:
                self._watch_for_hangs()
            if self._warming is None or self._warming.failure or self._beside.failure:
                self._started = time.monotonic()
                self._next_progress_s = _PROGRESS_EVERY_S
                self._warm_up()

    def _report(self, what: str, part: Part) -> int:
        """Say why it ended; 2 where a setting or the checkpoint was refused at first, else 1."""
        child = part.child
        if child.refusals:
            for reason in child.refusals:
                complain(f"nereid serve: {reason}")
            return 1 if self._is_announced else 2
        complain(f"nereid serve: {what}; the end of its output:")
        for line in (*child.tail, *child.errors):
            # The server writes a traceback's line ends as \\n, all in one line.
            complain("    " + line.replace("\\n", "\n    "))
        complain(f"nereid serve: {what}; the whole log: {self._plan.log_path}")
        if self._is_announced and part.restarts.number:
            complain(f"nereid serve: it was started again {part.restarts.number} times in a row")
        return 1

    def _announce(self, curls: list[str], elapsed_s: float) -> None:
        name = self._plan.frontend.model
        say(f"nereid: ready after {elapsed_s:.1f} s; the model's name is {name}")
        for pooler in self._plan.poolers:
            say(f"  {pooler.kind:12} {pooler.name}")
        for door, address in self._plan.doors:
            say(f"  {door:12} {address}")
        say("Try it:")
        for curl in curls:
            say(curl)
        say("Ctrl-C stops it.")

    def _drain(self) -> None:
        """Take no new requests, and wait for those that run."""
        limit_s = self._plan.drain_timeout_s
        frontend = self._parts[-1].child
        if limit_s <= 0 or frontend.exit_code is not None:
            return
        frontend.signal(signal.SIGUSR1)
        deadline = time.monotonic() + limit_s
        is_told = False
        while not self._hurry.wait(_DRAIN_LOOK_EVERY_S):
            left = num_unfinished(self._plan.frontend, self._plan.metrics_url)
            if not left:
                return
            if time.monotonic() >= deadline:
                say(f"nereid: {left} requests did not finish within {limit_s:g} s")
                return
            if not is_told:
                is_told = True
                say(
                    f"nereid: {left} requests finish first, for at most {limit_s:g} s; "
                    "a second signal ends them"
                )

    def _end_all(self) -> None:
        for part in reversed(self._parts):  # the frontend first: it lets its streams go
            grace_s = _FRONTEND_GRACE_S if part is not self._parts[0] else (
                SERVER_EXIT_TIMEOUT_S + 5.0
            )  # fmt: skip
            part.child.stop(grace_s, self._hurry.wait)
        left = end_descendants(_LEFTOVER_GRACE_S, self._hurry.wait)
        if left:
            say(f"nereid: ended what was left behind: {', '.join(left)}")
        self._remove_shared_memory()
        say("nereid: stopped")

    def _remove_shared_memory(self) -> None:
        for region in Path("/dev/shm").glob(self._plan.shm_prefix + "*"):
            region.unlink(missing_ok=True)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP ask to stop; the second one to stop at once."""

        def on_signal(number: int, frame: object) -> None:  # noqa: ARG001 - signal's signature
            if self._stop.is_set():
                self._hurry.set()
            self._stop.set()

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, on_signal) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


@contextmanager
def _open_log(path: Path) -> Iterator[IO[str]]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("w", buffering=1)
    except OSError as error:
        raise CliError(
            f"--log-file: {path} can't be written ({error.strerror}); give another, "
            f"such as {Path(tempfile.gettempdir()) / 'nereid.log'}"
        ) from None
    try:
        yield log
    finally:
        with contextlib.suppress(OSError):  # a full disk: what it did not take is lost
            log.close()
