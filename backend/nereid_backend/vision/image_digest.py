# SPDX-License-Identifier: Apache-2.0
"""Computes a digest of the prepared images of a prompt."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""The arguments that contain one value for each token: 0 for a text token, and another number for
an image token."""

_DIGEST_BYTES = 32


def arguments_digest(arguments: Mapping[str, Any]) -> bytes:
    """Return one hash of the names and the values of a prompt's image arguments.

    The types of the tokens are left out, because they follow from the token ids. Otherwise, the
    hash would change with each further message of a chat, although the images are the same.
    """
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in sorted(set(arguments).difference(TOKEN_TYPES)):
        hasher.update(name.encode())
        _add_to_hash(hasher, arguments[name])
    return hasher.digest()


def _add_to_hash(hasher: hashlib.blake2b, value: Any) -> None:  # noqa: ANN401 - a model's argument
    """Add the content of a value to a hash.

    The value is a tensor, an array, a plain value such as a number, or a nested list of these.

    Mutates: hasher.
    """
    if isinstance(value, list | tuple):
        # The length distinguishes nested lists such as [[1], [2]] and [[1, 2]].
        hasher.update(f"[{len(value)}".encode())
        for item in value:
            _add_to_hash(hasher, item)
    elif isinstance(value, Tensor):
        # Hash the data type and the shape, too, because different tensors can have the same bytes.
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        # `data` is a memoryview, so the bytes of the array are not copied.
        hasher.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray):
        hasher.update(f"{value.dtype}{value.shape}".encode())
        hasher.update(np.ascontiguousarray(value).data)
    else:
        # The separator distinguishes lists such as [1, 23] and [12, 3].
        hasher.update(f"{value!r};".encode())
