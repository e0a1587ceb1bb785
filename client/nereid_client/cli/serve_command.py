"""`nereid serve`: run a Triton server and the OpenAI frontend together."""

import argparse
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ByteSize, TypeAdapter, ValidationError

from nereid_client.cli.install_server_command import LAUNCHER_MARK, launcher_path
from nereid_client.cli.libpython import find_libpython
from nereid_client.console import CliError, complain
from nereid_client.settings import SCHEMA, VARIABLES, Settings
from nereid_client.several_models.serve_models import ServedModels, without_model_settings
from nereid_client.supervise import fork_server, pooling_models, startup_checks
from nereid_client.supervise.frontend_client import FrontendClient
from nereid_client.supervise.hang_detection import PROBES, Probe
from nereid_client.supervise.restart_policy import RestartPolicy
from nereid_client.supervise.supervisor import (
    SERVER_EXIT_TIMEOUT_S,
    Program,
    ServePlan,
    Supervisor,
)

_Number = TypeVar("_Number", int, float)

# A JSON file that maps the environment variables of the language model's settings to descriptions.
# The backend declares these settings, but this package must not import the backend. `make settings`
# therefore writes the descriptions to this file.
_ENGINE_SETTINGS = Path(__file__).with_name("engine_settings.json")
# Maps each flag of the language model to the placeholder that --help shows for the flag's value.
# The backend checks the values that the user gives.
_ENGINE_FLAGS = {
    "--max-model-len": "N",
    "--kv-cache-memory": "SIZE",
    "--dtype": "NAME",
    "--reasoning-parser": "NAME",
    "--tool-parser": "NAME",
    "--max-num-seqs": "N",
    "--max-num-batched-tokens": "N",
    "--tensor-parallel-size": "N",
    "--data-parallel-size": "N",
    "--draft-model": "PATH",
}
# Maps each flag of the frontend to the name of a setting and to the placeholder that --help shows
# for the flag's value. The flag --host is missing here, because it also sets the address of the
# Triton server.
_FRONTEND_FLAGS = {
    "--openai-port": ("port", "N"),
    "--frontend-workers": ("frontend_workers", "N"),
    "--max-concurrent-requests": ("max_concurrent_requests", "N"),
    "--request-timeout": ("request_timeout_s", "S"),
    "--unread-timeout": ("unread_timeout_s", "S"),
    "--log-level": ("log_level", "LEVEL"),
}
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_PORT_FLAGS = {
    "--http-port": (8000, "The port of the Triton server's HTTP endpoint."),
    "--grpc-port": (8001, "The port of the Triton server's gRPC endpoint."),
    "--metrics-port": (8002, "The port of the Triton server's metrics."),
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
        help="The folder of a Hugging Face checkpoint, or a GGUF file. The default is the "
        "demo model beside the model repository. [NEREID_MODEL]",
    )
    model.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="A TOML file that describes several models, instead of --model. [NEREID_MODELS_FILE]",
    )
    model.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="The name of the model in the API. The default is the name of the folder. "
        "[NEREID_SERVED_MODEL_NAME]",
    )
    model.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="A LoRA adapter, which requests select with the model NAME. The flag can be repeated. "
        "[NEREID_LORA_ADAPTERS]",
    )
    engine_settings = json.loads(_ENGINE_SETTINGS.read_text(encoding="utf-8"))
    for flag, metavar in _ENGINE_FLAGS.items():
        variable = _engine_variable(flag)
        model.add_argument(flag, metavar=metavar, help=f"{engine_settings[variable]} [{variable}]")
    pooling_models.add_flags(parser.add_argument_group("embedding model and reranker"))
    endpoints = parser.add_argument_group("endpoints")
    endpoints.add_argument(
        "--host",
        help="The address on which all servers listen. The default is 127.0.0.1. The variable "
        "changes the address of the OpenAI frontend only. [NEREID_OPENAI_HOST]",
    )
    for flag, (port, text) in _PORT_FLAGS.items():
        endpoints.add_argument(
            flag, type=int, default=port, metavar="N", help=f"{text} The default is {port}."
        )
    for flag, (name, metavar) in _FRONTEND_FLAGS.items():
        setting = SCHEMA[name]
        endpoints.add_argument(
            flag,
            metavar=metavar,
            help=f"{setting['description']} The default is {setting['default']}. "
            f"[{VARIABLES[name]}]",
        )
    server = parser.add_argument_group("processes and logs")
    server.add_argument(
        "--model-repository",
        type=Path,
        metavar="DIR",
        help="The folder with the Triton models. The default is the folder model_repository in the "
        "current folder, else the one in Nereid's checkout or in the installed package.",
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
        help="If a model does not answer a small request for this many seconds while requests are "
        "running, the Triton server is restarted. 0 means never. The default is %(default)s.",
    )
    server.add_argument(
        "--max-process-memory",
        type=_size,
        default=0,
        metavar="SIZE",
        help="The largest memory of one process, such as 8GiB. A process that exceeds it for five "
        "seconds is restarted. The largest process is also restarted when the memory of the "
        "machine or the container is nearly exhausted. The default is 80 %% of the memory.",
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
        "--log-file",
        type=Path,
        metavar="PATH",
        help="The file for the log of all servers. - is the standard output. The default is "
        "~/.local/state/nereid/serve-PORT.log.",
    )
    server.add_argument("tritonserver_args", nargs="*", metavar="-- ARGS", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check all settings, run the servers until they are stopped, and return the exit code."""
    return Supervisor(make_plan(args)).run()


def make_plan(args: argparse.Namespace) -> ServePlan:
    """Check all settings, and return the plan of the processes to start.

    This function starts no server.

    Raises: CliError.
    """
    startup_checks.check_python_version()
    tritonserver = _find_tritonserver(args.tritonserver)
    repository = _find_repository(args.model_repository)
    startup_checks.check_model_repository(repository)
    several = _several_models(args)
    models = several or _OneLanguageModel(args, repository)
    environment = _environment(args, models.path, models.name)
    if several is None:
        environment |= pooling_models.environment(models.pooling_models)
    settings = startup_checks.check_frontend_settings(environment)
    if not settings.batch_folder:
        environment["NEREID_BATCH_FOLDER"] = str(_state_folder() / f"batches-{settings.port}")
    if settings.api_key_file and not settings.api_key:
        # The supervisor sends requests to the frontend, so the supervisor needs an API key of its
        # own.
        environment["NEREID_API_KEY"] = secrets.token_urlsafe(32)
        settings = startup_checks.check_frontend_settings(environment)
    host = args.host or "127.0.0.1"
    addresses = {flag: (host, getattr(args, _attribute(flag))) for flag in _PORT_FLAGS}
    startup_checks.check_ports(addresses | {"--openai-port": (settings.host, settings.port)})
    fork_server_address = fork_server.choose_address(repository, environment)
    if several is None:
        startup_checks.check_model_settings(repository, environment)
    else:
        several.check_settings(repository, environment)
        folder = _state_folder() / f"models-{settings.port}"
        several.write_repository(folder, repository, environment)
        repository, environment = folder, without_model_settings(environment)
    if fork_server_address:
        environment[fork_server.ADDRESS_VARIABLE] = fork_server_address
    shm_prefix = f"nereid_{os.getpid()}_"
    openai_url = f"http://{_local_host(settings.host)}:{settings.port}"
    http_url = f"http://{_local_host(host)}:{args.http_port}"
    metrics_url = _metrics_url(args)
    return ServePlan(
        server=Program(
            "tritonserver",
            _server_command(args, tritonserver, repository, shm_prefix, settings.log_level)
            + list(models.server_arguments),
            environment,
        ),
        frontend_program=Program(
            "the OpenAI frontend", [sys.executable, "-m", "nereid_client"], environment
        ),
        shm_prefix=shm_prefix,
        log_path=args.log_file or _state_folder() / f"serve-{settings.port}.log",
        model=models.path,
        pooling_models=models.pooling_models,
        probes=models.probes,
        frontend=FrontendClient(openai_url, models.name, settings.api_key),
        endpoints=[
            ("OpenAI API", f"{openai_url}/v1"),
            ("Triton HTTP", http_url),
            ("Triton gRPC", settings.grpc_url),
            ("Triton metrics", metrics_url),
            ("OpenAI metrics", f"{openai_url}/metrics"),
        ],
        metrics_url=metrics_url,
        http_url=http_url,
        hang_timeout_s=args.hang_timeout,
        max_process_memory=args.max_process_memory,
        warnings=_exposure_warnings(host, settings),
        restarts=RestartPolicy(args.max_restarts, args.restart_backoff),
        drain_timeout_s=args.drain_timeout,
        log_format=settings.log_format,
        fork_server=fork_server_address,
    )


class _OneLanguageModel:
    """The models that `nereid serve` serves without --config.

    There is one language model. An embedding model and a reranker are optional.

    Attributes:
        path: the checkpoint of the language model.
        name: the name of the language model in the API.
        pooling_models: the embedding model and the reranker.

    Raises: CliError if a checkpoint is wrong.
    """

    server_arguments: Sequence[str] = ()

    def __init__(self, args: argparse.Namespace, repository: Path) -> None:
        path = args.model or _environment_path("NEREID_MODEL")
        path = path or repository.parent / "demo" / "chat"
        self.path: Path = path.expanduser().absolute()
        startup_checks.check_checkpoint(self.path)
        self.pooling_models = pooling_models.choose(args, repository)
        name = args.served_model_name or os.environ.get("NEREID_SERVED_MODEL_NAME")
        self.name: str = name or self.path.resolve().name

    @property
    def probes(self) -> list[Probe]:
        """The test requests that show whether each model still answers."""
        return [PROBES[kind] for kind in ("llm", *(model.kind for model in self.pooling_models))]


def _several_models(args: argparse.Namespace) -> ServedModels | None:
    """Return the models in the file that --config names, or None without --config.

    The environment variable NEREID_MODELS_FILE can replace the flag.

    Raises: CliError if the file is wrong, or if another flag describes a model.
    """
    path = args.config or _environment_path("NEREID_MODELS_FILE")
    if path is None:
        return None
    for flag in ("--model", "--served-model-name", "--lora", "--embedding-model", "--rerank-model"):
        if getattr(args, _attribute(flag)):
            raise CliError(f"{flag} has no effect with --config. Describe the model in {path}.")
    return ServedModels(path.expanduser().absolute())


def _environment(args: argparse.Namespace, model: Path, name: str) -> dict[str, str]:
    """Return the environment variables of the Triton server and of the frontend.

    The result contains the variables of this process. A flag replaces the variable of its setting.
    """
    environment = dict(os.environ)
    flags = {_engine_variable(flag): flag for flag in _ENGINE_FLAGS}
    flags |= {VARIABLES[setting]: flag for flag, (setting, _) in _FRONTEND_FLAGS.items()}
    flags["NEREID_OPENAI_HOST"] = "--host"
    if args.config:
        environment["NEREID_MODELS_FILE"] = str(args.config.expanduser().absolute())
    for variable, flag in flags.items():
        value = getattr(args, _attribute(flag))
        if value is not None:
            environment[variable] = value
    if args.draft_model:
        environment["NEREID_DRAFT_MODEL"] = str(Path(args.draft_model).expanduser().absolute())
    if args.lora:
        environment["NEREID_LORA_ADAPTERS"] = ",".join(map(_absolute_adapter, args.lora))
    grpc_url = f"{_local_host(args.host or '127.0.0.1')}:{args.grpc_port}"
    if os.environ.get("NEREID_GRPC_URL") not in (None, "", grpc_url):
        complain(
            f"nereid: NEREID_GRPC_URL={os.environ['NEREID_GRPC_URL']} has no effect, because "
            f"`nereid serve` starts its own Triton server, whose gRPC endpoint is {grpc_url}. "
            "`python -m nereid_client` runs the frontend for another server."
        )
    return environment | {
        "NEREID_MODEL": str(model),
        "NEREID_SERVED_MODEL_NAME": name,
        "NEREID_GRPC_URL": grpc_url,
        "NEREID_METRICS_URL": _metrics_url(args),
        "PYTHONUNBUFFERED": "1",  # so that progress messages of the Python models are not delayed
    }


def _absolute_adapter(value: str) -> str:
    """Return a value of --lora with an absolute path. Example: "a=b" gives "a=/folder/b"."""
    name, separator, path = value.partition("=")
    if not (name and path) or "," in value:
        raise CliError(f"--lora: the value must be NAME=PATH without a comma, but it is {value!r}.")
    return f"{name}{separator}{Path(path).expanduser().absolute()}"


def _exposure_warnings(host: str, settings: Settings) -> list[str]:
    """Return warnings about endpoints that other machines can reach without an API key."""
    if host in _LOOPBACK:
        return []
    endpoints = "the Triton server's HTTP, gRPC and metrics endpoints"
    if settings.api_key or settings.api_key_file:
        return [
            f"--host {host} lets other machines reach {endpoints}, which cannot check API keys. "
            "Anybody who reaches them can use the models without a key and can read and change the "
            "server's settings. Leave --host out and set NEREID_OPENAI_HOST instead, or block "
            "these ports in a firewall."
        ]
    return [
        f"--host {host} lets other machines reach the OpenAI API and {endpoints}. No API key is "
        "required (NEREID_API_KEY, NEREID_API_KEY_FILE), and the Triton server's endpoints cannot "
        "check keys at all. Block these ports in a firewall."
    ]


def _engine_variable(flag: str) -> str:
    """Return the environment variable that corresponds to a flag of the language model.

    Example: "--dtype" returns "NEREID_DTYPE".
    """
    return f"NEREID_{_attribute(flag)}".upper()


def _metrics_url(args: argparse.Namespace) -> str:
    """Return the URL of the Triton server's metrics."""
    return f"http://{_local_host(args.host or '127.0.0.1')}:{args.metrics_port}/metrics"


def _local_host(host: str) -> str:
    """Return the address at which this machine reaches a server that listens on `host`."""
    return "127.0.0.1" if host in ("0.0.0.0", "") else host


def _server_command(
    args: argparse.Namespace, tritonserver: Path, repository: Path, shm_prefix: str, log_level: str
) -> list[str]:
    """Return the command that starts the Triton server."""
    command = [str(tritonserver), f"--model-repository={repository}"]
    for endpoint in ("http", "grpc", "metrics"):
        command += [
            f"--{endpoint}-address={args.host or '127.0.0.1'}",
            f"--{endpoint}-port={getattr(args, endpoint + '_port')}",
        ]
    command += [
        f"--exit-timeout-secs={SERVER_EXIT_TIMEOUT_S}",
        # Nereid's model configurations are complete, so Triton need not complete them. Otherwise,
        # Triton would start each model twice: first to complete its configuration, and then to load
        # it.
        "--disable-auto-complete-config",
        # With enough threads, all models load at the same time. The threads use little CPU time,
        # because each thread only waits for the process of its model.
        "--model-load-thread-count=8",
        # With this prefix, the shared memory of a server that was killed can be found and removed.
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
    ]
    if log_level == "debug":
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
    """Return the path of the model repository: the given path, or the first folder that exists.

    The folder `model_repository` is looked up in the working folder, in the folder of a checkout,
    and in the installed wheel `nereid`.
    """
    if given is not None:
        return given.expanduser().absolute()
    packages = Path(__file__).resolve().parents[2]
    places = (Path.cwd(), packages.parent, packages / "nereid")
    repositories = [place / "model_repository" for place in places]
    return next((path for path in repositories if path.is_dir()), repositories[0])


def _environment_path(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _state_folder() -> Path:
    """Return the folder that contains logs and batches by default. The folder may not exist yet."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "nereid"


def _size(text: str) -> int:
    """Return a number of bytes, from text such as "8GiB".

    Raises: argparse.ArgumentTypeError.
    """
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise argparse.ArgumentTypeError(
            f"must be a number of bytes, such as 65536 or 8GiB, but it is {text!r}"
        ) from None


def _at_least_0(kind: Callable[[str], _Number]) -> Callable[[str], _Number]:
    """Return an argument type for argparse: a number that is not negative."""

    def parse(text: str) -> _Number:
        number = kind(text)
        if not 0 <= number < float("inf"):
            raise argparse.ArgumentTypeError(f"must be at least 0, but it is {text}")
        return number

    parse.__name__ = "number"  # argparse says "invalid number value"
    return parse
