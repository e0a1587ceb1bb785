import random
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from fakes.hashed_path import HashedPath
from fakes.modular_guide import ModularGuide
from nereid_backend import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.errors import EngineError
from nereid_backend.sampling.sampler import NOT_FINITE
from nereid_backend.step_runner import Runner
from scipy import stats

VOCAB = 45
EOS = 44


def make_sequence(prompt=(1, 2, 3), row=0, seed=0, guide=False, **params):
    """Return a new sequence with the sampling parameters `params`.

    `guide` is the guide of the sequence; True creates a `ModularGuide`, and False no guide.
    """
    sequence = Sequence(
        "r",
        list(prompt),
        SamplingParams(**params),
        max_total_tokens=999,
        eos_token_ids=(EOS,),
        seed=seed,
    )
    sequence.row = row
    if guide:
        sequence.guide = ModularGuide(VOCAB) if guide is True else guide
    return sequence


def chunk_of(sequence, *, start=None, end=None, is_first=False, drafts=()):
    """Return a chunk of a sequence that ends with the draft tokens `drafts`.

    The chunk contains the tokens from `start` to `end`. By default, `start` is the first token that
    is not computed yet, and `end` is the end of the known tokens. A chunk with an explicit `end`
    does not sample a token.
    """
    sequence.draft_token_ids = list(drafts)
    start = sequence.num_computed_tokens if start is None else start
    samples = end is None
    end = len(sequence.token_ids) if end is None else end
    num_tokens = end - start + len(drafts)
    num_logits = 1 + len(drafts) if samples else 0
    return Chunk(sequence, start, num_tokens, samples, is_first, num_logits)


def run(runner, *chunks):
    """Run one step, and append the sampled tokens to the sequences, as the scheduler does."""
    result = runner.run(StepPlan(list(chunks), sum(chunk.num_tokens for chunk in chunks)))
    sampling = [chunk.sequence for chunk in chunks if chunk.samples]
    for sequence, sampled in zip(sampling, result.sampled, strict=True):
        assert len(sampled.token_ids) == len(sampled.logprobs)
        if sampled.error is None and sampled.token_ids[-1] not in sequence.stop_token_ids:
            # The last sampled token is never a draft token, so the next step has to compute it.
            assert sampled.token_ids != sequence.draft_token_ids[: len(sampled.token_ids)]
        sequence.num_computed_tokens = len(sequence.token_ids)
        sequence.token_ids += sampled.token_ids
    return result


def output_of(sequence):
    return sequence.token_ids[sequence.num_prompt_tokens :]


def answer_alone(sequence, num_tokens):
    """Return the tokens of a request that runs alone and without drafts."""
    runner = Runner(HashedPath(VOCAB))
    while not _has_ended(sequence, num_tokens):
        run(runner, chunk_of(sequence))
    return output_of(sequence)[:num_tokens]


def _has_ended(sequence, num_tokens):
    output = output_of(sequence)
    return len(output) >= num_tokens or EOS in output


SETTINGS = [
    {},
    {"temperature": 0.0},
    {"guide": True},
    {"temperature": 1.7, "top_p": 0.8, "guide": True},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"temperature": 0.0, "presence_penalty": 1.0, "guide": True},
    {"bad_words_token_ids": [[4, 5], [6], [7, 7, 8]], "min_tokens": 20, "guide": True},
    {"logit_bias": {3: 2.0, 9: -4.0}, "top_k": 7, "min_p": 0.02, "logprobs": 2, "guide": True},
    {"allowed_token_ids": list(range(0, VOCAB, 2)), "min_tokens": 3},
]


@pytest.mark.parametrize("seed", range(6))
def test_the_tokens_of_a_request_do_not_depend_on_other_requests_chunks_rows_or_drafts(seed):
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))] for _ in SETTINGS]

    def new_sequence(number):
        return make_sequence(prompts[number], row=number, seed=number, **SETTINGS[number])

    numbers = range(len(SETTINGS))
    expected = [answer_alone(new_sequence(number), 30) for number in numbers]
    assert len({tuple(tokens) for tokens in expected}) == len(SETTINGS)

    # Each step computes random chunks of random sequences. Some steps follow a preemption.
    runner = Runner(HashedPath(VOCAB))
    sequences = [new_sequence(number) for number in numbers]
    num_drafts = 0
    while active := [number for number in numbers if not _has_ended(sequences[number], 30)]:
        chunks = []
        for number in rng.sample(active, rng.randrange(1, len(active) + 1)):
            chunks.append(_random_chunk(sequences[number], expected[number], rng))
            num_drafts += len(sequences[number].draft_token_ids)
        if rng.random() < 0.1:
            _move_to_other_rows(sequences, rng)
        run(runner, *chunks)

    assert num_drafts > 50
    assert [output_of(sequence)[:30] for sequence in sequences] == expected


def _move_to_other_rows(sequences, rng):
    """Move each sequence to a random row, as if it had been preempted and resumed."""
    rows = rng.sample(range(20), len(sequences))
    for sequence, row in zip(sequences, rows, strict=True):
        sequence.row, sequence.num_computed_tokens = row, 0


def _random_chunk(sequence, answer, rng):
    """Return a random chunk of a sequence.

    The chunk contains some of the tokens that are not computed yet, or all of them together with up
    to four draft tokens. The draft tokens are copied from `answer`, but in about half of the chunks
    one of them is replaced by a random token.
    """
    start, num_known = sequence.num_computed_tokens, len(sequence.token_ids)
    if num_known - start > 1 and rng.random() < 0.3:
        chunk = chunk_of(sequence, end=rng.randrange(start + 1, num_known))
        sequence.num_computed_tokens += chunk.num_tokens
        return chunk

    following_tokens = answer[len(output_of(sequence)) :]
    drafts = following_tokens[: rng.randrange(5)]
    if drafts and rng.random() < 0.5:
        drafts[rng.randrange(len(drafts))] = rng.randrange(VOCAB)
    return chunk_of(sequence, drafts=drafts)


def test_right_drafts_are_kept_and_the_first_wrong_one_is_replaced():
    answer = answer_alone(make_sequence(temperature=0.0), 6)
    wrong = (answer[2] + 1) % VOCAB
    for drafts, num_sampled in (
        (answer[:4], 5),
        ([*answer[:2], wrong, answer[3]], 3),
        ([wrong], 1),
    ):
        sequence = make_sequence(temperature=0.0)
        run(Runner(HashedPath(VOCAB)), chunk_of(sequence, drafts=drafts))
        assert output_of(sequence) == answer[:num_sampled]


def test_drafts_do_not_change_the_distribution():
    """Sample two tokens with each of 6000 seeds.

    Compare the frequencies of the pairs of tokens with the exact probabilities.
    """
    vocab_size, num_sequences = 6, 6000
    path = HashedPath(vocab_size, spread=1.0)
    params = {"temperature": 1.2, "top_p": 0.9, "frequency_penalty": 0.4}
    probabilities = _pair_probabilities(path, [1, 2], **params)
    sequences = [make_sequence((1, 2), row=i, seed=7 * i, **params) for i in range(num_sequences)]
    likely_token = int(path.logits_after([1, 2]).argmax())
    drafts = [likely_token, int(path.logits_after([1, 2, likely_token]).argmax())]

    run(Runner(path), *(chunk_of(sequence, drafts=drafts) for sequence in sequences))
    lengths = Counter(len(output_of(sequence)) for sequence in sequences)
    # If the first draft token is rejected, the first step samples only one token. These sequences
    # need another step for their second token.
    short = [sequence for sequence in sequences if len(output_of(sequence)) == 1]
    run(Runner(path), *(chunk_of(sequence, start=2, drafts=()) for sequence in short))

    assert all(lengths[length] > 100 for length in (1, 2, 3))
    pair_counts = np.zeros((vocab_size, vocab_size))
    for sequence in sequences:
        first, second = output_of(sequence)[:2]
        pair_counts[first, second] += 1
    assert (pair_counts[probabilities == 0] == 0).all()
    # A chi-square test requires at least 5 expected pairs in each cell, so only the likely pairs
    # are compared.
    is_likely = probabilities * num_sequences > 5
    assert is_likely.sum() > 12
    observed, expected = pair_counts[is_likely], probabilities[is_likely] * num_sequences
    chi2 = ((observed - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(chi2, len(observed) - 1) > 1e-3


def _pair_probabilities(path, prompt, **params):
    """Return a matrix: entry [a, b] is the probability that the first two tokens are a and b."""
    probabilities = np.zeros((path.vocab_size, path.vocab_size))
    for first, probability in enumerate(_exact(path.logits_after(prompt), [], **params)):
        second_probabilities = _exact(path.logits_after([*prompt, first]), [first], **params)
        probabilities[first] = probability * second_probabilities
    return probabilities


def _exact(logits, output, *, temperature, top_p, frequency_penalty):
    """Return the exact probabilities of the next token after the generated tokens `output`."""
    logits = logits.double().clone()
    for token in output:
        logits[token] -= frequency_penalty
    probs = (logits / temperature).softmax(-1)
    order = probs.argsort(descending=True)
    sum_of_likelier_tokens = probs[order].cumsum(-1) - probs[order]
    probs[order[sum_of_likelier_tokens >= top_p]] = 0
    return (probs / probs.sum()).numpy()


def test_a_stop_token_among_right_drafts_ends_the_answer_there():
    sequence = make_sequence(temperature=0.0, logit_bias={EOS: 100})
    run(Runner(HashedPath(VOCAB)), chunk_of(sequence, drafts=[EOS, EOS]))
    assert output_of(sequence) == [EOS]


def test_a_guide_restricts_every_token_and_accepts_the_chosen_tokens():
    sequence = make_sequence(guide=True, seed=3)
    answer = answer_alone(sequence, 200)
    # The constructor raises an error if a token of the answer was not allowed.
    ModularGuide(VOCAB, tuple(t for t in answer if t != EOS))
    assert sequence.guide.accepted[: len(answer) - 1] == answer[:-1]
    assert answer != answer_alone(make_sequence(seed=3), 200)


def test_forced_tokens_come_with_the_token_that_forces_them():
    # After a multiple of seven, such as token 14, the guide allows only the tokens 8, 9, 10.
    sequence = make_sequence(temperature=0.0, guide=True, logit_bias={14: 100})
    result = run(Runner(HashedPath(VOCAB)), chunk_of(sequence))
    assert result.sampled[0].token_ids == [14, 8, 9, 10]
    assert result.sampled[0].logprobs[1:] == [0.0, 0.0, 0.0]
    assert sequence.guide.accepted == [14, 8, 9, 10]


def test_drafts_after_forced_tokens_are_kept_too():
    answer = answer_alone(make_sequence(temperature=0.0, guide=True, logit_bias={14: 100}), 6)
    assert answer[:5] == [14, 8, 9, 10, 14]
    for num_drafts in range(1, 6):
        sequence = make_sequence(temperature=0.0, guide=True, logit_bias={14: 100})
        run(Runner(HashedPath(VOCAB)), chunk_of(sequence, drafts=answer[:num_drafts]))
        assert output_of(sequence) == ([14, 8, 9, 10] * 2 if num_drafts >= 4 else [14, 8, 9, 10])


@pytest.mark.parametrize(
    "params",
    [{"logprobs": 0}, {"allowed_token_ids": [8, 9, 10, 14]}, {"bad_words_token_ids": [[9, 9]]}],
)
def test_tokens_are_not_forced_if_other_parameters_need_the_logits(params):
    # After token 14, the guide allows only the tokens 8, 9, 10, one after the other.
    sequence = make_sequence(temperature=0.0, guide=True, logit_bias={14: 100}, **params)
    runner = Runner(HashedPath(VOCAB))
    for length in range(1, 5):
        run(runner, chunk_of(sequence))
        assert len(output_of(sequence)) == length
    assert output_of(sequence) == [14, 8, 9, 10]


@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(0, [14, 8, 9]), (2, [14, 8, 9]), (3, [14, 8])]
)
def test_forced_tokens_end_at_a_stop_token_and_wait_for_min_tokens(min_tokens, expected):
    # After token 14, the guide allows only the tokens 8, 9, 10, one after the other. Token 9 is a
    # stop token, so it is forbidden until the answer has `min_tokens` tokens.
    sequence = make_sequence(
        temperature=0.0,
        guide=True,
        logit_bias={14: 100},
        stop_token_ids=[9],
        min_tokens=min_tokens,
    )
    runner = Runner(HashedPath(VOCAB))

    run(runner, chunk_of(sequence))

    assert output_of(sequence) == expected
    if expected[-1] != 9:
        (sampled,) = run(runner, chunk_of(sequence)).sampled
        assert "forbidden by the grammar and min_tokens" in sampled.error


def test_a_guide_and_allowed_tokens_that_contradict_each_other_end_the_request_by_name():
    contradiction = make_sequence((4,), guide=ModularGuide(VOCAB, (7,)), allowed_token_ids=[3, 4])
    valid = make_sequence(row=1, guide=True)
    path = HashedPath(VOCAB)
    result = run(Runner(path), chunk_of(contradiction), chunk_of(valid))
    assert "forbidden by the grammar and allowed_token_ids" in result.sampled[0].error
    assert result.sampled[1].error is None
    assert path.cleared == []


class BrokenGuide(ModularGuide):
    """A guide whose method `broken_method` raises an error."""

    def __init__(self, broken_method):
        self.broken_method = None  # The constructor of the base class calls `accept`.
        super().__init__(VOCAB)
        self.broken_method = broken_method

    def fill(self, row):
        self._fail_if_broken("fill")
        return super().fill(row)

    def accept(self, token_ids):
        self._fail_if_broken("accept")
        return super().accept(token_ids)

    def forced(self):
        self._fail_if_broken("forced")
        return super().forced()

    def _fail_if_broken(self, method):
        if self.broken_method == method:
            raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("broken_method", ["fill", "accept", "forced"])
def test_a_guide_that_fails_ends_its_own_request_only(broken_method):
    guides = [BrokenGuide(broken_method), ModularGuide(VOCAB)]
    sequences = [make_sequence(row=row, guide=guide) for row, guide in enumerate(guides)]
    result = run(Runner(HashedPath(VOCAB)), *(chunk_of(sequence) for sequence in sequences))
    assert result.sampled[0].token_ids == []
    assert "ZeroDivisionError: a bug" in result.sampled[0].error
    assert result.sampled[1].error is None


class BlindGuide(ModularGuide):
    """A guide whose masks allow all tokens, but which then accepts no token."""

    def fill(self, row):
        return False

    def accept(self, token_ids):
        if token_ids:
            raise EngineError("not allowed")


def test_a_token_that_a_guide_does_not_accept_ends_the_request():
    result = run(Runner(HashedPath(VOCAB)), chunk_of(make_sequence(guide=BlindGuide(VOCAB))))
    assert "not allowed" in result.sampled[0].error


def test_masks_are_filled_while_the_model_computes():
    model_started, mask_filled = threading.Event(), threading.Event()

    class WaitingPath(HashedPath):
        """A model whose forward pass waits until the guide has filled a mask."""

        def forward(self, plan, sampled=None):
            model_started.set()
            assert mask_filled.wait(timeout=60)
            return super().forward(plan)

    class WaitingGuide(ModularGuide):
        """A guide that waits for the start of the forward pass before it fills a mask."""

        def fill(self, row):
            assert model_started.wait(timeout=60)
            mask_filled.set()
            return super().fill(row)

    runner = Runner(WaitingPath(VOCAB))
    # In its first step, the runner learns the size of the vocabulary, which is also the size of the
    # masks. This first step has no guide, so set the event for which the model would wait.
    mask_filled.set()
    run(runner, chunk_of(make_sequence()))
    model_started.clear()
    mask_filled.clear()

    result = run(runner, chunk_of(make_sequence(guide=WaitingGuide(VOCAB))))

    assert result.sampled[0].error is None


def test_a_failed_step_waits_for_its_masks_and_clears_its_sequences():
    model_failed = threading.Event()

    class FailingPath(HashedPath):
        def forward(self, plan, sampled=None):
            model_failed.set()
            raise RuntimeError("out of memory")

    class SlowGuide(ModularGuide):
        """A guide that fills a mask 50 ms after the model has failed."""

        def fill(self, row):
            assert model_failed.wait(timeout=60)
            time.sleep(0.05)
            self.is_filled = True
            return super().fill(row)

    runner = Runner(HashedPath(VOCAB))
    # In its first step, the runner learns the size of the vocabulary, which is also the size of the
    # masks.
    run(runner, chunk_of(make_sequence()))
    runner._path = FailingPath(VOCAB)
    sequence = make_sequence(guide=SlowGuide(VOCAB))

    with pytest.raises(RuntimeError, match="out of memory"):
        run(runner, chunk_of(sequence))

    assert sequence.guide.is_filled
    assert runner._path.cleared == [sequence]


def test_several_threads_fill_the_masks_of_many_guides():
    sequences = [
        make_sequence((i % VOCAB,), row=i, guide=ModularGuide(VOCAB, (i % VOCAB,)))
        for i in range(1, 60)
        if i % 7
    ]
    result = run(Runner(HashedPath(VOCAB)), *(chunk_of(sequence) for sequence in sequences))
    assert all(sampled.error is None for sampled in result.sampled)


def test_logits_that_are_not_finite_clear_the_state_of_only_their_own_request():
    path = HashedPath(VOCAB, broken_after=9)
    broken, sound = make_sequence((9,), row=0), make_sequence((8,), row=1)
    result = run(Runner(path), chunk_of(broken), chunk_of(sound))
    assert result.sampled[0].error == NOT_FINITE
    assert result.sampled[1].error is None
    assert path.cleared == [broken]


def test_logits_that_are_not_finite_after_a_wrong_draft_are_ignored():
    sequence = make_sequence(temperature=0.0, logit_bias={9: -100})
    (sampled,) = run(
        Runner(HashedPath(VOCAB, broken_after=9)), chunk_of(sequence, drafts=[9, 9])
    ).sampled
    assert sampled.error is None
    assert len(sampled.token_ids) == 1


def test_prompt_logprobs_are_computed_only_for_tokens_of_the_prompt():
    path = HashedPath(VOCAB)
    prompt = [5, 6, 7, 8]
    other = make_sequence((1, 2, 3), row=1, temperature=0.0)
    reporting = make_sequence(prompt, row=0, prompt_logprobs=1, temperature=0.0)
    whole_prompt = Chunk(reporting, 0, 4, samples=True, is_first=True, num_logits=4)

    result = Runner(path).run(StepPlan([chunk_of(other), whole_prompt], num_tokens=7))

    # The chunk at index 1 contains the whole prompt. The first token of a prompt has no logprobs.
    assert list(result.prompt_logprobs) == [1]
    report = result.prompt_logprobs[1]
    assert [top.token_ids[0] for top in report] == prompt[1:]
    for length, top in enumerate(report, start=1):
        expected = path.logits_after(prompt[:length]).log_softmax(-1)
        assert top.logprobs == pytest.approx(expected[top.token_ids].tolist(), abs=1e-5)
    assert result.sampled[0].token_ids == [int(path.logits_after([1, 2, 3]).argmax())]
    assert result.sampled[1].token_ids == [int(path.logits_after(prompt).argmax())]


def test_a_chunk_inside_a_prompt_reports_without_sampling():
    sequence = make_sequence((5, 6, 7, 8), prompt_logprobs=0)
    chunk = Chunk(sequence, 1, 2, samples=False, is_first=False, num_logits=2)
    result = Runner(HashedPath(VOCAB)).run(StepPlan([chunk], num_tokens=2))
    assert result.sampled == []
    assert [top.token_ids for top in result.prompt_logprobs[0]] == [[7], [8]]


def test_a_step_without_logits_returns_no_tokens_and_no_logprobs():
    sequence = make_sequence((5, 6, 7, 8))
    chunk = Chunk(sequence, 0, 2, samples=False, is_first=True, num_logits=0)
    result = Runner(HashedPath(VOCAB)).run(StepPlan([chunk], num_tokens=2))
    assert result.sampled == []
    assert result.prompt_logprobs == {}


def test_sequences_with_different_seeds_differ():
    answers = {tuple(answer_alone(make_sequence(seed=seed), 20)) for seed in range(8)}
    assert len(answers) == 8


def test_the_tokens_depend_on_the_seed_and_not_on_the_generator_of_torch():
    first = answer_alone(make_sequence(seed=5), 20)
    torch.manual_seed(123)
    torch.rand(7)
    assert answer_alone(make_sequence(seed=5), 20) == first


def test_masks_that_are_filled_quickly_are_filled_without_a_thread():
    filling_threads = []

    class RecordingGuide(ModularGuide):
        def fill(self, row):
            filling_threads.append(threading.current_thread())
            return super().fill(row)

    sequence = make_sequence(guide=RecordingGuide(VOCAB), bad_words_token_ids=[[EOS]])
    runner = Runner(HashedPath(VOCAB))
    for _ in range(60):
        assert run(runner, chunk_of(sequence)).sampled[0].error is None

    # The first step fills its mask after the forward pass, because the runner does not know the
    # size of the masks before. The second step uses another thread, because the runner does not
    # know yet that masks are filled quickly.
    assert filling_threads[1] is not threading.current_thread()
    assert filling_threads[-1] is threading.current_thread()
