"""Start `nereid serve` with damaged checkpoints, for engine_faults.py."""

import json
import shutil
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.bench.markdown_table import short
from loadtest.faults.fault_rows import Section
from loadtest.server.served import Served, error_message

WEIGHTS = "model.safetensors"
_DEMO = Path(__file__).resolve().parents[2] / "demo"
_REFUSED_EXIT_CODE = 2
_HEADER_SIZE = struct.Struct("<Q")  # a safetensors file begins with the size of its header


def split_file(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Split a safetensors file into its header and the bytes of its tensors."""
    (size,) = _HEADER_SIZE.unpack_from(data)
    tensors_start = _HEADER_SIZE.size + size
    return json.loads(data[_HEADER_SIZE.size : tensors_start]), data[tensors_start:]


def join_file(header: Any, tensors: bytes) -> bytes:  # noqa: ANN401 - may be no proper header
    """Return a safetensors file. `header` is bytes, or a value that is written as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return _HEADER_SIZE.pack(len(text)) + text + tensors


def _first_matrix(header: dict[str, Any]) -> str:
    """Return the name of the first tensor with two dimensions."""
    return next(name for name, entry in header.items() if len(entry.get("shape", ())) == 2)


def _first_half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _with_absurd_length(data: bytes) -> bytes:
    return _HEADER_SIZE.pack(2**64 - 1) + data[_HEADER_SIZE.size :]


def _without_json(data: bytes) -> bytes:
    _, tensors = split_file(data)
    return join_file(b"{this is not JSON", tensors)


def _without_a_tensor(data: bytes) -> bytes:
    """Remove one tensor from the header and its bytes from the data of a safetensors file."""
    header, tensors = split_file(data)
    begin, end = header.pop(_first_matrix(header))["data_offsets"]
    for entry in header.values():
        offsets = entry.get("data_offsets")  # the entry __metadata__ has no offsets
        if offsets and offsets[0] >= end:
            entry["data_offsets"] = [offset - (end - begin) for offset in offsets]
    return join_file(header, tensors[:begin] + tensors[end:])


def _with_another_shape(data: bytes) -> bytes:
    header, tensors = split_file(data)
    matrix = header[_first_matrix(header)]
    rows, columns = matrix["shape"]
    matrix["shape"] = [rows * 2, columns // 2]
    return join_file(header, tensors)


def _with_another_type(data: bytes) -> bytes:
    header, tensors = split_file(data)
    matrix = header[_first_matrix(header)]
    matrix["dtype"] = "F64"  # the file has too few bytes for this dtype
    return join_file(header, tensors)


def _rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Return a function that changes the content of the file `name` in a folder."""

    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return damage


def _set_config(**values: Any) -> Callable[[Path], None]:  # noqa: ANN401 - JSON
    """Return a function that sets entries of config.json in a folder."""

    def change(content: bytes) -> bytes:
        return json.dumps(json.loads(content) | values).encode()

    return _rewrite("config.json", change)


BREAKS: dict[str, Callable[[Path], None]] = {
    "weights: half of the file": _rewrite(WEIGHTS, _first_half),
    "weights: an empty file": _rewrite(WEIGHTS, lambda _: b""),
    "weights: header of 2^64 - 1 bytes": _rewrite(WEIGHTS, _with_absurd_length),
    "weights: header is no JSON": _rewrite(WEIGHTS, _without_json),
    "weights: a tensor is missing": _rewrite(WEIGHTS, _without_a_tensor),
    "weights: a tensor of another shape": _rewrite(WEIGHTS, _with_another_shape),
    "weights: a tensor of another type": _rewrite(WEIGHTS, _with_another_type),
    "config.json: cut": _rewrite("config.json", _first_half),
    "config.json: a list": _rewrite("config.json", lambda _: b"[]"),
    "config.json: model_type unknown": _set_config(model_type="no_such_model"),
    "config.json: another hidden size": _set_config(hidden_size=136),
    "tokenizer.json: cut": _rewrite("tokenizer.json", _first_half),
    "tokenizer.json: an empty object": _rewrite("tokenizer.json", lambda _: b"{}"),
}
"""For each kind of damage, a function that damages the checkpoint in a folder."""


def make(whole: Path, folder: Path, damage: str) -> Path:
    """Copy a checkpoint to `folder`, and damage the copy. `damage` is a key of BREAKS."""
    shutil.copytree(whole, folder)
    BREAKS[damage](folder)
    return folder


class Start(NamedTuple):
    """The end of `nereid serve`. The exit code is 0 if the server became ready."""

    exit_code: int
    seconds: float
    message: str


def start(model: Path, *, is_pooler: bool = False) -> Start:
    """Start `nereid serve` with one language model, or with one embedding model (`is_pooler`)."""
    arguments = ["--log-level=warning", "--rerank-model=none"]
    arguments += [f"--embedding-model={model if is_pooler else 'none'}"]
    served = Served(None if is_pooler else model, arguments=arguments)
    started = time.monotonic()
    try:
        with served:
            return Start(0, time.monotonic() - started, "the server became ready")
    except RuntimeError as error:
        seconds = time.monotonic() - started
        assert served.process is not None
        return Start(served.process.returncode, seconds, error_message(str(error)) or "-")


def run_checkpoints(only: str) -> Section:
    """Start a server with each damaged checkpoint, and return the table of their error messages.

    Only the damages whose title contains `only` are tested. The section is marked as broken if a
    server did not refuse its checkpoint.
    """
    # The language model gets each kind of damage, the embedding model only every fourth.
    cases = {f"language model: {damage}": ("chat", damage) for damage in BREAKS}
    cases |= {f"embedding model: {damage}": ("embed", damage) for damage in list(BREAKS)[::4]}
    rows, is_broken = [], False
    for title, (demo, damage) in cases.items():
        if only not in title:
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = make(_DEMO / demo, Path(folder) / "model", damage)
            result = start(model, is_pooler=demo == "embed")
        message = short(result.message.replace(str(model), "MODEL"))
        rows.append([title, str(result.exit_code), f"{result.seconds:.1f} s", message])
        is_broken |= result.exit_code != _REFUSED_EXIT_CODE
        print(" | ".join(rows[-1]), flush=True)
    return Section.of(("Damage", "Exit code", "Time", "Error message"), rows, is_broken)
