"""Find incomplete weight files of a checkpoint by reading only their headers.

This finds an interrupted download in milliseconds, while loading the weights takes seconds or
minutes. A safetensors file consists of the length of the header (an unsigned 64-bit little-endian
integer), the header (JSON with the offsets of each tensor), and the bytes of the tensors
(github.com/huggingface/safetensors).
"""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_LFS_POINTER = b"version https://git-lfs"


def find_damage(folder: Path) -> str | None:
    """Return a description of the first damaged or missing weight file, or None if all are good."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
        return _first_damage(files)
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        return f"the file {index} is damaged ({reason}). Download it again."
    if missing:
        return (
            f"the folder {folder} lacks {len(missing)} of {len(names)} weight files. The first "
            f"missing file is {missing[0]}. Download the missing files."
        )
    return _first_damage([folder / name for name in names])


def _first_damage(files: Sequence[Path]) -> str | None:
    """Return a description of the first damaged file, or None if all files are intact."""
    return next((damage for file in files if (damage := _damage_of_file(file))), None)


def _damage_of_file(path: Path) -> str | None:
    """Return a description of the damage to one safetensors file, or None if there is none."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if size < 8:
                return f"the file {path} is incomplete: it has {size} bytes. Download it again."
            (length,) = struct.unpack("<Q", start)
            if length > min(size - 8, _MAX_HEADER_BYTES):
                file.seek(0)
                if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                    return (
                        f"the file {path} is only a pointer of Git LFS. Run `git lfs pull` to "
                        "download the weights."
                    )
                return (
                    f"the file {path} is incomplete, or it is not a safetensors file: its header "
                    f"should have {length} bytes, but the file has {size}. Download it again."
                )
            header = json.loads(file.read(length))
        end = max((tensor["data_offsets"][1] for tensor in _tensors(header)), default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        return f"the header of the file {path} cannot be read ({reason}). Download it again."
    if 8 + length + end != size:
        return (
            f"the file {path} is incomplete: according to its header it should have "
            f"{8 + length + end} bytes, but it has {size}. Download it again."
        )
    return None


def _tensors(header: dict[str, Any]) -> list[dict[str, Any]]:
    return [tensor for name, tensor in header.items() if name != "__metadata__"]
