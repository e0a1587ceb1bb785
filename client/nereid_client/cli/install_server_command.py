"""`nereid install-server`: install the Triton server that the PyTriton wheel contains.

The wheel contains a complete `tritonserver`, its Python backend, and one stub for each version of
Python. In a virtual environment, the command `tritonserver --model-repository ...` also needs three
things that the wheel does not contain. This module adds these things:

- a copy of the stub for the running Python, in the folder where the backend expects it
- the path of libpython
- a launcher that sets the environment variables with which the stub finds the virtual environment

    DIR/nvidia_pytriton.libs/                       the server's own libraries
    DIR/pytriton/tritonserver/bin/tritonserver      the server
    DIR/pytriton/tritonserver/python_backend_stubs/ the stubs for all versions of Python
    DIR/pytriton/tritonserver/backends/python/      libtriton_python.so, and the copy of one stub
    <sys.prefix>/bin/tritonserver                   the launcher
"""

import argparse
import filecmp
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from nereid_client.cli.libpython import find_libpython, is_loader_default
from nereid_client.console import CliError, FailureError, say

SERVER_WHEEL = "nvidia-pytriton==0.7.0"
"""The wheel that contains Triton server 2.51. It is installed without its dependencies."""

LAUNCHER_MARK = "# Written by `nereid install-server`."

_LAUNCHER = """\
#!/usr/bin/env bash
{mark} Run the command again instead of editing this file.
# Starts the embedded Triton server with the Python and the packages of this environment.
set -euo pipefail
server={server}

# The server's Python stub embeds an isolated Python, which ignores PYTHONPATH. It finds the
# standard library and the packages of this environment through the first `python3` in PATH.
export PATH={bin}:"$PATH"
export LD_LIBRARY_PATH={libraries}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
exec "$server"/bin/tritonserver --backend-directory "$server"/backends "$@"
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand `install-server`."""
    parser = commands.add_parser(
        "install-server",
        help="install the embedded Triton server and its launcher",
        description="Install the Triton server that the nvidia-pytriton wheel contains, and write "
        "a launcher. The command `tritonserver` then works in this Python environment.",
    )
    parser.add_argument(
        "--target",
        type=Path,
        default=default_target(),
        metavar="DIR",
        help="The folder of the server. The default is opt/tritonserver in the Python environment.",
    )
    parser.add_argument(
        "--wheel",
        default=SERVER_WHEEL,
        help="The requirement or the path of the wheel to install. The default is %(default)s.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Install the server and its launcher, unless both are up to date. Return 0, the exit code.

    Raises: FailureError if a file cannot be written. CliError if the library libpython is missing.
    """
    try:
        _install(args)
    except OSError as error:
        raise FailureError(
            f"The server or its launcher {launcher_path()} cannot be written ({error}). Free some "
            "space or change the permissions, and run `nereid install-server` again."
        ) from None
    return 0


def _install(args: argparse.Namespace) -> None:
    """Install the wheel, copy the stub for this Python version, and write the launcher.

    A wheel that is already installed, and a launcher that is up to date, are left unchanged.
    """
    # The server embeds Python, and the launcher must name the folder of the library libpython. If
    # the library is missing, `find_libpython` raises an error before anything is installed.
    libpython = find_libpython()
    target: Path = args.target.resolve()
    server = target / "pytriton" / "tritonserver"
    _install_wheel_if_missing(args.wheel, target)
    # The stub is the program that runs Python models. An existing stub is also replaced, because
    # the Python version may have changed since the installation.
    _copy_stub_for_this_python(server)
    launcher = launcher_path()
    if _write_launcher(launcher, target, libpython):
        say(f"install-server: wrote {launcher}, which starts {server / 'bin' / 'tritonserver'}")
    else:
        say(f"install-server: {launcher} is up to date")


def default_target() -> Path:
    """Return the default folder of the server."""
    return Path(sys.prefix) / "opt" / "tritonserver"


def launcher_path() -> Path:
    """Return the path of the launcher, which is in the `bin` folder of this environment."""
    return Path(sys.prefix) / "bin" / "tritonserver"


def launcher_text(target: Path, libpython: Path) -> str:
    """Return the text of the launcher for a server in the folder `target`."""
    libraries = [target / "nvidia_pytriton.libs"]
    if not is_loader_default(libpython):
        libraries.append(libpython.parent)
    return _LAUNCHER.format(
        mark=LAUNCHER_MARK,
        server=shlex.quote(str(target / "pytriton" / "tritonserver")),
        bin=shlex.quote(str(Path(sys.prefix) / "bin")),
        libraries=shlex.quote(os.pathsep.join(map(str, libraries))),
    )


def _install_wheel_if_missing(wheel: str, target: Path) -> None:
    """Install a wheel into a folder, unless the folder already contains this wheel."""
    # The stamp file is written after the installation. If an installation is interrupted, there is
    # no stamp, and the next run installs the wheel again.
    stamp = target / ".nereid-wheel"
    is_installed = stamp.is_file() and stamp.read_text() == wheel
    if is_installed:
        return
    say(f"install-server: installing {wheel} into {target} with pip")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--upgrade", "--target", str(target), wheel]
    if subprocess.run(command, check=False).returncode != 0:
        raise FailureError(
            f"pip failed to install {wheel} into {target}; its error message is above. The wheel "
            "exists for Linux on x86_64 and aarch64 only."
        )
    stamp.write_text(wheel)


def _copy_stub_for_this_python(server: Path) -> None:
    """Copy the stub program for the running Python version to the folder backends/python.

    The Triton server starts this program in order to run Python models.

    Raises: CliError if the server has no stub program for this Python version.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    all_stubs = server / "python_backend_stubs"
    stub = all_stubs / version / "triton_python_backend_stub"
    if not stub.is_file():
        versions = ", ".join(sorted(folder.name for folder in all_stubs.glob("3.*"))) or "none"
        raise CliError(
            f"The Triton server has no stub for Python {version}, only for: {versions}. Create the "
            "virtual environment with one of these versions, or remove the folder "
            f"{server.parent.parent} and run `nereid install-server` again."
        )
    copy = server / "backends" / "python" / stub.name
    is_copied = copy.is_file() and filecmp.cmp(stub, copy)
    if not is_copied:
        # While the old stub is running, the operating system refuses to write to the file of the
        # stub, but the file can be replaced. Therefore, the new stub is written to another file.
        unfinished = copy.with_name(f".{copy.name}.unfinished")
        shutil.copy2(stub, unfinished)
        unfinished.replace(copy)


def _write_launcher(path: Path, target: Path, libpython: Path) -> bool:
    """Write the launcher. Return False if the launcher was already up to date."""
    text = launcher_text(target, libpython)
    if path.exists():
        old = path.read_bytes()
        if old == text.encode():
            return False
        if LAUNCHER_MARK.encode() not in old:
            raise CliError(
                f"The file {path} exists and was not written by `nereid install-server`: another "
                "Triton server is installed there. Use that one, or create a virtual environment "
                "for the embedded server."
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    # The launcher is first written to another file. If the disk becomes full during the writing,
    # `path` is not changed. If the launcher were written to `path` directly, `path` could be an
    # incomplete launcher. The next installation would then refuse to replace the file, as if
    # another Triton server had been installed.
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.chmod(0o755)
    unfinished.replace(path)
    return True
