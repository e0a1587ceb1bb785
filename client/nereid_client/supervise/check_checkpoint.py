"""Checks that a path is a complete Hugging Face checkpoint, before the server's programs start."""

import json
from pathlib import Path

from nereid_client.console import CliError
from nereid_client.supervise import weight_files

_JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def check_checkpoint(path: Path, source: str = "--model") -> None:
    """Check that a path is a Hugging Face checkpoint with complete safetensors files.

    An existing GGUF file is accepted, too. The backend checks its content when it loads the file.

    Args:
        path: the path of the checkpoint.
        source: the flag that contains the path, or the table of a file. The error message begins
            with this text.

    Raises: CliError.
    """
    try:
        _check_checkpoint(path)
    except CliError as error:
        raise CliError(f"{source}: {error}") from None
    except OSError as error:
        raise unreadable(source, error) from None


def unreadable(source: str, error: OSError) -> CliError:
    """Return the error for a path that the operating system does not allow this program to read.

    Args:
        source: the flag that contains the path. The error message begins with this text.
        error: the error of the operating system, which names the path.
    """
    return CliError(
        f"{source}: {error.filename} cannot be read ({error.strerror}). Allow the user that runs "
        "nereid to read this path and the folders above it, or give another path."
    )


def _check_checkpoint(path: Path) -> None:
    """Check that a path is a GGUF file, or a folder with a complete Hugging Face checkpoint.

    Such a folder has config.json and *.safetensors files, of which none is damaged or missing.
    """
    if not path.exists():
        raise CliError(
            f"the folder {path} does not exist. Give the folder of a checkpoint on this "
            "machine. `hf download NAME --local-dir FOLDER` downloads one."
        )
    is_gguf_file = path.suffix == ".gguf" and path.is_file()
    if is_gguf_file:  # the backend checks its content
        return
    if not path.is_dir():
        raise CliError(
            f"{path} is not a folder. Give the folder that contains config.json, or a GGUF file."
        )
    _check_checkpoint_files(path)


def _find_checkpoint_inside(folder: Path) -> Path | None:
    """Return the path of a checkpoint inside `folder`, or None if `folder` contains no checkpoint.

    `folder` itself is not a checkpoint. It may contain a GGUF file, or it may be a model's folder
    in the cache of the Hugging Face Hub. In the second case, the result is the folder of a version,
    such as models--Qwen--Qwen3-0.6B/snapshots/c1899de.
    """
    versions = (config.parent for config in folder.glob("snapshots/*/config.json"))
    return min((*folder.glob("*.gguf"), *versions), default=None)


def _check_checkpoint_files(folder: Path) -> None:
    """Check that a folder contains the files of a checkpoint, and that the files are complete."""
    folder = weight_files.model_folder(folder)
    if not (folder / "config.json").is_file():
        remedy = "Give the folder of a Hugging Face checkpoint."
        if (folder / "adapter_config.json").is_file():
            remedy = (
                "It is a LoRA adapter. Give the folder of its base model, and add the adapter of a "
                f"language model with --lora NAME={folder}."
            )
        elif (checkpoint := _find_checkpoint_inside(folder)) is not None:
            remedy = f"Give the checkpoint {checkpoint}."
        raise CliError(f"the folder {folder} has no config.json. {remedy}")
    for name in _JSON_FILES:
        _check_json(folder / name)
    problem = weight_files.find_problem(folder)
    if problem is not None:
        raise CliError(problem)


def _check_json(path: Path) -> None:
    """If a file exists, check that it contains a JSON object."""
    try:
        if path.is_file() and not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise CliError(f"the file {path} cannot be read ({error}). Download it again.") from None
