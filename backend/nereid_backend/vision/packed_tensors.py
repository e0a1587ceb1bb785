# SPDX-License-Identifier: Apache-2.0
"""Converts the prepared images of a prompt to bytes, and converts the bytes back.

The bytes are sent between processes.
"""

import hashlib
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.errors import RequestError, first_line

# A client that calls the executor directly can send image arguments with any names. The following
# names are refused, because an image argument with such a name would replace an argument of the
# engine.
_RESERVED = frozenset(
    ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache")
)
# The data types of tensors that are accepted from clients. torch has further data types, but it
# crashes if bytes are converted to some of these types, such as quint8.
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
# msgpack, torch and the conversions of Python's types raise these errors for damaged images.
_DAMAGE_ERRORS = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    OverflowError,
    RuntimeError,
)


def pack_images(images: ImageInputs) -> bytes:
    """Convert the prepared images of a prompt to msgpack bytes."""
    arguments = {name: _pack(value) for name, value in images.arguments.items()}
    packed: bytes = msgpack.packb([arguments, images.digest, images.first_token, images.kinds])
    return packed


def unpack_images(data: bytes) -> ImageInputs:
    """Convert the result of `pack_images` to images.

    The bytes come from another process, and a client can send any bytes. Therefore the bytes are
    validated.

    Raises:
        RequestError: the bytes are damaged, or an argument has a name that only the engine may use.
    """
    try:
        arguments, digest, first_token, kinds = msgpack.unpackb(data)
        images = ImageInputs(
            {str(name): _unpack(value) for name, value in arguments.items()},
            # `bytes(3)` would return three zero bytes, but `memoryview` refuses an integer.
            bytes(memoryview(digest)),
            int(first_token),
            tuple(map(str, kinds)),
        )
    except _DAMAGE_ERRORS as error:
        raise _damage_error(first_line(error)) from None
    if not _RESERVED.isdisjoint(images.arguments):
        raise _damage_error("an argument has a reserved name")
    # The digest is a key in the prefix cache.
    if len(images.digest) > hashlib.blake2b.MAX_KEY_SIZE:
        raise _damage_error(f"the digest has {len(images.digest)} bytes")
    return images


def _damage_error(problem: str) -> RequestError:
    """Return the error for bytes that do not describe valid images."""
    return RequestError(f"envelope: the images are damaged: {problem}")


def _pack(value: Any) -> Any:  # noqa: ANN401 - a tensor, a list or a plain value
    """Convert a value to a value that msgpack can pack.

    A tensor is converted to a map that contains its type, its shape and its bytes.
    """
    if isinstance(value, Tensor):
        all_bytes = value.contiguous().reshape(-1).view(torch.uint8)
        content = all_bytes.numpy().data  # msgpack packs this memoryview without a copy.
        name = str(value.dtype).removeprefix("torch.")
        return {"dtype": name, "shape": list(value.shape), "bytes": content}
    if isinstance(value, list | tuple):
        return [_pack(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _pack(torch.as_tensor(value))
    return value


def _unpack(value: Any) -> Any:  # noqa: ANN401 - a value of msgpack
    """Restore the argument of `_pack` from its result `value`."""
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if isinstance(value, dict):
        dtype = _DTYPES[value["dtype"]]
        content = bytearray(memoryview(value["bytes"]))
        # torch.frombuffer refuses an empty buffer.
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    return value
