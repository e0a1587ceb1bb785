"""The supervisor, which starts, restarts and stops the Triton server and the frontend."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from nereid_client.console import CliError, complain, continue_without_output, say
from nereid_client.signal_flag import SignalFlag
from nereid_client.supervise.child_processes import ChildProcess, adopt_orphans, end_descendants
from nereid_client.supervise.hang_detection import HangWatch
from nereid_client.supervise.memory_watch import MemoryWatch
from nereid_client.supervise.pooling_models import PoolingWarmUp
from nereid_client.supervise.serve_log import open_log
from nereid_client.supervise.serve_plan import ServePlan
from nereid_client.supervise.shared_memory import delete_shared_memory, reserve_prefix
from nereid_client.supervise.start_fork_server import start_fork_server
from nereid_client.supervise.supervised_program import SupervisedProgram
from nereid_client.supervise.unfinished_requests import count_unfinished
from nereid_client.supervise.warmup import WarmUp

SERVER_EXIT_TIMEOUT_S = 5
_TICK_S = 0.05
_PROGRESS_EVERY_S = 10.0
# The time in seconds between SIGTERM and SIGKILL, for each group of processes.
_SERVER_GRACE_S = SERVER_EXIT_TIMEOUT_S + 5.0
_FRONTEND_GRACE_S = 8.0
_LEFTOVER_GRACE_S = 3.0
_ORPHAN_GRACE_S = 1.0
_DRAIN_CHECK_EVERY_S = 0.1
# After a model has reported that it is stopping, the supervisor waits for this number of seconds
# before it restarts the server, so that the model can answer the waiting requests.
_LAST_RESPONSES_S = 1.0


class Supervisor:
    """Runs the Triton server and the frontend, and restarts them after failures.

    The supervisor stops after a signal, or after a failure that a restart cannot repair.
    """

    def __init__(self, plan: ServePlan) -> None:
        """Create a supervisor for the programs in `plan`. The method `run` starts them."""
        self._plan = plan
        self._stop = SignalFlag()  # set by the first signal
        self._second_signal = SignalFlag()  # set by the second signal
        self._started = time.monotonic()
        self._next_progress_s = _PROGRESS_EVERY_S
        self._is_announced = False  # whether all programs have been ready once
        self._hang_watches: list[HangWatch] = []
        self._memory = MemoryWatch(plan.max_process_memory, complain)
        self._programs: list[SupervisedProgram] = []  # the Triton server, then the frontend
        self._warm_up: WarmUp | None = None  # None after all models have answered
        self._fork_server: ChildProcess | None = None

    @property
    def _server(self) -> SupervisedProgram:
        return self._programs[0]

    @property
    def _frontend(self) -> SupervisedProgram:
        return self._programs[1]

    def run(self) -> int:
        """Run the programs. At the end, stop all processes and delete the shared memory.

        Returns: the exit code: 0 after a signal, 1 after a failure, 2 for a wrong setting.
        """
        with (
            open_log(self._plan.log_path, self._plan.log_format) as log,
            self._handle_signals(),
            continue_without_output(),
            reserve_prefix(self._plan.shm_prefix),
        ):
            adopt_orphans()
            try:
                return self._run(log)
            finally:
                self._end_all()

    def _run(self, log: IO[str]) -> int:
        """Run the programs. Stop after a signal, or if a failed program must not be restarted."""
        self._start_programs(log)
        while not self._stop.wait(_TICK_S):
            self._memory.check()
            exit_code = self._handle_failures()
            if exit_code is not None:
                return exit_code
            self._restart_due_programs()
            self._report_progress()
        if self._is_announced:
            self._drain()
        say("nereid: stopping")
        return 0

    def _start_programs(self, log: IO[str]) -> None:
        """Start the Triton server, the frontend, the warm-up and, if needed, the fork server.

        Raises: CliError if the operating system cannot start the server or the frontend.
        """
        plan = self._plan
        self._print_what_starts()
        if plan.fork_server:
            environment = plan.server.environment
            self._fork_server = start_fork_server(plan.fork_server, environment, log, say)
        for program in (plan.server, plan.frontend_program):
            try:
                started_program = SupervisedProgram(program, plan.restarts, log)
            except OSError as error:
                raise CliError(
                    f"{program.name} cannot be started: the operating system does not run "
                    f"{program.command[0]} ({error.strerror})"
                ) from None
            self._programs.append(started_program)
        self._start_warm_up()

    def _print_what_starts(self) -> None:
        """Print the checkpoints of the models, the name of the log, and the plan's warnings."""
        plan = self._plan
        for path in (plan.model, *(model.path for model in plan.pooling_models)):
            say(f"nereid: serving {path}")
        say(f"nereid: starting tritonserver and the OpenAI frontend; their log is {plan.log_name}")
        for warning in plan.warnings:
            complain(f"nereid: warning: {warning}")

    def _start_warm_up(self) -> None:
        """Start threads that wait until each model has been loaded and has answered a request."""
        plan = self._plan
        warm_up = WarmUp(plan.frontend)
        self._warm_up = warm_up
        self._pooling_warm_up = PoolingWarmUp(plan.frontend, plan.pooling_models, warm_up.is_ready)
        warm_up.start()
        self._pooling_warm_up.start()

    def _watch_for_hangs(self) -> None:
        """Stop the hang detection for the previous server, and start it for the running server."""
        plan = self._plan
        for watch in self._hang_watches:
            watch.stop()
        self._hang_watches = []
        if plan.hang_timeout_s > 0:
            for probe in plan.probes:
                watch = HangWatch(
                    plan.frontend, plan.metrics_url, plan.http_url, probe, plan.hang_timeout_s
                )
                watch.start()
                self._hang_watches.append(watch)

    def _report_progress(self) -> None:
        """If all models have answered, end the warm-up, and print that the server is ready.

        Otherwise, print from time to time what the server is waiting for.
        """
        warm_up = self._warm_up
        if warm_up is None:  # all models have answered
            return
        elapsed_s = time.monotonic() - self._started
        # `warm_up.curl` is set after the language model has answered its first request.
        if warm_up.curl is not None and self._pooling_warm_up.is_done:
            curls = [warm_up.curl, *self._pooling_warm_up.curls]
            self._end_warm_up(curls, elapsed_s)
        elif elapsed_s >= self._next_progress_s:
            self._next_progress_s += _PROGRESS_EVERY_S
            say(f"nereid: {warm_up.stage} ({elapsed_s:.0f} s so far)")

    def _end_warm_up(self, curls: list[str], elapsed_s: float) -> None:
        """Print that all models answer. After the first start, also start the hang detection."""
        self._warm_up = None
        # While a model is loading, its stub may end because the model rejects a setting. From now
        # on, all models are loaded, so a stub that disappears has failed.
        self._server.stubs.are_models_loaded = True
        if self._is_announced:  # after a restart, which has already started the hang detection
            say(f"nereid: everything answers again after {elapsed_s:.1f} s")
            return
        self._is_announced = True
        self._watch_for_hangs()
        self._announce(curls, elapsed_s)

    def _handle_failures(self) -> int | None:
        """Find the programs that have failed, and plan their restarts.

        Returns: the exit code if a program must not be restarted again, else None.
        """
        for program in self._programs:
            if program.restart_at is not None:  # the restart is planned already
                continue
            failure = self._failure_of(program)
            if failure is None:
                continue
            exit_code = self._plan_restart(program, failure)
            if exit_code is not None:
                return exit_code
        return None

    def _failure_of(self, program: SupervisedProgram) -> str | None:
        """Return the reason why a program must be restarted, or None if the program works."""
        failure = program.failure()
        if failure is None and program is self._server:
            return self._server_failure()
        return failure

    def _plan_restart(self, program: SupervisedProgram, failure: str) -> int | None:
        """If a failed program may be restarted, end its processes and set the time of the restart.

        Returns: the exit code if the program must not be restarted again, else None.
        """
        # A program that exits during the first start has a wrong setting or a wrong checkpoint, so
        # a restart would not help. A program that crashes is always restarted.
        is_restartable = self._is_announced or program.has_crashed
        # `record_failure` returns None if the program has been restarted too often in a row.
        wait_s = program.restarts.record_failure() if is_restartable else None
        if wait_s is None:
            return self._report_failure(failure, program)
        when = "now" if wait_s == 0 else f"in {wait_s:g} s"
        restart = program.restarts.describe()
        complain(f"nereid: {failure}; it is started again {when} ({restart})")
        self._end_processes_of(program)
        program.restart_at = time.monotonic() + wait_s
        return None

    def _server_failure(self) -> str | None:
        """Return the reason why the running server does not answer, or None if the server works."""
        return self._failure_of_model() or self._failure_during_warm_up() or self._detected_hang()

    def _failure_of_model(self) -> str | None:
        """Return the first error of a model that has stopped, or None if no model has stopped.

        A model that has to stop reports an error, and then needs up to `_LAST_RESPONSES_S` seconds
        to answer its waiting requests. Before this time has passed, return None. Also return None
        during the first start, because the server then exits by itself after such an error.
        """
        child = self._server.child
        error_at = child.first_model_error_at
        if not self._is_announced or error_at is None:
            return None
        has_answered_waiting_requests = time.monotonic() - error_at > _LAST_RESPONSES_S
        if not has_answered_waiting_requests:
            return None
        return f"{self._server.name}: {child.model_errors[0]}"

    def _detected_hang(self) -> str | None:
        """Return the description of the first hang in `_hang_watches`, or None if no model hangs.

        Each watch sends test requests to one model. The watches start after the first warm-up.
        """
        return next((watch.finding for watch in self._hang_watches if watch.finding), None)

    def _failure_during_warm_up(self) -> str | None:
        """Return the reason why the warm-up has failed. Without a failed warm-up, return None.

        During the warm-up, the server starts a stub process for each Python model, and can wait
        forever for the end of a stub that is still running.
        """
        if self._warm_up is None:  # all models have answered
            return None
        if self._server.stubs.detect_hang():
            return f"{self._server.name} waits for the end of a stub process that is still running"
        return self._warm_up_failure

    @property
    def _warm_up_failure(self) -> str | None:
        """The reason why a model cannot answer its first request. None if no model has failed."""
        warm_up_failure = self._warm_up.failure if self._warm_up is not None else None
        return warm_up_failure or self._pooling_warm_up.failure

    def _end_processes_of(self, program: SupervisedProgram) -> None:
        """End all processes of a failed program, and remove the program's shared memory."""
        # The program may hang, so it is killed at once. Its waiting requests then fail immediately.
        program.child.kill()
        others = [other.child.pid for other in self._programs if other is not program]
        if self._fork_server is not None:
            # The fork server continues to run. It kills the processes that it has created for the
            # failed server.
            others.append(self._fork_server.pid)
        end_descendants(_ORPHAN_GRACE_S, self._second_signal.wait, keep=others)
        if program is self._server:
            delete_shared_memory(self._plan.shm_prefix)

    def _restart_due_programs(self) -> None:
        """Start each failed program whose time `restart_at` has come, and start a new warm-up.

        If the current warm-up is still waiting, no new warm-up is started, because the current one
        also waits for the restarted programs.
        """
        due = [program for program in self._programs if program.is_restart_due]
        restarted = [program for program in due if self._start_again(program)]
        if self._server in restarted:
            self._watch_for_hangs()
        # `_warm_up` is None after all models have answered.
        is_warming_up = self._warm_up is not None and self._warm_up_failure is None
        if restarted and not is_warming_up:
            self._started = time.monotonic()
            self._next_progress_s = _PROGRESS_EVERY_S
            self._start_warm_up()

    def _start_again(self, program: SupervisedProgram) -> bool:
        """Start a program that has ended. Return False if the operating system refuses."""
        try:
            program.start()
        except OSError as error:  # too little memory, or too many processes
            # The previous child has ended, so `_handle_failures` plans the next attempt.
            complain(f"nereid: {program.name} cannot be started ({error.strerror})")
            return False
        return True

    def _report_failure(self, failure: str, program: SupervisedProgram) -> int:
        """Print the reason why a program failed. The program will not be restarted.

        Returns: the exit code: 2 if a model rejected a setting or the checkpoint at the first
            start, else 1.
        """
        child = program.child
        if child.model_errors:
            for reason in child.model_errors:
                complain(f"nereid serve: {reason}")
            return 1 if self._is_announced else 2
        self._print_output(failure, child)
        if self._is_announced and program.restarts.number:
            restarts = _counted(program.restarts.number, "restart")
            complain(
                f"nereid serve: {program.name} failed again after {restarts} in a row "
                "(--max-restarts)"
            )
        return 1

    def _print_output(self, failure: str, child: ChildProcess) -> None:
        """Print why a program failed, and print the last lines of its output."""
        complain(f"nereid serve: {failure}. The last lines of its output are:")
        for line in (*child.last_lines, *child.error_lines):
            # The server logs a traceback as one line, in which \\n replaces each line end.
            complain("    " + line.replace("\\n", "\n    "))
        complain(f"nereid serve: {failure}. The whole log is {self._plan.log_name}")

    def _announce(self, curls: list[str], elapsed_s: float) -> None:
        """Print the models, the addresses, and example commands."""
        name = self._plan.frontend.model
        say(f"nereid: ready after {elapsed_s:.1f} s; the model's name is {name}")
        for model in self._plan.pooling_models:
            say(f"  {model.kind:14} {model.name}")
        for endpoint, address in self._plan.endpoints:
            say(f"  {endpoint:14} {address}")
        say("Try one of these commands in another terminal:")
        for curl in curls:
            say(curl)
        say("Press Ctrl-C to stop.")

    def _drain(self) -> None:
        """Make the frontend reject new requests. Wait until the running requests have ended.

        Stop waiting after the time limit for the drain, or after a second signal.
        """
        limit_s = self._plan.drain_timeout_s
        frontend = self._frontend.child
        if limit_s <= 0 or frontend.exit_code is not None:
            return
        frontend.signal(signal.SIGUSR1)
        deadline = time.monotonic() + limit_s
        is_first_check = True
        while not self._second_signal.wait(_DRAIN_CHECK_EVERY_S):
            num_left = count_unfinished(self._plan.frontend, self._plan.metrics_url)
            if not num_left:
                return
            requests = _counted(num_left, "request")
            if time.monotonic() >= deadline:
                say(f"nereid: {requests} did not finish within {limit_s:g} s (--drain-timeout)")
                return
            if is_first_check:
                say(
                    f"nereid: waiting for {requests} to finish, for at most {limit_s:g} s; "
                    "a second signal stops at once"
                )
            is_first_check = False

    def _end_all(self) -> None:
        """End all processes, and remove the shared memory of the server."""
        # Each process receives SIGTERM, and SIGKILL if it still runs after its grace time. After a
        # second signal to the supervisor, `wait` returns True at once, and SIGKILL follows at once.
        wait = self._second_signal.wait
        # `_programs` contains the Triton server, followed by the frontend. The frontend is stopped
        # first, because it must close its streams to the server before the server ends.
        for program in reversed(self._programs):
            grace_s = _SERVER_GRACE_S if program is self._server else _FRONTEND_GRACE_S
            program.child.stop(grace_s, wait)
        if self._fork_server is not None:
            self._fork_server.stop(_LEFTOVER_GRACE_S, wait)
        leftovers = end_descendants(_LEFTOVER_GRACE_S, wait)
        if leftovers:
            say(f"nereid: ended processes that were still running: {', '.join(leftovers)}")
        delete_shared_memory(self._plan.shm_prefix)
        say("nereid: stopped")

    @contextmanager
    def _handle_signals(self) -> Iterator[None]:
        """Install handlers for SIGINT, SIGTERM and SIGHUP that stop the programs.

        After the first signal, running requests may finish. After a second signal, everything stops
        immediately. If this process ignores SIGHUP, for example because of the program nohup, the
        process continues to ignore SIGHUP.
        """

        def on_signal(number: int, frame: object) -> None:  # noqa: ARG001 - signal's signature
            if self._stop.is_set():
                self._second_signal.set()
            self._stop.set()

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        previous = [signal.signal(number, on_signal) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, previous, strict=True):
                signal.signal(number, handler)


def _counted(number: int, noun: str) -> str:
    """Return a number with a noun. Examples: "1 request" and "2 requests"."""
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"
