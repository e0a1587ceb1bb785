"""Find the shared library of the running Python: the server's Python stub embeds it."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from nereid_client.console import CliError


def libpython_name() -> str:
    """The library's file name, such as `libpython3.11.so.1.0`.

    `INSTSONAME` would name the static library where Python itself was built without the shared one,
    as Debian's is; the stub wants the shared one in any case.
    """
    return f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"


def find_libpython() -> Path:
    """The library beside the running Python, else the system's.

    Raises: CliError when there is none, saying which package has it.
    """
    name = libpython_name()
    for folder in _own_folders():
        if (folder / name).is_file():
            return folder / name
    found = _from_loader_cache(name)
    if found is not None:
        return found
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    raise CliError(
        f"{name} was not found, and the Triton server's Python backend needs it: "
        f"apt-get install libpython{version} (or use a Python built with --enable-shared)"
    )


def is_loader_default(library: Path) -> bool:
    """Whether the loader finds this very library without LD_LIBRARY_PATH."""
    found = _from_loader_cache(library.name)
    return found is not None and found.resolve() == library.resolve()


def _own_folders() -> list[Path]:
    libdir = sysconfig.get_config_var("LIBDIR")
    multiarch = sysconfig.get_config_var("MULTIARCH")
    folders = [Path(sys.base_prefix) / "lib"]
    if libdir:
        folders.insert(0, Path(libdir))
        if multiarch:
            folders.append(Path(libdir) / multiarch)
    return folders


def _from_loader_cache(name: str) -> Path | None:
    for ldconfig in ("ldconfig", "/sbin/ldconfig"):  # /sbin is not on every user's PATH
        try:
            listing = subprocess.run(
                [ldconfig, "-p"], capture_output=True, text=True, check=True
            ).stdout
        except (OSError, subprocess.CalledProcessError):
            continue
        match = re.search(rf"^\s*{re.escape(name)} .*=> (\S+)$", listing, re.MULTILINE)
        if match and Path(match[1]).is_file():
            return Path(match[1])
    return None
