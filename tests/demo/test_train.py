"""Tests that dialogues with a common prompt have the same loss together and one by one."""

from random import Random

import pytest
import torch
from chat_format import Encoder, Sample, join
from lessons import training_group
from train import Recipe, batches, loss_sum, make_model


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_model(Recipe(hidden_size=32, num_heads=2, num_layers=2), tokenizer).eval()


def _loss(model, samples):
    with torch.no_grad():
        return sum(loss_sum(model, batch).item() for batch in batches(samples))


def _without_targets_before(sample, start):
    is_target = [False] * start + sample.is_target[start:]
    return Sample(sample.token_ids, is_target, sample.branch)


def test_sequences_with_a_common_prefix_are_joined():
    first = Sample([7, 8, 1, 2], [False, False, True, True], [0, 0, 0, 0])
    second = Sample([7, 8, 3], [False, False, True], [0, 0, 0])
    joined = join([first, second])
    assert joined.token_ids == [7, 8, 1, 2, 3]
    assert joined.is_target == [False, False, True, True, True]
    assert joined.branch == [0, 0, 1, 1, 2]
    assert joined.positions == [0, 1, 2, 3, 2]


def test_a_single_sequence_is_a_prefix_without_branches():
    alone = Sample([7, 8], [False, True], [0, 0])
    assert join([alone]) == alone
    assert alone.positions == [0, 1]


def test_the_loss_of_joined_dialogues_is_the_sum_of_their_losses(model, tokenizer):
    rng, encoder = Random(4), Encoder(tokenizer)
    groups = (encoder.encode(training_group(rng)) for _ in range(40))
    samples = next(group for group in groups if len(group) > 3)
    joined = join(samples)
    prefix_length = joined.branch.count(0)
    # The joined sequence contains the targets of the common beginning only once.
    one_by_one = _loss(model, [_without_targets_before(one, prefix_length) for one in samples])
    assert one_by_one > 0
    together = _loss(model, [_without_targets_before(joined, prefix_length)])
    assert together == pytest.approx(one_by_one, rel=2e-3)  # The model computes in bfloat16.


def test_padding_does_not_change_the_loss(model, tokenizer):
    rng, encoder = Random(5), Encoder(tokenizer)
    samples = [join(encoder.encode(training_group(rng))) for _ in range(12)]
    together = _loss(model, samples)
    assert together == pytest.approx(sum(_loss(model, [one]) for one in samples), rel=2e-3)
