from pathlib import Path

import pytest
from nereid_backend import ConfigError, EngineConfig


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 * 2**20), ("2 GiB", 2**31), ("1.5gb", 1_500_000_000), ("4096", 4096), (7, 7)],
)
def test_a_memory_size_is_a_number_or_a_text_with_a_unit(text, size):
    config = EngineConfig("/m", kv_cache_memory=text, max_grammar_bytes=text)
    assert (config.kv_cache_bytes, config.max_grammar_bytes) == (size, size)


@pytest.mark.parametrize("value", ["", "-1", "2 bananas", "4,096", "2GiB or more", 1.5, True, -1])
def test_a_value_that_is_not_a_size_is_refused(value):
    with pytest.raises(ConfigError, match="kv_cache_memory: the value must be a number of bytes"):
        EngineConfig("/m", kv_cache_memory=value)


@pytest.mark.parametrize("value", ["0", 0])
def test_a_memory_size_of_zero_is_refused(value):
    with pytest.raises(ConfigError, match="kv_cache_memory: the value must be greater than 0"):
        EngineConfig("/m", kv_cache_memory=value)


def test_settings_from_text_become_typed_fields():
    config = EngineConfig.from_settings(
        {
            "model": "/m",
            "max_num_seqs": "8",
            "kv_cache_memory": "1MiB",
            "gpu_memory_utilization": "0.5",
            "max_model_len": "",
        }
    )
    assert (config.max_num_seqs, config.kv_cache_bytes) == (8, 2**20)
    assert (config.gpu_memory_utilization, config.max_model_len) == (0.5, None)


def test_an_unknown_setting_is_an_error_that_suggests_the_most_similar_one():
    message = "max_modellen: this setting does not exist. Did you mean max_model_len?"
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_settings({"model": "/m", "max_modellen": "3"})
    with pytest.raises(ConfigError, match=message):
        EngineConfig("/m", max_modellen=3)


def test_a_text_that_is_not_a_number_is_named():
    message = "max_num_seqs: the value must be an integer, but it is 'many'"
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_settings({"model": "/m", "max_num_seqs": "many"})


def test_two_adapters_with_the_same_name_are_refused():
    message = "lora_adapters: the value must be pairs with different names"
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_settings({"model": "/m", "lora_adapters": "a=/x, b=/y, a=/z"})


@pytest.mark.parametrize("adapters", [{"a": 5}, {5: "/x"}, {"a": Path("/x")}])
def test_an_adapter_with_a_name_or_a_folder_of_a_wrong_type_is_named(adapters):
    with pytest.raises(ConfigError, match="lora_adapters: the value must be a text, but it is"):
        EngineConfig("/m", lora_adapters=adapters)


def test_a_model_is_needed():
    with pytest.raises(ConfigError, match="model: this setting has no default, so it must be set"):
        EngineConfig.from_settings({})


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "int3"},
        {"device": "tpu"},
        {"block_size": 0},
        {"max_num_seqs": "8"},
        {"max_model_len": 1},
        {"num_threads": 0},
        {"num_threads": 5000},
        {"grammar_threads": 100_000},
        {"data_parallel_size": 5000},
        {"tensor_parallel_size": 5000},
        {"prepack": 1},
        {"grammar_timeout": 0},
        {"model": ""},
        {"gpu_memory_utilization": 1.5},
        {"gpu_memory_utilization": float("nan")},
        {"kv_cache_memory": "lots"},
        {"seed": -1},
        {"max_num_batched_tokens": 100, "max_num_seqs": 101},
    ],
)
def test_a_wrong_value_is_refused_when_the_config_is_made(wrong):
    name = next(iter(wrong))
    with pytest.raises(ConfigError, match=f"{name}: the value must be"):
        EngineConfig(**{"model": "/m", **wrong})


def test_a_number_that_no_process_can_receive_is_refused_with_its_name():
    message = f"seed: the value must be at most {2**64 - 1}, but it is {10**30}"
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_settings({"model": "/m", "seed": str(10**30)})


def test_the_error_about_too_many_threads_names_the_limit():
    message = "num_threads: the value must be at most 1024, but it is '5000'"
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_settings({"model": "/m", "num_threads": "5000"})


def test_a_config_cannot_be_changed():
    with pytest.raises(AttributeError):
        EngineConfig("/m").max_num_seqs = 3
