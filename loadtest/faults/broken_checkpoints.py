"""Start `nereid serve` with damaged checkpoints. The program engine_faults.py uses this module."""

import json
import shutil
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtest.bench.markdown_table import short, table
from loadtest.server.served import Served

WEIGHTS = "model.safetensors"
_DEMO = Path(__file__).resolve().parents[2] / "demo"


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Split a safetensors file into its header and the bytes of its tensors."""
    (size,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header: Any, tensors: bytes) -> bytes:  # noqa: ANN401 - may be no proper header
    """Return a safetensors file with the given header and the bytes of the tensors."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tensors


def _first(header: dict[str, Any]) -> str:
    return next(name for name, about in header.items() if len(about.get("shape", ())) == 2)


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _absurd_length(data: bytes) -> bytes:
    return b"\xff" * 8 + data[8:]


def _no_json(data: bytes) -> bytes:
    _, tensors = parts(data)
    return joined(b"{this is not JSON", tensors)


def _without_a_tensor(data: bytes) -> bytes:
    header, tensors = parts(data)
    name = _first(header)
    begin, end = header.pop(name)["data_offsets"]
    for about in header.values():
        if "data_offsets" in about and about["data_offsets"][0] >= end:
            about["data_offsets"] = [at - (end - begin) for at in about["data_offsets"]]
    return joined(header, tensors[:begin] + tensors[end:])


def _another_shape(data: bytes) -> bytes:
    header, tensors = parts(data)
    about = header[_first(header)]
    rows, columns = about["shape"]
    about["shape"] = [rows * 2, columns // 2]
    return joined(header, tensors)


def _another_type(data: bytes) -> bytes:
    header, tensors = parts(data)
    about = header[_first(header)]
    about["dtype"] = "F64"  # the file has too few bytes for this dtype
    return joined(header, tensors)


def _rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return apply


def _set(name: str, **values: Any) -> Callable[[Path], None]:  # noqa: ANN401 - JSON
    def apply(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return apply


BREAKS: dict[str, Callable[[Path], None]] = {
    "weights: half of the file": _rewrite(WEIGHTS, _cut),
    "weights: an empty file": _rewrite(WEIGHTS, lambda _: b""),
    "weights: header of 2^64 - 1 bytes": _rewrite(WEIGHTS, _absurd_length),
    "weights: header is no JSON": _rewrite(WEIGHTS, _no_json),
    "weights: a tensor is missing": _rewrite(WEIGHTS, _without_a_tensor),
    "weights: a tensor of another shape": _rewrite(WEIGHTS, _another_shape),
    "weights: a tensor of another type": _rewrite(WEIGHTS, _another_type),
    "config.json: cut": _rewrite("config.json", _cut),
    "config.json: a list": _rewrite("config.json", lambda _: b"[]"),
    "config.json: model_type unknown": _set("config.json", model_type="no_such_model"),
    "config.json: another hidden size": _set("config.json", hidden_size=136),
    "tokenizer.json: cut": _rewrite("tokenizer.json", _cut),
    "tokenizer.json: an empty object": _rewrite("tokenizer.json", lambda _: b"{}"),
}
"""For each kind of damage, a function that damages the checkpoint in a folder."""


def make(whole: Path, folder: Path, what: str) -> Path:
    """Copy a checkpoint to `folder`, and damage the copy. `what` is a key of BREAKS."""
    shutil.copytree(whole, folder)
    BREAKS[what](folder)
    return folder


def load(model: Path, *, is_pooler: bool = False) -> tuple[int, float, str]:
    """Start `nereid serve` with a damaged checkpoint.

    Returns:
        The exit code, the seconds until the end, and the error message. The exit code is 0 if the
        server became ready.
    """
    arguments = ["--log-level=warning"]
    arguments += [f"--embedding-model={model}"] if is_pooler else ["--embedding-model=none"]
    environment = {"NEREID_RERANK_MODEL": "none"}
    served = Served(None if is_pooler else model, environment, arguments)
    started = time.monotonic()
    try:
        with served:
            return 0, time.monotonic() - started, "the server became ready"
    except RuntimeError as error:
        took_s = time.monotonic() - started
        said = [line for line in str(error).splitlines() if line.startswith("nereid serve: ")]
        assert served.process is not None
        return served.process.returncode, took_s, (said or ["nereid serve: -"])[0][14:]


def run_checkpoints(only: str) -> tuple[str, bool]:
    """Return the table of damaged checkpoints, and whether an exit code differed from 2."""
    rows, is_broken = [], False
    kinds = [("chat", name) for name in BREAKS]
    kinds += [("embed", name) for name in list(BREAKS)[::4]]
    for demo, name in kinds:
        title = f"{'embedding model' if demo == 'embed' else 'language model'}: {name}"
        if only not in title:
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = make(_DEMO / demo, Path(folder) / "model", name)
            code, took_s, said = load(model, is_pooler=demo == "embed")
            said = said.replace(str(model), "MODEL")
        rows.append([title, str(code), f"{took_s:.1f} s", short(said)])
        is_broken |= code != 2
        print(" | ".join(rows[-1]), flush=True)
    head = ["Damage", "Exit code", "Time", "Error message"]
    return table(head, rows) if rows else "", is_broken
