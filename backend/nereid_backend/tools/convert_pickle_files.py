# SPDX-License-Identifier: Apache-2.0
"""Converts the pickle files of a checkpoint to safetensors files in the same folder.

    python -m nereid_backend.tools.convert_pickle_files FOLDER

The program is for checkpoints whose weights are only in files such as pytorch_model.bin. It runs no
code that the files contain.
"""

import pickle
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nereid_backend.checkpoints.safetensors_files import pickle_files
from nereid_backend.errors import ModelError, NereidError, one_line

# The errors of `torch.load` if a file is damaged, or contains something other than tensors.
_READ_ERRORS = (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError)


def convert_pickle_files(folder: Path) -> list[Path]:
    """Convert each pickle file in a folder. Return the paths of the new safetensors files.

    If a file cannot be converted, the new files are removed.

    Raises:
        ModelError: the folder contains no pickle files, or a file cannot be converted.
    """
    files = pickle_files(folder)
    if not files:
        raise ModelError(f"{folder} has no pickle files with weights, such as pytorch_model.bin.")
    new_files = [file.with_suffix(".safetensors") for file in files]
    try:
        with ExitStack() as removals:
            for file, new_file in zip(files, new_files, strict=True):
                removals.callback(new_file.unlink, missing_ok=True)
                save_file(_read_weights(file), new_file, {"format": "pt"})
            removals.pop_all()  # All files are converted, so keep the new files.
    except OSError as error:
        raise ModelError(f"{folder} cannot be written ({error}). Free some space.") from error
    return new_files


def _read_weights(file: Path) -> dict[str, Tensor]:
    """Return the tensors in a pickle file by name."""
    try:
        # With weights_only=True, torch runs no code of the file.
        weights = torch.load(file, map_location="cpu", weights_only=True)
        # Tensors in a safetensors file must not share memory, so each tensor is copied.
        return {str(name): weight.contiguous().clone() for name, weight in weights.items()}
    except (*_READ_ERRORS, AttributeError) as error:
        raise ModelError(
            f"{file} cannot be converted, because it is damaged or contains more than the weights "
            f"of a model ({one_line(error)})."
        ) from error


def main(arguments: list[str]) -> None:
    """Convert the files in the folder `arguments[0]`. Exit with code 1 after an error."""
    if len(arguments) != 1:
        sys.exit("Give the folder of a checkpoint.")
    try:
        new_files = convert_pickle_files(Path(arguments[0]))
    except NereidError as error:
        sys.exit(str(error))
    sys.stdout.write("".join(f"wrote {file}\n" for file in new_files))


if __name__ == "__main__":
    main(sys.argv[1:])
