# SPDX-License-Identifier: Apache-2.0
"""Checks that a checkpoint has the tensors of another checkpoint, with other numbers."""

import json
from pathlib import Path

from nereid_backend.checkpoints.safetensors_files import open_tensors
from nereid_backend.errors import ModelError

Layout = dict[str, tuple[tuple[int, ...], str]]
"""The shape and the data type of each tensor of a checkpoint, by name."""


def read_layout(folder: str) -> Layout:
    """Return the shapes and data types of a checkpoint's tensors without reading their numbers.

    Raises:
        ModelError: if the folder is not a checkpoint in safetensors files, or a file is damaged.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(f"{folder} is not a folder on the server.")
    tensors = open_tensors(path, for_reading=False)
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def check_same_layout(old: Layout, new: Layout) -> None:
    """Raise a ModelError that names the first tensor that differs between two checkpoints."""
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            raise ModelError(f"the new checkpoint lacks the tensor {name}.")
        if name not in old:
            raise ModelError(
                f"the new checkpoint has the tensor {name}, which the served model does not have."
            )
        if old[name] != new[name]:
            raise ModelError(
                f"the tensor {name} of the new checkpoint has the shape {list(new[name][0])} and "
                f"the type {new[name][1]}, but the served model needs the shape "
                f"{list(old[name][0])} and the type {old[name][1]}."
            )


def read_architecture(folder: str) -> str:
    """Return the name of the model's class in config.json; "" if the file does not name a class.

    Raises:
        ModelError: if config.json is missing or damaged.
    """
    file = Path(folder, "config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return str((config.get("architectures") or [""])[0])
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{file} cannot be read ({error}).") from error
