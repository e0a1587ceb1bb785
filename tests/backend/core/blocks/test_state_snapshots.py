import pytest
from nereid_backend import SamplingParams
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Sampled, StepResult

BLOCK = 16


def make_scheduler(num_states=64, max_num_seqs=4) -> Scheduler:
    return Scheduler(
        BlockPool(1000),
        block_size=BLOCK,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        shares_blocks=False,
        num_states=num_states,
    )


def make_sequence(name: str, prompt: list[int], max_tokens: int = 1) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Sequence(name, prompt, params, max_total_tokens=len(prompt) + max_tokens)


def run(scheduler: Scheduler, *sequences: Sequence):
    """Run requests to their end.

    Returns:
        The (start, end) of each chunk, the positions of the saved snapshots, and the positions of
        the loaded snapshots.
    """
    for sequence in sequences:
        scheduler.add(sequence)
    chunks, saves, loads = [], [], []
    while scheduler.has_work():
        plan = scheduler.plan()
        ends = [chunk.start + chunk.num_tokens for chunk in plan.chunks]
        chunks += [(c.start, end) for c, end in zip(plan.chunks, ends, strict=True)]
        saves += [ends[index] for index, _ in plan.snapshots.saves]
        loads += [plan.chunks[index].start for index, _ in plan.snapshots.loads]
        sampled = [Sampled([7], [-0.5]) for chunk in plan.chunks if chunk.samples]
        scheduler.commit(plan, StepResult(sampled))
        scheduler.check()
    return chunks, saves, loads


def test_a_long_prompt_has_snapshots_at_chunk_ends_and_at_its_last_block_but_one():
    chunks, saves, _ = run(make_scheduler(), make_sequence("a", list(range(1000))))
    assert chunks == [(0, 512), (512, 976), (976, 1000)]
    assert saves == [512, 976]


def test_a_short_prompt_is_not_divided():
    chunks, saves, _ = run(make_scheduler(), make_sequence("a", list(range(130))))
    assert (chunks, saves) == ([(0, 130)], [])


def test_the_last_snapshot_of_an_answer_replaces_the_one_before():
    scheduler = make_scheduler()
    _, saves, _ = run(scheduler, make_sequence("a", list(range(10)), max_tokens=60))
    assert saves == [16, 32, 48, 64]
    assert len(scheduler.cache.snapshots) == 1


def test_the_next_turn_loads_the_snapshot_at_the_end_of_the_answer():
    scheduler = make_scheduler()
    first = make_sequence("a", list(range(200)), max_tokens=60)
    run(scheduler, first)
    _, _, loads = run(scheduler, make_sequence("b", [*first.token_ids, 1, 2, 3]))
    assert loads == [256]


def test_the_end_of_a_common_prefix_gets_a_snapshot_when_it_is_computed_again():
    scheduler = make_scheduler()
    prefix = list(range(320))
    _, saves, loads = zip(
        *(
            run(scheduler, make_sequence(name, [*prefix, *range(start, start + 180)]))
            for name, start in (("a", 1000), ("b", 2000), ("c", 3000))
        ),
        strict=True,
    )
    assert saves == ([480], [320, 480], [480])
    assert loads == ([], [], [320])


def test_sequences_with_images_have_no_snapshots():
    sequence = make_sequence("a", list(range(1000)), max_tokens=60)
    sequence.images = ImageInputs({}, b"digest", 0)
    chunks, saves, _ = run(make_scheduler(), sequence)
    assert (chunks[:2], saves) == ([(0, 512), (512, 1000)], [])


@pytest.mark.parametrize("num_states", [2, 3, 5])
def test_running_sequences_and_snapshots_share_the_memory(num_states):
    scheduler = make_scheduler(num_states, max_num_seqs=2)
    for number in range(6):
        prompts = [list(range(name * 1000, name * 1000 + 150)) for name in (number, number + 100)]
        run(scheduler, *(make_sequence(str(prompt[0]), prompt) for prompt in prompts))
        assert len(scheduler.cache.snapshots) <= num_states
    if num_states == 2:
        # While the last two sequences were running, no memory was left for snapshots.
        assert len(scheduler.cache.snapshots) < 2
