"""Finds missing and incomplete weight files in a checkpoint. Only the headers are read.

Reading the headers finds an interrupted download in milliseconds. Loading the weights would take
seconds or minutes.

A safetensors file consists of the length of the header (an unsigned 64-bit little-endian integer),
the header (JSON with the offsets of each tensor), and the bytes of the tensors
(github.com/huggingface/safetensors).
"""

import json
import shlex
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_INDEX = "model.safetensors.index.json"
_INDEX_ERRORS = (ValueError, KeyError, TypeError, AttributeError)  # an index with a wrong content
_ADAPTER = "adapter_model.safetensors"
_LENGTH_BYTES = 8  # a file starts with the header's length, which has this number of bytes
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library has the same limit
_LFS_POINTER = b"version https://git-lfs"


def model_folder(folder: Path) -> Path:
    """Return the folder in a checkpoint that contains config.json and the weights for transformers.

    Some checkpoints of sentence-transformers have a subfolder, such as 0_Transformer, which
    modules.json names. Return `folder` if there is no such subfolder. The backend reports a damaged
    modules.json.
    """
    if (folder / "config.json").is_file():
        return folder
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        return folder / str(min(modules, key=lambda module: module["idx"])["path"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return folder


def safetensors_files(folder: Path) -> list[Path]:
    """Return those safetensors files in a folder that the backend reads to load the weights.

    The result is model.safetensors, or the files in the index, or all files except the weights of
    an adapter. Example: consolidated.safetensors, which contains the same weights once more, is
    left out if there is an index.
    """
    # As in transformers, an index beside model.safetensors is ignored.
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    try:
        return [folder / name for name in _indexed_names(folder / _INDEX)]
    except (OSError, *_INDEX_ERRORS):
        files = sorted(folder.glob("*.safetensors"))
        return [file for file in files if file.name != _ADAPTER]


def find_problem(folder: Path) -> str | None:
    """Describe the first damaged or missing weight file. Return None if all files are intact.

    Raises: OSError if a file cannot be read, for example because this program has no permission.
    """
    if not any(folder.glob("*.safetensors")):
        return (
            f"the folder {folder} has no *.safetensors file. If a program for training wrote the "
            "folder, export the model with the method save_pretrained of transformers. If the "
            "folder has pickle files, such as pytorch_model.bin, convert them with this command, "
            f"which runs no code of the checkpoint: {shlex.quote(sys.executable)} -m "
            f"nereid_backend.tools.convert_pickle_files {shlex.quote(str(folder))}"
        )
    index = folder / _INDEX
    if not (folder / "model.safetensors").is_file() and index.is_file():
        return _damage_of_shards(folder, index)
    return _first_damage(safetensors_files(folder))


def _indexed_names(index: Path) -> list[str]:
    """Return the sorted names of the weight files in an index."""
    return sorted(set(json.loads(index.read_text())["weight_map"].values()))


def _damage_of_shards(folder: Path, index: Path) -> str | None:
    """Describe the first damaged or missing file of a checkpoint with several weight files.

    Return None if all files are intact. The file `index` contains the names of the weight files.
    """
    try:
        names = _indexed_names(index)
        missing = [name for name in names if not (folder / name).is_file()]
    except _INDEX_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
        return f"the file {index} is damaged ({reason}). Download it again."
    if missing:
        return (
            f"the folder {folder} lacks {len(missing)} of {len(names)} weight files. The first "
            f"missing file is {missing[0]}. Download the missing files."
        )
    return _first_damage([folder / name for name in names])


def tensors_of(path: Path) -> list[dict[str, Any]]:
    """Return the headers of all tensors in a safetensors file.

    A header has the keys dtype, shape and data_offsets. The list is empty if the file is damaged or
    cannot be read.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES))
            if length > _MAX_HEADER_BYTES:
                return []
            header = json.loads(file.read(length))
    except (OSError, ValueError, struct.error, RecursionError):
        return []
    return _tensors(header) if isinstance(header, dict) else []


def _first_damage(files: Sequence[Path]) -> str | None:
    """Describe the first damaged file. Return None if all files are intact."""
    return next((damage for file in files if (damage := _damage_of_file(file))), None)


def _damage_of_file(path: Path) -> str | None:
    """Describe the damage to one safetensors file. Return None if the file is intact."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
            if size < _LENGTH_BYTES:
                return f"the file {path} is incomplete: it has {size} bytes. Download it again."
            (length,) = struct.unpack_from("<Q", start)
            if length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                return _wrong_length_message(path, size, length, start)
            file.seek(_LENGTH_BYTES)
            header = json.loads(file.read(length))
        expected_size = _LENGTH_BYTES + length + _num_tensor_bytes(header)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        return f"the header of the file {path} cannot be read ({reason}). Download it again."
    if expected_size != size:
        return (
            f"the file {path} is incomplete: according to its header it should have "
            f"{expected_size} bytes, but it has {size}. Download it again."
        )
    return None


def _num_tensor_bytes(header: object) -> int:
    """Return the number of bytes of all tensors in a file, according to its header.

    The header contains the start and the end of each tensor. The result is the largest end.

    Raises:
        TypeError: the header is not a JSON object, for example because it is `[]`.
    """
    if not isinstance(header, dict):
        raise TypeError("the header is not a JSON object")
    tensor_ends: list[int] = [tensor["data_offsets"][1] for tensor in _tensors(header)]
    return max(tensor_ends, default=0)


def _wrong_length_message(path: Path, size: int, length: int, start: bytes) -> str:
    """Return the error message for a file whose first 8 bytes give an impossible header length.

    The file may be a Git LFS pointer, which contains only text, and no length. `start` contains the
    first bytes of the file.
    """
    if start.startswith(_LFS_POINTER):
        return (
            f"the file {path} is only a pointer of Git LFS. Run `git lfs pull` to download the "
            "weights."
        )
    return (
        f"the file {path} is incomplete, or it is not a safetensors file: its header should have "
        f"{length} bytes, but the file has {size}. Download it again."
    )


def _tensors(header: dict[str, Any]) -> list[dict[str, Any]]:
    return [tensor for name, tensor in header.items() if name != "__metadata__"]
