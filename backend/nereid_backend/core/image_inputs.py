# SPDX-License-Identifier: Apache-2.0
"""The images of a request, in the input format of the model."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs:
    """The images of one prompt, after the checkpoint's processor has prepared them.

    Attributes:
        arguments: the arguments of the model that describe the images, by name. Example: the
            argument `pixel_values`. The values are torch tensors or lists.
        digest: a hash of the arguments. If two prompts have the same token ids and the same digest,
            the model computes the same attention keys and values.
        first_token: the index of the first prompt token that depends on the images.
        has_videos: whether some of the images are frames of a video.
    """

    arguments: Mapping[str, object]
    digest: bytes
    first_token: int
    has_videos: bool = False
