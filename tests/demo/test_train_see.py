"""Tests of the drawings and the training of the model that answers questions about drawings."""

import dataclasses
from random import Random

import pytest
import torch
from lessons.drawings import NAMES, Drawing, Item, make_drawing, patch_labels
from train_see import Recipe, RowMaker, Trainer, make_tokenizer

SMALL = Recipe(
    steps=4, image_steps=2, drawings_per_step=4, decay_steps=2, hidden_size=32, num_heads=2
)


def test_no_drawing_of_the_training_has_the_content_of_a_held_out_drawing():
    rng = Random("contents")
    trained = {make_drawing(rng, held_out=False).content for _ in range(4000)}
    held_out = {make_drawing(rng, held_out=True).content for _ in range(500)}
    assert len(held_out) > 200
    assert not trained & held_out


def test_the_content_of_a_drawing_does_not_depend_on_the_places():
    first, second = Item("star", "red", (0.2, 0.2), 0.1), Item("circle", "blue", (0.8, 0.8), 0.1)
    drawing = Drawing((100, 100), "white", (first, second))
    assert drawing.content == "white: blue circle, red star"
    moved = dataclasses.replace(second, centre=(0.3, 0.7))
    assert Drawing((90, 120), "white", (moved, first)).content == drawing.content


def test_each_item_has_one_patch_with_its_centre():
    rng = Random("labels")
    for _ in range(200):
        drawing = make_drawing(rng, held_out=False)
        labels = patch_labels(drawing, patches_per_side=6)
        names = [NAMES[label.name] for label in labels if label.is_centre]
        assert sorted(names) == sorted(item.name for item in drawing.items)


@pytest.mark.parametrize("share_without_drawing", [0.0, 1.0])
def test_each_row_of_the_training_begins_like_a_prompt(monkeypatch, share_without_drawing):
    monkeypatch.setattr("train_see._NO_DRAWING", share_without_drawing)
    tokenizer = make_tokenizer()
    row = RowMaker(Recipe(), tokenizer).make(Random("row"))
    assert tokenizer.decode(row.sample.token_ids).startswith("<|im_start|>user\n")


def test_a_training_that_was_stopped_continues_with_the_same_result(tmp_path):
    whole = Trainer(SMALL, tmp_path / "whole")
    whole.train()
    stopped = Trainer(SMALL, tmp_path / "stopped")
    compute_gradients = stopped._compute_gradients

    def stop_after_2(step):
        if step == 2:
            stopped._store()
            raise KeyboardInterrupt
        return compute_gradients(step)

    stopped._compute_gradients = stop_after_2
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    continued = Trainer(SMALL, tmp_path / "stopped")
    continued.train()
    torch.testing.assert_close(
        continued.model.state_dict(), whole.model.state_dict(), rtol=0, atol=1e-6
    )


def test_a_training_with_other_parameters_is_not_continued(tmp_path):
    Trainer(SMALL, tmp_path)._store()
    with pytest.raises(ValueError, match="has other parameters"):
        Trainer(dataclasses.replace(SMALL, seed=2), tmp_path)
