# SPDX-License-Identifier: Apache-2.0
"""Finds the folder of the checkpoint that the setting `model` selects."""

from pathlib import Path

GGUF_LINK = "nereid_weights.gguf"
"""The name of the link to a GGUF file, in the checkpoint folder that describes the file.

Other folders contain no file with this name. A Hugging Face checkpoint may contain "model.gguf"."""


def checkpoint_folder(model: str) -> str:
    """Return the folder of the checkpoint that the setting `model` selects.

    If the setting is the path of a GGUF file (llama.cpp's format, a single file), return a folder
    that contains the model's config and tokenizer, and a link to the file. The folder is created in
    Nereid's cache folder if it does not exist. Any other path is returned unchanged.

    Raises:
        ModelError: if the GGUF file is damaged or not supported.
    """
    if not model.endswith(".gguf"):
        return model
    # Only GGUF files need the gguf library.
    from nereid_backend.checkpoints.gguf.gguf_folder import create_gguf_folder

    return str(create_gguf_folder(Path(model), link_name=GGUF_LINK))
