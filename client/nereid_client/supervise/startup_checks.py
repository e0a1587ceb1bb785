"""What `nereid serve` checks before it starts anything. Each check raises CliError, one line."""

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from nereid_client.console import CliError
from nereid_client.settings import SettingsError, settings_from_environment
from nereid_client.supervise import weight_files as weights

_OLDEST, _NEWEST = (3, 11), (3, 12)
# The backend's own check, which the client may not import: a program in the same environment.
_BACKEND_CHECK = "nereid_backend.serving.check_settings"
_WRONG = 2
_CHECK_TIMEOUT_S = 20.0
_JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def check_python_version(running: tuple[int, int] = sys.version_info[:2]) -> None:
    """Refuse a Python that the server's stubs and our packages were not tested with."""
    if not _OLDEST <= running <= _NEWEST:
        raise CliError(
            f"this is Python {running[0]}.{running[1]}; Nereid needs 3.11 or 3.12: "
            "make the environment again with one of those"
        )


def check_embedded_numpy(installed: str | None = None) -> None:
    """Refuse numpy 2 before the embedded server, whose Python stub then misreads every array."""
    installed = installed or version("numpy")
    if int(installed.split(".")[0]) >= 2:
        raise CliError(
            f"numpy {installed} does not work with the embedded Triton server, which was built for "
            "numpy 1: pip install 'numpy<2'"
        )


def check_checkpoint(path: Path) -> None:
    """Refuse what is not a Hugging Face checkpoint with safetensors, or is cut off."""
    if not path.exists():
        raise CliError(
            f"--model: there is no {path}; give the folder of a checkpoint on this machine "
            "(hf download NAME --local-dir FOLDER fetches one)"
        )
    if not path.is_dir():
        raise CliError(f"--model: {path} is not a folder; give the folder that holds config.json")
    if not (path / "config.json").is_file():
        raise CliError(f"--model: {path} has no config.json; give a Hugging Face checkpoint")
    if not any(path.glob("*.safetensors")):
        raise CliError(
            f"--model: {path} has no *.safetensors file; convert the weights with "
            "transformers' save_pretrained, which writes safetensors"
        )
    for name in _JSON_FILES:
        _check_json(path / name)
    found = weights.damage(path)
    if found:
        raise CliError(f"--model: {found}")


def _check_json(path: Path) -> None:
    try:
        if path.is_file() and not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise CliError(f"--model: {path} cannot be read ({error}); download it again") from None


def check_model_repository(path: Path) -> None:
    """Refuse a folder that can't be our model repository."""
    if not (path / "llm" / "config.pbtxt").is_file():
        raise CliError(
            f"--model-repository: {path} has no llm/config.pbtxt; give the path of Nereid's "
            "model_repository folder, or run this from the folder that holds it"
        )


def check_frontend_settings(environment: Mapping[str, str]) -> None:
    """Refuse settings that the OpenAI frontend would refuse."""
    try:
        settings_from_environment(environment)
    except SettingsError as error:
        raise CliError(str(error)) from None


def check_model_settings(repository: Path, environment: Mapping[str, str]) -> None:
    """Refuse settings that the models would refuse; without the backend here, they do it later.

    Args:
        repository: of the models; those that are not ours are not looked at.
        environment: what they will be told.
    """
    command = [sys.executable, "-m", _BACKEND_CHECK, str(repository)]
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    if done.returncode == _WRONG and done.stdout.strip():
        raise CliError("; ".join(done.stdout.strip().splitlines()))


def check_ports(host: str, ports: Mapping[str, int]) -> None:
    """Refuse ports that are out of range, given twice, or taken.

    Args:
        host: the address that will be listened on.
        ports: flag -> port.
    """
    seen: dict[int, str] = {}
    for flag, port in ports.items():
        if not 1 <= port <= 65535:
            raise CliError(f"{flag}: a port is a number from 1 to 65535, got {port}")
        if port in seen:
            raise CliError(f"{flag} and {seen[port]} are both {port}; give each its own port")
        seen[port] = flag
        _check_port_is_free(host, port, flag)


def _check_port_is_free(host: str, port: int, flag: str) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
    except socket.gaierror as error:
        raise CliError(f"--host: {host} is no address of this machine ({error.strerror})") from None
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: connections that are still closing don't count, listeners do.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise CliError(
                f"port {port} on {host} can't be used ({error.strerror}): "
                f"stop what listens there, or give another with {flag}"
            ) from None
