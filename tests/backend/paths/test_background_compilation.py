import contextlib
import fcntl
import os
import pickle
import subprocess
import sys
import time
import zipfile
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import torch
from nereid_backend.paths.compiled_forward import (
    background_compilation,
    build_library,
    compile_process,
    library_files,
)
from nereid_backend.paths.compiled_forward.background_compilation import BackgroundCompilation
from nereid_backend.paths.compiled_forward.library_files import TraceError
from nereid_backend.paths.compiled_forward.model_skeleton import (
    Skeleton,
    pack_skeleton,
    unpack_skeleton,
)
from nereid_backend.paths.model_call import UnfitError
from torch import nn


def wait_until(condition, timeout_s=30.0):
    """Wait until `condition()` is true or the time is over, and return its last value."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


# ---- the process


@pytest.fixture
def locked(tmp_path):
    """A folder for libraries that is locked, as if another process were compiling in it."""
    with (tmp_path / "background.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield tmp_path


@pytest.fixture
def waiting(locked):
    """A compilation that waits until the folder is unlocked."""
    compilation = BackgroundCompilation(b"a model", locked / "library")
    yield compilation
    compilation.close()


def process_of(compilation):
    """Return the process of a compilation as a `psutil.Process`."""
    return psutil.Process(compilation._process.pid)


def test_the_process_has_the_lowest_priority_and_leads_a_group(waiting):
    process = process_of(waiting)
    assert wait_until(lambda: process.nice() == 19)
    assert os.getpgid(process.pid) == process.pid
    # In another session, the niceness of the process would have no effect.
    assert os.getsid(process.pid) == os.getsid(0)
    assert waiting.outcome is None


def test_close_kills_the_process(waiting):
    process = process_of(waiting)
    waiting.close()
    assert not process.is_running()
    assert "killed" in waiting.outcome


_ENGINE = """
import sys, time
from pathlib import Path
from nereid_backend.paths.compiled_forward.background_compilation import BackgroundCompilation
compilation = BackgroundCompilation(b"a model", Path(sys.argv[1]))
print(compilation._process.pid, flush=True)
time.sleep(60)
"""


def test_the_process_dies_with_the_engine(locked):
    command = [sys.executable, "-c", _ENGINE, str(locked / "library")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as engine:
        process = psutil.Process(int(engine.stdout.readline()))
        # The second thread starts after the process has received the model.
        assert wait_until(lambda: process.num_threads() == 2)
        engine.kill()
    assert wait_until(lambda: not process.is_running() or process.status() == "zombie")


def test_a_killed_process_gives_a_reason(waiting):
    process_of(waiting).kill()
    assert wait_until(lambda: waiting.outcome is not None)
    assert waiting.outcome == "the compilation was killed or needed too much memory"


def test_a_process_that_takes_too_long_is_killed(locked):
    compilation = BackgroundCompilation(b"a model", locked / "library", timeout_s=0.1)
    process = process_of(compilation)
    assert wait_until(lambda: compilation.outcome is not None)
    assert compilation.outcome == "the compilation took longer than 0.1 s"
    assert not process.is_running()


@pytest.mark.long  # The process imports torch, which takes long.
def test_an_error_of_the_process_is_the_reason(tmp_path):
    compilation = BackgroundCompilation(b"no model", tmp_path / "library")
    assert wait_until(lambda: compilation.outcome is not None, timeout_s=120)
    assert "invalid load key" in compilation.outcome
    assert not (tmp_path / "library").exists()


def test_a_process_that_cannot_start_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(background_compilation.sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(OSError, match="missing"):
        BackgroundCompilation(b"a model", tmp_path / "library")


# ---- the model that is sent to the process


def received(module):
    """Pack a module to send it to another process, and return the unpacked module."""
    skeleton = Skeleton(module, "attention", is_native=True, num_threads=3)
    unpacked = unpack_skeleton(pack_skeleton(skeleton))
    assert unpacked[1:] == skeleton[1:]
    return unpacked.model


def test_small_tensors_keep_their_values():
    layer = nn.Linear(3, 2).to(torch.bfloat16)
    layer.register_buffer("scale", torch.tensor(2.5))
    layer.register_buffer("transposed", torch.arange(6).view(2, 3).t())
    layer.register_buffer("expanded", torch.tensor([[1.5]]).expand(4, 5))
    layer.register_buffer("empty", torch.empty(0, 3))
    layer.register_buffer("nothing", None)

    received_layer = received(layer)

    tensors = received_layer.state_dict()
    assert tensors.keys() == layer.state_dict().keys()
    for name, expected in layer.state_dict().items():
        assert torch.equal(tensors[name], expected)
        assert tensors[name].stride() == expected.stride()
        assert tensors[name].dtype == expected.dtype
    assert received_layer.nothing is None
    assert isinstance(received_layer.weight, nn.Parameter)
    assert not received_layer.weight.requires_grad


def test_large_tensors_keep_only_their_shapes():
    layer = nn.Linear(1024, 512)
    layer.register_buffer("view", torch.zeros(700, 800, dtype=torch.int8).t())
    message = pack_skeleton(Skeleton(layer, "attention", is_native=False, num_threads=1))
    assert len(message) < 10_000
    received_layer = unpack_skeleton(message).model
    assert received_layer.weight.shape == (512, 1024)
    assert (received_layer.view.shape, received_layer.view.stride()) == ((800, 700), (1, 800))
    assert torch.equal(received_layer.bias, layer.bias)


def test_a_tensor_with_two_names_stays_one_tensor():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    received_layers = received(nn.Sequential(first, second))
    assert received_layers[0].weight is received_layers[1].weight


def test_tensors_made_for_inference_are_sent():
    layer = nn.Linear(2, 2)
    with torch.inference_mode():
        layer.register_buffer("packed", torch.ones(2, 2))
    assert torch.equal(received(layer).packed, torch.ones(2, 2))


class OddTensor(torch.Tensor):
    """A subclass of Tensor, which torch's compiler may treat differently from Tensor."""


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        pytest.param(lambda x: x, "lambda", id="a local function"),
        pytest.param(torch.ones(2).as_subclass(OddTensor), "OddTensor", id="a class of tensor"),
    ],
)
def test_a_model_that_cannot_be_sent_gives_a_reason(value, reason):
    layer = nn.Linear(2, 2)
    layer.extra = value
    with pytest.raises(UnfitError, match=f"cannot be sent to another process .*{reason}"):
        received(layer)


def test_functions_of_modules_are_sent_by_name():
    layer = nn.Linear(2, 2)
    layer.activation = partial(nn.functional.gelu, approximate="tanh")
    assert received(layer).activation.func is nn.functional.gelu
    assert pickle.loads(pickle.dumps(received(layer).activation)).keywords == {
        "approximate": "tanh"
    }


# ---- the folder of the libraries


def test_old_temporary_folders_are_deleted(tmp_path):
    for name in ("tmp_old", "tmp_new", "0123456789abcdef"):
        (tmp_path / name / "library").mkdir(parents=True)
    two_hours_ago = time.time() - 7200
    for name in ("tmp_old", "0123456789abcdef"):
        os.utime(tmp_path / name, (two_hours_ago, two_hours_ago))
    compile_process._delete_folders_of_killed_compilations(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0123456789abcdef", "tmp_new"]


def test_a_library_that_was_truncated_on_disk_is_compiled_again(tmp_path):
    file = tmp_path / library_files.LIBRARY_FILE
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model.so", b"code" * 1000)
    assert library_files.has_library(tmp_path)
    for num_bytes in (file.stat().st_size // 2, 0):
        os.truncate(file, num_bytes)
        assert not library_files.has_library(tmp_path)


def test_a_lack_of_memory_is_no_error_of_the_trace(monkeypatch):
    def trace(*_, **__):
        raise MemoryError

    monkeypatch.setattr(torch.export, "export", trace)
    hook = SimpleNamespace(serving=lambda _: contextlib.nullcontext())
    with pytest.raises(MemoryError):
        build_library._trace(nn.Linear(2, 2), hook, torch.device("cpu"))


def test_an_error_of_the_trace_is_recorded(tmp_path):
    folder = tmp_path / "library"
    assert library_files.read_trace_error(folder) is None
    library_files.write_trace_error(folder, TraceError("odd code"))
    assert library_files.read_trace_error(folder) == "odd code"
    assert not library_files.has_library(folder)
