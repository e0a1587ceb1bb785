"""Tests of `nereid install-server` with a small wheel, which the real pip installs."""

import argparse
import errno
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from nereid_client.cli import install_server_command as install_server
from nereid_client.cli import libpython
from nereid_client.console import CliError

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
SERVER = "pytriton/tritonserver"
FAKE_SERVER = '#!/bin/bash\necho "$0 $*"\nenv\n'


def make_wheel(folder: Path, stubs: tuple[str, ...] = (VERSION,)) -> Path:
    """Create a wheel with the structure of nvidia-pytriton, and return the path of the wheel.

    The server program in the wheel prints its arguments and its environment.
    """
    info = "nvidia_pytriton-0.0.1.dist-info"
    program = f"{SERVER}/bin/tritonserver"
    files = {
        program: FAKE_SERVER,
        f"{SERVER}/backends/python/libtriton_python.so": "backend",
        "nvidia_pytriton.libs/libx.so": "x",
        # The installation must not install the packages that the wheel requires.
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: nvidia-pytriton\nVersion: 0.0.1\n"
        "Requires-Dist: no-such-package-anywhere==1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    for stub in stubs:
        files[f"{SERVER}/python_backend_stubs/{stub}/triton_python_backend_stub"] = f"stub {stub}"
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    wheel = folder / "nvidia_pytriton-0.0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            mode = 0o100755 if name == program else 0o100644
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode << 16  # a ZIP file has the Unix mode in the upper 16 bits
            archive.writestr(entry, text)
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder in which pip has installed the wheel, and the path of the wheel.

    The wheel is deleted, so that a second installation with pip would fail.
    """
    folder = tmp_path_factory.mktemp("installed")
    wheel = make_wheel(folder, stubs=("3.8", VERSION))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(install_server, "launcher_path", lambda: folder / "launcher")
        assert install(folder, wheel) == 0
    wheel.unlink()
    return folder, wheel


@pytest.fixture
def wheel(tmp_path, installed):
    """The path of the installed wheel. The fixture copies the installed server to `tmp_path`."""
    folder, wheel = installed
    shutil.copytree(folder / "target", tmp_path / "target")
    return wheel


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    path = tmp_path / "bin" / "tritonserver"
    monkeypatch.setattr(install_server, "launcher_path", lambda: path)
    return path


def install(folder: Path, wheel: Path) -> int:
    return install_server.run(argparse.Namespace(target=folder / "target", wheel=str(wheel)))


def test_the_stub_of_this_python_is_copied_to_the_folder_of_the_backend(installed):
    backend = installed[0] / "target" / SERVER / "backends" / "python"
    assert (backend / "triton_python_backend_stub").read_text() == f"stub {VERSION}"


def test_the_launcher_starts_the_server_with_this_environment(tmp_path, wheel, launcher):
    install(tmp_path, wheel)
    output = subprocess.run(
        [launcher, "--model-repository", "a b"],
        env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    server = tmp_path / "target" / SERVER
    arguments = f"--backend-directory {server}/backends --model-repository a b"
    assert output[0] == f"{server}/bin/tritonserver {arguments}"
    variables = dict(line.split("=", 1) for line in output[1:] if "=" in line)
    assert variables["PATH"] == f"{sys.prefix}/bin:/usr/bin:/bin"
    assert f"{tmp_path}/target/nvidia_pytriton.libs" in variables["LD_LIBRARY_PATH"].split(":")


def test_a_second_call_installs_nothing(tmp_path, wheel, launcher, capsys):
    install(tmp_path, wheel)
    assert install(tmp_path, wheel) == 0
    assert "up to date" in capsys.readouterr().out


def test_an_interrupted_installation_is_repeated(tmp_path, wheel, launcher):
    (tmp_path / "target" / ".nereid-wheel").unlink()
    (tmp_path / "target" / SERVER / "bin" / "tritonserver").write_text("half")
    install(tmp_path, make_wheel(tmp_path))
    assert (tmp_path / "target" / SERVER / "bin" / "tritonserver").read_text() == FAKE_SERVER


def test_the_message_about_a_missing_stub_lists_the_stubs_of_the_wheel(tmp_path, wheel, launcher):
    shutil.rmtree(tmp_path / "target" / SERVER / "python_backend_stubs" / VERSION)
    with pytest.raises(CliError, match=rf"no stub for Python {VERSION}, only for: 3\.8"):
        install(tmp_path, wheel)


def test_a_tritonserver_of_another_installation_is_not_replaced(tmp_path, wheel, launcher):
    launcher.parent.mkdir()
    launcher.write_text("#!/bin/sh\necho real\n")
    with pytest.raises(CliError, match="was not written by `nereid install-server`"):
        install(tmp_path, wheel)
    assert launcher.read_text() == "#!/bin/sh\necho real\n"


def test_a_missing_libpython_names_the_package(monkeypatch):
    monkeypatch.setattr(libpython, "libpython_name", lambda: "libpython9.9.so.1.0")
    with pytest.raises(CliError, match=rf"apt-get install libpython{VERSION}"):
        libpython.find_libpython()


def test_the_installation_can_be_repeated_after_the_disk_was_full(
    tmp_path, wheel, launcher, monkeypatch
):
    write_text = Path.write_text

    def write_half(path, text):
        """Write half of a text to a file, and then raise the error of a full disk."""
        write_text(path, text[: len(text) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full_disk:
        full_disk.setattr(Path, "write_text", write_half)
        with pytest.raises(CliError, match="No space left on device"):
            install(tmp_path, wheel)

    assert install(tmp_path, wheel) == 0
    assert subprocess.run([launcher], capture_output=True, check=True).stdout
