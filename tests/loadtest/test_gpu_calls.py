"""Tests of the calls of the GPU benchmarks. Scripts replace the programs of a call."""

import json
import os
import subprocess
import sys
import time
import zipfile

import pytest

from loadtest.gpu import environment
from loadtest.gpu.__main__ import child_environment
from loadtest.gpu.calls import Call, Part, calls
from loadtest.gpu.environment import ROOT
from loadtest.gpu.lines import Rank, report_progress
from loadtest.gpu.run_parts import PartResult, Results, run_call

# The time limit of each call in minutes.
MINUTES = {"checks": 6, "model": 8, "compiled": 8, "attention": 6}
SAYS = """
import json
import os


def say(rank, text):
    print(json.dumps({"rank": rank, "text": text, "data": {}}), flush=True)
"""


@pytest.fixture
def run(tmp_path):
    """A function that runs scripts as the parts of one call and returns the results."""

    def run_scripts(scripts, limit_s=2.0, call_s=60.0, **options):
        parts = []
        for name, code in scripts.items():
            (tmp_path / f"scripted_{name}.py").write_text(SAYS + code)
            parts.append(Part(name, (f"scripted_{name}",), limit_s))
        variables = child_environment(tmp_path, rehearse=False)
        results = Results("scripted", tmp_path / "out", is_rehearsal=False)
        run_call(Call("", call_s, parts), results, variables, can_run_engine=True, **options)
        return results

    return run_scripts


def test_a_part_that_hangs_is_killed_and_keeps_the_results_that_it_printed(run):
    started = time.monotonic()
    results = run(
        {
            "hangs": "say(1, 'step 5 ms')\nimport time; time.sleep(300)",
            "next": "say(2, 'copied')",
        },
        limit_s=4.0,
    )
    assert time.monotonic() - started < 60
    hung, following = results.parts
    assert [line["text"] for line in hung.lines] == ["step 5 ms"]
    assert "still running after" in hung.error
    assert following.error == ""
    assert results.has_failed


def test_a_part_that_crashes_is_named_first_and_the_others_run(run):
    results = run(
        {
            "figures": "say(2, 'copied'); say(1, 'step 5 ms')",
            "crashes": "import os; os.abort()",
        },
        limit_s=30.0,
    )
    lines = results.markdown().splitlines()
    found = [line for line in lines if line.startswith("- ")]
    assert found[0].startswith("- **WRONG** crashes: FAILED: exit code -6")
    assert found[1:] == ["- figures: step 5 ms", "- figures: copied"]


def test_the_results_are_written_after_every_part(run, monkeypatch):
    written = []
    plain = Results.write

    def write(self):
        plain(self)
        written.append(len(json.loads((self.folder / "scripted.json").read_text())["parts"]))

    monkeypatch.setattr(Results, "write", write)
    run({"one": "say(1, 'a')", "two": "say(1, 'b')"}, limit_s=30.0)
    assert written == [1, 2]


def test_parts_for_which_no_time_is_left_are_listed(run):
    results = run({"late": "say(1, 'a')"}, call_s=1.0)
    assert results.parts == []
    assert results.left_out == ["late: no time was left."]
    assert "- Left out: late: no time was left." in results.markdown()


def test_parts_of_the_engine_are_left_out_if_its_packages_are_missing(tmp_path):
    results = Results("checks", tmp_path, is_rehearsal=False)
    call = Call("", 60, [Part("engine", ("nothing",), 5, needs_engine=True)])
    run_call(call, results, {}, can_run_engine=False)
    assert results.left_out == ["engine: packages of the engine are missing."]


def test_parts_of_a_program_that_is_not_installed_are_left_out(tmp_path):
    results = Results("checks", tmp_path, is_rehearsal=False)
    call = Call("", 60, [Part("profile", ("nothing",), 5, prefix=("no-such-program",))])
    run_call(call, results, {}, can_run_engine=True)
    assert results.left_out == ["profile: the program no-such-program is not installed."]


def test_parts_whose_packages_are_missing_are_left_out(tmp_path):
    results = Results("checks", tmp_path, is_rehearsal=False)
    call = Call("", 60, [Part("tests", ("nothing",), 5, packages=("pytest", "no-such-package"))])
    run_call(call, results, {}, can_run_engine=True)
    assert results.left_out == ["tests: the package no-such-package is missing."]


def test_every_call_ends_within_its_minutes():
    assert set(calls()) == set(MINUTES)
    for name, call in calls().items():
        assert call.limit_s <= MINUTES[name] * 60 - 30
        assert all(part.limit_s < call.limit_s for part in call.parts)


def test_a_wrong_kernel_fails_the_call(tmp_path):
    results = Results("checks", tmp_path, is_rehearsal=False)
    line = {"rank": int(Rank.WRONG), "text": "differs by 0.2", "data": {}}
    results.add(PartResult("kernels", seconds=1.0, lines=[line]))
    assert results.has_failed
    assert "- **WRONG** kernels: differs by 0.2" in results.markdown()


# Packages


def test_a_package_that_is_too_old_or_missing_is_named():
    needed = {"numpy": "999.1", "no-such-package": "2.0", "torch": "2.1", "no-such-part": "0"}
    found = environment.problems(needed)
    assert len(found) == 3
    assert found[0].startswith("The package numpy ")
    assert found[0].endswith("is too old. Version 999.1 or later is needed.")
    assert found[1] == "The package no-such-package is missing. Version 2.0 or later is needed."
    assert found[2] == "The package no-such-part is missing."


def test_the_lowest_versions_are_those_that_the_backend_declares():
    assert environment.engine_packages()["transformers"] == "5.20"


def test_versions_are_compared_as_numbers():
    assert environment.numbers("5.9.1") < environment.numbers("5.20")
    assert environment.numbers("2.11.0+cu130") == (2, 11, 0)


def test_wheels_are_unpacked_and_found_before_installed_packages(tmp_path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "numpy-999.2-py3-none-any.whl", "w") as archive:
        archive.writestr("numpy-999.2.dist-info/METADATA", "Name: numpy\nVersion: 999.2\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = environment.unpack_wheels(wheels, tmp_path / "site")
    assert names == ["numpy-999.2-py3-none-any.whl"]
    assert environment.installed_version("numpy") == "999.2"


WITHOUT_PACKAGES = """
import sys
for name in ("transformers", "pydantic", "safetensors", "tokenizers", "msgpack"):
    sys.modules[name] = None
import loadtest.gpu.kernel_parts
"""


def test_the_kernels_need_only_torch_triton_and_numpy(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGES],
        cwd=ROOT,
        env=child_environment(tmp_path, rehearse=False),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["PYTHON=/some/python", "CALL=model"], "/some/python -m loadtest.gpu model"),
        (["PYTHON=/some/python", "WHEELS=/w"], 'WHEELS="/w" /some/python -m loadtest.gpu checks'),
    ],
)
def test_make_runs_the_calls_with_the_selected_interpreter_and_installs_nothing(given, expected):
    # If `make` runs this test, the variables of that `make` would change the output of this `make`.
    own = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "ARGS"}
    done = subprocess.run(
        ["make", "-n", "bench-gpu", *given],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in own},
        capture_output=True,
        text=True,
        check=True,
    )
    assert expected in done.stdout
    assert "pip" not in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_a_killed_part_takes_its_own_children_with_it(run, tmp_path):
    file = tmp_path / "pid"
    run(
        {
            "parent": "import subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
            f"open({str(file)!r}, 'w').write(str(child.pid))\n"
            "time.sleep(300)\n"
        },
        limit_s=4.0,
    )
    for _ in range(100):
        if not _is_running(int(file.read_text())):
            return
        time.sleep(0.1)
    raise AssertionError("the child still runs")


INTERRUPTED = """
import signal, sys
from pathlib import Path
from loadtest.gpu.calls import Call, Part
from loadtest.gpu.run_parts import Results, run_call
import os
source = Path("loadtest/gpu/__main__.py").read_text()
exec([line.strip() for line in source.splitlines() if "signal.signal(" in line][0])
results = Results("scripted", Path(sys.argv[1]), is_rehearsal=False)
run_call(Call("", 60, [Part("long", ("scripted_long",), 60)]), results, dict(os.environ),
         can_run_engine=True)
"""


def test_a_call_that_is_terminated_ends_its_parts(tmp_path):
    file = tmp_path / "pid"
    (tmp_path / "scripted_long.py").write_text(
        f"import os, time\nopen({str(file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)],
        cwd=ROOT,
        env=child_environment(tmp_path, rehearse=False),
        stdout=subprocess.DEVNULL,
    )
    for _ in range(300):
        if file.exists() and file.read_text():
            break
        time.sleep(0.1)
    process.terminate()
    process.wait(60)
    assert not _is_running(int(file.read_text()))


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("the forward pass is not compiled: no compiler was found", Rank.WRONG),
        ("decode steps are not replayed from captured graphs: out of memory", Rank.WRONG),
        ("CUDA graphs are off, because a step could not be captured: misaligned", Rank.WRONG),
        ("No more CUDA graphs are captured: only 12 MiB of GPU memory are free.", Rank.WRONG),
        ("Attention runs without GPU kernels and is several times slower, because", Rank.WRONG),
        ("cuDNN does not compute prompts without cached tokens, because", Rank.DETAIL),
        ("the forward pass is compiled", Rank.DETAIL),
    ],
)
def test_a_feature_that_cannot_be_used_fails_its_part(line, rank, capsys):
    report_progress(line)
    assert json.loads(capsys.readouterr().out)["rank"] == rank
