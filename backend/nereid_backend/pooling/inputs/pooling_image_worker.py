# SPDX-License-Identifier: Apache-2.0
"""The process that decodes images for models without a chat template.

    python -m nereid_backend.pooling.inputs.pooling_image_worker FD FOLDER TIMEOUT_S

The model is either a model such as ColPali, which embeds images of pages, or a model with an image
tower. A request contains one image file. The text of the request is ignored. image_worker.py
describes the arguments, the messages and the limits of the process.
"""

from pathlib import Path
from typing import Any

from nereid_backend.fast_imports import importing
from nereid_backend.vision.image_worker import Prepare, run_worker


def _load_image_preparer(folder: Path) -> Prepare:
    """Load the processor of a checkpoint, and return a function that prepares an image file.

    The function returns the message that this process sends: ["done", token ids, packed images].
    """
    _import_libraries()
    _configure_libraries()
    # `_import_libraries` must run before transformers is imported, and these modules import it.
    from transformers import AutoConfig

    from nereid_backend.core.image_inputs import ImageInputs
    from nereid_backend.pooling.inputs.image_processors import load_image_processor
    from nereid_backend.vision.decode_image import ImageLimits, decode_image
    from nereid_backend.vision.packed_tensors import pack_images

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # Converts an image to the token ids of its prompt, and to arguments of the model.
    process = load_image_processor(folder, config)

    def prepare(_text: str, images: list[bytes]) -> list[Any]:
        # A request contains one image, and its text is empty. `pop` removes the file from the
        # caller's list, because the list would otherwise keep the file in memory until the image is
        # prepared.
        image = decode_image(images.pop(), "image 1", ImageLimits())  # the name is for errors
        token_ids, arguments = process(image)
        # The digest and the first token are needed only for a prefix cache. Models for embedding
        # and reranking have no prefix cache.
        image_inputs = ImageInputs(arguments, digest=b"", first_token=0)
        return ["done", token_ids, pack_images(image_inputs)]

    return prepare


def _import_libraries() -> None:
    """Import torch and transformers."""
    # `declare_operators` makes torchvision usable without CUDA. The function must run before
    # transformers is imported, so the other modules are not imported at the top of the file.
    from nereid_backend.vision.torchvision_operators import declare_operators

    declare_operators()
    with importing():  # makes these imports faster
        import torch  # noqa: F401

        import nereid_backend.pooling.inputs.image_processors  # noqa: F401 - imports transformers


def _configure_libraries() -> None:
    """Set up Pillow and torch for this process. Both packages are already imported."""
    import torch

    from nereid_backend.vision.decode_image import ImageLimits
    from nereid_backend.vision.shared_pixels import share_pixels

    # After this call, a NumPy array that is created from an image uses the memory of the image, so
    # that the pixels are not copied.
    share_pixels(ImageLimits().max_pixels)
    # torch gets only one thread, because requests are processed in forked child processes, and
    # other threads of torch do not survive a fork.
    torch.set_num_threads(1)


if __name__ == "__main__":
    run_worker(_load_image_preparer)
