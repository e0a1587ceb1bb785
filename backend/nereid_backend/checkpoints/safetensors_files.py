# SPDX-License-Identifier: Apache-2.0
"""Opens the safetensors files of a checkpoint without reading their tensors.

When a file is opened, the safetensors library checks that the header has at most 100 MB. The
library also checks that the tensors are within the file, and that there are no gaps and no overlaps
between tensors. Files are mapped into memory, so opening a file takes little memory and time.
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nereid_backend.errors import ModelError

INDEX = "model.safetensors.index.json"
USUAL_FILE = "model.safetensors"
# The files of a LoRA adapter. Some programs write them beside the files of the model.
ADAPTER_CONFIG_FILE = "adapter_config.json"
_ADAPTER_FILE = "adapter_model.safetensors"
# transformers writes weights into pickle files with such names.
_USUAL_PICKLE_FILES = "pytorch_model*.bin"
# The names of pickle files that contain no weights begin with these texts. Programs for training
# write such files.
_TRAINING_FILES = (
    *("training_args", "optimizer", "scheduler"),
    *("rng_state", "random_states", "scaler"),
)
# Maps a data type of safetensors to the size of one number in bytes. `StoredTensor.number_bytes`
# computes the sizes for all other data types.
_NUMBER_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
        name: the name of the tensor in the file.
        file: the path of the file.
        shape: the shape of the tensor.
        dtype: the name of the data type in safetensors, such as "BF16" or "F8_E4M3".
        view: an object of the safetensors library that reads the tensor.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    view: Any

    def read(self) -> Tensor:
        """Return the tensor.

        Raises:
            ModelError: if the tensor cannot be read.
        """
        # The index `...` selects the whole tensor. It also selects a scalar, which has no
        # dimension.
        return self._read(...)

    def read_rows(self, start: int, end: int) -> Tensor:
        """Return the rows from `start` to `end` (exclusive) of the first dimension.

        Raises:
            ModelError: if the tensor cannot be read.
        """
        return self._read(slice(start, end))

    def _read(self, index: object) -> Tensor:
        try:
            tensor: Tensor = self.view[index]
        except (SafetensorError, RuntimeError, OSError) as error:
            raise ModelError(
                f"the tensor {self.name} in {self.file} cannot be read ({error}). Download the "
                "file again."
            ) from error
        return tensor

    @property
    def number_bytes(self) -> int:
        """The number of bytes of one number."""
        # Examples: "F8_E4M3" and "U8" have 1 byte, and "BF16" and "I16" have 2 bytes.
        bytes_of_small_number = 1 if "8" in self.dtype else 2
        return _NUMBER_BYTES.get(self.dtype, bytes_of_small_number)


def open_tensors(folder: Path, *, for_reading: bool = True) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name. Their values are not read.

    A tensor that the index names, but that is in no file, is left out. Example: a program has
    removed lm_head.weight, which equals the embedding, from a file, but not from the index.

    Args:
        folder: the folder of the checkpoint.
        for_reading: whether the values will be read. If True, the operating system counts the
            mapped files as used memory. A file that is larger than the memory can therefore be
            opened only with False.

    Raises:
        ModelError: if a file is missing, incomplete or damaged, or if two files contain a tensor
            that is not in the index.
    """
    file_of_tensor = _read_index(folder)  # {} if the checkpoint has no index
    paths = sorted({folder / file for file in file_of_tensor.values()})
    if not paths:
        paths = _files_without_index(folder)
    # If the library safetensors opens a file with the framework "pt", the operating system counts
    # the file as used memory. With the framework "numpy", the file is not counted.
    framework = "pt" if for_reading else "numpy"
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        _add_tensors(tensors, _open_file(path, framework), file_of_tensor)
    return tensors


def _add_tensors(
    tensors: dict[str, StoredTensor],
    new_tensors: dict[str, StoredTensor],
    file_of_tensor: dict[str, str],
) -> None:
    """Add the tensors of one file to the tensors of other files. Mutates: `tensors`.

    If several files contain a tensor, the tensor of the file that the index names is used.

    Args:
        tensors: the tensors of other files by name.
        new_tensors: the tensors of the file by name.
        file_of_tensor: the index, which maps the name of each tensor to the name of its file.

    Raises:
        ModelError: if two files contain a tensor that is not in the index.
    """
    for name, tensor in new_tensors.items():
        indexed_file = file_of_tensor.get(name)
        if name in tensors and indexed_file is None:
            raise ModelError(
                f"{tensors[name].file} and {tensor.file} both contain the tensor {name}. Remove "
                "the file that does not belong to the checkpoint."
            )
        if name not in tensors or tensor.file.name == indexed_file:
            tensors[name] = tensor


def check_read_permission(path: Path) -> None:
    """Raise a ModelError if this process is not allowed to read a file of a checkpoint."""
    try:
        path.open("rb").close()
    except PermissionError as error:
        raise ModelError(
            f"{path} cannot be read, because this process has no permission to read the file. "
            "Change the permissions of the file, or run the server as another user."
        ) from error


def _read_index(folder: Path) -> dict[str, str]:
    """Return a dict that maps the name of each tensor to the name of its file.

    Large checkpoints are divided into several files. An index (model.safetensors.index.json) lists
    the file of each tensor. If there is no index, the dict is empty. Example of the result:
    {"model.norm.weight": "model-00002-of-00002.safetensors"}.

    Raises:
        ModelError: if the index is damaged or may not be read, or if a file is missing.
    """
    index = folder / INDEX
    if not index.is_file() or (folder / USUAL_FILE).is_file():
        return {}
    check_read_permission(index)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        file_of_tensor = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} cannot be read ({error}). Download the file again.") from error
    _check_indexed_files(index, sorted(set(file_of_tensor.values())))
    return file_of_tensor


def _check_indexed_files(index: Path, files: list[str]) -> None:
    """Raise a ModelError if a file in the index is missing or is not directly in the folder."""
    folder = index.parent
    for name in files:
        # A name with a folder, such as "../file", could select any file on the machine.
        has_folder = Path(name).name != name
        if has_folder:
            raise ModelError(
                f"{index} names the weight file {name}, but weight files must be directly in "
                f"{folder}. Move the files into this folder, and correct their names in the index."
            )
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of {len(files)} weight files, such as {missing[0]}. "
            "Download the missing files."
        )


def _files_without_index(folder: Path) -> list[Path]:
    """Return the weight files in a folder that contains no index file.

    If the folder contains model.safetensors, the result is only this file.

    Raises:
        ModelError: if there is no weight file.
    """
    usual_file = folder / USUAL_FILE
    if usual_file.is_file():
        return [usual_file]
    # In the cache of the Hub, a file is a link, whose target may be missing.
    files = sorted(
        file
        for file in folder.glob("*.safetensors")
        if file.is_file() and file.name != _ADAPTER_FILE
    )
    if not files:
        raise ModelError(f"{folder} has no .safetensors files. {_describe_remedy(folder)}")
    return files


def _describe_remedy(folder: Path) -> str:
    """Return a text that explains how to get safetensors files for the folder.

    If the folder contains pickle files, the text contains a command that converts them.
    """
    if (folder / _ADAPTER_FILE).is_file():
        return describe_adapter(folder)
    files = pickle_files(folder)
    if not files:
        return (
            "Download the checkpoint's .safetensors files. If a program for training wrote the "
            "folder, export the model with the method save_pretrained of transformers."
        )
    return (
        f"{files[0].name} is a pickle file, which can run code when it is loaded. Convert the "
        "weights to safetensors files with this command, which runs no code of the checkpoint: "
        f"python -m nereid_backend.tools.convert_pickle_files {shlex.quote(str(folder))}"
    )


def pickle_files(folder: Path) -> list[Path]:
    """Return the pickle files in a folder that may contain the weights of a model."""
    usual_files = sorted(folder.glob(_USUAL_PICKLE_FILES))
    if usual_files:
        return usual_files
    files = sorted((*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
    return [file for file in files if not file.name.startswith(_TRAINING_FILES)]


def describe_adapter(folder: Path) -> str:
    """Return a text that explains how to use a folder that contains only a LoRA adapter."""
    return (
        f"{folder} is a LoRA adapter. For a language model, set model to the adapter's base model, "
        f"and set lora_adapters to name={folder}. For an embedding model or a reranker, merge the "
        "adapter into the base model."
    )


def _open_file(path: Path, framework: str) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name. The values of the tensors are not read.

    `framework` is the library that receives the values when they are read: "pt" for torch, or
    "numpy".

    Raises:
        ModelError: if the file is incomplete or damaged.
    """
    check_read_permission(path)
    try:
        file: Any = safe_open(path, framework=framework)
        tensors = {}
        for name in file.keys():  # noqa: SIM118 - the object is not a mapping
            view = file.get_slice(name)
            shape = tuple(view.get_shape())
            tensors[name] = StoredTensor(name, path, shape, view.get_dtype(), view)
        return tensors
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise ModelError(
            f"{path} is incomplete or damaged ({error}). Download the file again."
        ) from error
