"""Tests of the selector, which chooses an engine process for each request."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from nereid_backend.serving.executor.replica_selector import ReplicaSelector, chunk_hashes

CHUNK, MAX_EXTRA = 64, 4
# A prompt is a list of chunks, and each chunk repeats one token.
prompts = st.lists(st.integers(0, 2), max_size=4)


def prompt(chunks):
    return np.repeat(np.array(chunks, dtype=np.int32), CHUNK).tobytes()


def common(first, second):
    """Return the number of leading chunks that two prompts have in common."""
    equal = [a == b for a, b in zip(first, second, strict=False)]
    return equal.index(False) if False in equal else len(equal)


@given(
    num_replicas=st.integers(1, 4),
    steps=st.lists(st.tuples(prompts, st.integers(1, 3), st.integers(0, 9)), max_size=30),
    data=st.data(),
)
def test_the_longest_prefix_wins_while_the_load_is_balanced(num_replicas, steps, data):
    selector = ReplicaSelector(num_replicas)
    sent = [[] for _ in range(num_replicas)]
    requests = []
    for chunks, num_sequences, event in steps:
        everyone = list(range(num_replicas))
        running = data.draw(st.lists(st.sampled_from(everyone), min_size=1, unique=True))
        loads = [sum(n for replica, n in requests if replica == one) for one in everyone]
        chosen = selector.select(prompt(chunks), num_sequences, running)
        assert chosen in running
        prefixes = [max((common(chunks, old) for old in sent[i]), default=0) for i in everyone]
        longest = max(prefixes[one] for one in running)
        holders = [one for one in running if prefixes[one] == longest]
        fewest = min(loads[one] for one in running)
        if min(loads[one] for one in holders) <= fewest + MAX_EXTRA:
            assert chosen in holders
            assert loads[chosen] == min(loads[one] for one in holders)
        else:
            assert loads[chosen] == fewest
        sent[chosen].append(chunks)
        requests.append((chosen, num_sequences))
        if event < 5:  # a request ends
            selector.release(*requests.pop(event % len(requests)))
        elif event == 9:  # a process dies
            lost = len(requests) % num_replicas
            selector.forget(lost)
            sent[lost] = []


@given(st.lists(st.integers(0, 2**31 - 1), max_size=400), st.integers(0, 400))
def test_prompts_share_the_hashes_of_their_common_full_chunks(token_ids, cut):
    array = np.array(token_ids, dtype=np.int32)
    hashes = chunk_hashes(array.tobytes())
    assert len(hashes) == len(token_ids) // CHUNK
    other = np.concatenate([array[:cut], [-1], array[cut:]]).astype(np.int32)
    shared = min(cut, len(token_ids)) // CHUNK
    other_hashes = chunk_hashes(other.tobytes())
    assert other_hashes[:shared] == hashes[:shared]
    assert not set(other_hashes[shared:]) & set(hashes[shared:])


def test_different_prompts_alternate_between_processes_without_load():
    selector = ReplicaSelector(3)
    chosen = []
    for number in range(6):
        chosen.append(selector.select(prompt([number]), 1, [0, 1, 2]))
        selector.release(chosen[-1], 1)
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_a_popular_prefix_spreads_when_its_process_is_busy():
    selector = ReplicaSelector(2)
    chosen = [selector.select(prompt([1, 2]), 1, [0, 1]) for _ in range(20)]
    assert chosen[:5] == [0] * 5
    assert abs(chosen.count(0) - chosen.count(1)) <= 1
