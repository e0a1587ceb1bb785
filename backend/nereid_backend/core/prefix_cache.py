# SPDX-License-Identifier: Apache-2.0
"""Finds blocks whose keys and values a new request would compute again.

A full block's content is named by a hash over its tokens and the hash of the block before it, so
that equal hashes mean equal tokens from the start of the sequence on:

    H'(salt) -> h0 = H(H'(salt), tokens 0..15) -> h1 = H(h0, tokens 16..31) -> ...

A block stays findable while somebody holds it and, when nobody does, until the pool needs it for
something else; the block that has been idle longest goes first, and of a sequence the tail goes
before the head. What is found is what would have been computed, so answers do not change.
"""

import hashlib
from array import array

from nereid_backend.core.block_pool import BlockPool
from nereid_backend.core.request import Request
from nereid_backend.core.window import Sight

# Long enough that nobody can make two prompts meet: requests of several users share the cache.
_DIGEST_BYTES = 16


class PrefixCache:
    """Names of full blocks, for as long as the pool keeps them.

    Attributes:
        num_queried_tokens: tokens of the requests that looked for a prefix.
        num_hit_tokens: how many of these were found.
    """

    def __init__(self, pool: BlockPool, block_size: int, sight: Sight | None = None) -> None:
        """Begin with nothing known; where there is sight, nothing before it has to be there."""
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._pool = pool
        self._block_size = block_size
        self._sight = sight
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        pool.on_reuse(self._drop)

    def find(self, request: Request) -> list[int]:
        """The blocks that hold the beginning of a request's tokens, as far as they are known.

        Never all tokens: the last one is left to compute, because a token comes of its logits.
        Where the model does not look back to the beginning, the null block stands first.
        """
        digests = self._digests(request, (len(request.token_ids) - 1) // self._block_size)
        if self._sight is not None:
            return self._find_seen(digests, self._sight)
        found: list[int] = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def blocks_named(self, digests: list[bytes]) -> set[int]:
        """Those of the blocks with these names that there are."""
        return {self._blocks[digest] for digest in digests if digest in self._blocks}

    def add(self, request: Request) -> None:
        """Make a request's full blocks findable, as far as they are computed."""
        num_full = request.num_computed_tokens // self._block_size
        if num_full <= request.num_findable_blocks:
            return
        digests = self._digests(request, num_full)
        for index in range(request.num_findable_blocks, num_full):
            # Where two requests computed the same tokens, the first one's block is found.
            if digests[index] not in self._blocks:
                block = request.block_table[index]
                self._blocks[digests[index]] = block
                self._hashes[block] = digests[index]
                self._pool.keep(block)
        request.num_findable_blocks = num_full

    def forget(self, block: int) -> None:
        """Make sure that a block is not found any more."""
        self._drop(block)
        self._pool.forget(block)

    def check(self) -> None:
        """Verify that exactly the blocks that the pool keeps can be found, by one name each.

        Raises:
            AssertionError: a name leads to a block that may hold something else.
        """
        assert len(self._blocks) == len(self._hashes) == self._pool.num_kept
        assert all(self._hashes[block] == digest for digest, block in self._blocks.items())

    def _find_seen(self, digests: list[bytes], sight: Sight) -> list[int]:
        """The longest beginning of which all is there that the token behind it sees."""
        null = self._pool.null_block
        found: list[int] = []
        best, num_hidden, begin = 0, 0, 0
        for index, digest in enumerate(digests):
            block = self._blocks.get(digest, null)
            found.append(block)
            if block == null:
                begin = index + 1
            first = sight.first_seen((index + 1) * self._block_size) // self._block_size
            if begin <= first and block != null:
                best, num_hidden = index + 1, first
        return [null] * num_hidden + found[num_hidden:best]

    def _drop(self, block: int) -> None:
        digest = self._hashes.pop(block, None)
        if digest is not None:
            del self._blocks[digest]

    def _digests(self, request: Request, count: int) -> list[bytes]:
        """The names of a request's first full blocks; remembered, because its tokens only grow."""
        digests, size = request.block_digests, self._block_size
        if not digests and count > 0:
            digests.append(self._name(_root(request.params.cache_salt), request.token_ids[:size]))
        for index in range(len(digests), count):
            tokens = request.token_ids[index * size : (index + 1) * size]
            digests.append(self._name(digests[-1], tokens))
        return digests[:count]

    @staticmethod
    def _name(before: bytes, token_ids: list[int]) -> bytes:
        content = before + array("q", token_ids).tobytes()
        return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _root(salt: str) -> bytes:
    """What comes before the first block. No salt can be chosen such that this is a block's name."""
    text = salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES, person=b"salt").digest()
