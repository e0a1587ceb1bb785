import pytest
from nereid_backend import ConfigError, EngineConfig
from nereid_backend.config import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 * 2**20), ("2 GiB", 2**31), ("1.5gb", 1_500_000_000), ("4096", 4096), (7, 7)],
)
def test_sizes_of_memory_are_read_with_their_units(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "-1", "2 bananas", "0", True, 0, 1.5])
def test_what_is_no_size_of_memory_is_refused(text):
    with pytest.raises(ConfigError, match="kv_cache_memory: the value must be a positive"):
        parse_bytes(text)


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


def test_an_unknown_setting_is_an_error_that_suggests_the_nearest():
    with pytest.raises(ConfigError, match='"max_modellen" is not known'):
        EngineConfig.from_settings({"model": "/m", "max_modellen": "3"})


def test_a_setting_that_is_no_number_is_named_with_its_value():
    message = 'max_num_seqs: the value must be an integer, but it is "many"'
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_settings({"model": "/m", "max_num_seqs": "many"})


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
        EngineConfig("/m", **wrong)


def test_a_config_cannot_be_changed():
    with pytest.raises(AttributeError):
        EngineConfig("/m").max_num_seqs = 3
