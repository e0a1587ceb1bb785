"""`nereid serve`: a Triton server and the OpenAI frontend, run and stopped together."""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nereid_client.cli import checks, poolers
from nereid_client.cli.children import Child, adopt_orphans, end_descendants
from nereid_client.cli.console import CliError, complain, say
from nereid_client.cli.install_server import LAUNCHER_MARK, launcher_path
from nereid_client.cli.libpython import find_libpython
from nereid_client.cli.poolers import Pooler, PoolerWarmUp
from nereid_client.cli.warmup import Frontend, WarmUp

_PROGRESS_EVERY_S = 10.0
_FRONTEND_GRACE_S = 8.0
_SERVER_EXIT_TIMEOUT_S = 5
_LEFTOVER_GRACE_S = 3.0

# flag -> (environment variable, metavar, help). The backend reads and checks the variables.
_ENGINE_FLAGS = {
    "--max-model-len": ("NEREID_MAX_MODEL_LEN", "N", "longest prompt plus answer, in tokens"),
    "--kv-cache-memory": ("NEREID_KV_CACHE_MEMORY", "SIZE", "for the KV cache, such as 2GiB"),
    "--dtype": ("NEREID_DTYPE", "NAME", "auto, float32, bfloat16 or float16"),
    "--reasoning-parser": (
        "NEREID_REASONING_PARSER",
        "NAME",
        "format of reasoning (default: what the chat template shows; none: not parsed)",
    ),
    "--tool-parser": ("NEREID_TOOL_PARSER", "NAME", "format of tool calls (default: the same)"),
    "--max-num-seqs": ("NEREID_MAX_NUM_SEQS", "N", "most sequences that run at a time"),
    "--max-num-batched-tokens": (
        "NEREID_MAX_NUM_BATCHED_TOKENS",
        "N",
        "most tokens computed in one step of the engine",
    ),
}
_PORT_FLAGS = {
    "--http-port": (8000, "the Triton server's HTTP door"),
    "--grpc-port": (8001, "the Triton server's gRPC door"),
    "--metrics-port": (8002, "the Triton server's Prometheus metrics"),
    "--openai-port": (9000, "the OpenAI API"),
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `serve` to the command line."""
    parser = commands.add_parser(
        "serve",
        help="serve a model: tritonserver and the OpenAI API",
        description="Start a Triton server on the model repository and the OpenAI API in front of "
        "it, wait until the model answers, and run until Ctrl-C or SIGTERM.",
        epilog="Exit codes: 0 stopped by a signal, 1 something failed, 2 a setting is wrong. "
        "Every flag of the model is also an environment variable, named in brackets. Arguments "
        "after -- go to tritonserver.",
    )
    model = parser.add_argument_group("the model")
    model.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="folder of a Hugging Face checkpoint with safetensors "
        "(default: the demo beside the model repository) [NEREID_MODEL]",
    )
    model.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="its name in the API (default: the folder's name) [NEREID_SERVED_MODEL_NAME]",
    )
    for flag, (variable, metavar, text) in _ENGINE_FLAGS.items():
        model.add_argument(flag, metavar=metavar, help=f"{text} [{variable}]")
    poolers.add_flags(parser.add_argument_group("the models beside it"))
    doors = parser.add_argument_group("doors")
    doors.add_argument("--host", default="127.0.0.1", help="address (default: %(default)s)")
    for flag, (port, text) in _PORT_FLAGS.items():
        doors.add_argument(
            flag, type=int, default=port, metavar="N", help=f"{text} (default: {port})"
        )
    server = parser.add_argument_group("the server")
    server.add_argument(
        "--model-repository",
        type=Path,
        metavar="DIR",
        help="(default: model_repository in this folder, else beside Nereid's sources)",
    )
    server.add_argument(
        "--tritonserver",
        type=Path,
        metavar="PATH",
        help="the program (default: the installed embedded one, else the one on PATH)",
    )
    server.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="(default: %(default)s) [NEREID_LOG_LEVEL]",
    )
    server.add_argument("--log-file", type=Path, metavar="PATH", help="where the servers' log goes")
    server.add_argument("tritonserver_args", nargs="*", metavar="-- ARGS", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Plan:
    """What will be started, checked already."""

    server_command: list[str]
    frontend_command: list[str]
    environment: dict[str, str]
    shm_prefix: str
    log_path: Path
    model: Path
    poolers: list[Pooler]
    frontend: Frontend
    doors: list[tuple[str, str]]


def run(args: argparse.Namespace) -> int:
    """Check, start, wait, announce, watch, stop."""
    return Supervisor(make_plan(args)).run()


def make_plan(args: argparse.Namespace) -> Plan:
    """Everything decided and checked, nothing started.

    Raises: CliError.
    """
    checks.check_python_version()
    tritonserver = _find_tritonserver(args.tritonserver)
    repository = _find_repository(args.model_repository)
    checks.check_model_repository(repository)
    model = args.model or _environment_path("NEREID_MODEL") or repository.parent / "demo" / "chat"
    model = model.expanduser().absolute()
    checks.check_checkpoint(model)
    beside = poolers.choose(args, repository)
    ports = {flag: getattr(args, _attribute(flag)) for flag in _PORT_FLAGS}
    checks.check_ports(args.host, ports)

    given_name = args.served_model_name or os.environ.get("NEREID_SERVED_MODEL_NAME")
    name = given_name or model.resolve().name
    environment = _environment(args, model, name) | poolers.environment(beside)
    shm_prefix = f"nereid_{os.getpid()}_"
    near = "127.0.0.1" if args.host in ("0.0.0.0", "") else args.host
    return Plan(
        server_command=_server_command(args, tritonserver, repository, shm_prefix),
        frontend_command=[sys.executable, "-m", "nereid_client"],
        environment=environment,
        shm_prefix=shm_prefix,
        log_path=args.log_file or _default_log_path(args.openai_port),
        model=model,
        poolers=beside,
        frontend=Frontend(
            f"http://{near}:{args.openai_port}", name, environment.get("NEREID_API_KEY", "")
        ),
        doors=[
            ("OpenAI API", f"http://{near}:{args.openai_port}/v1"),
            ("Triton HTTP", f"http://{near}:{args.http_port}"),
            ("Triton gRPC", f"{near}:{args.grpc_port}"),
            ("metrics", f"http://{near}:{args.metrics_port}/metrics"),
        ],
    )


class Supervisor:
    """Runs a plan until a signal comes or a child ends."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._children: list[Child] = []
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._started = time.monotonic()

    def run(self) -> int:
        """0 after a signal, 1 after a failure; nothing that was started is left."""
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
        for name, command in (
            ("tritonserver", plan.server_command),
            ("the OpenAI frontend", plan.frontend_command),
        ):
            self._children.append(Child(name, command, plan.environment, log, say))
        warm_up = WarmUp(plan.frontend)
        beside = PoolerWarmUp(plan.frontend, plan.poolers)
        warm_up.start()
        beside.start()
        announced = False
        next_progress_s = _PROGRESS_EVERY_S
        while not self._stop.wait(0.05):
            failure = self._failure(warm_up.failure or beside.failure)
            if failure is not None:
                return self._report(*failure)
            elapsed_s = time.monotonic() - self._started
            if warm_up.curl and beside.is_done and not announced:
                announced = True
                self._announce([warm_up.curl, *beside.curls], elapsed_s)
            elif not announced and elapsed_s >= next_progress_s:
                next_progress_s += _PROGRESS_EVERY_S
                say(f"nereid: {warm_up.stage} ({elapsed_s:.0f} s)")
        say("nereid: stopping")
        return 0

    def _failure(self, refusal: str | None) -> tuple[str, Child] | None:
        for child in self._children:
            if child.exit_code is not None:
                return child.describe_end(), child
        if refusal:
            return refusal, self._children[0]
        return None

    def _report(self, what: str, child: Child) -> int:
        """Say why it ended; 2 where a setting or the checkpoint was refused, else 1."""
        if child.refusals:
            for reason in child.refusals:
                complain(f"nereid serve: {reason}")
            return 2
        complain(f"nereid serve: {what}; the end of its output:")
        for line in (*child.tail, *child.errors):
            # The server writes a traceback's line ends as \\n, all in one line.
            complain("    " + line.replace("\\n", "\n    "))
        complain(f"nereid serve: {what}; the whole log: {self._plan.log_path}")
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

    def _end_all(self) -> None:
        for child in reversed(self._children):  # the frontend first: it lets its streams go
            grace_s = _FRONTEND_GRACE_S if child is not self._children[0] else (
                _SERVER_EXIT_TIMEOUT_S + 5.0
            )  # fmt: skip
            child.stop(grace_s, self._hurry.wait)
        left = end_descendants(_LEFTOVER_GRACE_S, self._hurry.wait)
        if left:
            say(f"nereid: ended what was left behind: {', '.join(left)}")
        for region in Path("/dev/shm").glob(self._plan.shm_prefix + "*"):
            region.unlink(missing_ok=True)
        say("nereid: stopped")

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


def _environment(args: argparse.Namespace, model: Path, name: str) -> dict[str, str]:
    environment = dict(os.environ)
    for flag, (variable, _, _) in _ENGINE_FLAGS.items():
        value = getattr(args, _attribute(flag))
        if value is not None:
            environment[variable] = value
    environment |= {
        "NEREID_MODEL": str(model),
        "NEREID_SERVED_MODEL_NAME": name,
        "NEREID_LOG_LEVEL": args.log_level,
        "NEREID_OPENAI_HOST": args.host,
        "NEREID_OPENAI_PORT": str(args.openai_port),
        "NEREID_GRPC_URL": f"{args.host}:{args.grpc_port}".replace("0.0.0.0:", "127.0.0.1:"),
        "PYTHONUNBUFFERED": "1",  # progress lines of the server's Python models come at once
    }
    return environment


def _server_command(
    args: argparse.Namespace, tritonserver: Path, repository: Path, shm_prefix: str
) -> list[str]:
    command = [str(tritonserver), f"--model-repository={repository}"]
    for door in ("http", "grpc", "metrics"):
        command += [
            f"--{door}-address={args.host}",
            f"--{door}-port={getattr(args, door + '_port')}",
        ]
    command += [
        f"--exit-timeout-secs={_SERVER_EXIT_TIMEOUT_S}",
        # Our configurations are complete; guessing would start every Python model twice.
        "--disable-auto-complete-config",
        # Each in a thread of its own: they wait for their processes, not for one another.
        "--model-load-thread-count=8",
        # Names by which the shared memory of a server that was killed can be found.
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
    ]
    if args.log_level == "debug":
        command.append("--log-verbose=1")
    return command + list(args.tritonserver_args)


def _find_tritonserver(given: Path | None) -> Path:
    if given is not None:
        if not os.access(given, os.X_OK):
            raise CliError(f"--tritonserver: {given} is not a program")
        return given.absolute()
    ours = launcher_path()
    if ours.is_file() and LAUNCHER_MARK in ours.read_text(errors="replace"):
        find_libpython()
        checks.check_embedded_numpy()
        return ours
    found = shutil.which("tritonserver")
    if found is None:
        raise CliError("there is no tritonserver; install the embedded one: nereid install-server")
    return Path(found)


def _find_repository(given: Path | None) -> Path:
    if given is not None:
        return given.expanduser().absolute()
    here = Path.cwd() / "model_repository"
    beside_sources = Path(__file__).resolve().parents[3] / "model_repository"
    return here if here.is_dir() or not beside_sources.is_dir() else beside_sources


def _environment_path(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _default_log_path(port: int) -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "nereid" / f"serve-{port}.log"


def _open_log(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w", buffering=1)
    except OSError as error:
        raise CliError(
            f"--log-file: {path} can't be written ({error.strerror}); give another, "
            f"such as {Path(tempfile.gettempdir()) / 'nereid.log'}"
        ) from None
