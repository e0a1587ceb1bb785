import json

import pytest
from nereid_backend.errors import ConfigError
from nereid_backend.serving.serving_settings import read_pooling_settings


@pytest.fixture
def args(tmp_path):
    """The arguments of `initialize` for a config.pbtxt that names the folder of a checkpoint."""
    (tmp_path / "model_repository" / "embedding").mkdir(parents=True)
    (tmp_path / "demo").mkdir()
    parameters = {"model": {"string_value": "../demo"}}
    return {
        "model_config": json.dumps({"parameters": parameters}),
        "model_repository": str(tmp_path / "model_repository" / "embedding"),
    }


def read(args, **environ):
    """Return the settings of the worker process."""
    return read_pooling_settings("embedding", args, environ)[1]


def test_the_path_in_config_pbtxt_is_relative_to_the_repository(args, tmp_path):
    assert read(args).model == str(tmp_path / "demo")


def test_a_missing_checkpoint_of_config_pbtxt_is_ignored(args, tmp_path):
    (tmp_path / "demo").rmdir()
    assert read(args) is None


def test_a_variable_overrides_config_pbtxt_and_none_disables_the_model(args):
    assert read(args, NEREID_EMBEDDING_MODEL="/mine").model == "/mine"
    assert read(args, NEREID_EMBEDDING_MODEL="none") is None


def test_settings_of_the_model_and_of_its_server_are_separated(args):
    variables = {"MAX_BATCH_TOKENS": "64", "MAX_REQUESTS": "7"}
    environ = {f"NEREID_EMBEDDING_{name}": value for name, value in variables.items()}
    serving, config = read_pooling_settings("embedding", args, environ)
    assert config.max_batch_tokens == 64
    assert serving.max_requests == 7


def test_the_variables_of_other_models_are_ignored(args):
    assert read(args, NEREID_RERANK_DTYPE="nonsense", NEREID_MODEL="x").dtype == "auto"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("DTYP", "x", "NEREID_EMBEDDING_DTYP: this setting does not exist."),
        ("DTYPE", "float8", "embedding_dtype: the value must be 'auto', 'float32', "),
        ("MAX_REQUESTS", "0", "embedding_max_requests: the value must be greater than 0,"),
        ("START_TIMEOUT_S", "soon", "embedding_start_timeout_s: the value must be an integer"),
    ],
)
def test_the_message_names_the_wrong_setting(args, variable, value, message):
    with pytest.raises(ConfigError) as caught:
        read(args, **{f"NEREID_EMBEDDING_{variable}": value})
    assert message in str(caught.value)


def test_an_unknown_parameter_of_config_pbtxt_is_refused(args):
    args["model_config"] = '{"parameters": {"dtyp": {"string_value": "auto"}}}'
    with pytest.raises(ConfigError, match=r"^embedding_dtyp: .* Did you mean embedding_dtype\?"):
        read(args)
