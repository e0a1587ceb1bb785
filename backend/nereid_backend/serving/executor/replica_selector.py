# SPDX-License-Identifier: Apache-2.0
"""Selects an engine process for each request, if there are several engine processes.

Each engine process has its own prefix cache. A request is therefore sent to the process that
already received the longest prefix of the prompt. Exception: if this process has many more
sequences than another process, the request is sent to the process with the fewest sequences.

The selector does not read the caches of the processes. Instead, the selector stores which prompts
were sent to which process.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence

# Prompts are compared in chunks of this number of tokens.
_CHUNK_TOKENS = 64
_TOKEN_BYTES = 4
# The largest number of chunks that the selector stores. One chunk needs about 200 bytes.
_MAX_CHUNKS = 100_000
# Let n be the number of sequences of the process with the longest prefix, and m the smallest number
# of sequences of any process. The process with the longest prefix is selected only if n - m is at
# most this limit.
_MAX_EXTRA_SEQUENCES = 4


def chunk_hashes(token_ids: bytes) -> list[bytes]:
    """Return one hash for each full chunk of a prompt.

    The hash of a chunk depends on all tokens up to the end of the chunk. If the first 64 * n tokens
    of two prompts are equal, the first n hashes of these prompts are therefore equal. Example: a
    prompt of 200 tokens has 3 full chunks, so the result has 3 hashes.

    Args:
        token_ids: the token ids of the prompt as int32 numbers.
    """
    size = _CHUNK_TOKENS * _TOKEN_BYTES
    hashes, so_far = [], hashlib.blake2b(digest_size=8)
    for start in range(0, len(token_ids) - size + 1, size):
        so_far.update(token_ids[start : start + size])
        hashes.append(so_far.digest())
    return hashes


class ReplicaSelector:
    """Selects a process for each request, and counts the sequences of each process.

    The class is thread-safe.

    Args:
        num_replicas: the number of processes.
    """

    def __init__(self, num_replicas: int) -> None:
        self._lock = threading.Lock()
        self._num_sequences = [0] * num_replicas
        # The serial number of the last request of each process. If several processes have the same
        # number of sequences, the process with the oldest last request is selected.
        self._last_request = list(range(-num_replicas, 0))
        self._num_requests = 0
        # Maps the hash of a chunk to the processes that received the chunk. The least recently
        # stored chunk is first.
        self._replicas_of: OrderedDict[bytes, set[int]] = OrderedDict()

    def select(self, token_ids: bytes, num_sequences: int, running: Collection[int]) -> int:
        """Select a process for a request, and return the number of the process.

        The sequences of the request are added to the count of the process.

        Args:
            token_ids: the token ids of the prompt as int32 numbers.
            num_sequences: the number of sequences of the request.
            running: the processes that accept requests. At least one process must be running.
        """
        # If there is only one process, the hashes are not needed.
        hashes = chunk_hashes(token_ids) if len(self._num_sequences) > 1 else []
        with self._lock:
            limit = min(self._num_sequences[one] for one in running) + _MAX_EXTRA_SEQUENCES
            best = self._least_loaded(self._with_longest_prefix(hashes, set(running)))
            if self._num_sequences[best] > limit:
                best = self._least_loaded(running)
            self._num_sequences[best] += num_sequences
            self._num_requests += 1
            self._last_request[best] = self._num_requests
            self._store(hashes, best)
            return best

    def release(self, replica: int, num_sequences: int) -> None:
        """Subtract the sequences of an ended request from the count of the process `replica`."""
        with self._lock:
            self._num_sequences[replica] -= num_sequences

    def forget(self, replica: int) -> None:
        """Delete the record of the prompts that were sent to a process.

        The caller calls this method when the process has died, because the prefix cache of the
        process is then lost.
        """
        with self._lock:
            for chunk, replicas in list(self._replicas_of.items()):
                replicas.discard(replica)
                if not replicas:
                    del self._replicas_of[chunk]

    def _with_longest_prefix(self, hashes: Sequence[bytes], running: set[int]) -> set[int]:
        """Return the processes among `running` that received the longest prefix of a prompt.

        If no running process received the first chunk of the prompt, return all running processes.
        """
        best = running
        for one in hashes:
            remaining = best & self._replicas_of.get(one, set())
            if not remaining:
                break
            best = remaining
        return best

    def _least_loaded(self, replicas: Collection[int]) -> int:
        """Return the process in `replicas` with the fewest sequences."""
        return min(replicas, key=lambda one: (self._num_sequences[one], self._last_request[one]))

    def _store(self, hashes: Sequence[bytes], replica: int) -> None:
        """Record that a prompt was sent to a process.

        If more than `_MAX_CHUNKS` chunks are stored, delete the least recently stored chunks.
        """
        # The first chunk of a prompt is stored last, so that it is deleted after the later chunks.
        # A later chunk is useless if an earlier chunk of the prompt is missing.
        for one in reversed(hashes):
            self._replicas_of.setdefault(one, set()).add(replica)
            self._replicas_of.move_to_end(one)
        while len(self._replicas_of) > _MAX_CHUNKS:
            self._replicas_of.popitem(last=False)
