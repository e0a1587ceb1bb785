# SPDX-License-Identifier: Apache-2.0
"""Converts the images of a prompt to bytes and back, for messages between processes."""

from typing import Any

import msgpack
import torch
from torch import Tensor

from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.errors import RequestError, first_line

# A client that calls the executor directly can send image arguments with any names. The following
# names are refused, because these arguments would replace arguments that the engine passes.
_RESERVED = frozenset(
    ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache")
)


def pack_images(images: ImageInputs) -> bytes:
    """Return the images of a prompt as msgpack bytes."""
    arguments = {name: _pack(value) for name, value in images.arguments.items()}
    packed: bytes = msgpack.packb([arguments, images.digest, images.first_token])
    return packed


def unpack_images(data: bytes) -> ImageInputs:
    """Return the images that `pack_images` packed.

    Raises:
        RequestError: the bytes are damaged.
    """
    try:
        arguments, digest, first_token = msgpack.unpackb(data)
        if _RESERVED.intersection(arguments):
            raise ValueError("an argument has a reserved name")
        unpacked = {str(name): _unpack(value) for name, value in arguments.items()}
        return ImageInputs(unpacked, bytes(digest), int(first_token))
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise RequestError(f"envelope: the images are damaged: {first_line(error)}") from None


def _pack(value: Any) -> Any:  # noqa: ANN401 - a tensor, a list or a plain value
    """Return a value that msgpack can pack. A tensor becomes a map of its type, shape and bytes."""
    if isinstance(value, Tensor):
        content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        name = str(value.dtype).removeprefix("torch.")
        return {"dtype": name, "shape": list(value.shape), "bytes": content}
    if isinstance(value, list | tuple):
        return [_pack(item) for item in value]
    if hasattr(value, "tolist"):
        # An array or a scalar of numpy.
        return _pack(torch.as_tensor(value))
    return value


def _unpack(value: Any) -> Any:  # noqa: ANN401 - a value of msgpack
    """Return the value that `_pack` packed."""
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if isinstance(value, dict):
        dtype = getattr(torch, value["dtype"])
        content = bytearray(value["bytes"])
        if not content:
            return torch.empty(value["shape"], dtype=dtype)
        return torch.frombuffer(content, dtype=dtype).reshape(value["shape"])
    return value
