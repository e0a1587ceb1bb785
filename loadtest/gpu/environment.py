"""The packages that the GPU benchmarks need, and wheels that contain missing packages.

This module needs only the standard library, because it runs before anything else is imported.
"""

import re
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
# For nightly builds of torch, the package of the Triton language has another name.
_OTHER_NAMES = {"triton": ("triton", "pytorch-triton")}
# The kernels need only the packages in KERNEL_PACKAGES. The engine also needs the other packages.
KERNEL_PACKAGES = {"torch": "2.11", "triton": "3.6", "numpy": "1.26"}
_ENGINE_PACKAGES = ("transformers", "pydantic", "safetensors", "tokenizers")
# pydantic itself determines the versions of these packages, so no lowest version is given here.
_ANY_VERSION = "0"
_NEEDED_BY_PYDANTIC = dict.fromkeys(
    ("pydantic-core", "annotated-types", "typing-inspection"), _ANY_VERSION
)


def engine_packages() -> dict[str, str]:
    """Return the lowest versions of the packages that the engine needs, by name.

    The versions of the engine's own packages are read from backend/pyproject.toml.
    """
    project = tomllib.loads((ROOT / "backend" / "pyproject.toml").read_text())["project"]
    needed = dict(KERNEL_PACKAGES)
    for requirement in project["dependencies"]:
        match = re.match(r"(?P<name>[\w-]+)>=(?P<version>[\d.]+)", requirement)
        if match and match["name"] in (*KERNEL_PACKAGES, *_ENGINE_PACKAGES):
            needed[match["name"]] = match["version"]
    return needed | _NEEDED_BY_PYDANTIC


def problems(needed: dict[str, str]) -> list[str]:
    """Return one sentence for each package that is missing or too old.

    Args:
        needed: the lowest version of each package, by name.
    """
    sentences = []
    for name, lowest in needed.items():
        installed = installed_version(name)
        remedy = "" if lowest == _ANY_VERSION else f" Version {lowest} or later is needed."
        if installed is None:
            sentences.append(f"The package {name} is missing.{remedy}")
        elif numbers(installed) < numbers(lowest):
            sentences.append(f"The package {name} {installed} is too old.{remedy}")
    return sentences


def installed_version(name: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed."""
    for candidate in _OTHER_NAMES.get(name, (name,)):
        try:
            return version(candidate)
        except PackageNotFoundError:
            continue
    return None


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a version. Example: "2.11.0+cu130" gives (2, 11, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def unpack_wheels(wheels: Path, target: Path) -> list[str]:
    """Unpack wheels into a folder, and add the folder to the beginning of `sys.path`.

    A wheel is a zip archive, so no installer is needed. Wheels for other versions of Python are
    unpacked, too, and then fail when they are imported.

    Args:
        wheels: the folder of the .whl files.
        target: the folder into which they are unpacked. It is created if needed.

    Returns:
        The names of the unpacked files.
    """
    files = sorted(wheels.glob("*.whl"))
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        with zipfile.ZipFile(file) as archive:
            archive.extractall(target)
    sys.path.insert(0, str(target))
    return [file.name for file in files]


def all_versions() -> dict[str, str]:
    """Return the versions of all installed packages by name, sorted by name.

    If a package is installed in two folders, return the version in the folder that Python searches
    first.
    """
    versions: dict[str, str] = {}
    for package in distributions():
        versions.setdefault(str(package.metadata["Name"]), package.version)
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))
