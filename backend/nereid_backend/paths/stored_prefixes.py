# SPDX-License-Identifier: Apache-2.0
"""Converts the KV cache blocks and recurrent states of stored prefixes to bytes and back."""

import io
from collections.abc import Sequence
from typing import Any

import torch

from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.paths.recurrent import RowsPath


class StoredPrefixes:
    """Reads and writes KV cache blocks and recurrent states as bytes.

    Attributes:
        has_blocks: whether the blocks contain keys and values. False for a model without attention.
        layout: a description of the bytes. A forward path can read only bytes with its own layout.
    """

    def __init__(self, path: Any) -> None:  # noqa: ANN401 - any path with the attribute kv_cache
        """Create an object that reads and writes the KV cache and the recurrent states of `path`.

        `path` must have the attribute `kv_cache`.
        """
        self._cache: KVCache | None = path.kv_cache
        self._snapshots = path.snapshots if isinstance(path, RowsPath) else {}
        self.has_blocks = self._cache is not None
        tensors = [] if self._cache is None else self._cache.tensors()
        shapes = [f"{tuple(tensor.shape[1:])} {tensor.dtype}" for tensor in tensors]
        self.layout = f"{type(path).__name__}, {type(self._cache).__name__}, {'; '.join(shapes)}"

    def read_block(self, block: int) -> bytes:
        """Return the keys and values of a block as bytes."""
        return b"" if self._cache is None else self._cache.read_block(block)

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Replace the keys and values in `blocks` with the stored `contents`.

        Each item of `contents` was returned by `read_block` and belongs to one item of `blocks`.
        """
        if self._cache is not None and blocks:
            self._cache.write_blocks(blocks, contents)

    def read_snapshot(self, snapshot_id: int) -> bytes:
        """Return the recurrent state that is stored with the id `snapshot_id`, as bytes."""
        buffer = io.BytesIO()
        torch.save(self._snapshots[snapshot_id], buffer)
        return buffer.getvalue()

    def write_snapshot(self, snapshot_id: int, content: bytes) -> None:
        """Restore a stored recurrent state from the bytes that `read_snapshot` returned."""
        self._snapshots[snapshot_id] = torch.load(io.BytesIO(content), weights_only=True)
