import time

import numpy as np
import pytest
import torch
from backend.sampling.one_token import sample
from nereid_backend import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.errors import RequestError
from nereid_backend.grammar.vocabulary import mask_of
from nereid_backend.sampling.apply_masks import with_masks
from nereid_backend.sampling.draft_verification import Position
from nereid_backend.sampling.logits_processor import LogitsProcessor, check_token_ids
from nereid_backend.sampling.sampler import Sampler
from nereid_backend.sampling.sampling_table import changes_logits

VOCAB = 70
INF = float("inf")


def make_sequence(prompt=(1, 2, 3), output=(), row=0, seed=0, eos=(), **params):
    sequence = Sequence(
        "r",
        list(prompt),
        SamplingParams(**{"temperature": 0.0, **params}),
        max_total_tokens=999,
        eos_token_ids=eos,
        seed=seed,
    )
    sequence.row = row
    sequence.token_ids += output
    return sequence


def processed(logits, *sequences, processor=None, drafts=()):
    """Apply penalties and masks to logits. Row i of `logits` belongs to the i-th sequence."""
    processor = processor or LogitsProcessor()
    positions = [Position(sequence, list(drafts)) for sequence in sequences]
    changed = [i for i, sequence in enumerate(sequences) if changes_logits(sequence.params)]
    return processor.process(logits, positions, changed, {})


def slow_penalties(logits, prompt, output, params):
    """Return one row of logits with penalties, computed token by token by the definition."""
    row = logits.tolist()
    for token in range(len(row)):
        if token in prompt or token in output:
            factor = params.repetition_penalty
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        row[token] -= params.frequency_penalty * output.count(token)
        row[token] -= params.presence_penalty * (token in output)
    return torch.tensor(row)


def test_logits_of_requests_without_parameters_are_returned_unchanged():
    logits = torch.randn(2, VOCAB)
    assert processed(logits, make_sequence(), make_sequence(row=1, temperature=1.0)) is logits


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.1},
        {"frequency_penalty": -0.8},
        {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    ],
    ids=str,
)
def test_penalties_follow_their_definition_while_texts_grow_and_rows_change(penalties):
    rng = np.random.default_rng(3)
    torch.manual_seed(3)
    processor = LogitsProcessor()
    sequences = [
        make_sequence(rng.integers(0, VOCAB, size).tolist(), row=row, **penalties)
        for row, size in enumerate((1, 5, 90, 30))
    ]
    plain = make_sequence(row=9)
    for step in range(100):
        # After preemptions, requests have other rows. Some of the rows belonged to other requests.
        if step % 20 == 19:
            for sequence, row in zip(sequences, rng.permutation(6).tolist(), strict=False):
                sequence.row = row
        batch = [sequence for sequence in sequences if rng.random() < 0.7] + [plain]
        logits = torch.randn(len(batch), VOCAB) * 3
        changed_logits = processed(logits, *batch, processor=processor)
        for sequence, row, changed_row in zip(batch, logits, changed_logits, strict=True):
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            output = sequence.token_ids[sequence.num_prompt_tokens :]
            expected = slow_penalties(row, prompt, output, sequence.params)
            torch.testing.assert_close(changed_row, expected, rtol=1e-5, atol=1e-5)
            if sequence is not plain:
                sequence.token_ids += rng.integers(0, VOCAB, rng.integers(0, 4)).tolist()


def test_penalties_count_the_draft_tokens_before_a_position():
    torch.manual_seed(0)
    params = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.5}
    for output in ([], [4], [9, 9, 2]):
        sequence = make_sequence((4, 5, 4), output, **params)
        processor = LogitsProcessor()
        positions = [Position(sequence, [4, 9, 8, 4][:count]) for count in range(5)]
        logits = torch.randn(5, VOCAB)
        found = processor.process(logits, positions, range(5), {})
        for row, position in enumerate(positions):
            expected = slow_penalties(
                logits[row], [4, 5, 4], output + position.drafts, sequence.params
            )
            torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-5)
        # The draft tokens of the first call do not change later results.
        again = processed(logits[:1], sequence, processor=processor)
        torch.testing.assert_close(again[0], found[0])


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1.0])
@pytest.mark.parametrize("penalty", [1e-308, 1e-40, 1e-38, 1e38, 1e40, 1e308])
@pytest.mark.filterwarnings("error")
def test_an_extreme_repetition_penalty_selects_or_excludes_the_tokens_of_the_prompt(
    penalty, temperature
):
    logits = torch.zeros(1, VOCAB)
    logits[0, :3] = torch.tensor([50.0, 60.0, 10.0])
    sequence = make_sequence((1, 2), repetition_penalty=penalty, temperature=temperature)
    assert sample(logits, [sequence])[0].token_ids == ([1] if penalty < 1 else [0])
    sequence = make_sequence((3,), repetition_penalty=penalty, allowed_token_ids=[3])
    for logit in (-50.0, 0.0, 50.0):
        logits[0, 3] = logit
        assert sample(logits, [sequence])[0].token_ids == [3]


def test_presence_and_frequency_do_not_count_the_prompt():
    logits = torch.randn(1, VOCAB)
    sequence = make_sequence((1, 2, 3), presence_penalty=2.0, frequency_penalty=2.0)
    assert torch.equal(processed(logits, sequence), logits)


def test_a_bias_is_added_and_may_outweigh_everything_else():
    logits = torch.zeros(2, VOCAB)
    found = processed(
        logits, make_sequence(logit_bias={5: 100, 7: -3.5}), make_sequence(row=1, logit_bias={5: 1})
    )
    assert found[0, 5] == 100
    assert found[0, 7] == -3.5
    assert found[1, 5] == 1
    assert found.abs().sum() == 104.5


def test_the_bias_comes_before_the_penalties():
    sequence = make_sequence((5,), logit_bias={5: 10.0}, repetition_penalty=2.0)
    assert processed(torch.full((1, VOCAB), 2.0), sequence)[0, 5] == 6.0


def test_only_allowed_tokens_are_left():
    allowed = [0, 31, 32, 64, 69]
    found = processed(
        torch.zeros(2, VOCAB), make_sequence(allowed_token_ids=allowed), make_sequence()
    )
    assert (found[0] == 0).nonzero().squeeze(1).tolist() == allowed
    assert (found[1] == 0).all()


def test_a_bias_does_not_bring_back_a_token_that_is_not_allowed():
    sequence = make_sequence(allowed_token_ids=[3], logit_bias={4: 100})
    assert sample(torch.zeros(1, VOCAB), [sequence])[0].token_ids == [3]


@pytest.mark.parametrize(
    ("output", "drafts", "forbidden"),
    [
        ([], [], [40]),
        ([20], [], [21, 40]),
        ([20, 30], [], [40]),
        ([10, 20], [], [21, 30, 40]),
        ([10], [20], [21, 30, 40]),
        ([], [10, 20], [21, 30, 40]),
        ([10, 20, 7], [], [40]),
    ],
)
def test_the_last_token_of_a_bad_word_is_forbidden_after_its_other_tokens(
    output, drafts, forbidden
):
    sequence = make_sequence(
        (10, 20), output, bad_words_token_ids=[[10, 20, 30], [20, 21], [40], [10, 20, 30, 50]]
    )
    found = processed(torch.zeros(1, VOCAB), sequence, drafts=drafts)
    assert found[0].isinf().nonzero().squeeze(1).tolist() == forbidden


def test_the_sequences_of_a_request_share_the_arrays_of_their_parameters():
    first = make_sequence(bad_words_token_ids=[[4]], eos=(5,), min_tokens=1, n=3)
    sequences = first.all_sequences()
    for row, sequence in enumerate(sequences):
        sequence.row = row
    processor = LogitsProcessor()
    found = processed(torch.zeros(3, VOCAB), *sequences, processor=processor)
    assert [row.isinf().nonzero().squeeze(1).tolist() for row in found] == [[4, 5]] * 3
    sequences[1].token_ids.append(9)
    found = processed(torch.zeros(3, VOCAB), *sequences, processor=processor)
    assert [row.isinf().sum().item() for row in found] == [2, 1, 2]
    assert len({id(params.stops) for params in processor._logits_params.values()}) == 1


def test_the_time_of_a_step_does_not_grow_with_the_number_of_bad_words():
    words = [[a, b, 9, 10 + b] for a in range(VOCAB) for b in range(60)] * 10
    sequence = make_sequence(output=[5, 6, 9], bad_words_token_ids=[*words, [9, 11]])
    processor = LogitsProcessor()
    logits = torch.zeros(1, VOCAB)
    processed(logits, sequence, processor=processor)  # The first call prepares the words.
    started_s = time.thread_time()
    for _ in range(20):
        found = processed(logits, sequence, processor=processor)
    assert time.thread_time() - started_s < 0.1
    assert found[0].isinf().nonzero().squeeze(1).tolist() == [11, 16]


def test_min_tokens_counts_draft_tokens():
    sequence = make_sequence(eos=(5,), min_tokens=2, output=[9])
    logits = torch.zeros(1, VOCAB)
    assert processed(logits, sequence)[0, 5] == -INF
    assert processed(logits, sequence, drafts=[8])[0, 5] == 0


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {}], ids=["random", "greedy"])
def test_a_request_whose_limits_exclude_all_tokens_ends_with_an_error_that_names_them(params):
    impossible = make_sequence(
        row=0, allowed_token_ids=[5, 6], bad_words_token_ids=[[6]], eos=(5,), min_tokens=3, **params
    )
    outcomes = sample(torch.randn(2, VOCAB), [impossible, make_sequence(row=1, **params)])
    assert outcomes[0].token_ids == []
    fields = "allowed_token_ids and bad_words_token_ids and min_tokens"
    assert f"forbidden by {fields}" in outcomes[0].error
    assert outcomes[1].error is None


def test_greedy_takes_the_argmax_of_the_processed_logits():
    torch.manual_seed(5)
    logits = torch.randn(20, VOCAB)
    sequences = [
        make_sequence((1, 2), [3, 4], row=i, presence_penalty=2, logit_bias={i: 1.5})
        for i in range(20)
    ]
    expected = processed(logits, *sequences).argmax(-1).tolist()
    assert [s.token_ids[0] for s in sample(logits, sequences)] == expected
    assert expected != logits.argmax(-1).tolist()


def test_masks_set_all_and_only_forbidden_tokens_to_minus_infinity():
    rng = np.random.default_rng(0)
    for vocab_size in (5, 32, 33, 200):
        allowed = rng.random((3, vocab_size)) < 0.5
        logits = torch.randn(4, vocab_size)
        masks = [mask_of(np.flatnonzero(row), vocab_size) for row in allowed]
        masked = with_masks(logits, {0: masks[0], 3: masks[2], 2: masks[1]})
        for row, is_allowed in ((0, allowed[0]), (2, allowed[1]), (3, allowed[2])):
            expected = torch.where(torch.from_numpy(is_allowed), logits[row], -INF)
            assert torch.equal(masked[row], expected)
        assert torch.equal(masked[1], logits[1])  # This row has no mask.
        rows = [0, 2, 3]
        assert torch.equal(with_masks(logits[rows], dict(enumerate(masks))), masked[rows])


def test_sampled_tokens_do_not_depend_on_the_slices_of_a_batch(monkeypatch):
    torch.manual_seed(1)
    settings = [{"logprobs": 3}, {"temperature": 1.0, "repetition_penalty": 1.3}, {"logprobs": 0}]
    sequences = [make_sequence(row=i, seed=i, **settings[i % 3]) for i in range(30)]
    logits = torch.randn(30, VOCAB)
    positions = [Position(sequence, []) for sequence in sequences]
    whole = Sampler().sample(logits, positions)
    monkeypatch.setattr(
        "nereid_backend.sampling.sampler.slices",
        lambda count, *_: [slice(i, min(i + 4, count)) for i in range(0, count, 4)],
    )
    cut = Sampler().sample(logits, positions)
    assert cut.token_ids == whole.token_ids
    assert cut.top == whole.top
    assert cut.logprobs == pytest.approx(whole.logprobs, abs=1e-6)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {VOCAB: 1}}, f"logit_bias: the token id {VOCAB} is outside"),
        ({"allowed_token_ids": [0, 99]}, "allowed_token_ids: the token id 99 is outside"),
        ({"bad_words_token_ids": [[1], [2, 80]]}, r"bad_words_token_ids: .* \(0 to 69\)"),
    ],
)
def test_tokens_beyond_the_vocabulary_are_refused_by_name(params, message):
    with pytest.raises(RequestError, match=message):
        check_token_ids(SamplingParams(**params), VOCAB)


def test_tokens_within_the_vocabulary_and_any_stop_tokens_pass_the_check():
    last = VOCAB - 1
    check_token_ids(
        SamplingParams(
            logit_bias={last: 1},
            allowed_token_ids=[last],
            bad_words_token_ids=[[last]],
            stop_token_ids=[VOCAB],
        ),
        VOCAB,
    )
