# SPDX-License-Identifier: Apache-2.0
"""Checks that the tensors of two checkpoints have the same names, shapes and data types.

The values of the tensors may differ.
"""

import json
from pathlib import Path

from nereid_backend.checkpoints.safetensors_files import open_tensors
from nereid_backend.errors import ModelError

Layout = dict[str, tuple[tuple[int, ...], str]]
"""Maps the name of each tensor in a checkpoint to the shape and the data type of the tensor."""

_REMEDY = "Use a checkpoint of the same model, or restart the server with the new checkpoint."


def read_layout(folder: str) -> Layout:
    """Return the shapes and data types of a checkpoint's tensors. The values are not read.

    Raises:
        ModelError: if the folder contains no safetensors files, or if a file is damaged.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(
            f"{folder} is not a folder on the server. Name the folder of a checkpoint."
        )
    tensors = open_tensors(path, for_reading=False)
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def check_same_layout(old: Layout, new: Layout) -> None:
    """Check that two checkpoints have the same layout, so that one can replace the other.

    Args:
        old: the layout of the loaded model: for each tensor, its shape and its data type.
        new: the layout of the checkpoint whose weights are about to replace the loaded weights.

    Raises:
        ModelError: if a tensor exists in only one of the checkpoints, or if the shape or the data
            type of a tensor differs. The message contains the name of the first such tensor.
    """
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            raise ModelError(
                f"the new checkpoint lacks the tensor {name}, which the served model has. {_REMEDY}"
            )
        if name not in old:
            raise ModelError(
                f"the new checkpoint has the tensor {name}, which the served model does not have. "
                f"{_REMEDY}"
            )
        if old[name] != new[name]:
            old_shape, old_dtype = old[name]
            new_shape, new_dtype = new[name]
            raise ModelError(
                f"the tensor {name} of the new checkpoint has the shape {list(new_shape)} and the "
                f"type {new_dtype}, but the served model needs the shape {list(old_shape)} and the "
                f"type {old_dtype}. {_REMEDY}"
            )


def read_architecture(folder: str) -> str:
    """Return the name of the model's class in config.json, or "" if the file has no such name.

    Example: "Qwen3ForCausalLM".

    Raises:
        ModelError: if config.json is missing or damaged.
    """
    file = Path(folder, "config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        names = config.get("architectures")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read ({error}).") from error
    if names and not isinstance(names, list):
        raise ModelError(f"{file}: architectures must be a list, but it is {names!r}.")
    return str(names[0]) if names else ""
