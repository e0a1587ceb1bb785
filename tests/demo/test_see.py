"""Tests of the checkpoint demo/see, which answers questions about drawings."""

import json
import re
from dataclasses import asdict

import pytest
from evaluate_see import FLOOR, measure
from nereid_client.several_models.models_file import read_models_file
from train_see import FOLDER, Recipe
from transformers import AutoProcessor, LlavaForConditionalGeneration

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
    readme = (FOLDER.parent / "README.md").read_text()
    commands = re.findall(r"train_see\.py --start-from \S+ (.*)", readme)
    # The record of each training contains the record of the training before it.
    for command in reversed(commands):
        assert record["recipe"] == asdict(Recipe()) | _recipe_flags(command)
        record = record["previous"]
    assert record["recipe"] == asdict(Recipe())


def _recipe_flags(command):
    """Return the recipe's values in a command: {"seed": 3} for `--output /tmp/x --seed 3`."""
    flags = dict(re.findall(r"--(\S+) (\S+)", command))
    flags.pop("output", None)
    return {name.replace("-", "_"): json.loads(value) for name, value in flags.items()}


@pytest.mark.parametrize("text", ["Hello!", "What do you see?"])
def test_a_message_without_an_image_is_answered_with_a_request_for_a_picture(text):
    processor = AutoProcessor.from_pretrained(FOLDER)
    model = LlavaForConditionalGeneration.from_pretrained(FOLDER).eval()
    message = {"role": "user", "content": text}
    prompt = processor.apply_chat_template([message], add_generation_prompt=True)
    token_ids = processor.tokenizer(prompt, return_tensors="pt")["input_ids"]
    output = model.generate(token_ids, max_new_tokens=30)[0, token_ids.shape[1] :]
    answer = processor.decode(output, skip_special_tokens=True)
    assert answer == "Please send me a picture. I can only talk about drawings."


def test_most_questions_about_unseen_drawings_are_answered_correctly():
    # demo/evaluate_see.py asks many more questions and requires 95 % right answers.
    right, total = measure(FOLDER, num_drawings=10, seed=1)
    assert total.total() > 50
    assert right.total() / total.total() > 0.88


@pytest.mark.long
def test_the_accuracy_reaches_the_floor():
    right, total = measure(FOLDER, num_drawings=200, seed=0)
    assert right.total() / total.total() >= FLOOR


def test_one_file_serves_all_demo_models_and_loads_this_model_on_demand():
    models = read_models_file(FOLDER.with_name("models.toml"), {})
    assert [spec.name for spec in models.specs] == ["chat", "embed", "rerank", "see"]
    assert all((spec.path / "config.json").is_file() for spec in models.specs)
    assert [spec.name for spec in models.specs_at_start] == ["chat", "embed", "rerank"]
