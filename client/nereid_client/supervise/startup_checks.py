"""The checks that `nereid serve` runs before it starts a program.

Each check raises a CliError if it fails.
"""

import errno
import importlib.util
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from nereid_client.batches.batch_folder import batch_folder
from nereid_client.console import CliError
from nereid_client.middleware.client_keys import read_key_file
from nereid_client.settings import Settings, SettingsError, settings_from_environment
from nereid_client.supervise.check_checkpoint import unreadable
from nereid_client.workers.worker_pool import check_settings_of_several_workers

_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 11), (3, 13)
# With three models and no connection, the Triton server has about 75 open files.
_FEWEST_OPEN_FILES = 256
_USUAL_OPEN_FILES = 1024
# The module of the backend that checks the models' settings. It runs as a separate program, because
# the client package must not import the backend package.
_BACKEND_CHECK = "nereid_backend.serving.check_settings"
_WRONG_SETTINGS_EXIT_CODE = 2
_CHECK_TIMEOUT_S = 20.0


def check_python_version(running: tuple[int, int] = sys.version_info[:2]) -> None:
    """Raise a CliError if this version of Python is not supported.

    Raises: CliError.
    """
    if not _OLDEST_PYTHON <= running <= _NEWEST_PYTHON:
        raise CliError(
            f"Nereid requires Python 3.11, 3.12 or 3.13, but this is Python {running[0]}."
            f"{running[1]}. Create the virtual environment again with one of these versions."
        )


def check_open_files() -> None:
    """Raise the limit on open files of this process and its children to at least 1024, if allowed.

    Raises: CliError if the largest limit that is allowed is too low for the Triton server.
    """
    limit, largest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if largest < _FEWEST_OPEN_FILES:
        raise CliError(
            f"a process may have at most {largest} open files here (`ulimit -n`), but the Triton "
            f"server needs up to {_FEWEST_OPEN_FILES}, and one more for each connection. Raise the "
            "limit, for example with `ulimit -n 4096`, with LimitNOFILE=4096 in a service of "
            "systemd, or with `docker run --ulimit nofile=4096`."
        )
    if limit < _USUAL_OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(largest, _USUAL_OPEN_FILES), largest))


def check_embedded_numpy(installed: str | None = None) -> None:
    """Check that numpy is older than version 2.

    The Python stub of the embedded Triton server was built for numpy 1 and misreads the arrays of
    numpy 2.

    Raises: CliError.
    """
    installed = installed or version("numpy")
    if int(installed.split(".")[0]) >= 2:
        raise CliError(
            f"The embedded Triton server requires numpy 1, but numpy {installed} is installed. "
            "Run: pip install 'numpy<2'. There are no wheels of numpy 1 for Python 3.13, so use "
            "Python 3.11 or 3.12 with this server."
        )


def check_backend_is_installed() -> None:
    """Check that the package with the models is installed in the same environment as this package.

    Raises: CliError.
    """
    if importlib.util.find_spec("nereid_backend") is None:
        raise CliError(
            f"The package nereid-backend is not installed in the environment of {sys.executable}. "
            "Install it from the folder `backend` of Nereid's repository, or from its wheel."
        )


def absolute_path(path: str | Path, source: str) -> Path:
    """Return an absolute path. A "~" at the beginning of `path` is replaced by a home folder.

    Args:
        path: the path. A relative path starts at the current folder.
        source: the flag that contains the path. The error message begins with this text.

    Raises: CliError if the home folder is unknown.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise CliError(
            f"{source}: the path {path} begins with ~, but the home folder is unknown. Give a path "
            "that does not begin with ~."
        ) from None


def check_model_repository(path: Path) -> None:
    """Check that a folder is Nereid's model repository.

    Raises: CliError.
    """
    try:
        has_model = (path / "llm" / "config.pbtxt").is_file()
    except OSError as error:
        raise unreadable("--model-repository", error) from None
    if not has_model:
        raise CliError(
            f"--model-repository: the folder {path} has no llm/config.pbtxt. Give the path of "
            "Nereid's folder model_repository, or run this command in the folder that contains it."
        )


def check_ensemble(repository: Path, ensemble: str) -> None:
    """Check that the model repository contains the model that the frontend will use.

    Raises: CliError.
    """
    if not (repository / ensemble / "config.pbtxt").is_file():
        raise CliError(
            f"NEREID_ENSEMBLE: the model repository {repository} has no model {ensemble!r}. Remove "
            "the variable, or give the name of a model in this folder."
        )


def check_frontend_settings(environment: Mapping[str, str]) -> Settings:
    """Check the settings of the frontend, and return them.

    Raises: CliError if a setting is wrong.
    """
    try:
        settings = settings_from_environment(environment)
        if settings.api_key_file:
            # Reading the file checks the file. The frontend reads the keys later.
            read_key_file(Path(settings.api_key_file))
        batch_folder(settings)  # checks the folder
        if settings.frontend_workers > 1:
            check_settings_of_several_workers(settings)
        return settings
    except SettingsError as error:
        raise CliError(str(error)) from None


def check_model_settings(repository: Path, environment: Mapping[str, str]) -> None:
    """Run a program of the backend that checks the settings of the models.

    If the program does not end in time, or cannot run because the backend is not installed, the
    settings count as correct. The models themselves reject wrong settings when they start.

    Args:
        repository: the model repository. Models that are not Nereid's are ignored.
        environment: the environment variables of the models.

    Raises: CliError that contains the lines that the program has printed.
    """
    command = [sys.executable, "-m", _BACKEND_CHECK, str(repository)]
    try:
        result = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    # The exit code 1 is ignored, because it means that the backend is not installed, or that the
    # program has a bug.
    problems = result.stdout.strip().splitlines()
    if result.returncode == _WRONG_SETTINGS_EXIT_CODE and problems:
        raise CliError("; ".join(problems))


def check_ports(addresses: Mapping[str, tuple[str, int]]) -> None:
    """Check that all ports are valid, different and free.

    Args:
        addresses: maps the flag of each port to the host and the port on which a server will
            listen.

    Raises: CliError.
    """
    seen: dict[int, str] = {}
    for flag, (host, port) in addresses.items():
        if not 1 <= port <= 65535:
            raise CliError(f"{flag} must be from 1 to 65535, but it is {port}")
        if port in seen:
            raise CliError(
                f"{seen[port]} and {flag} are both {port}. Give each of them its own port."
            )
        seen[port] = flag
        _check_port_is_free(host, port, flag)


def _check_port_is_free(host: str, port: int, flag: str) -> None:
    """Check that a program can listen on a port.

    Raises: CliError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: a part has over 63 characters
        raise _wrong_host(host, error) from None
    with socket.socket(family, kind, protocol) as probe:
        # Without SO_REUSEADDR, `bind` would fail while old connections to the port are closing. The
        # servers set this option, too, so the check fails only if a server would fail as well.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise _wrong_host(host, error) from None
            raise CliError(
                f"{flag}: port {port} on {host} cannot be used ({error.strerror}). Stop the "
                f"program that listens on it, or give another port with {flag}."
            ) from None


def _wrong_host(host: str, error: OSError | UnicodeError) -> CliError:
    """Return the error for a host that is not an address of this machine."""
    reason = error.strerror if isinstance(error, OSError) else error
    return CliError(
        f"--host: {host} is not an address of this machine ({reason}). Give one of its "
        "addresses, such as 127.0.0.1, or 0.0.0.0 for all addresses."
    )
