import importlib.util
import logging
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from nereid_backend.attention.cpu import compile_kernels, load_kernels
from nereid_backend.attention.cpu.instruction_sets import usable_instruction_sets

ROOT = Path(__file__).resolve().parents[3]
HAS_COMPILER = any(map(shutil.which, compile_kernels.COMPILERS))

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")


def test_the_kernels_are_built_if_there_is_a_compiler():
    # The tests of the kernels are skipped if the kernels cannot be built. This test fails instead.
    assert load_kernels.load_library().nereid_has_linear() in (0, 1)


@pytest.fixture
def precompiled(tmp_path, monkeypatch):
    """The path of a precompiled library for the best instruction set. No C++ compiler is found."""
    compiled_library = load_kernels.load_library()._name
    monkeypatch.setattr(load_kernels, "_PRECOMPILED", tmp_path)
    monkeypatch.setattr(compile_kernels, "COMPILERS", ())
    path = tmp_path / f"{usable_instruction_sets()[0].name}.so"
    shutil.copy(compiled_library, path)
    return path


def test_without_a_compiler_the_library_of_the_package_is_used(precompiled):
    library = load_kernels.load_library()
    assert library._name == str(precompiled)
    assert library.nereid_has_linear() in (0, 1)


def test_a_library_of_the_package_that_cannot_be_loaded_is_ignored(
    precompiled, monkeypatch, caplog
):
    precompiled.write_bytes(b"no library")
    with pytest.raises(compile_kernels.KernelBuildError, match="no C\\+\\+ compiler was found"):
        load_kernels.load_library()

    monkeypatch.undo()  # The compiler is found again.
    monkeypatch.setattr(load_kernels, "_PRECOMPILED", precompiled.parent)
    with caplog.at_level(logging.WARNING):
        assert load_kernels.load_library()._name != str(precompiled)
    assert "The precompiled CPU kernels cannot be used" in caplog.text


def test_a_second_build_waits_for_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(load_kernels, "_PRECOMPILED", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    built_paths = []

    def slow_build(compiler, instruction_set, path):
        built_paths.append(path)
        time.sleep(0.2)
        # Any library that can be loaded suffices for this test.
        path.symlink_to(load_kernels._TORCH_LIBRARY)

    monkeypatch.setattr(load_kernels, "_build", slow_build)
    instruction_set = usable_instruction_sets()[-1]
    with ThreadPoolExecutor() as pool:
        list(pool.map(load_kernels._load, 3 * [instruction_set]))

    (path,) = built_paths
    assert list(path.parent.iterdir()) == [path]


def test_a_compiler_that_cannot_be_started_is_an_error_of_the_build(tmp_path, monkeypatch):
    compiler = tmp_path / "g++"
    compiler.write_bytes(b"a program for another processor")
    compiler.chmod(0o755)
    monkeypatch.setattr(load_kernels, "_PRECOMPILED", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(compile_kernels.KernelBuildError, match=r"could not be built .*Exec format"):
        load_kernels.load_library()


def test_an_unknown_home_folder_is_an_error_of_the_build(tmp_path, monkeypatch):
    monkeypatch.setattr(load_kernels, "_PRECOMPILED", tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError))
    with pytest.raises(compile_kernels.KernelBuildError, match=r"set .* XDG_CACHE_HOME"):
        load_kernels.load_library()


def test_a_cache_folder_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(load_kernels, "_PRECOMPILED", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")  # not even root can write to /proc
    with pytest.raises(compile_kernels.KernelBuildError, match=r"/proc/nowhere.*set .* XDG_CACHE"):
        load_kernels.load_library()


def test_torch_may_be_installed_in_a_folder_whose_name_has_a_space(monkeypatch):
    packages = Path("/home/me/my models/site-packages")
    openmp = packages / "torch/lib/libgomp.so.1"
    maps = f"7f00-7f10 r-xp 00000000 08:01 123      {openmp}\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: maps)
    monkeypatch.setattr(load_kernels.torch, "__file__", str(packages / "torch/__init__.py"))
    # Without the path of the OpenMP library, the kernels would be built for one thread.
    assert load_kernels._openmp_path() == str(openmp)


@pytest.mark.parametrize("remaining_bytes", [0, 100, 100_000])
def test_a_library_that_was_truncated_on_disk_is_built_again(
    remaining_bytes, tmp_path, monkeypatch
):
    complete_library = Path(load_kernels.load_library()._name)
    instruction_set = usable_instruction_sets()[0]
    monkeypatch.setattr(load_kernels, "_PRECOMPILED", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built_paths = []

    def build(compiler, instruction_set, path):
        built_paths.append(path)
        shutil.copy(complete_library, path)

    monkeypatch.setattr(load_kernels, "_build", build)
    load_kernels._load(instruction_set)
    truncated = tmp_path / "truncated"
    truncated.write_bytes(complete_library.read_bytes()[:remaining_bytes])
    truncated.replace(built_paths[0])  # A power failure can truncate a file in this way.

    library = load_kernels._load(instruction_set)
    assert built_paths == 2 * [Path(library._name)]
    # The library is complete now, so the next load does not build it again.
    load_kernels._load(instruction_set)
    assert len(built_paths) == 2


def test_a_wheel_build_deletes_the_libraries_that_it_has_compiled(monkeypatch, tmp_path):
    pytest.importorskip("hatchling")
    file = ROOT / "backend" / "hatch_build.py"
    module_spec = importlib.util.spec_from_file_location("hatch_build", file)
    hatch_build = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(hatch_build)
    # This object replaces the modules that compile the kernels.
    fake_modules = SimpleNamespace(
        KernelBuildError=OSError,
        find_compiler=lambda: "cc",
        compile_library=lambda compiler, flags, libraries, path: path.touch(),
        INSTRUCTION_SETS=[SimpleNamespace(name="avx2", flags=[])],
    )
    monkeypatch.setattr(hatch_build, "_load", lambda path: fake_modules)
    monkeypatch.setattr(hatch_build.platform, "system", lambda: "Linux")
    monkeypatch.setattr(hatch_build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(hatch_build.tempfile, "tempdir", str(tmp_path))
    hook = hatch_build.PrecompiledKernels(str(ROOT / "backend"), {}, None, None, "", "wheel")
    build_data = {"force_include": {}}

    hook.initialize("standard", build_data)
    (library,) = map(Path, build_data["force_include"])
    assert (library.name, library.is_file()) == ("avx2.so", True)

    hook.finalize("standard", build_data, "")
    assert not list(tmp_path.iterdir())
