import itertools
import random

import pytest
from backend.scripted_model import BLOCK
from nereid_backend import SamplingParams
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.blocks.prefix_cache import PrefixCache
from nereid_backend.core.sequence import Sequence


def make_sequence(tokens: list[int], salt: str = "") -> Sequence:
    return Sequence("r", tokens, SamplingParams(cache_salt=salt), max_total_tokens=100)


def find(cache: PrefixCache, sequence: Sequence) -> list[int]:
    """Return the cached blocks of `sequence` for a model with one group of layers."""
    (blocks,) = cache.find(sequence)
    return blocks


def computed(pool: BlockPool, cache: PrefixCache, sequence: Sequence) -> list[int]:
    """Compute all tokens of a request, release its blocks, and return these blocks."""
    cached_blocks = find(cache, sequence)
    pool.acquire(cached_blocks)
    num_blocks = -(-len(sequence.token_ids) // BLOCK)
    sequence.block_table = cached_blocks + pool.allocate(num_blocks - len(cached_blocks))
    sequence.num_blocks_in_cache = len(cached_blocks)
    sequence.num_computed_tokens = len(sequence.token_ids)
    cache.add(sequence)
    blocks = list(sequence.block_table)
    pool.release(sequence.block_table)
    pool.check([])
    cache.check()
    return blocks


@pytest.fixture
def pool():
    return BlockPool(8)


@pytest.fixture
def cache(pool):
    return PrefixCache(pool, BLOCK)


TOKENS = list(range(100, 110))


def test_full_blocks_are_found_after_their_request_is_gone(pool, cache):
    blocks = computed(pool, cache, make_sequence(TOKENS))
    assert pool.num_free == 8
    assert find(cache, make_sequence([*TOKENS, 5])) == blocks[:2]


def test_the_last_token_of_a_cached_prompt_is_computed_again(pool, cache):
    blocks = computed(pool, cache, make_sequence(TOKENS[:8]))
    assert find(cache, make_sequence(TOKENS[:8])) == blocks[:1]


def test_a_block_is_found_only_after_the_same_preceding_blocks(pool, cache):
    computed(pool, cache, make_sequence(TOKENS))
    assert find(cache, make_sequence([7, 7, 7, 7, *TOKENS[4:]])) == []
    assert find(cache, make_sequence(TOKENS[4:])) == []


def test_a_prompt_with_another_salt_finds_no_blocks(pool, cache):
    computed(pool, cache, make_sequence(TOKENS, "one"))
    assert find(cache, make_sequence(TOKENS, "two")) == []
    assert len(find(cache, make_sequence(TOKENS, "one"))) == 2


def test_a_salt_that_equals_the_hash_of_a_block_finds_no_blocks(pool, cache):
    # If a salt were hashed in the same way as the digest of a block, a sequence whose salt is such
    # a digest would find the second block of `sequence` as its own first block.
    for start in range(10_000):
        sequence = make_sequence([start] * 4 + TOKENS[:5])
        cache.find(sequence)
        try:
            salt = sequence.block_hashes[0].decode()
            break
        except UnicodeDecodeError:
            continue
    computed(pool, cache, sequence)
    assert find(cache, make_sequence(TOKENS[:5], salt)) == []


def test_any_text_can_be_a_salt(pool, cache):
    computed(pool, cache, make_sequence(TOKENS, "\ud800"))
    assert len(find(cache, make_sequence(TOKENS, "\ud800"))) == 2


def test_the_least_recently_used_prefix_is_evicted_first_from_its_end(pool, cache):
    old, new = list(range(200, 213)), list(range(300, 313))
    computed(pool, cache, make_sequence(old))
    computed(pool, cache, make_sequence(new))
    # Each request left 3 full blocks in the cache, and 2 of the 8 blocks are free.
    pool.release(pool.allocate(4))
    assert len(find(cache, make_sequence(old))) == 1
    assert len(find(cache, make_sequence(new))) == 3
    cache.check()


def test_a_prefix_that_was_used_again_is_evicted_last(pool, cache):
    old, new = list(range(200, 213)), list(range(300, 313))
    for tokens in (old, new, old):
        computed(pool, cache, make_sequence(tokens))
    pool.release(pool.allocate(4))
    assert len(find(cache, make_sequence(old))) == 3
    assert len(find(cache, make_sequence(new))) == 1


def test_a_forgotten_block_is_not_found(pool, cache):
    blocks = computed(pool, cache, make_sequence(TOKENS))
    cache.forget(blocks[1])
    assert find(cache, make_sequence(TOKENS)) == blocks[:1]
    pool.check([])
    cache.check()


def test_the_same_tokens_computed_twice_are_found_once(pool, cache):
    first, second = make_sequence(TOKENS), make_sequence(TOKENS)
    for sequence in (first, second):
        sequence.block_table = pool.allocate(3)
        sequence.num_computed_tokens = len(TOKENS)
        cache.add(sequence)
    assert find(cache, make_sequence(TOKENS)) == first.block_table[:2]
    cache.check()


def num_common_blocks(first: list[int], second: list[int]) -> int:
    """Return the number of full blocks in the longest common prefix of two prompts."""
    pairs = zip(first, second, strict=False)
    num_equal = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return num_equal // BLOCK


def test_random_requests_find_the_blocks_that_a_search_of_all_earlier_requests_finds():
    rng = random.Random(1)
    pool = BlockPool(400)
    cache = PrefixCache(pool, BLOCK)
    past_prompts: list[list[int]] = []
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
        longest = max((num_common_blocks(tokens, past) for past in past_prompts), default=0)
        # The last token of a prompt is always computed, so its block is never taken from the cache.
        expected = min(longest, (len(tokens) - 1) // BLOCK)
        assert len(find(cache, make_sequence(tokens))) == expected
        computed(pool, cache, make_sequence(tokens))
        past_prompts.append(tokens)
