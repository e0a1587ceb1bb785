"""Tests of the wheels: reproducible builds, contents, and serving without the repository."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from loadtest.server.served import free_ports

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"nereid": ".", "parsers": "parsers", "backend": "backend", "client": "client"}


def run(*command: str | Path, folder: Path = ROOT) -> str:
    """Run a command that must succeed, and return its standard output."""
    # The version is fixed, because a commit between two builds would change the version.
    environment = os.environ | {"SETUPTOOLS_SCM_PRETEND_VERSION": "0.0.1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(name: str, target: Path, *options: str, folder: Path = ROOT) -> Path:
    run(
        sys.executable, "-m", "build", "--quiet", "--no-isolation", *options,
        "--outdir", target, folder / FOLDERS[name],
    )  # fmt: skip
    (wheel,) = target.glob("nereid-*.whl" if name == "nereid" else f"nereid_{name}-*.whl")
    return wheel


@pytest.fixture(scope="module")
def parsers_wheels(tmp_path_factory):
    """The paths of two wheels of the package `nereid-parsers`, built one after the other."""
    return [build_wheel("parsers", tmp_path_factory.mktemp(n), "--wheel") for n in ("a", "b")]


def test_two_builds_of_a_wheel_are_equal(parsers_wheels):
    first, second = (hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in parsers_wheels)
    assert first == second


def test_a_wheel_contains_its_modules_the_licence_and_the_version(parsers_wheels):
    wheel = parsers_wheels[0]
    names = zipfile.ZipFile(wheel).namelist()
    modules = {
        path.relative_to(ROOT / "parsers").as_posix()
        for path in (ROOT / "parsers" / "nereid_parsers").rglob("*.py")
    }
    assert modules <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert wheel.name.split("-")[1] in next(name for name in names if name.endswith("METADATA"))


def hashes_of_files(folder):
    """Return a dict from the name of each file in a folder to the SHA-256 of the file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FOLDERS)
def test_two_builds_of_a_release_are_equal(tmp_path, monkeypatch, name):
    """Two builds are equal although the names of their source folders differ.

    The dates and the modes of the source files also differ. Only the wheel of the backend may
    contain compiled kernels.
    """
    date = datetime(2026, 1, 2, 3, 4, 6, tzinfo=UTC)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(int(date.timestamp())))
    first, second = tmp_path / "first", tmp_path / "the second copy"
    copy_files(ROOT, first, run("git", "ls-files", "-z").rstrip("\0").split("\0"))
    names = [path.relative_to(first) for path in first.rglob("*") if path.is_file()]
    copy_files(first, second, names)
    for path in filter(Path.is_file, second.rglob("*")):
        path.chmod(0o600)
        os.utime(path, (1e9, 1e9))

    wheel = build_wheel(name, tmp_path / "dist" / "first", folder=first)
    second_wheel = build_wheel(name, tmp_path / "dist" / "second", folder=second)

    hashes = hashes_of_files(wheel.parent)
    assert len(hashes) == 2  # a wheel and a source distribution
    assert hashes_of_files(second_wheel.parent) == hashes
    files = zipfile.ZipFile(wheel).infolist()
    assert {file.date_time for file in files} == {date.timetuple()[:6]}
    kernels = [file.filename for file in files if "/precompiled/" in file.filename]
    assert bool(kernels) == (name == "backend")


def copy_files(source: Path, target: Path, names: Iterable[str | Path]) -> None:
    """Copy the files with the given names, if they exist."""
    for name in names:
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.triton
def test_the_installed_wheels_serve_the_demo_models_without_the_repository(tmp_path):
    wheels = {name: build_wheel(name, tmp_path / "dist") for name in FOLDERS}
    names = zipfile.ZipFile(wheels["nereid"]).namelist()
    assert "nereid/model_repository/llm/config.pbtxt" in names
    assert "nereid/demo/chat/model.safetensors" in names
    paths_of_backend = map(Path, zipfile.ZipFile(wheels["backend"]).namelist())
    kernels = {path.name for path in paths_of_backend if "precompiled" in path.parts}
    assert kernels >= {"avx2.so", "avx512_bf16.so"}

    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", environment)
    python, nereid = environment / "bin" / "python", environment / "bin" / "nereid"
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "--quiet", "-c", constraints, *wheels.values())
    folder = tmp_path / "empty"
    folder.mkdir()
    run(nereid, "install-server", folder=folder)

    ports = dict(zip(("http", "grpc", "metrics", "openai"), free_ports(4), strict=True))
    flags = [f"--{name}-port={port}" for name, port in ports.items()]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("NEREID_")}
    variables |= {"XDG_STATE_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    variables["PATH"] = str(folder_without_compilers(tmp_path))
    server = subprocess.Popen(
        [nereid, "serve", *flags], cwd=folder, env=variables, text=True, stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        # When the server is ready, `nereid serve` prints an example of a request with curl.
        assert any(line.startswith("curl ") for line in server.stdout)
        body = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{ports['openai']}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        assert answer["choices"][0]["message"]["content"]
        # The engine must use the compiled kernels of the wheel and must not compile its own.
        assert any("attention/cpu/precompiled/" in maps for maps in memory_maps(environment))
        assert not list((tmp_path / "cache" / "nereid").glob("cpu-kernels-*"))
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=120)


def folder_without_compilers(folder: Path) -> Path:
    """Create and return a folder with links to all programs of this machine except compilers."""
    programs = folder / "programs"
    programs.mkdir()
    for source in (path for place in ("/usr/bin", "/usr/sbin") for path in Path(place).iterdir()):
        is_compiler = re.search(r"(^|-)(g\+\+|gcc|c\+\+|cc|clang(\+\+)?)(-\d+)?$", source.name)
        if not is_compiler and not (programs / source.name).is_symlink():
            (programs / source.name).symlink_to(source)
    return programs


def memory_maps(environment: Path) -> Iterator[str]:
    """Yield the memory map of each process that runs the Python of the given environment."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text()
            if str(environment) in maps:
                yield maps
