"""Whether a checkpoint's weight files are whole: their headers are read, not the weights.

A download that broke off is found in milliseconds that way, where loading takes seconds or minutes.
The format: an unsigned 64-bit little-endian length, a JSON header of that length, then the tensors'
bytes, of which the header tells the offsets (github.com/huggingface/safetensors).
"""

import json
import struct
from pathlib import Path
from typing import Any

_LONGEST_HEADER_BYTES = 100_000_000  # the library's own limit
_LFS_POINTER = b"version https://git-lfs"


def damage(folder: Path) -> str | None:
    """What is wrong with the weight files of a folder, in words; None for nothing that shows."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            missing = [name for name in names if not (folder / name).is_file()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{index} is broken ({type(error).__name__}: {error}); download it again"
        if missing:
            return (
                f"{folder} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}; "
                "download them"
            )
        files = [folder / name for name in names]
    else:
        single = folder / "model.safetensors"
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    return next((found for file in files if (found := _damage_of_file(file))), None)


def _damage_of_file(path: Path) -> str | None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if size < 8:
                return f"{path} is cut: it has {size} bytes; download it again"
            (length,) = struct.unpack("<Q", start)
            if length > min(size - 8, _LONGEST_HEADER_BYTES):
                file.seek(0)
                if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                    return f"{path} is a pointer to the weights; fetch them (git lfs pull)"
                return (
                    f"{path} is cut or no safetensors file: its header would have {length} bytes, "
                    f"the file has {size}; download it again"
                )
            header = json.loads(file.read(length))
        end = max((one["data_offsets"][1] for one in _tensors(header)), default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        told = f"{type(error).__name__}: {error}"
        return f"{path}: its header cannot be read ({told}); download it again"
    if 8 + length + end != size:
        return (
            f"{path} is cut: its header speaks of {8 + length + end} bytes, the file has {size}; "
            "download it again"
        )
    return None


def _tensors(header: dict[str, Any]) -> list[dict[str, Any]]:
    return [about for name, about in header.items() if name != "__metadata__"]
