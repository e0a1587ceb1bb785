"""`nereid serve`: run a Triton server and the OpenAI frontend together."""

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
from nereid_client.supervise import pooling_models, startup_checks
from nereid_client.supervise.frontend_client import FrontendClient
from nereid_client.supervise.restart_policy import RestartPolicy
from nereid_client.supervise.supervisor import (
    SERVER_EXIT_TIMEOUT_S,
    Program,
    ServePlan,
    Supervisor,
)

_Number = TypeVar("_Number", int, float)

# Flags of the language model: (environment variable, metavar, help). The backend reads the
# variables and checks their values.
_ENGINE_FLAGS = {
    "--max-model-len": (
        "NEREID_MAX_MODEL_LEN",
        "N",
        "The maximum number of tokens in the prompt and the response together.",
    ),
    "--kv-cache-memory": (
        "NEREID_KV_CACHE_MEMORY",
        "SIZE",
        "The memory for the KV cache, such as 2GiB.",
    ),
    "--dtype": (
        "NEREID_DTYPE",
        "NAME",
        "The data type of the model: auto, float32, bfloat16 or float16.",
    ),
    "--reasoning-parser": (
        "NEREID_REASONING_PARSER",
        "NAME",
        "The format of reasoning. The default is derived from the chat template. The value none "
        "turns the parser off.",
    ),
    "--tool-parser": (
        "NEREID_TOOL_PARSER",
        "NAME",
        "The format of tool calls. The default is derived from the chat template. The value none "
        "turns the parser off.",
    ),
    "--max-num-seqs": (
        "NEREID_MAX_NUM_SEQS",
        "N",
        "The maximum number of sequences that run at the same time.",
    ),
    "--max-num-batched-tokens": (
        "NEREID_MAX_NUM_BATCHED_TOKENS",
        "N",
        "The maximum number of tokens in one step of the engine.",
    ),
}
# Flags of the frontend. Only the frontend gets these variables.
_FRONTEND_FLAGS = {
    "--max-concurrent-requests": (
        "NEREID_MAX_CONCURRENT_REQUESTS",
        "N",
        "The maximum number of requests that run at the same time. Further requests are rejected "
        "with a 429. The default is 1024.",
    ),
    "--request-timeout": (
        "NEREID_REQUEST_TIMEOUT_S",
        "S",
        "The maximum duration of a request, in seconds. The default is 0, no limit.",
    ),
    "--unread-timeout": (
        "NEREID_UNREAD_TIMEOUT_S",
        "S",
        "A request ends if its client reads nothing for this many seconds. The default is 120.",
    ),
}
_FRONTEND_VARIABLES = {variable for variable, _, _ in _FRONTEND_FLAGS.values()}
_PORT_FLAGS = {
    "--http-port": (8000, "The port of the Triton server's HTTP endpoint."),
    "--grpc-port": (8001, "The port of the Triton server's gRPC endpoint."),
    "--metrics-port": (8002, "The port of the Triton server's metrics."),
    "--openai-port": (9000, "The port of the OpenAI frontend."),
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand `serve`."""
    parser = commands.add_parser(
        "serve",
        help="serve models with the Triton server and the OpenAI frontend",
        description="Start a Triton server and the OpenAI frontend, wait until the models answer, "
        "and run until Ctrl-C or SIGTERM. A process that ends unexpectedly is restarted.",
        epilog="The name in brackets is the environment variable of a flag; the flag takes "
        "precedence. Arguments after -- are passed to tritonserver. Exit codes: 0 after a signal, "
        "1 after a failure, 2 if a setting is wrong.",
    )
    model = parser.add_argument_group("language model")
    model.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="The folder of a Hugging Face checkpoint with safetensors files. The default is the "
        "demo model beside the model repository. [NEREID_MODEL]",
    )
    model.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="The name of the model in the API. The default is the name of the folder. "
        "[NEREID_SERVED_MODEL_NAME]",
    )
    for flag, (variable, metavar, text) in _ENGINE_FLAGS.items():
        model.add_argument(flag, metavar=metavar, help=f"{text} [{variable}]")
    pooling_models.add_flags(parser.add_argument_group("embedding model and reranker"))
    endpoints = parser.add_argument_group("endpoints")
    endpoints.add_argument(
        "--host",
        default="127.0.0.1",
        help="The address on which all servers listen. The default is %(default)s.",
    )
    for flag, (port, text) in _PORT_FLAGS.items():
        endpoints.add_argument(
            flag, type=int, default=port, metavar="N", help=f"{text} The default is {port}."
        )
    for flag, (variable, metavar, text) in _FRONTEND_FLAGS.items():
        endpoints.add_argument(flag, metavar=metavar, help=f"{text} [{variable}]")
    server = parser.add_argument_group("processes and logs")
    server.add_argument(
        "--model-repository",
        type=Path,
        metavar="DIR",
        help="The folder with the Triton models. The default is the folder model_repository in the "
        "current folder, else the one beside Nereid's sources.",
    )
    server.add_argument(
        "--tritonserver",
        type=Path,
        metavar="PATH",
        help="The Triton server program. The default is the one that `nereid install-server` "
        "installed, else the one in PATH.",
    )
    server.add_argument(
        "--max-restarts",
        type=_at_least_0(int),
        default=5,
        metavar="N",
        help="The maximum number of restarts in a row of a process that ended. 0 means no restart. "
        "The default is %(default)s.",
    )
    server.add_argument(
        "--restart-backoff",
        type=_at_least_0(float),
        default=1.0,
        metavar="S",
        help="The number of seconds before the second restart in a row. It doubles for each "
        "further restart. The default is %(default)s.",
    )
    server.add_argument(
        "--hang-timeout",
        type=_at_least_0(float),
        default=300.0,
        metavar="S",
        help="A Triton server that makes no progress for this many seconds is restarted. 0 means "
        "never. The default is %(default)s.",
    )
    server.add_argument(
        "--drain-timeout",
        type=_at_least_0(float),
        default=30.0,
        metavar="S",
        help="The number of seconds that running requests have to finish after SIGTERM. The "
        "default is %(default)s.",
    )
    server.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="The log level. The default is %(default)s. [NEREID_LOG_LEVEL]",
    )
    server.add_argument(
        "--log-file",
        type=Path,
        metavar="PATH",
        help="The file for the log of all servers. The default is "
        "~/.local/state/nereid/serve-PORT.log.",
    )
    server.add_argument("tritonserver_args", nargs="*", metavar="-- ARGS", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check all settings, then run the servers until the end. Return the exit code."""
    return Supervisor(make_plan(args)).run()


def make_plan(args: argparse.Namespace) -> ServePlan:
    """Return everything to run, with all settings checked. Nothing is started.

    Raises: CliError.
    """
    startup_checks.check_python_version()
    tritonserver = _find_tritonserver(args.tritonserver)
    repository = _find_repository(args.model_repository)
    startup_checks.check_model_repository(repository)
    model = args.model or _environment_path("NEREID_MODEL") or repository.parent / "demo" / "chat"
    model = model.expanduser().absolute()
    startup_checks.check_checkpoint(model)
    served_pooling_models = pooling_models.choose(args, repository)
    ports = {flag: getattr(args, _attribute(flag)) for flag in _PORT_FLAGS}
    startup_checks.check_ports(args.host, ports)

    given_name = args.served_model_name or os.environ.get("NEREID_SERVED_MODEL_NAME")
    name = given_name or model.resolve().name
    environment = _environment(args, model, name) | pooling_models.environment(
        served_pooling_models
    )
    startup_checks.check_frontend_settings(environment)
    startup_checks.check_model_settings(
        repository,
        {name: text for name, text in environment.items() if name not in _FRONTEND_VARIABLES},
    )
    shm_prefix = f"nereid_{os.getpid()}_"
    local_host = "127.0.0.1" if args.host in ("0.0.0.0", "") else args.host
    metrics_url = f"http://{local_host}:{args.metrics_port}/metrics"
    return ServePlan(
        server=Program(
            "tritonserver",
            _server_command(args, tritonserver, repository, shm_prefix),
            {name: text for name, text in environment.items() if name not in _FRONTEND_VARIABLES},
        ),
        frontend_program=Program(
            "the OpenAI frontend", [sys.executable, "-m", "nereid_client"], environment
        ),
        shm_prefix=shm_prefix,
        log_path=args.log_file or _default_log_path(args.openai_port),
        model=model,
        pooling_models=served_pooling_models,
        frontend=FrontendClient(
            f"http://{local_host}:{args.openai_port}", name, environment.get("NEREID_API_KEY", "")
        ),
        endpoints=[
            ("OpenAI API", f"http://{local_host}:{args.openai_port}/v1"),
            ("Triton HTTP", f"http://{local_host}:{args.http_port}"),
            ("Triton gRPC", f"{local_host}:{args.grpc_port}"),
            ("Triton metrics", metrics_url),
            ("OpenAI metrics", f"http://{local_host}:{args.openai_port}/metrics"),
        ],
        metrics_url=metrics_url,
        generate_url=f"http://{local_host}:{args.http_port}/v2/models/llm/generate",
        hang_timeout_s=args.hang_timeout,
        restarts=RestartPolicy(args.max_restarts, args.restart_backoff),
        drain_timeout_s=args.drain_timeout,
    )


def _environment(args: argparse.Namespace, model: Path, name: str) -> dict[str, str]:
    """Return the environment variables of both programs: the current ones and the flags."""
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
        "PYTHONUNBUFFERED": "1",  # so that progress messages of the Python models are not delayed
    }
    return environment


def _server_command(
    args: argparse.Namespace, tritonserver: Path, repository: Path, shm_prefix: str
) -> list[str]:
    """Return the command that starts the Triton server."""
    command = [str(tritonserver), f"--model-repository={repository}"]
    for endpoint in ("http", "grpc", "metrics"):
        command += [
            f"--{endpoint}-address={args.host}",
            f"--{endpoint}-port={getattr(args, endpoint + '_port')}",
        ]
    command += [
        f"--exit-timeout-secs={SERVER_EXIT_TIMEOUT_S}",
        # The model configurations are complete. Auto-completion would start each model twice.
        "--disable-auto-complete-config",
        # All models load at the same time. Each thread only waits for the process of its model.
        "--model-load-thread-count=8",
        # With this prefix, the shared memory of a server that was killed can be found and removed.
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
    ]
    if args.log_level == "debug":
        command.append("--log-verbose=1")
    return command + list(args.tritonserver_args)


def _find_tritonserver(given: Path | None) -> Path:
    """Return the path of the Triton server program.

    Raises: CliError if there is none.
    """
    if given is not None:
        if not os.access(given, os.X_OK):
            raise CliError(f"--tritonserver: {given} is not an executable file")
        return given.absolute()
    launcher = launcher_path()
    if launcher.is_file() and LAUNCHER_MARK in launcher.read_text(errors="replace"):
        find_libpython()
        startup_checks.check_embedded_numpy()
        return launcher
    found = shutil.which("tritonserver")
    if found is None:
        raise CliError(
            "The program tritonserver was not found. Run `nereid install-server` to install it."
        )
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
    """Return an argument type for argparse: a number that is not negative."""

    def parse(text: str) -> _Number:
        number = kind(text)
        if not 0 <= number < float("inf"):
            raise argparse.ArgumentTypeError(f"must be at least 0, but it is {text}")
        return number

    parse.__name__ = "number"  # argparse says "invalid number value"
    return parse
