"""Tests that the code and the config.pbtxt files of the ensemble agree on names of tensors."""

import re
from pathlib import Path

import pytest
from nereid_backend.serving import tensor_names

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"


def tensors(model, side):
    """Return the tensors that a model's config.pbtxt declares: name -> (data type, dimension).

    `side` is "input" or "output".
    """
    text = (REPOSITORY / model / "config.pbtxt").read_text()
    block = re.search(rf"^{side} \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)[1]
    rows = re.findall(r'name: "(\w+)"\s+data_type: (\w+)\s+dims: \[ (-?\d+) \]', block)
    return {name: (data_type, int(dimension)) for name, data_type, dimension in rows}


def steps():
    """Return the steps in the ensemble's config.pbtxt: name of the model -> text of the step."""
    text = (REPOSITORY / "llm" / "config.pbtxt").read_text()
    parts = re.split(r'model_name: "(\w+)"', text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_ensemble_declares_the_inputs_that_the_code_reads():
    tensors_in_code = {
        tensor_names.TEXT_INPUT,
        tensor_names.INPUT_IDS,
        tensor_names.CHAT_REQUEST,
        tensor_names.STREAM,
        tensor_names.SAMPLING_PARAMETERS,
        tensor_names.EXCLUDE_INPUT,
        tensor_names.IMAGE,
        *(tensor_names.RETURN_PREFIX + name for name in tensor_names.RETURNABLE),
    }
    assert set(tensors("llm", "input")) == tensors_in_code


def test_the_ensemble_declares_the_outputs_that_the_code_writes():
    assert set(tensors("llm", "output")) == {
        tensor_names.TEXT_OUTPUT,
        tensor_names.DELTA,
        *tensor_names.RETURNABLE,
    }


def test_the_tensors_of_consecutive_steps_are_equal():
    assert tensors("llm", "input") == tensors("tokenizer", "input")
    assert tensors("llm", "output") == tensors("postprocessor", "output")
    assert tensors("tokenizer", "output") == tensors("executor", "input")
    assert tensors("executor", "output") == tensors("postprocessor", "input")


@pytest.mark.parametrize("model", ["tokenizer", "executor", "postprocessor"])
def test_the_ensemble_maps_every_tensor_of_a_step(model):
    step = steps()[model]
    for side in ("input", "output"):
        mapped = re.findall(rf'{side}_map {{ key: "(\w+)" value: "(\w+)" }}', step)
        assert {key for key, _ in mapped} == set(tensors(model, side))
