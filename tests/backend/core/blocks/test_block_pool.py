import pytest
from nereid_backend.core.blocks.block_pool import BlockPool


def test_each_free_block_is_allocated_once():
    pool = BlockPool(5)
    taken = pool.allocate(2) + pool.allocate(3)
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)


def test_released_blocks_can_be_allocated_again():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    pool.release(blocks[:2])
    assert pool.num_free == 2
    assert sorted(pool.allocate(2)) == sorted(blocks[:2])


def test_an_allocation_of_no_blocks_changes_nothing():
    pool = BlockPool(2)
    assert pool.allocate(0) == []
    assert pool.num_free == 2


def test_releasing_a_block_twice_is_an_error():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="but no block table contains it"):
        pool.release(blocks)


def test_allocating_more_blocks_than_are_free_is_an_error():
    with pytest.raises(AssertionError, match="3 blocks were requested, but only 2 blocks are free"):
        BlockPool(2).allocate(3)


def test_check_finds_a_table_that_lost_a_block():
    pool = BlockPool(4)
    table = pool.allocate(2)
    pool.check([table])
    with pytest.raises(AssertionError, match="do not match the block tables"):
        pool.check([table[:1]])
