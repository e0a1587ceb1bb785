# SPDX-License-Identifier: Apache-2.0
"""Creates a checkpoint folder that describes a GGUF file.

The folder has the format of a Hugging Face checkpoint, and it is in Nereid's cache folder. It
contains config.json, generation_config.json, the files of the tokenizer, the chat template, and a
link to the GGUF file. No weights are copied, and torch is not imported.
"""

import hashlib
import json
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np

from nereid_backend.cache_folder import cache_folder
from nereid_backend.checkpoints.gguf.gguf_config import gguf_config
from nereid_backend.checkpoints.gguf.gguf_file import GgufFile, GgufTensor, read_gguf
from nereid_backend.checkpoints.gguf.gguf_tokenizer import TOKENIZER_KEY_PREFIX, write_tokenizer
from nereid_backend.errors import ModelError, UnsupportedModelError

# The name of the folder depends on this version number. Increase the number if this module is
# changed and writes different files. Nereid then creates a new folder and ignores the old folder.
_VERSION = 7
# The values of general.type in files that contain no model.
_KINDS_WITHOUT_MODEL = ("adapter", "mmproj", "imatrix")


def create_gguf_folder(path: Path, link_name: str) -> Path:
    """Return the checkpoint folder for a GGUF file. Create the folder if it does not exist.

    A GGUF file contains a whole model in llama.cpp's format. The checkpoint folder contains the
    config and the tokenizer of the model in the format of transformers, and a link to the GGUF
    file. The folder is in Nereid's cache folder.

    Args:
        path: the path of the GGUF file.
        link_name: the name of the link.

    Raises:
        ModelError: if the file is damaged.
        UnsupportedModelError: if the architecture or the tokenizer is not supported, or if the
            model is divided into several files.
    """
    # The name of the folder depends on the size and the modification time of the file, so a
    # replaced file gets a new folder. An existing folder is therefore up to date.
    folder = _folder_of(path)
    if folder.is_dir():
        if _is_complete(folder):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
    file = read_gguf(path)
    _check_is_whole_model(file)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _write_folder(file, folder, link_name)
    except OSError as error:
        has_other_process_succeeded = folder.is_dir()
        if not has_other_process_succeeded:
            raise ModelError(
                f"{path}: the folder {folder} cannot be written ({error}). Free some space, or set "
                "the environment variable XDG_CACHE_HOME to another folder."
            ) from error
    return folder


def _is_complete(folder: Path) -> bool:
    """Return whether all JSON files of a checkpoint folder are complete.

    A power failure can truncate a file.

    Each JSON file contains an object, so its last character is "}".
    """
    try:
        return all(path.read_bytes().rstrip().endswith(b"}") for path in folder.glob("*.json"))
    except OSError:  # for example, another process is deleting the folder
        return False


def _write_folder(file: GgufFile, folder: Path, link_name: str) -> None:
    """Create the checkpoint folder for a GGUF file.

    Several processes may create the folder at the same time. Each process writes its own temporary
    folder, and then tries to rename it. The first process succeeds, and the other processes use the
    folder of the first process.

    Raises:
        OSError: if the folder cannot be written, or if another process has created the folder.
    """
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _write_config_and_tokenizer(file, unfinished)
        os.symlink(file.path.resolve(), unfinished / link_name)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _check_is_whole_model(file: GgufFile) -> None:
    """Raise an UnsupportedModelError if a file contains no model, or only a part of a model."""
    kind = file.metadata.get("general.type")
    if kind in _KINDS_WITHOUT_MODEL:
        raise UnsupportedModelError(
            f"{file.path} contains no model, because its general.type is {kind!r}. Set model to "
            "the GGUF file of the model. LoRA adapters must have PEFT's format."
        )
    num_parts = file.metadata.get("split.count", 1)
    if num_parts not in (0, 1):
        raise UnsupportedModelError(
            f"{file.path} is one of {num_parts} parts (split.count). Merge them with the command "
            "llama-gguf-split --merge of llama.cpp, and set model to the merged file."
        )


def _folder_of(path: Path) -> Path:
    """Return the path of the checkpoint folder for a GGUF file.

    The name of the folder changes if the file is replaced, or if transformers, which converts the
    tokenizer, is replaced.
    """
    try:
        state = path.stat()
        cache = cache_folder()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error}).") from error
    except RuntimeError as error:  # The home folder is unknown.
        raise ModelError(f"{path}: {error}.") from error
    versions = f"{_VERSION} {version('transformers')}"
    key = f"{versions} {path.resolve()} {state.st_size} {state.st_mtime_ns}"
    return cache / "gguf" / hashlib.sha256(key.encode()).hexdigest()[:32]


def _write_config_and_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write the config files and the tokenizer of a GGUF file into a folder."""
    factors = file.tensors.get("rope_freqs.weight")
    config = gguf_config(file, None if factors is None else _read_floats(file, factors))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation = {name: config[name] for name in ids if config[name] is not None}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    if f"{TOKENIZER_KEY_PREFIX}model" in file.metadata:
        write_tokenizer(file, folder)


def _read_floats(file: GgufFile, tensor: GgufTensor) -> list[float]:
    """Read the numbers of a small float32 tensor."""
    if tensor.kind.name != "F32":
        raise UnsupportedModelError(f"{file.path}: {tensor.name} has the type {tensor.kind.name}.")
    count = tensor.num_bytes // 4
    numbers = np.fromfile(file.path, dtype="<f4", count=count, offset=tensor.start)
    return [float(number) for number in numbers]
