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
    """A function that makes the engine measure the given number of free bytes of memory."""

    def set_free_bytes(num_bytes):
        monkeypatch.setattr(weight_memory, "available_memory", lambda: num_bytes)

    return set_free_bytes


@pytest.mark.parametrize(
    ("family", "weight_dtype"), [("qwen3", "int4"), ("qwen3", "int8"), ("gemma2", "int4")]
)
def test_rounding_while_reading_gives_the_same_tokens_as_rounding_later(
    family, weight_dtype, checkpoint, set_free
):
    folder = checkpoint(family)

    def tokens_and_bytes():
        engine = open_engine(folder, weight_dtype=weight_dtype)
        tokens = run_alone(engine)
        engine.close()
        return tokens, engine.info.weights_bytes

    rounded_later = tokens_and_bytes()
    # There are three bytes of memory for each weight. Weights of float32 need four bytes, so the
    # engine must round them while it reads them.
    set_free(3 * count_weights(folder).num_weights)
    assert tokens_and_bytes() == rounded_later


@pytest.mark.parametrize(
    ("dtype", "bytes_per_linear_weight", "remedy"),
    [
        ("float32", 2, "With dtype=bfloat16, they need"),
        ("bfloat16", 1.1, "With weight_dtype=int8, they need"),
        ("bfloat16", 0.7, "With weight_dtype=int4, they need"),
        ("bfloat16", 0, "Use a quantised checkpoint of the model, or a smaller model."),
    ],
)
def test_the_refusal_names_the_most_exact_setting_that_fits(
    dtype, bytes_per_linear_weight, remedy, checkpoint, set_free
):
    folder = checkpoint("qwen3")
    counts = count_weights(folder)
    # Only the weights of linear layers can be rounded. All other weights need two bytes each.
    num_other_weights = counts.num_weights - counts.num_unquantised_linear
    linear_bytes = counts.num_unquantised_linear * bytes_per_linear_weight
    set_free(int(2 * num_other_weights + linear_bytes))
    with pytest.raises(ConfigError, match=remedy):
        open_engine(folder, dtype=dtype)


def test_bfloat16_weights_count_as_float32_on_a_cpu_that_is_slow_in_bfloat16(
    checkpoint, set_free, monkeypatch, tmp_path
):
    folder = shutil.copytree(checkpoint("qwen3"), tmp_path / "copy")
    config_file = folder / "config.json"
    changes = {"dtype": "bfloat16", "text_config": 5}
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | changes))
    # There are three bytes of memory for each weight: enough for bfloat16 (two bytes), but not for
    # float32 (four bytes).
    set_free(3 * count_weights(folder).num_weights)
    config, device = EngineConfig(str(folder)), torch.device("cpu")

    monkeypatch.setattr(weight_memory, "has_fast_bfloat16", lambda: True)
    weight_memory.form_that_fits(config, device)

    monkeypatch.setattr(weight_memory, "has_fast_bfloat16", lambda: False)
    with pytest.raises(ConfigError, match=r"as float32, but .* With dtype=bfloat16, they need"):
        weight_memory.form_that_fits(config, device)


@pytest.mark.parametrize(
    ("device", "remedy"),
    [("cpu", "With weight_dtype=int4"), ("cuda", "Use a quantised checkpoint")],
)
def test_rounding_is_recommended_on_a_cpu_only(device, remedy, checkpoint, set_free):
    folder = checkpoint("qwen3")
    counts = count_weights(folder)
    num_other_weights = counts.num_weights - counts.num_unquantised_linear
    set_free(2 * num_other_weights + counts.num_unquantised_linear)
    config = EngineConfig(str(folder), dtype="bfloat16", prepack=False)
    with pytest.raises(ConfigError, match=remedy):
        weight_memory.form_that_fits(config, torch.device(device))


def test_rounded_weights_that_do_not_fit_are_refused(checkpoint, set_free):
    set_free(1000)
    with pytest.raises(ConfigError, match="but only 1000 bytes are free"):
        open_engine(checkpoint("qwen3"), weight_dtype="int4")
