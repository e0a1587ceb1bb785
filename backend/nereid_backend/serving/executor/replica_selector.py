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

# To compare prompts, the selector divides each prompt into chunks of `_CHUNK_TOKENS` tokens.
_CHUNK_TOKENS = 64
_TOKEN_BYTES = 4
# The selector stores at most `_MAX_CHUNKS` chunks, about 200 bytes for each chunk. A chunk consists
# of `_CHUNK_TOKENS` tokens of a prompt.
_MAX_CHUNKS = 100_000
# For each prompt, the selector prefers the engine process P that has already received the longest
# prefix of the prompt. But if P has too many sequences (over `_MAX_EXTRA_SEQUENCES` more than the
# process with the fewest sequences), the selector chooses the process with the fewest sequences.
_MAX_EXTRA_SEQUENCES = 4


def chunk_hashes(token_ids: bytes) -> list[bytes]:
    """Return one hash for each chunk of 64 tokens of a prompt. Ignore an incomplete last chunk.

    The hash of a chunk depends on all tokens up to the end of the chunk. If the first 64 * n tokens
    of two prompts are equal, the first n hashes of these prompts are therefore equal. Example: a
    prompt of 200 tokens has 3 full chunks, so the result has 3 hashes.

    Args:
        token_ids: the token ids of the prompt as int32 numbers.
    """
    chunk_bytes = _CHUNK_TOKENS * _TOKEN_BYTES
    num_full_chunks = len(token_ids) // chunk_bytes
    prefix_hash = hashlib.blake2b(digest_size=8)
    hashes = []
    for index in range(num_full_chunks):
        start = index * chunk_bytes
        prefix_hash.update(token_ids[start : start + chunk_bytes])
        hashes.append(prefix_hash.digest())
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
        # For each process, the serial number of the last request that was sent to the process. If
        # several processes have the fewest sequences, the selector chooses the one whose serial
        # number is smallest.
        self._last_request = list(range(-num_replicas, 0))
        self._num_requests = 0
        # Maps the hash of a chunk (64 tokens of a prompt) to the numbers of the processes that
        # received the chunk. The least recently stored chunk comes first.
        self._replicas_of: OrderedDict[bytes, set[int]] = OrderedDict()

    def select(self, token_ids: bytes, num_sequences: int, running: Collection[int]) -> int:
        """Select an engine process for a request, and return the number of the process.

        Prefer the process that has received the longest prefix of the prompt, because the process
        probably still has this prefix in its cache. If this process has many more sequences than
        another process, select the process with the fewest sequences instead.

        Mutates: the request and its sequences now count for the selected process, and the prefixes
        of the prompt are recorded for this process.

        Args:
            token_ids: the token ids of the prompt as int32 numbers.
            num_sequences: the number of sequences of the request.
            running: the processes that accept requests. At least one process must be running.
        """
        # If there is only one process, the hashes are not needed.
        hashes = chunk_hashes(token_ids) if len(self._num_sequences) > 1 else []
        with self._lock:
            selected = self._choose(hashes, set(running))
            self._num_sequences[selected] += num_sequences
            # Store the number of the process's last request. If several processes have equally few
            # sequences, `_choose` selects the process whose last request is the oldest.
            self._num_requests += 1
            self._last_request[selected] = self._num_requests
            self._store(hashes, selected)
            return selected

    def _choose(self, hashes: Sequence[bytes], running: set[int]) -> int:
        """Choose an engine process for a prompt. The docstring of `select` describes the choice.

        Args:
            hashes: the hashes of the prompt's chunks, from `chunk_hashes`.
            running: the numbers of the running processes.
        """
        least_loaded = self._least_loaded(running)
        preferred = self._least_loaded(self._with_longest_prefix(hashes, running))
        num_extra = self._num_sequences[preferred] - self._num_sequences[least_loaded]
        return least_loaded if num_extra > _MAX_EXTRA_SEQUENCES else preferred

    def release(self, replica: int, num_sequences: int) -> None:
        """Subtract `num_sequences` from the number of sequences of the process `replica`."""
        with self._lock:
            self._num_sequences[replica] -= num_sequences

    def forget(self, replica: int) -> None:
        """Forget all prompts that were sent to the process with the number `replica`.

        The caller calls this method when the process has died, because the prefix cache of the
        process is then lost.
        """
        with self._lock:
            for chunk, replicas in list(self._replicas_of.items()):
                replicas.discard(replica)
                if not replicas:
                    del self._replicas_of[chunk]

    def _with_longest_prefix(self, hashes: Sequence[bytes], running: set[int]) -> set[int]:
        """Return the processes in `running` that have received the longest prefix of a prompt.

        If no running process received the first chunk of the prompt, return all running processes.

        Args:
            hashes: the hashes of the prompt's chunks, from `chunk_hashes`.
            running: the numbers of the running processes.
        """
        replicas = running
        for chunk_hash in hashes:
            replicas_with_chunk = replicas & self._replicas_of.get(chunk_hash, set())
            if not replicas_with_chunk:
                break
            replicas = replicas_with_chunk
        return replicas

    def _least_loaded(self, replicas: Collection[int]) -> int:
        """Return the number of the process with the fewest sequences among `replicas`."""
        return min(replicas, key=lambda one: (self._num_sequences[one], self._last_request[one]))

    def _store(self, hashes: Sequence[bytes], replica: int) -> None:
        """Record that a prompt was sent to a process.

        If more than `_MAX_CHUNKS` chunks are stored, delete the least recently stored chunks.
        """
        # The least recently stored chunks are deleted first. The later chunks of a prompt are
        # useless if an earlier chunk is missing. Therefore store the chunks of a prompt in reverse
        # order, so that the first chunk is deleted last.
        for chunk_hash in reversed(hashes):
            self._replicas_of.setdefault(chunk_hash, set()).add(replica)
            self._replicas_of.move_to_end(chunk_hash)
        while len(self._replicas_of) > _MAX_CHUNKS:
            self._replicas_of.popitem(last=False)
