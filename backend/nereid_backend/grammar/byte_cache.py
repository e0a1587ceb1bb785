# SPDX-License-Identifier: Apache-2.0
"""A cache that limits the total size of its values in bytes."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Entry(NamedTuple, Generic[T]):
    """A cached value, and its size in bytes."""

    value: T
    num_bytes: int


class ByteCache(Generic[T]):
    """A thread-safe cache that removes the least recently used values."""

    def __init__(self, max_bytes: int) -> None:
        """Create a cache whose values together need at most `max_bytes` bytes."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # The entries are ordered from the least to the most recently used.
        self._entries: OrderedDict[Hashable, _Entry[T]] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """The size of all cached values in bytes."""
        return self._num_bytes

    def get(self, key: Hashable) -> T | None:
        """Return the cached value of a key, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry.value

    def put(self, key: Hashable, value: T, num_bytes: int) -> None:
        """Store a value that takes `num_bytes` bytes of memory.

        If all values together exceed the limit, drop the least recently used values. A value that
        is larger than the whole cache is not stored.
        """
        if num_bytes > self._max_bytes:
            return
        with self._lock:
            replaced = self._entries.pop(key, None)
            if replaced is not None:
                self._num_bytes -= replaced.num_bytes
            self._entries[key] = _Entry(value, num_bytes)
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                _, least_recently_used = self._entries.popitem(last=False)
                self._num_bytes -= least_recently_used.num_bytes
