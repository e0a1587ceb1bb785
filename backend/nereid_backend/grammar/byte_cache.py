# SPDX-License-Identifier: Apache-2.0
"""A cache that limits the total size of its values in bytes."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteCache(Generic[T]):
    """A thread-safe cache that removes the least recently used values."""

    def __init__(self, max_bytes: int) -> None:
        """Create a cache whose values take at most `max_bytes` together."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
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
            return entry[0]

    def put(self, key: Hashable, value: T, num_bytes: int) -> None:
        """Store a value that takes `num_bytes` bytes of memory.

        If all values together exceed the limit, drop the least recently used values. A value that
        is larger than the whole cache is not stored.
        """
        with self._lock:
            if num_bytes > self._max_bytes:
                return
            if key in self._entries:
                self._num_bytes -= self._entries.pop(key)[1]
            self._entries[key] = (value, num_bytes)
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                _, (_, dropped_bytes) = self._entries.popitem(last=False)
                self._num_bytes -= dropped_bytes
