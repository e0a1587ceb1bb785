"""The checkpoint demo/see, which answers questions about drawings."""

import json
import re
from dataclasses import asdict

import pytest
from evaluate_see import FLOOR, measure
from train_see import FOLDER, Recipe

MAX_BYTES = 20_000_000
FILES = {
    "config.json", "generation_config.json", "processor_config.json", "tokenizer.json",
    "tokenizer_config.json", "chat_template.jinja", "model.safetensors", "training.json",
}  # fmt: skip


def test_the_folder_has_every_file_and_is_small():
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(sizes) == FILES
    assert sum(sizes.values()) < MAX_BYTES


def test_the_checkpoint_was_trained_with_the_commands_of_the_readme():
    record = json.loads((FOLDER / "training.json").read_text())
    assert record["previous"]["recipe"] == asdict(Recipe())
    defaults = asdict(Recipe())
    flags = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in record["recipe"].items()
        if value != defaults[name]
    ]
    readme = (FOLDER.parent / "README.md").read_text()
    (command,) = re.findall(r"train_see.py --start-from \S+ (.*)", readme)
    assert set(re.findall(r"--\S+ \S+", command)) == set(flags)


def test_most_questions_about_unseen_drawings_are_answered_correctly():
    # demo/evaluate_see.py asks many more questions, and its floor is 95 %.
    right, total = measure(FOLDER, num_drawings=10, seed=1)
    assert sum(total.values()) > 50
    assert sum(right.values()) / sum(total.values()) > 0.88


@pytest.mark.long
def test_the_accuracy_reaches_the_floor():
    right, total = measure(FOLDER, num_drawings=200, seed=0)
    assert sum(right.values()) / sum(total.values()) >= FLOOR
