"""`nereid install-server`: the Triton server inside a PyTriton wheel, made ready to run.

The wheel holds a real `tritonserver`, its Python backend, and one stub for each Python version.
Three things are missing before `tritonserver --model-repository ...` works from a virtual
environment, and this module adds them: the stub of the running Python where the backend looks for
it, the path of libpython, and the environment, which the stub's embedded Python must find.

    DIR/nvidia_pytriton.libs/                       the server's own libraries
    DIR/pytriton/tritonserver/bin/tritonserver
    DIR/pytriton/tritonserver/backends/python/      libtriton_python.so, and the stub, copied from
    DIR/pytriton/tritonserver/python_backend_stubs/3.11/triton_python_backend_stub
    <sys.prefix>/bin/tritonserver                   the launcher written here
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
from nereid_client.console import CliError, say

SERVER_WHEEL = "nvidia-pytriton==0.7.0"
"""Triton server 2.51. The wheel's declared dependencies are PyTriton's and not installed."""

LAUNCHER_MARK = "# Written by `nereid install-server`."

_LAUNCHER = """\
#!/usr/bin/env bash
{mark} Write it again rather than edit it.
# Starts the embedded Triton server with this environment's Python and packages.
set -euo pipefail
server={server}
python={python}

# The server's Python stub embeds an isolated Python: it ignores PYTHONPATH and finds the standard
# library and this environment's packages through the first `python3` on PATH, as getpath.py does.
export PATH={bin}:"$PATH"
export NEREID_PYTHON="${{NEREID_PYTHON:-$python}}"
export LD_LIBRARY_PATH={libraries}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
exec "$server"/bin/tritonserver --backend-directory "$server"/backends "$@"
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `install-server` to the command line."""
    parser = commands.add_parser(
        "install-server",
        help="install the embedded tritonserver and its launcher",
        description="Install the Triton server that the nvidia-pytriton wheel embeds, and write "
        "a launcher, so that `tritonserver --model-repository DIR` works from this Python "
        "environment.",
    )
    parser.add_argument(
        "--target",
        type=Path,
        default=default_target(),
        metavar="DIR",
        help="where the server goes (default: %(default)s)",
    )
    parser.add_argument(
        "--wheel",
        default=SERVER_WHEEL,
        help="what pip installs: a requirement or a wheel's path (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Install what is missing and say what was done."""
    libpython = find_libpython()
    target: Path = args.target.resolve()
    server = target / "pytriton" / "tritonserver"
    stamp = target / ".nereid-wheel"  # written last: a broken-off installation is done again
    if not (stamp.is_file() and stamp.read_text() == args.wheel):
        _pip_install(args.wheel, target)
        stamp.write_text(args.wheel)
    _copy_stub(server)
    launcher = launcher_path()
    if _write_launcher(launcher, target, libpython):
        say(f"install-server: {launcher} starts {server / 'bin' / 'tritonserver'}")
    else:
        say(f"install-server: {launcher} is up to date")
    return 0


def default_target() -> Path:
    """Where the server is installed unless told otherwise."""
    return Path(sys.prefix) / "opt" / "tritonserver"


def launcher_path() -> Path:
    """Where the launcher is: the folder of this environment's commands."""
    return Path(sys.prefix) / "bin" / "tritonserver"


def launcher_text(target: Path, libpython: Path) -> str:
    """The launcher for a server installed in `target`."""
    libraries = [target / "nvidia_pytriton.libs"]
    if not is_loader_default(libpython):
        libraries.append(libpython.parent)
    return _LAUNCHER.format(
        mark=LAUNCHER_MARK,
        server=shlex.quote(str(target / "pytriton" / "tritonserver")),
        python=shlex.quote(sys.executable),
        bin=shlex.quote(str(Path(sys.prefix) / "bin")),
        libraries=shlex.quote(os.pathsep.join(map(str, libraries))),
    )


def _pip_install(wheel: str, target: Path) -> None:
    say(f"install-server: pip installs {wheel} into {target}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--upgrade", "--target", str(target), wheel]
    if subprocess.run(command, check=False).returncode != 0:
        raise CliError(
            f"pip could not install {wheel} into {target}; its message is above "
            "(the wheel exists for Linux on x86_64 and aarch64)"
        )


def _copy_stub(server: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        has = ", ".join(sorted(p.name for p in stub.parent.parent.glob("3.*"))) or "none"
        raise CliError(
            f"this Triton server has no stub for Python {version} (it has: {has}): "
            "make the environment with one of those, or remove the folder and install again: "
            f"{server.parent.parent}"
        )
    copy = server / "backends" / "python" / stub.name
    if not (copy.is_file() and filecmp.cmp(stub, copy)):
        shutil.copy2(stub, copy)


def _write_launcher(path: Path, target: Path, libpython: Path) -> bool:
    text = launcher_text(target, libpython)
    if path.exists():
        old = path.read_bytes()
        if old == text.encode():
            return False
        if LAUNCHER_MARK.encode() not in old:
            raise CliError(
                f"{path} exists and is not ours: a Triton server is installed there already; "
                "use that one, or make a virtual environment for the embedded one"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return True
