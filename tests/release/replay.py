"""Builds a stage of the Dockerfile in a new Debian root file system, without a container engine."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).resolve().parents[2]
_SUITES = {"debian:12-slim": "bookworm", "debian:13-slim": "trixie"}
_TRITON_IMAGE = "nvcr.io/nvidia/tritonserver:"
# These commands make a Debian system a substitute for NVIDIA's image: they install Debian's Python
# and the Triton server of the PyTriton wheel.
_TRITON_BASE = r"""
apt-get update
apt-get install --yes --no-install-recommends python3 python3-pip libpython3-dev g++
useradd --uid 1000 triton-server
pip install --break-system-packages 'numpy<2'
pip install --no-deps --target /opt/tritonserver nvidia-pytriton==0.7.0
cd /opt/tritonserver/pytriton/tritonserver
cp python_backend_stubs/3.11/triton_python_backend_stub backends/python
mkdir -p /opt/tritonserver/bin
printf '#!/bin/sh\nLD_LIBRARY_PATH=/opt/tritonserver/nvidia_pytriton.libs exec %s "$@"\n' \
    "$PWD/bin/tritonserver --backend-directory $PWD/backends" > /opt/tritonserver/bin/tritonserver
chmod +x /opt/tritonserver/bin/tritonserver
"""
_MOUNTED = ("/proc", "/dev")
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


class Image:
    """A stage of the Dockerfile. The constructor builds the stage in the folder `root`.

    Attributes:
        root: The root file system.
        variables: The environment variables that the instruction ENV sets.
        user: The user id that the instruction USER sets, or 0 without this instruction.
        entrypoint: The words of the instruction ENTRYPOINT.
        health_check: The words of the command in the instruction HEALTHCHECK.
    """

    def __init__(self, stage: str, root: Path) -> None:
        self.root = root
        self.variables = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.user, self.entrypoint, self.health_check = 0, [], []
        self._folder = Path("/")
        for step in _steps(stage):
            getattr(self, f"_{step['instruction'].lower()}")(step["value"])

    def command(self, words: list[str], state: Path) -> list[str]:
        """Return a command that runs a program of the image on a read-only root file system.

        The program runs as the user of the image.

        Args:
            words: The program and its arguments.
            state: The folder that is mounted on /var/lib/nereid. The program can write to no other
                folder on a disk.
        """
        os.chown(state, self.user, self.user)
        command = ["bwrap", "--ro-bind", str(self.root), "/", "--dev", "/dev", "--proc", "/proc"]
        command += ["--tmpfs", "/tmp", "--bind", str(state), "/var/lib/nereid", "--clearenv"]
        for variable in self.variables.items():
            command += ["--setenv", *variable]
        command += ["--chdir", str(self._folder), "--die-with-parent"]
        user = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"]
        return [*user, *command, *words]

    def _from(self, value: str) -> None:
        """Install a minimal Debian in the root, from the Debian mirror of this machine.

        If the image is NVIDIA's, also run the commands of `_TRITON_BASE`.
        """
        image = value.split()[0]
        has_triton = image.startswith(_TRITON_IMAGE)
        suite = "bookworm" if has_triton else _SUITES[image]
        script = ["debootstrap", "--variant=minbase", suite, str(self.root), _mirror()]
        subprocess.run(script, check=True, stdout=subprocess.DEVNULL)
        shutil.copy("/etc/resolv.conf", self.root / "etc")
        if _CERTIFICATES.is_file():
            shutil.copy(_CERTIFICATES, self.root / "etc" / "host-certificates.crt")
        if has_triton:
            self.variables["PATH"] = f"/opt/tritonserver/bin:{self.variables['PATH']}"
            self._run(_TRITON_BASE)

    def _env(self, value: str) -> None:
        for word in shlex.split(value):
            name, _, text = word.partition("=")
            self.variables[name] = text.replace("$PATH", self.variables["PATH"])

    def _workdir(self, value: str) -> None:
        self._folder = Path(value)
        (self.root / value[1:]).mkdir(parents=True, exist_ok=True)

    def _user(self, value: str) -> None:
        self.user = int(value)

    def _expose(self, value: str) -> None:
        assert value.isdecimal()

    def _entrypoint(self, value: str) -> None:
        self.entrypoint = json.loads(value)

    def _healthcheck(self, value: str) -> None:
        self.health_check = json.loads(value[value.index("[") :])

    def _copy(self, value: str) -> None:
        """Copy one file, or all files of a folder that git does not ignore.

        `value` contains the source and the target. If the source is a folder, both end with "/".
        """
        source, target = value.split()
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", source]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        for name in listed.stdout.rstrip("\0").split("\0"):
            inner = target + name.removeprefix(source) if target.endswith("/") else name
            file = self.root / str(self._folder)[1:] / inner.removeprefix("./")
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, file, follow_symlinks=False)

    def _run(self, value: str) -> None:
        """Run a shell command in the root file system.

        The local package folders of this machine's pip are mounted in the root file system.
        """
        folders = [*_MOUNTED, *_pip_folders()]
        mounts = [
            f"mkdir -p {self.root}{path}; mount --rbind {path} {self.root}{path}"
            for path in folders
        ]
        inner = f"cd {self._folder} && {value}"
        pip = _pip_variables()
        variables = " ".join(f"{k}={shlex.quote(v)}" for k, v in (self.variables | pip).items())
        shell = f"chroot {self.root} /usr/bin/env -i {variables} sh -ec {shlex.quote(inner)}"
        script = "; ".join([*mounts, shell])
        # The kernel removes the mounts when the mount namespace ends.
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"RUN {value}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"


def _steps(stage: str) -> list[dict[str, str]]:
    """Return the instructions of a stage of the Dockerfile, beginning with its FROM."""
    with (ROOT / "Dockerfile").open("rb+") as file:
        structure = DockerfileParser(fileobj=file).structure
    steps = [step for step in structure if step["instruction"] != "COMMENT"]
    starts = [n for n, step in enumerate(steps) if step["instruction"] == "FROM"]
    first = next(n for n in starts if steps[n]["value"].endswith(f"AS {stage}"))
    following = [n for n in starts if n > first]
    return steps[first : following[0] if following else None]


def _mirror() -> str:
    """Return the address of the Debian mirror that this machine uses."""
    files = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    for file in filter(Path.is_file, files):
        found = re.search(r"^(?:URIs:|deb)\s+(\S+/debian)\s", file.read_text(), re.MULTILINE)
        if found:
            return found[1]
    raise LookupError("no Debian mirror is configured in /etc/apt")


def _pip_settings() -> str:
    """Return pip's settings on this machine, for example "global.find-links='/wheels'"."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _pip_variables() -> dict[str, str]:
    """Return pip's settings as environment variables, such as {"PIP_FIND_LINKS": "/wheels"}."""
    found = re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", _pip_settings(), re.MULTILINE)
    settings = {f"PIP_{name.upper().replace('-', '_')}": value for name, value in found}
    return settings | {"PIP_CERT": "/etc/host-certificates.crt"}


def _pip_folders() -> list[str]:
    """Return the local folders from which pip is configured to read packages and constraints."""
    settings = _pip_settings()
    named = map(Path, re.findall(r"(?<=['\s/])/(?:[\w.-]+/?)+", settings))
    folders = [path for path in named if path.is_dir()]
    folders += [Path(file).parent for file in re.findall(r"constraint='(/[^']+)'", settings)]
    # A package index in a folder named "simple" contains links to files next to this folder, so the
    # parent folder is returned.
    return sorted({str(path.parent if path.name == "simple" else path) for path in folders})
