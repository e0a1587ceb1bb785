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
    *("F64", "F32", "F16", "BF16", "I64", "I8", "U8", "BOOL", "F8_E4M3", "F4"),
    *("x", "", None, 7),
)
_NUMBERS = (0, -1, 1, 2**31, 2**53, 2**63, 2**64 - 1, 10**30, 0.5, None, "1", [])
_LIMIT_S = 60.0
_ADDRESS_SPACE = 8 << 30
_LARGEST_GROWTH_MIB = 300.0


def changed_header(rng, header):
    """Return a copy of a header with one to three errors."""
    header = copy.deepcopy(header)
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(list(header))
        entry = header[name]  # the dtype, the shape and the offsets of a tensor
        change = rng.choice(
            ("remove", "dtype", "shape", "last dimension", "offsets", "new entry", "copy")
        )
        if not isinstance(entry, dict) or change == "remove":
            header.pop(name)
        elif change == "dtype":
            entry["dtype"] = rng.choice(_DTYPES)
        elif change == "shape":
            entry["shape"] = rng.choice(([], [0], [-1, 4], [2**40, 2**40], [1] * 70, "x", odd(rng)))
        elif change == "last dimension" and entry.get("shape"):
            entry["shape"] = [*entry["shape"][:-1], rng.choice(_NUMBERS)]
        elif change == "offsets":
            entry["data_offsets"] = [rng.choice(_NUMBERS), rng.choice(_NUMBERS)]
        elif change == "new entry":
            header[rng.choice(("__metadata__", "lm_head.weight", "x", "\0"))] = odd(rng)
        else:
            header[rng.choice(list(header))] = entry
    return header


def changed(rng, data):
    """Return the bytes of a weight file with an error.

    The file consists of the header's length, the header (JSON) and the values of the tensors.
    """
    header, tensors = broken_checkpoints.split_file(data)
    # The changes of header entries are the most frequent ones.
    changes = ("cut", "header length", "header text", "other header", "tensors", *["entries"] * 3)
    change = rng.choice(changes)
    if change == "cut":
        return data[: rng.choice((0, 1, 7, 8, 9, rng.randrange(len(data))))]
    if change == "header length":
        size = rng.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(data), rng.randrange(2**24)))
        return struct.pack("<Q", size) + data[8:]
    if change == "header text":
        text = damaged(rng, json.dumps(header).encode())
        return broken_checkpoints.join_file(text, tensors)
    if change == "other header":
        text = rng.choice((b"", b"[]", b"{}", b"[" * 100_000, b'{"a":' * 50_000, rng.randbytes(99)))
        return broken_checkpoints.join_file(text, tensors)
    if change == "tensors":
        tensors = rng.choice((b"", tensors[:-4], tensors + b"more"))
        return broken_checkpoints.join_file(header, tensors)
    return broken_checkpoints.join_file(changed_header(rng, header), tensors)


@pytest.fixture
def folder(tmp_path):
    """A copy of a demo model."""
    # This is the smallest demo model that generates text. All its weights are read for each case.
    shutil.copytree(ROOT / "demo" / "chat", tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def load(folder):
    """A function that loads the checkpoint in another process and returns the outcome."""
    script = Path(__file__).with_name("load_checkpoints.py")
    command = [sys.executable, str(script), str(folder), str(_ADDRESS_SPACE)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:

        def load_once():
            # The program loads the checkpoint once for each line.
            process.stdin.write("\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, f"the process died: {process.wait()}"
            return json.loads(line)

        yield load_once
        process.stdin.close()


def test_any_weights_are_loaded_or_refused(random_cases, folder, load):
    weights = folder / broken_checkpoints.WEIGHTS
    intact_bytes = weights.read_bytes()
    intact = load()
    assert intact["refusal"] is intact["defect"] is None

    num_refused = 0
    for number, rng in random_cases("weights", default_number=60):
        weights.write_bytes(changed(rng, intact_bytes))
        outcome = load()
        case = f"case {number}: {outcome}"
        assert outcome["defect"] is None, case
        assert outcome["refusal"] != "", case
        assert "\n" not in (outcome["refusal"] or ""), case
        assert outcome["seconds"] < _LIMIT_S, case
        assert outcome["peak_mib"] < intact["peak_mib"] + _LARGEST_GROWTH_MIB, case
        num_refused += outcome["refusal"] is not None
    assert num_refused

    weights.write_bytes(intact_bytes)
    assert load()["refusal"] is None
