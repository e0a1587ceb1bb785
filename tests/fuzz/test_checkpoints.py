"""Tests that damaged weight files are refused with a clear error.

A refusal takes seconds, needs little memory, and does not crash the process.
"""

import copy
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.values import damaged, odd

from loadtest.faults import broken_checkpoints

ROOT = Path(__file__).resolve().parents[2]
_DTYPES = (
    "F64",
    "F32",
    "F16",
    "BF16",
    "I64",
    "I8",
    "U8",
    "BOOL",
    "F8_E4M3",
    "F4",
    "x",
    "",
    None,
    7,
)
_NUMBERS = (0, -1, 1, 2**31, 2**53, 2**63, 2**64 - 1, 10**30, 0.5, None, "1", [])
_SECONDS = 60.0
_ADDRESS_SPACE = 8 << 30
_GROWTH_MIB = 300.0


def changed_header(rng, header):
    """Return a copy of a header with one to three errors."""
    header = copy.deepcopy(header)
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(list(header))
        about = header[name]
        how = rng.randrange(7)
        if not isinstance(about, dict) or how == 0:
            header.pop(name)
        elif how == 1:
            about["dtype"] = rng.choice(_DTYPES)
        elif how == 2:
            about["shape"] = rng.choice(([], [0], [-1, 4], [2**40, 2**40], [1] * 70, "x", odd(rng)))
        elif how == 3 and about.get("shape"):
            about["shape"] = [*about["shape"][:-1], rng.choice(_NUMBERS)]
        elif how == 4:
            about["data_offsets"] = [rng.choice(_NUMBERS), rng.choice(_NUMBERS)]
        elif how == 5:
            header[rng.choice(("__metadata__", "lm_head.weight", "x", "\0"))] = odd(rng)
        else:
            header[rng.choice(list(header))] = about
    return header


def changed(rng, data):
    """Return the bytes of a weight file with an error."""
    header, tensors = broken_checkpoints.split_file(data)
    how = rng.randrange(8)
    if how == 0:
        return data[: rng.choice((0, 1, 7, 8, 9, rng.randrange(len(data))))]
    if how == 1:
        size = rng.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(data), rng.randrange(2**24)))
        return struct.pack("<Q", size) + data[8:]
    if how == 2:
        text = damaged(rng, json.dumps(header).encode())
        return broken_checkpoints.join_file(text, tensors)
    if how == 3:
        junk = rng.choice((b"", b"[]", b"{}", b"[" * 100_000, b'{"a":' * 50_000, rng.randbytes(99)))
        return broken_checkpoints.join_file(junk, tensors)
    if how == 4:
        return broken_checkpoints.join_file(
            header, rng.choice((b"", tensors[:-4], tensors + b"more"))
        )
    return broken_checkpoints.join_file(changed_header(rng, header), tensors)


@pytest.fixture
def folder(tmp_path):
    # This is the smallest demo model that generates text. All its weights are read for each case.
    shutil.copytree(ROOT / "demo" / "chat", tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def loader(folder):
    """A function that loads the checkpoint in another process and returns the outcome."""
    script = Path(__file__).with_name("load_checkpoints.py")
    command = [sys.executable, str(script), str(folder), str(_ADDRESS_SPACE)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:

        def load():
            process.stdin.write("\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, f"the process died: {process.wait()}"
            return json.loads(line)

        yield load
        process.stdin.close()


def test_any_weights_are_loaded_or_refused(rounds, folder, loader):
    path = folder / broken_checkpoints.WEIGHTS
    whole = path.read_bytes()
    at_rest = loader()
    assert at_rest["refusal"] is at_rest["defect"] is None
    num_refused = 0
    for number, rng in rounds("weights", 60):
        path.write_bytes(changed(rng, whole))
        found = loader()
        num_refused += found["refusal"] is not None
        assert found["defect"] is None, f"case {number}: {found}"
        assert found["refusal"] != "", f"case {number}"
        assert "\n" not in (found["refusal"] or ""), f"case {number}: {found}"
        assert found["seconds"] < _SECONDS, f"case {number}: {found}"
        assert found["peak_mib"] < at_rest["peak_mib"] + _GROWTH_MIB, f"case {number}: {found}"
    assert num_refused
    path.write_bytes(whole)
    assert loader()["refusal"] is None
