import json

import pytest
from nereid_backend import ConfigError
from nereid_backend.serving.serving_settings import read_settings


def args(tmp_path, **parameters):
    config = {"parameters": {n: {"string_value": v} for n, v in parameters.items()}}
    return {"model_config": json.dumps(config), "model_repository": str(tmp_path / "repo" / "llm")}


def test_a_relative_model_in_config_pbtxt_counts_from_the_repository(tmp_path):
    settings, engine = read_settings(args(tmp_path, model="../demo/chat"), {})
    assert settings.model == engine.model == str(tmp_path / "demo" / "chat")


def test_the_environment_wins_over_config_pbtxt(tmp_path):
    environment = {"NEREID_MODEL": "/other", "NEREID_MAX_NUM_SEQS": "7", "NEREID_HEARTBEAT_MS": "9"}
    settings, engine = read_settings(args(tmp_path, model="x", max_num_seqs="3"), environment)
    assert (settings.model, engine.max_num_seqs, settings.heartbeat_ms) == ("/other", 7, 9)


def test_an_empty_variable_is_no_setting(tmp_path):
    _, engine = read_settings(args(tmp_path, model="x", seed="3"), {"NEREID_SEED": ""})
    assert engine.seed == 3


def test_an_unknown_setting_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(ConfigError, match='"max_num_seq" is not known'):
        read_settings(args(tmp_path, model="x"), {"NEREID_MAX_NUM_SEQ": "3"})


def test_a_wrong_value_is_named(tmp_path):
    with pytest.raises(
        ConfigError, match='heartbeat_ms: the value must be an integer, but it is "soon"'
    ):
        read_settings(args(tmp_path, model="x"), {"NEREID_HEARTBEAT_MS": "soon"})
    with pytest.raises(
        ConfigError, match="stale_after_ms: the value must be at least 1, but it is 0"
    ):
        read_settings(args(tmp_path, model="x"), {"NEREID_STALE_AFTER_MS": "0"})


def test_the_frontends_variables_are_left_alone(tmp_path):
    read_settings(args(tmp_path, model="x"), {"NEREID_API_KEY": "k", "NEREID_OPENAI_PORT": "9000"})
