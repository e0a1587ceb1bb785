"""The checks that `nereid serve` runs before it starts a program.

Each check raises a CliError if it fails.
"""

import errno
import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from nereid_client.console import CliError
from nereid_client.middleware.client_keys import read_key_file
from nereid_client.settings import Settings, SettingsError, settings_from_environment
from nereid_client.supervise import weight_files
from nereid_client.workers.worker_pool import check_settings_of_several_workers

_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 11), (3, 13)
# The module of the backend that checks the models' settings. It runs as a separate program, because
# the client package must not import the backend package.
_BACKEND_CHECK = "nereid_backend.serving.check_settings"
_WRONG_SETTINGS_EXIT_CODE = 2
_CHECK_TIMEOUT_S = 20.0
_JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def check_python_version(running: tuple[int, int] = sys.version_info[:2]) -> None:
    """Raise a CliError if this version of Python is not supported.

    Raises: CliError.
    """
    if not _OLDEST_PYTHON <= running <= _NEWEST_PYTHON:
        raise CliError(
            f"Nereid requires Python 3.11, 3.12 or 3.13, but this is Python {running[0]}."
            f"{running[1]}. Create the virtual environment again with one of these versions."
        )


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


def check_checkpoint(path: Path, source: str = "--model") -> None:
    """Check that a path is a Hugging Face checkpoint with complete safetensors files.

    An existing GGUF file is accepted, too. The backend checks its content when it loads the file.

    Args:
        path: the path of the checkpoint.
        source: the flag that contains the path, or the table of a file. The error message begins
            with this text.

    Raises: CliError.
    """
    try:
        _check_checkpoint(path)
    except CliError as error:
        raise CliError(f"{source}: {error}") from None
    except OSError as error:
        raise unreadable(source, error) from None


def unreadable(source: str, error: OSError) -> CliError:
    """Return the error for a path that the operating system does not allow this program to read.

    Args:
        source: the flag that contains the path. The error message begins with this text.
        error: the error of the operating system, which names the path.
    """
    return CliError(
        f"{source}: {error.filename} cannot be read ({error.strerror}). Allow the user that runs "
        "nereid to read this path and the folders above it, or give another path."
    )


def _check_checkpoint(path: Path) -> None:
    """Check that a path is a GGUF file, or a folder with a complete Hugging Face checkpoint.

    Such a folder has config.json and *.safetensors files, of which none is damaged or missing.
    """
    if not path.exists():
        raise CliError(
            f"the folder {path} does not exist. Give the folder of a checkpoint on this "
            "machine. `hf download NAME --local-dir FOLDER` downloads one."
        )
    is_gguf_file = path.suffix == ".gguf" and path.is_file()
    if is_gguf_file:  # the backend checks its content
        return
    if not path.is_dir():
        raise CliError(
            f"{path} is not a folder. Give the folder that contains config.json, or a GGUF file."
        )
    _check_checkpoint_files(path)


def _find_checkpoint_inside(folder: Path) -> Path | None:
    """Return the path of a checkpoint inside `folder`, or None if `folder` contains no checkpoint.

    `folder` itself is not a checkpoint. It may contain a GGUF file, or it may be a model's folder
    in the cache of the Hugging Face Hub. In the second case, the result is the folder of a version,
    such as models--Qwen--Qwen3-0.6B/snapshots/c1899de.
    """
    versions = (config.parent for config in folder.glob("snapshots/*/config.json"))
    return min((*folder.glob("*.gguf"), *versions), default=None)


def _check_checkpoint_files(folder: Path) -> None:
    """Check that a folder contains the files of a checkpoint, and that the files are complete."""
    folder = weight_files.model_folder(folder)
    if not (folder / "config.json").is_file():
        remedy = "Give the folder of a Hugging Face checkpoint."
        if (folder / "adapter_config.json").is_file():
            remedy = (
                "It is a LoRA adapter. Give the folder of its base model, and add the adapter of a "
                f"language model with --lora NAME={folder}."
            )
        elif (checkpoint := _find_checkpoint_inside(folder)) is not None:
            remedy = f"Give the checkpoint {checkpoint}."
        raise CliError(f"the folder {folder} has no config.json. {remedy}")
    for name in _JSON_FILES:
        _check_json(folder / name)
    problem = weight_files.find_problem(folder)
    if problem is not None:
        raise CliError(problem)


def _check_json(path: Path) -> None:
    """If a file exists, check that it contains a JSON object."""
    try:
        if path.is_file() and not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise CliError(f"the file {path} cannot be read ({error}). Download it again.") from None


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
