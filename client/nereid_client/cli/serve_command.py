"""`nereid serve`: run a Triton server and the OpenAI frontend together."""

import argparse
import dataclasses
import ipaddress
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nereid_client.batches.batch_folder import batch_folder
from nereid_client.cli.serve_flags import (
    ENGINE_FLAGS,
    FRONTEND_FLAGS,
    PORT_FLAGS,
    add_flags,
    attribute,
    engine_variable,
)
from nereid_client.cli.tritonserver_command import (
    find_repository,
    find_tritonserver,
    restrict_management,
    server_command,
)
from nereid_client.console import CliError, complain
from nereid_client.management_key import KEY_VARIABLE
from nereid_client.settings import VARIABLES, Settings, SettingsError
from nereid_client.several_models.model_variables import without_model_settings
from nereid_client.several_models.models_file import adapter_names
from nereid_client.several_models.serve_models import ServedModels
from nereid_client.supervise import pooling_models, startup_checks
from nereid_client.supervise.check_checkpoint import check_checkpoint
from nereid_client.supervise.frontend_client import FrontendClient
from nereid_client.supervise.hang_detection import PROBES, Probe
from nereid_client.supervise.restart_policy import RestartPolicy
from nereid_client.supervise.serve_plan import STANDARD_OUTPUT, Program, ServePlan
from nereid_client.supervise.start_fork_server import ADDRESS_VARIABLE, choose_address
from nereid_client.supervise.supervisor import Supervisor
from nereid_client.workers.listening_sockets import is_loopback

# The flags that describe models. They are refused together with --config, whose file describes all
# models.
_MODEL_FLAGS = ("--model", "--served-model-name", "--lora", "--embedding-model", "--rerank-model")


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
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check all settings, run the servers until they are stopped, and return the exit code."""
    return Supervisor(make_plan(args)).run()


def make_plan(args: argparse.Namespace) -> ServePlan:
    """Check all settings, and return a plan that describes the processes to start.

    Raises: CliError.
    """
    startup_checks.check_python_version()
    startup_checks.check_open_files()
    tritonserver = find_tritonserver(args.tritonserver)
    repository = find_repository(args.model_repository)
    startup_checks.check_model_repository(repository)
    several = _models_of_file(args)
    models = several or _OneLanguageModel(args, repository)
    environment = _environment(args, models.path, models.name)
    if several is None:
        environment |= pooling_models.environment(models.pooling_models)
        names = [models.name, *(model.name for model in models.pooling_models)]
        _check_adapter_names(environment.get("NEREID_LORA_ADAPTERS", ""), names)
    warnings = _add_frontend_defaults(environment)
    settings = startup_checks.check_frontend_settings(environment)
    host = args.host or "127.0.0.1"
    if _is_ipv6(host):
        raise CliError(
            f"--host: the Triton server cannot listen on the IPv6 address {host}. Leave --host out "
            f"and set NEREID_OPENAI_HOST={host}, so that the OpenAI frontend listens on it."
        )
    addresses = {flag: (host, getattr(args, attribute(flag))) for flag in PORT_FLAGS}
    startup_checks.check_ports(addresses | {"--openai-port": (settings.host, settings.port)})
    fork_server_address = choose_address(repository, environment)
    if several is None:
        startup_checks.check_ensemble(repository, settings.ensemble)
        startup_checks.check_model_settings(repository, environment)
    else:
        several.check_settings(repository, environment)
        folder = _state_folder() / f"models-{settings.port}"
        several.replace_repository(folder, repository)
        repository = folder
    if fork_server_address:
        environment[ADDRESS_VARIABLE] = fork_server_address
    environment[KEY_VARIABLE] = secrets.token_urlsafe(16)
    server_environment = environment if several is None else without_model_settings(environment)
    # Two servers in containers can have the same process id and share /dev/shm. With the same
    # prefix, one server would delete the memory of the other one.
    shm_prefix = f"nereid_{os.getpid()}_{secrets.token_hex(4)}_"
    openai_url = f"http://{_address_to_connect_to(settings.host)}:{settings.port}"
    http_url = f"http://{_address_to_connect_to(host)}:{args.http_port}"
    metrics_url = _metrics_url(args)
    command = server_command(args, tritonserver, repository, shm_prefix, settings.log_level)
    command += models.server_arguments
    command += restrict_management(
        environment[KEY_VARIABLE], command, frontend_loads_models=several is not None
    )
    return ServePlan(
        server=Program("tritonserver", command, server_environment),
        frontend_program=Program(
            "the OpenAI frontend", [sys.executable, "-m", "nereid_client"], environment
        ),
        shm_prefix=shm_prefix,
        log_path=_log_path(args, settings.port),
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
        warnings=warnings + _exposure_warnings(host, settings),
        restarts=RestartPolicy(args.max_restarts, args.restart_backoff),
        drain_timeout_s=args.drain_timeout,
        log_format=settings.log_format,
        fork_server=fork_server_address,
    )


def _add_frontend_defaults(environment: dict[str, str]) -> list[str]:
    """Add the frontend settings for which `nereid serve` has a different default. Return warnings.

    Without a batch folder, the frontend alone would have no Batch API. `nereid serve` uses a folder
    of its own, if files can be stored there. If the clients have API keys, the supervisor needs a
    key, too, because it sends requests to the frontend. This key is generated.
    """
    settings = startup_checks.check_frontend_settings(environment)
    warnings = []
    if not settings.batch_folder:
        folder = str(_state_folder() / f"batches-{settings.port}")
        try:
            batch_folder(dataclasses.replace(settings, batch_folder=folder))
            environment["NEREID_BATCH_FOLDER"] = folder
        except SettingsError as error:
            warnings.append(f"The Batch API is turned off. {error}")
    if settings.api_key_file and not settings.api_key:
        environment["NEREID_API_KEY"] = secrets.token_urlsafe(32)
    return warnings


class _OneLanguageModel:
    """The models that `nereid serve` serves without the flag --config.

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
        self.path: Path = startup_checks.absolute_path(path, "--model")
        check_checkpoint(self.path)
        self.pooling_models = pooling_models.choose_pooling_models(args, repository)
        name = args.served_model_name or os.environ.get("NEREID_SERVED_MODEL_NAME")
        self.name: str = name or self.path.resolve().name

    @property
    def probes(self) -> list[Probe]:
        """The test requests that show whether each model still answers."""
        return [PROBES[kind] for kind in ("llm", *(model.kind for model in self.pooling_models))]


def _models_of_file(args: argparse.Namespace) -> ServedModels | None:
    """Read the models file, and return its models. If no models file is given, return None.

    The flag --config or the environment variable NEREID_MODELS_FILE gives the path of the file. The
    flag takes precedence.

    Raises: CliError if the file is wrong, or if a flag such as --model is given together with a
        models file, which describes all models.
    """
    path = args.config or _environment_path("NEREID_MODELS_FILE")
    if path is None:
        return None
    for flag in _MODEL_FLAGS:
        is_given = bool(getattr(args, attribute(flag)))
        if is_given:
            raise CliError(f"{flag} has no effect with --config. Describe the model in {path}.")
    # If the file leaves out a setting of a model, the setting's flag gives the value, or else the
    # setting's environment variable.
    environment = {**os.environ, **_variables_of_flags(args)}
    return ServedModels(startup_checks.absolute_path(path, "--config"), environment)


def _environment(args: argparse.Namespace, model: Path, name: str) -> dict[str, str]:
    """Return the environment variables of the Triton server and of the frontend.

    The result contains the variables of this process. If a flag sets a setting, the value of the
    flag replaces the value of the setting's variable. A warning is printed if the variable
    NEREID_GRPC_URL of this process has no effect.
    """
    # The Triton server listens on the address in --host. The frontend on this machine connects to
    # that address. If the server listens on all addresses (0.0.0.0), the frontend connects to
    # 127.0.0.1.
    grpc_url = f"{_address_to_connect_to(args.host or '127.0.0.1')}:{args.grpc_port}"
    _warn_about_other_server(grpc_url)
    return {
        **os.environ,
        **_variables_of_flags(args),
        "NEREID_MODEL": str(model),
        "NEREID_SERVED_MODEL_NAME": name,
        "NEREID_GRPC_URL": grpc_url,
        "NEREID_METRICS_URL": _metrics_url(args),
        "PYTHONUNBUFFERED": "1",  # so that progress messages of the Python models are not delayed
    }


def _variables_of_flags(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that correspond to the given flags.

    Example: `--max-model-len 2048` returns {"NEREID_MAX_MODEL_LEN": "2048"}.
    """
    values = {
        variable: _variable_value(flag, getattr(args, attribute(flag)))
        for variable, flag in _flags_by_variable().items()
    }
    return {variable: value for variable, value in values.items() if value is not None}


def _variable_value(flag: str, value: Any) -> str | None:  # noqa: ANN401 - the type of any flag
    """Return the value of a flag as the text of an environment variable. Make paths absolute.

    If the flag is not given, return None.
    """
    is_given = value is not None and value != []  # a flag that can be repeated has a list
    if not is_given:
        return None
    convert = _CONVERTERS_OF_PATHS.get(flag, str)
    return convert(value)


_CONVERTERS_OF_PATHS: dict[str, Callable[[Any], str]] = {
    "--lora": lambda adapters: ",".join(map(_absolute_adapter, adapters)),
    "--config": lambda path: str(startup_checks.absolute_path(path, "--config")),
    # An empty path means that there is no draft model, so it is not made absolute.
    "--draft-model": lambda path: path and str(startup_checks.absolute_path(path, "--draft-model")),
}
"""Maps each flag whose value contains paths to a function that makes the paths absolute."""


def _flags_by_variable() -> dict[str, str]:
    """Return a dict that maps each environment variable to the flag for the same setting.

    Example: the key "NEREID_MAX_MODEL_LEN" has the value "--max-model-len".
    """
    flags = {engine_variable(flag): flag for flag in ENGINE_FLAGS}
    flags |= {VARIABLES[setting]: flag for flag, (setting, _) in FRONTEND_FLAGS.items()}
    # Neither table contains the flags below. --host also sets the address of the Triton server, and
    # the values of --config and --lora have types of their own.
    return flags | {
        "NEREID_OPENAI_HOST": "--host",
        "NEREID_MODELS_FILE": "--config",
        "NEREID_LORA_ADAPTERS": "--lora",
    }


def _warn_about_other_server(grpc_url: str) -> None:
    """Print a warning if NEREID_GRPC_URL names a Triton server other than `grpc_url`."""
    other_url = os.environ.get("NEREID_GRPC_URL")
    if other_url not in (None, "", grpc_url):
        complain(
            f"nereid: NEREID_GRPC_URL={other_url} has no effect, because `nereid serve` starts its "
            f"own Triton server, whose gRPC endpoint is {grpc_url}. `python -m nereid_client` runs "
            "the frontend for another server."
        )


def _absolute_adapter(value: str) -> str:
    """Make the path in a value of --lora absolute. For example, "a=b" becomes "a=/folder/b"."""
    name, separator, path = value.partition("=")
    if not (name and path) or "," in value:
        raise CliError(f"--lora: the value must be NAME=PATH without a comma, but it is {value!r}.")
    return f"{name}{separator}{startup_checks.absolute_path(path, '--lora')}"


def _check_adapter_names(lora_adapters: str, names: Sequence[str]) -> None:
    """Check that no adapter has the name of a model. Requests could not select such an adapter."""
    for name in adapter_names(lora_adapters):
        if name in names:
            raise CliError(
                f"--lora: the name of an adapter must differ from the names of the models, but an "
                f"adapter and a model have the name {name!r}. Choose another name for the adapter."
            )


def _exposure_warnings(host: str, settings: Settings) -> list[str]:
    """Return warnings about endpoints that other machines can use without an API key."""
    has_key = bool(settings.api_key or settings.api_key_file)
    if is_loopback(host):
        if has_key or is_loopback(settings.host):
            return []
        return [
            f"NEREID_OPENAI_HOST={settings.host} lets other machines reach the OpenAI API, and no "
            "API key is required. Set NEREID_API_KEY or NEREID_API_KEY_FILE, or block the port in "
            "a firewall."
        ]
    endpoints = "the Triton server's HTTP, gRPC and metrics endpoints"
    if has_key:
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


def _metrics_url(args: argparse.Namespace) -> str:
    """Return the URL of the Triton server's metrics."""
    return f"http://{_address_to_connect_to(args.host or '127.0.0.1')}:{args.metrics_port}/metrics"


def _is_ipv6(host: str) -> bool:
    """Return whether `host` is an IPv6 address. Other values may contain colons, too.

    Examples: the result is True for "::1", and False for "127.0.0.1:8000".
    """
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _address_to_connect_to(host: str) -> str:
    """Return the address at which this machine can reach a server that listens on `host`.

    "0.0.0.0" and "::" mean all addresses of this machine. An IPv6 address has brackets in a URL.

    Examples: "0.0.0.0" returns "127.0.0.1", and "::1" returns "[::1]".
    """
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def _environment_path(variable: str) -> Path | None:
    """Return the path in an environment variable, or None if the variable is missing or empty."""
    value = os.environ.get(variable)
    return Path(value) if value else None


def _log_path(args: argparse.Namespace, port: int) -> Path:
    """Return the path of the log. STANDARD_OUTPUT means the standard output."""
    if args.log_file is None:
        return _state_folder() / f"serve-{port}.log"
    if args.log_file == STANDARD_OUTPUT:
        return STANDARD_OUTPUT
    return startup_checks.absolute_path(args.log_file, "--log-file")


def _state_folder() -> Path:
    """Return the default folder for logs and batches. The folder may not exist yet.

    Raises: CliError if neither XDG_STATE_HOME nor the home folder of the user is known.
    """
    state = os.environ.get("XDG_STATE_HOME")
    try:
        return Path(state or Path.home() / ".local" / "state") / "nereid"
    except RuntimeError:
        raise CliError(
            "the home folder of this user is unknown. Set the environment variable XDG_STATE_HOME "
            "to a folder for logs and batches."
        ) from None
