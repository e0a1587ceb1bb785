import pytest
from nereid_backend import SamplingParams
from nereid_backend.core.draft_tokens.prompt_lookup import PromptLookup
from nereid_backend.core.sequence import Sequence


def make_sequence(tokens: list[int]) -> Sequence:
    return Sequence("r", tokens, SamplingParams(), max_total_tokens=1000)


class CountedList(list):
    """A list that counts how many of its items were read with slices."""

    num_read = 0

    def __getitem__(self, key):
        items = super().__getitem__(key)
        self.num_read += len(items) if isinstance(key, slice) else 0
        return items


@pytest.mark.parametrize(
    ("tokens", "limit", "expected"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], 9, [4, 5, 9, 1]),
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 1, [5]),
        ([1, 2, 3, 4, 5, 6], 9, []),
        ([1, 2, 3], 9, []),
        ([1, 2, 3, 4, 1, 2, 3], 0, []),
        ([7, 7, 7, 7], 9, [7, 7, 7, 7]),
        ([5, 6, 5, 6, 5], 9, [6, 5, 6, 5]),
    ],
)
def test_the_tokens_after_an_earlier_occurrence_of_the_last_three_tokens_are_proposed(
    tokens, limit, expected
):
    assert PromptLookup(4).propose(make_sequence(tokens), limit) == expected


def test_tokens_that_were_added_since_the_last_search_are_searched():
    lookup = PromptLookup(4)
    sequence = make_sequence([1, 2, 3, 4])
    assert lookup.propose(sequence, 2) == []
    sequence.token_ids += [5, 6, 2, 3, 4]
    assert lookup.propose(sequence, 2) == [5, 6]


def test_the_sequences_of_a_request_read_their_long_prompt_only_once():
    prompt = CountedList([*range(1000), 1, 2, 3])
    lookup = PromptLookup(2)
    first = Sequence("r", prompt, SamplingParams(n=3), max_total_tokens=2000)
    sequences = first.all_sequences()
    for number, sequence in enumerate(sequences):
        sequence.token_ids = CountedList([*sequence.token_ids, 4, 500 + number, 501 + number])
        assert lookup.propose(sequence, 2) == []
        sequence.token_ids.append(502 + number)
        assert lookup.propose(sequence, 2) == [503 + number, 504 + number]
    num_read = [sequence.token_ids.num_read for sequence in sequences]
    assert num_read[0] > 1000
    assert max(num_read[1:]) < 100

    for sequence in sequences:
        lookup.forget(sequence)
    other = make_sequence([1, 2, 3, 4, 1, 2, 3])
    assert lookup.propose(other, 1) == [4]


def test_a_request_whose_drafts_are_rejected_pauses_and_tries_again_later():
    lookup = PromptLookup(2)
    sequence = make_sequence([1, 2, 3, 4, 1, 2, 3])
    has_draft = []
    for _ in range(60):
        proposed = lookup.propose(sequence, 2)
        has_draft.append(bool(proposed))
        if proposed:
            lookup.lengths.record_draft(sequence, len(proposed), 0)
    assert all(has_draft[:4])
    assert 1 <= sum(has_draft[8:]) <= 2
    assert lookup.lengths.num_accepted == 0


def test_drafts_continue_while_they_are_accepted():
    lookup = PromptLookup(2)
    sequence = make_sequence([1, 2, 3, 4, 1, 2, 3])
    for _ in range(50):
        proposed = lookup.propose(sequence, 2)
        assert proposed == [4, 1]
        lookup.lengths.record_draft(sequence, 2, 2)
    assert lookup.lengths.num_accepted == lookup.lengths.num_proposed == 100
    assert lookup.lengths.num_drafts == 50
