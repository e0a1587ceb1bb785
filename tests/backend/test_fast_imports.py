"""Tests that the cached index of the models in transformers equals the index of transformers."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from nereid_backend import fast_imports

# Prints whether the cached index equals the index that transformers computes, and a class.
PROGRAM = """
from nereid_backend.fast_imports import use_cached_index
use_cached_index()
use_cached_index()
import pathlib, transformers
from transformers.utils import import_utils
models = pathlib.Path(transformers.__file__).with_name("models")
cached = import_utils.create_import_structure_from_path
print(cached(models) == cached.__closure__[0].cell_contents(models), transformers.Qwen3Config)
"""


def test_transformers_works_with_the_cached_index(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("True <class 'transformers.models.qwen3."), done.stderr
    assert len(list(tmp_path.glob("nereid/transformers-models-*.marshal"))) == 1


INDEX = {"qwen3": {frozenset({"torch"}): {"modeling_qwen3": {"Qwen3Model"}}}}


@pytest.fixture
def calls():
    """The paths for which the index was computed."""
    return []


@pytest.fixture
def cached(tmp_path, monkeypatch, calls):
    """A function that returns the cached index of a package whose index is `INDEX`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "package" / "models").mkdir(parents=True)

    def compute(path):
        calls.append(path)
        return INDEX

    return fast_imports._with_cache(compute, tmp_path / "package")


def test_index_is_computed_once(cached, calls, tmp_path):
    models = tmp_path / "package" / "models"
    assert cached(models) == cached(str(models)) == cached(str(models / "__init__.py")) == INDEX
    assert len(calls) == 1


def test_index_of_another_folder_is_not_cached(cached, calls, tmp_path):
    folder = tmp_path / "package" / "models" / "qwen3"
    assert cached(folder) == cached(folder) == INDEX
    assert len(calls) == 2


def test_index_is_computed_if_the_home_folder_is_unknown(cached, calls, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError))
    assert cached(tmp_path / "package" / "models") == INDEX
    assert len(calls) == 1


def test_damaged_file_is_replaced(cached, calls, tmp_path):
    models = tmp_path / "package" / "models"
    cached(models)
    (file,) = (tmp_path / "cache" / "nereid").iterdir()
    file.write_bytes(file.read_bytes()[:9])
    assert cached(models) == cached(models) == INDEX
    assert len(calls) == 2


def test_cache_that_cannot_be_written_is_no_error(cached, calls, tmp_path):
    Path(tmp_path / "cache").write_text("a file where the folder would be")
    models = tmp_path / "package" / "models"
    assert cached(models) == cached(models) == INDEX
    assert len(calls) == 2


_SCIPY = """
import sys
from nereid_backend.fast_imports import importing
with importing():
    from scipy.optimize import linear_sum_assignment
    assert "scipy.optimize._lsap" not in sys.modules
    if len(sys.argv) > 1:
        from scipy.optimize import OptimizeResult
        assert OptimizeResult(x=1).x == 1
import numpy, scipy.optimize
rows, columns = linear_sum_assignment(numpy.array([[4.0, 1.0], [2.0, 8.0]]))
assert columns.tolist() == [1, 0]
assert scipy.optimize.linear_sum_assignment is not linear_sum_assignment
print("fine")
"""


@pytest.mark.parametrize("arguments", [[], pytest.param(["other"], marks=pytest.mark.long)])
def test_scipy_is_imported_when_it_is_used(arguments):
    command = [sys.executable, "-c", _SCIPY, *arguments]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "fine\n"
