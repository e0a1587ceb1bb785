# SPDX-License-Identifier: Apache-2.0
"""Finds the folder of a checkpoint for the setting `model`."""

from pathlib import Path

GGUF_LINK = "model.gguf"
"""The folder that describes a GGUF file contains a link to the file. This is the link's name."""


def checkpoint_folder(model: str) -> str:
    """Return the folder of the checkpoint that the setting `model` names.

    If the setting names a GGUF file, the result is a folder in Nereid's cache folder that describes
    the file. Any other path is returned unchanged.

    Raises:
        ModelError: if the GGUF file is damaged or not supported.
    """
    if not model.endswith(".gguf"):
        return model
    # Only GGUF files need the gguf library.
    from nereid_backend.checkpoints.gguf.gguf_folder import create_gguf_folder

    return str(create_gguf_folder(Path(model), GGUF_LINK))
