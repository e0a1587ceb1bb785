# SPDX-License-Identifier: Apache-2.0
"""The images of a request, in the input format of the model."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs:
    """The images of one prompt, after the checkpoint's processor has prepared them.

    Attributes:
        arguments: the model's arguments that describe the images, such as `pixel_values`. The keys
            are the names of the arguments. The values are tensors of torch, or lists.
        digest: a hash of the arguments. Two prompts with the same token ids and the same digest
            have the same keys and values.
        first_token: the index of the first prompt token whose keys and values depend on the images.
        has_videos: whether some of the images are frames of a video.
    """

    arguments: Mapping[str, object]
    digest: bytes
    first_token: int
    has_videos: bool = False
