"""The command that starts the Triton server for `nereid serve`."""

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from nereid_client.cli.install_server_command import LAUNCHER_MARK, launcher_path
from nereid_client.cli.libpython import find_libpython
from nereid_client.console import CliError
from nereid_client.management_key import HEADER
from nereid_client.supervise import startup_checks
from nereid_client.supervise.check_checkpoint import unreadable
from nereid_client.supervise.supervisor import SERVER_EXIT_TIMEOUT_S

_FLAG_OF_ARGUMENT = {
    "--model-repository": "--model-repository",
    "--model-store": "--model-repository",
    "--http-address": "--host",
    "--grpc-address": "--host",
    "--metrics-address": "--host",
    "--http-port": "--http-port",
    "--grpc-port": "--grpc-port",
    "--metrics-port": "--metrics-port",
}
"""Maps each argument of the Triton server that `nereid serve` must know to the flag for it."""


def server_command(
    args: argparse.Namespace, tritonserver: Path, repository: Path, shm_prefix: str, log_level: str
) -> list[str]:
    """Return the command that starts the Triton server.

    Args:
        args: the parsed flags of `nereid serve`, and the arguments after --.
        tritonserver: the path of the server's program.
        repository: the path of the model repository.
        shm_prefix: the beginning of the names of the server's shared memory regions.
        log_level: the setting log_level of the frontend. "debug" makes the server log more.

    Raises: CliError if an argument after -- must be set with a flag of `nereid serve` instead.
    """
    _check_no_flag_is_replaced(args.tritonserver_args)
    command = [str(tritonserver), f"--model-repository={repository}"]
    for endpoint in ("http", "grpc", "metrics"):
        command += [
            f"--{endpoint}-address={args.host or '127.0.0.1'}",
            f"--{endpoint}-port={getattr(args, endpoint + '_port')}",
        ]
    command += [
        f"--exit-timeout-secs={SERVER_EXIT_TIMEOUT_S}",
        # Nereid's model configurations are complete. Without this flag, the server would start each
        # model twice: first to complete the configuration, then to load the model.
        "--disable-auto-complete-config",
        # With eight threads, all models load at the same time. The threads use little CPU time,
        # because each thread only waits for the process of one model.
        "--model-load-thread-count=8",
        # The names of the server's shared memory regions begin with this prefix. `nereid serve`
        # uses the prefix to find and delete the regions of a killed server.
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
    ]
    if log_level == "debug":
        command.append("--log-verbose=1")
    return command + list(args.tritonserver_args)


def _check_no_flag_is_replaced(arguments: Sequence[str]) -> None:
    """Raise a CliError if an argument after `--` belongs to a flag of `nereid serve`.

    Example: `nereid serve -- --http-port=9000` is refused. The Triton server would listen on port
    9000, but the frontend would connect to the port of the flag --http-port. The error names the
    flag.
    """
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in _FLAG_OF_ARGUMENT:
            raise CliError(
                f"-- {name}: `nereid serve` sets this argument of the Triton server. Remove the "
                f"argument, and give the value with the flag {_FLAG_OF_ARGUMENT[name]} before --."
            )


def restrict_management(
    key: str, arguments: Sequence[str], *, frontend_loads_models: bool
) -> list[str]:
    """Return the arguments that make the Triton server require a key at endpoints for management.

    Args:
        key: the key.
        arguments: the other arguments of the server. If they restrict endpoints of HTTP or of gRPC,
            no argument is returned for this protocol, because the server refuses two restrictions
            of the same endpoint.
        frontend_loads_models: whether the frontend loads and unloads models. The endpoints of the
            model repository then need the key, too. Otherwise, the server refuses to load models,
            unless the arguments of the user allow it.
    """
    endpoints = "shared-memory,trace,logging"
    if frontend_loads_models:
        endpoints += ",model-repository"
    return [
        f"{flag}={endpoints}:{HEADER}={key}"
        for flag in ("--http-restricted-api", "--grpc-restricted-protocol")
        if not any(argument.startswith(flag) for argument in arguments)
    ]


def find_tritonserver(given: Path | None) -> Path:
    """Return the path of the Triton server program.

    Args:
        given: the value of the flag --tritonserver. If this value is None, search for the launcher
            of `nereid install-server`, and then for a program in the PATH.

    Raises: CliError if the program was not found or cannot run.
    """
    if given is not None:
        _check_executable(given)
        return given.absolute()
    launcher = launcher_path()
    if launcher.is_file() and LAUNCHER_MARK in launcher.read_text(errors="replace"):
        _check_packages_of_server()
        return launcher
    found = shutil.which("tritonserver")
    if found is None:
        raise CliError(
            "The program tritonserver was not found. Run `nereid install-server` to install it."
        )
    return Path(found)


def _check_executable(given: Path) -> None:
    try:
        is_file = given.is_file()
    except OSError as error:
        raise unreadable("--tritonserver", error) from None
    if not (is_file and os.access(given, os.X_OK)):
        raise CliError(
            f"--tritonserver: {given} is not an executable file. Give the path of the program "
            "tritonserver, or leave --tritonserver out."
        )


def _check_packages_of_server() -> None:
    """Check that this Python environment has libpython, numpy 1 and the backend for the server."""
    find_libpython()
    startup_checks.check_embedded_numpy()
    startup_checks.check_backend_is_installed()


def find_repository(given: Path | None) -> Path:
    """Return the path of the model repository.

    If `given` is None, search for the folder `model_repository` in the working folder, in Nereid's
    checkout and in the installed wheel `nereid`, in this order. If there is no such folder, return
    its path in the working folder, for the error message of the caller.
    """
    if given is not None:
        return startup_checks.absolute_path(given, "--model-repository")
    # In a checkout, this is the folder `client`. In a Python environment, it is `site-packages`.
    packages = Path(__file__).resolve().parents[2]
    in_working_folder = Path.cwd() / "model_repository"
    in_checkout = packages.parent / "model_repository"
    in_wheel = packages / "nereid" / "model_repository"
    candidates = (in_working_folder, in_checkout, in_wheel)
    return next((folder for folder in candidates if folder.is_dir()), in_working_folder)
