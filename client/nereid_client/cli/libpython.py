"""Find the shared library libpython of the running Python version.

The Python stub of the Triton server embeds Python and needs this library.
"""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from nereid_client.console import CliError


def libpython_name() -> str:
    """Return the file name of the library libpython, such as `libpython3.11.so.1.0`.

    Python's configuration variable INSTSONAME is not used. If Python was built without the shared
    library, as in Debian, this variable names the static library. The stub needs the shared
    library.
    """
    return f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"


def find_libpython() -> Path:
    """Return the path of the shared library libpython for the running Python version.

    The folders of the running Python are searched before the folders of the dynamic loader.

    Raises: CliError if the library was not found. The message names the package to install.
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
        f"The Triton server's Python backend requires {name}, which was not found. Run: apt-get "
        f"install libpython{version} (or use a Python that was built with --enable-shared)"
    )


def is_loader_default(library: Path) -> bool:
    """Return whether the dynamic loader finds a library without the variable LD_LIBRARY_PATH."""
    found = _from_loader_cache(library.name)
    return found is not None and found.resolve() == library.resolve()


def _own_folders() -> list[Path]:
    """Return the folders of the running Python that can contain libpython."""
    libdir = sysconfig.get_config_var("LIBDIR")
    multiarch = sysconfig.get_config_var("MULTIARCH")
    folders = [Path(sys.base_prefix) / "lib"]
    if libdir:
        folders.insert(0, Path(libdir))
        if multiarch:
            folders.append(Path(libdir) / multiarch)
    return folders


def _from_loader_cache(name: str) -> Path | None:
    """Return the path of the library `name` in the dynamic loader's cache, or None."""
    # Example of a line: "	libpython3.12.so.1.0 (libc6,x86-64) => /lib/libpython3.12.so.1.0".
    line = rf"^\s*{re.escape(name)} .*=> (\S+)$"
    match = re.search(line, _loader_cache(), re.MULTILINE)
    if match is None or not Path(match[1]).is_file():
        return None
    return Path(match[1])


def _loader_cache() -> str:
    """Return the list of libraries that `ldconfig -p` prints. Return "" if ldconfig cannot run."""
    for ldconfig in ("ldconfig", "/sbin/ldconfig"):  # /sbin is not in the PATH of every user
        try:
            command = [ldconfig, "-p"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            continue
    return ""
