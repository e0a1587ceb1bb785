"""`nereid serve`: a Triton server and the OpenAI frontend, run and stopped together."""

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from nereid_client.cli.install_server_command import LAUNCHER_MARK, launcher_path
from nereid_client.cli.libpython import find_libpython
from nereid_client.console import CliError
from nereid_client.supervise import pooling_models as poolers
from nereid_client.supervise import startup_checks as checks
from nereid_client.supervise.restart_policy import RestartPolicy
from nereid_client.supervise.supervisor import SERVER_EXIT_TIMEOUT_S, Plan, Program, Supervisor
from nereid_client.supervise.warmup import Frontend

_Number = TypeVar("_Number", int, float)

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
# The same for the OpenAI frontend, which alone is told of them.
_FRONTEND_FLAGS = {
    "--max-concurrent-requests": (
        "NEREID_MAX_CONCURRENT_REQUESTS",
        "N",
        "the OpenAI API refuses more at a time with a 429 (default: 1024)",
    ),
    "--request-timeout": (
        "NEREID_REQUEST_TIMEOUT_S",
        "S",
        "a request to the OpenAI API may take this long (default: 0, no limit)",
    ),
    "--unread-timeout": (
        "NEREID_UNREAD_TIMEOUT_S",
        "S",
        "a client may leave its answer unread for this long (default: 120)",
    ),
}
_OF_FRONTEND = {variable for variable, _, _ in _FRONTEND_FLAGS.values()}
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
        "it, wait until the model answers, and run until Ctrl-C or SIGTERM. What dies meanwhile is "
        "started again.",
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
    for flag, (variable, metavar, text) in _FRONTEND_FLAGS.items():
        doors.add_argument(flag, metavar=metavar, help=f"{text} [{variable}]")
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
        "--max-restarts",
        type=_at_least_0(int),
        default=5,
        metavar="N",
        help="how often in a row a server or frontend that died is started again; 0: the first "
        "death ends everything (default: %(default)s)",
    )
    server.add_argument(
        "--restart-backoff",
        type=_at_least_0(float),
        default=1.0,
        metavar="S",
        help="the wait before the second restart in a row, doubled for each further one "
        "(default: %(default)s)",
    )
    server.add_argument(
        "--hang-timeout",
        type=_at_least_0(float),
        default=300.0,
        metavar="S",
        help="a server that lives but answers nothing for so long is started again; 0: never "
        "(default: %(default)s)",
    )
    server.add_argument(
        "--drain-timeout",
        type=_at_least_0(float),
        default=30.0,
        metavar="S",
        help="requests that run at SIGTERM may take this long to finish (default: %(default)s)",
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
    checks.check_frontend_settings(environment)
    checks.check_model_settings(
        repository, {name: text for name, text in environment.items() if name not in _OF_FRONTEND}
    )
    shm_prefix = f"nereid_{os.getpid()}_"
    near = "127.0.0.1" if args.host in ("0.0.0.0", "") else args.host
    metrics_url = f"http://{near}:{args.metrics_port}/metrics"
    return Plan(
        server=Program(
            "tritonserver",
            _server_command(args, tritonserver, repository, shm_prefix),
            {name: text for name, text in environment.items() if name not in _OF_FRONTEND},
        ),
        frontend_program=Program(
            "the OpenAI frontend", [sys.executable, "-m", "nereid_client"], environment
        ),
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
            ("metrics", metrics_url),
        ],
        metrics_url=metrics_url,
        generate_url=f"http://{near}:{args.http_port}/v2/models/llm/generate",
        hang_timeout_s=args.hang_timeout,
        restarts=RestartPolicy(args.max_restarts, args.restart_backoff),
        drain_timeout_s=args.drain_timeout,
    )


def _environment(args: argparse.Namespace, model: Path, name: str) -> dict[str, str]:
    environment = dict(os.environ)
    for flag, (variable, _, _) in (_ENGINE_FLAGS | _FRONTEND_FLAGS).items():
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
        f"--exit-timeout-secs={SERVER_EXIT_TIMEOUT_S}",
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


def _at_least_0(kind: Callable[[str], _Number]) -> Callable[[str], _Number]:
    """A type for argparse: a number that is not negative."""

    def parse(text: str) -> _Number:
        number = kind(text)
        if not 0 <= number < float("inf"):
            raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
        return number

    parse.__name__ = "number"  # argparse says "invalid number value"
    return parse
