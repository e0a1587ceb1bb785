import json
from dataclasses import fields

import pytest
from nereid_backend.errors import ConfigError
from nereid_backend.pooling.pooling_config import PoolingConfig
from nereid_backend.serving import pooling_tensor_names as names
from nereid_backend.serving.pooling.pooling_settings import PoolingServing, read_pooling_settings
from nereid_backend.serving.serving_settings import read_settings


@pytest.fixture
def args(tmp_path):
    """What the server gives a model whose config.pbtxt names the demo's checkpoint."""
    (tmp_path / "model_repository" / "embedding").mkdir(parents=True)
    (tmp_path / "demo").mkdir()
    parameters = {"model": {"string_value": "../demo"}}
    return {
        "model_config": json.dumps({"parameters": parameters}),
        "model_repository": str(tmp_path / "model_repository" / "embedding"),
    }


def read(args, **environ):
    return read_pooling_settings("embedding", args, environ)


def test_the_files_checkpoint_counts_from_the_repository(args, tmp_path):
    assert read(args).config.model == str(tmp_path / "demo")


def test_the_files_checkpoint_counts_only_where_it_is_there(args, tmp_path):
    (tmp_path / "demo").rmdir()
    assert read(args).config is None


def test_a_variable_wins_and_none_serves_nothing(args):
    assert read(args, NEREID_EMBEDDING_MODEL="/mine").config.model == "/mine"
    assert read(args, NEREID_EMBEDDING_MODEL="none").config is None


def test_settings_of_the_library_and_of_the_server_are_told_apart(args):
    settings = read(args, NEREID_EMBEDDING_MAX_BATCH_TOKENS="64", NEREID_EMBEDDING_MAX_REQUESTS="7")
    assert settings.config.max_batch_tokens == 64
    assert settings.serving.max_requests == 7


def test_the_other_models_variables_are_left_alone(args):
    assert read(args, NEREID_RERANK_DTYPE="nonsense", NEREID_MODEL="x").config.dtype == "auto"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("DTYP", "x", '"embedding_dtyp" is not known. Did you mean "embedding_dtype"?'),
        ("DTYPE", "float8", "embedding_dtype: the value must be one of"),
        ("MAX_REQUESTS", "0", "embedding_max_requests: the value must be at least 1, but it is 0."),
        ("START_TIMEOUT_S", "soon", "embedding_start_timeout_s: the value must be an integer"),
    ],
)
def test_a_wrong_setting_is_named_as_it_was_written(args, variable, value, said):
    with pytest.raises(ConfigError) as caught:
        read(args, **{f"NEREID_EMBEDDING_{variable}": value})
    assert said in str(caught.value)


def test_the_list_of_names_has_every_setting():
    known = {field.name for config in (PoolingConfig, PoolingServing) for field in fields(config)}
    assert set(names.SETTINGS) == known


def test_the_language_models_settings_leave_these_names_alone(args):
    environ = {f"NEREID_{name.upper()}": "x" for name in names.SETTING_NAMES}
    read_settings(args, environ)
    with pytest.raises(ConfigError, match='The setting "embedding_modell" is not known'):
        read_settings(args, {"NEREID_EMBEDDING_MODELL": "x"})
