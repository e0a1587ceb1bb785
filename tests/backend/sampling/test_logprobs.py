import pytest
import torch
from backend.sampling.one_token import sample
from backend.sampling.test_logits import VOCAB, make_sequence
from nereid_backend import Engine, EngineConfig, SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.sampling.ranked_logprobs import rank_prompt, slices
from transformers import AutoModelForCausalLM


def test_top_logprobs_are_log_softmax_of_the_models_own_logits():
    torch.manual_seed(0)
    logits = torch.randn(4, VOCAB) * 4
    sequences = [
        make_sequence(row=0, logprobs=5, repetition_penalty=1.8),
        make_sequence(row=1, logprobs=0, temperature=2.0, allowed_token_ids=[7, 9]),
        make_sequence(row=2),
        make_sequence(row=3, logprobs=20, temperature=0.3, logit_bias={3: 50}),
    ]
    expected = logits.log_softmax(-1)
    outcomes = sample(logits, sequences)
    assert outcomes[2].top is None  # Only this sequence requests no log-probabilities.
    for row in (0, 1, 3):
        outcome, num_top = outcomes[row], sequences[row].params.logprobs
        (top,) = outcome.top
        assert top.token_ids[0] == outcome.token_ids[0]
        assert top.logprobs[0] == outcome.logprobs[0]
        assert top.token_ids[1:] == expected[row].topk(num_top).indices.tolist()
        assert top.logprobs == pytest.approx(expected[row][top.token_ids].tolist(), abs=1e-5)
        own = expected[row, top.token_ids[0]]
        assert top.rank == 1 + (expected[row] > own).sum().item()


def test_equal_logits_share_the_better_rank():
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = -1
    allowed = make_sequence(logprobs=1, allowed_token_ids=[3])
    assert sample(logits, [allowed])[0].top[0].rank == VOCAB
    assert sample(logits, [make_sequence(logprobs=1)])[0].top[0].rank == 1


def test_top_logprobs_contain_at_most_the_whole_vocabulary():
    (outcome,) = sample(torch.randn(1, 6), [make_sequence((1,), logprobs=20)])
    assert sorted(outcome.top[0].token_ids[1:]) == list(range(6))


def test_half_precision_logits_are_normalised_in_float32():
    torch.manual_seed(0)
    logits = (torch.randn(2, VOCAB) * 8).bfloat16()
    expected = logits.float().log_softmax(-1)
    (ranked,) = rank_prompt(logits, [4, 5], 3)
    for row, top in enumerate(ranked.read(*ranked.tensors)):
        assert top.logprobs == pytest.approx(expected[row][top.token_ids].tolist(), abs=1e-5)


def test_pieces_cover_every_row_once():
    for rows, vocab_size in ((1, 10), (100, 151_936), (7, 2**21), (0, 5)):
        pieces = slices(rows, vocab_size, torch.device("cpu"))
        covered = [row for piece in pieces for row in range(rows)[piece]]
        assert covered == list(range(rows))


def test_prompt_logprobs_in_chunks_equal_those_of_transformers(checkpoint):
    path = checkpoint("llama")
    prompt = torch.randint(3, 300, (23,), generator=torch.manual_seed(1)).tolist()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    engine = Engine(EngineConfig(str(path), dtype="float32", num_threads=1))
    params = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=4)
    sequence = Sequence("r", prompt, params, max_total_tokens=99)
    sequence.row, sequence.block_table = 0, [0, 1]
    prompt_logprobs = []
    for start, end in ((0, 9), (9, 10), (10, 23)):
        num_tokens = end - start
        chunk = Chunk(
            sequence,
            start,
            num_tokens,
            samples=end == 23,
            is_first=start == 0,
            num_logits=num_tokens,
        )
        result = engine._parts.runner.run(StepPlan([chunk], num_tokens))
        prompt_logprobs += result.prompt_logprobs[0]
    engine.close()
    assert [top.token_ids[0] for top in prompt_logprobs] == prompt[1:]
    for row, top in enumerate(prompt_logprobs):
        assert top.logprobs == pytest.approx(expected[row][top.token_ids].tolist(), abs=1e-4)
        assert set(top.token_ids[1:]) == set(expected[row].topk(4).indices.tolist())
    (sampled,) = result.sampled
    assert sampled.token_ids == [int(expected[-1].argmax())]
    assert sampled.top[0].logprobs == pytest.approx(
        expected[-1][sampled.top[0].token_ids].tolist(), abs=1e-4
    )


def test_where_fewer_tokens_are_within_reach_than_asked_for_the_others_have_no_probability():
    logits = torch.full((2, 50), float("-inf"))
    logits[:, [3, 30]] = torch.tensor([1.0, 2.0])
    (ranked,) = rank_prompt(logits, [3, 30], 4)
    for row, own, rank in zip(ranked.read(*ranked.tensors), (3, 30), (2, 1), strict=True):
        assert row.token_ids[:3] == [own, 30, 3]
        assert row.rank == rank
        assert row.logprobs[1] == pytest.approx(-0.3133, abs=1e-3)
        assert row.logprobs[3:] == [float("-inf")] * 2
        assert len(set(row.token_ids[1:])) == 4
