"""Tests of checkpoints that are larger than the free memory.

Such a checkpoint is refused, or its weights are rounded while they are read.
"""

import json
import shutil

import pytest
import torch
from backend.exactness import open_engine, run_alone
from nereid_backend import ConfigError, EngineConfig
from nereid_backend.checkpoints.weight_counts import count_weights
from nereid_backend.model.memory import weight_memory


@pytest.fixture
def set_free(monkeypatch):
    """A function that sets the free memory in bytes."""

    def set_bytes(num_bytes):
        monkeypatch.setattr(weight_memory, "available_memory", lambda: num_bytes)

    return set_bytes


@pytest.mark.parametrize(
    ("family", "name"), [("qwen3", "int4"), ("qwen3", "int8"), ("gemma2", "int4")]
)
def test_rounding_while_reading_gives_the_same_tokens_as_rounding_later(
    family, name, checkpoint, set_free
):
    folder = checkpoint(family)
    engine = open_engine(folder, weight_dtype=name)
    expected, num_bytes = run_alone(engine), engine.info.weights_bytes
    engine.close()
    counts = count_weights(folder)
    set_free(counts.num_weights * 3)
    engine = open_engine(folder, weight_dtype=name)
    assert run_alone(engine) == expected
    assert engine.info.weights_bytes == num_bytes
    engine.close()


def test_the_refusal_names_the_most_exact_setting_that_fits(checkpoint, set_free):
    folder = checkpoint("qwen3")
    counts = count_weights(folder)
    others = 2 * (counts.num_weights - counts.num_unquantised_linear)
    for free, remedy in (
        (2 * counts.num_weights, "With dtype=bfloat16, they need"),
        (others + counts.num_unquantised_linear * 1.1, "With weight_dtype=int8, they need"),
        (others + counts.num_unquantised_linear * 0.7, "With weight_dtype=int4, they need"),
        (others, "Use a quantised checkpoint of the model, or a smaller model."),
    ):
        set_free(int(free))
        dtype = "float32" if "bfloat16" in remedy else "bfloat16"
        with pytest.raises(ConfigError, match=remedy):
            open_engine(folder, dtype=dtype)


def test_bfloat16_weights_count_as_float32_on_a_cpu_that_is_slow_in_bfloat16(
    checkpoint, set_free, monkeypatch, tmp_path
):
    folder = shutil.copytree(checkpoint("qwen3"), tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"dtype": "bfloat16", "text_config": 5})
    )
    set_free(3 * count_weights(folder).num_weights)
    device = torch.device("cpu")
    monkeypatch.setattr(weight_memory, "has_fast_bfloat16", lambda: True)
    weight_memory.form_that_fits(EngineConfig(str(folder)), device)
    monkeypatch.setattr(weight_memory, "has_fast_bfloat16", lambda: False)
    with pytest.raises(ConfigError, match=r"as float32, but .* With dtype=bfloat16, they need"):
        weight_memory.form_that_fits(EngineConfig(str(folder)), device)


def test_rounding_is_recommended_on_a_cpu_only(checkpoint, set_free):
    folder = checkpoint("qwen3")
    counts = count_weights(folder)
    set_free(
        2 * (counts.num_weights - counts.num_unquantised_linear) + counts.num_unquantised_linear
    )
    config = EngineConfig(str(folder), dtype="bfloat16", prepack=False)
    for device, remedy in (
        ("cpu", "With weight_dtype=int4"),
        ("cuda", "Use a quantised checkpoint"),
    ):
        with pytest.raises(ConfigError, match=remedy):
            weight_memory.form_that_fits(config, torch.device(device))


def test_rounded_weights_that_do_not_fit_are_refused(checkpoint, set_free):
    set_free(1000)
    with pytest.raises(ConfigError, match="but only 1000 bytes are free"):
        open_engine(checkpoint("qwen3"), weight_dtype="int4")
