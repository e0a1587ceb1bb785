# SPDX-License-Identifier: Apache-2.0
"""The images, videos and audio of a request, in the input format of the model."""

from collections.abc import Mapping
from dataclasses import dataclass

KINDS = ("images", "videos", "audio")
"""The kinds of media that a chat can contain."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs:
    """The images, videos and audio of one prompt, converted to arguments of the model.

    Attributes:
        arguments: the arguments of the model that describe the media, by name. Example: the
            argument `pixel_values`. The values are torch tensors or lists.
        digest: a hash of the arguments, without the types of the tokens. If two prompts have the
            same token ids and the same digest, the model computes the same attention keys and
            values.
        first_token: the index of the first prompt token that depends on the media.
        kinds: the members of `KINDS` that the prompt contains.
    """

    arguments: Mapping[str, object]
    digest: bytes
    first_token: int
    kinds: tuple[str, ...] = ("images",)
