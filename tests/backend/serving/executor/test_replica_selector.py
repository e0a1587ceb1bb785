"""Tests of the selector, which chooses an engine process for each request."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from nereid_backend.serving.executor.replica_selector import ReplicaSelector, chunk_hashes

CHUNK = 64
# A process may have this many more sequences than another process before it loses new requests.
MAX_EXTRA = 4
# A prompt is a list of chunks, and each chunk repeats one token.
prompts = st.lists(st.integers(0, 2), max_size=4)


def prompt(chunks):
    return np.repeat(np.array(chunks, dtype=np.int32), CHUNK).tobytes()


def common(first, second):
    """Return the number of leading chunks that two prompts have in common."""
    equal = [a == b for a, b in zip(first, second, strict=False)]
    return equal.index(False) if False in equal else len(equal)


def check_choice(chosen, running, prefixes, loads):
    """Check that the chosen process has the longest prefix, unless it has too many sequences.

    `prefixes` contains the length of the longest known prefix of the prompt for each process, and
    `loads` contains the number of its sequences.
    """
    longest = max(prefixes[replica] for replica in running)
    with_longest = [replica for replica in running if prefixes[replica] == longest]
    fewest = min(loads[replica] for replica in running)
    fewest_with_longest = min(loads[replica] for replica in with_longest)
    assert chosen in running
    if fewest_with_longest <= fewest + MAX_EXTRA:
        assert chosen in with_longest
        assert loads[chosen] == fewest_with_longest
    else:
        assert loads[chosen] == fewest


@given(
    num_replicas=st.integers(1, 4),
    steps=st.lists(st.tuples(prompts, st.integers(1, 3), st.integers(0, 9)), max_size=30),
    data=st.data(),
)
def test_the_longest_prefix_wins_while_the_load_is_balanced(num_replicas, steps, data):
    selector = ReplicaSelector(num_replicas)
    prompts_of = [[] for _ in range(num_replicas)]
    requests = []
    for chunks, num_sequences, event in steps:
        replicas = list(range(num_replicas))
        running = data.draw(st.lists(st.sampled_from(replicas), min_size=1, unique=True))
        loads = [sum(n for owner, n in requests if owner == replica) for replica in replicas]
        prefixes = [max((common(chunks, p) for p in known), default=0) for known in prompts_of]

        chosen = selector.select(prompt(chunks), num_sequences, running)
        check_choice(chosen, running, prefixes, loads)

        prompts_of[chosen].append(chunks)
        requests.append((chosen, num_sequences))
        if event < 5:  # a request ends
            selector.release(*requests.pop(event % len(requests)))
        elif event == 9:  # a process dies
            lost = len(requests) % num_replicas
            selector.forget(lost)
            prompts_of[lost] = []


@given(st.lists(st.integers(0, 2**31 - 1), max_size=400), st.integers(0, 400))
def test_prompts_share_the_hashes_of_their_common_full_chunks(token_ids, cut):
    array = np.array(token_ids, dtype=np.int32)
    hashes = chunk_hashes(array.tobytes())
    assert len(hashes) == len(token_ids) // CHUNK

    # A prompt that differs from the token with the index `cut` on.
    other = np.concatenate([array[:cut], [-1], array[cut:]]).astype(np.int32)
    other_hashes = chunk_hashes(other.tobytes())
    num_shared = min(cut, len(token_ids)) // CHUNK
    assert other_hashes[:num_shared] == hashes[:num_shared]
    assert not set(other_hashes[num_shared:]) & set(hashes[num_shared:])


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
