import json

import pytest
from nereid_backend import ConfigError
from nereid_backend.serving.serving_settings import (
    check_single_instance,
    read_pooling_settings,
    read_settings,
)

# Variables of other programs. Their values may be wrong, because these functions ignore them.
OTHER_SETTINGS = {
    "NEREID_API_KEY": "k",
    "NEREID_OPENAI_PORT": "many",
    "NEREID_EMBEDDING_DTYPE": "unknown",
    "NEREID_RERANK_MAX_REQUESTS": "x",
}


def args(tmp_path, **parameters):
    """Return the arguments that Triton server passes to a model with the given parameters."""
    config = {"parameters": {n: {"string_value": v} for n, v in parameters.items()}}
    return {"model_config": json.dumps(config), "model_repository": str(tmp_path / "repo" / "llm")}


def test_a_relative_path_in_config_pbtxt_is_relative_to_the_repository(tmp_path):
    settings, engine = read_settings(args(tmp_path, model="../demo/chat"), {})
    assert settings.model == engine.model == str(tmp_path / "demo" / "chat")


def test_the_environment_overrides_config_pbtxt(tmp_path):
    environment = {"NEREID_MODEL": "/other", "NEREID_MAX_NUM_SEQS": "7", "NEREID_HEARTBEAT_MS": "9"}
    settings, engine = read_settings(args(tmp_path, model="x", max_num_seqs="3"), environment)
    assert (settings.model, engine.max_num_seqs, settings.heartbeat_ms) == ("/other", 7, 9)


ONE_ON_EACH_GPU = [{"count": 1, "kind": "KIND_GPU", "gpus": [0, 1]}]


@pytest.mark.parametrize("groups", [[{"count": 2}], [{"count": 1}, {}], ONE_ON_EACH_GPU])
def test_several_instances_of_a_model_are_refused(groups):
    config = {"model_config": json.dumps({"instance_group": groups}), "model_name": "executor"}
    message = "instance_group: the model executor must have one instance, but .* asks for 2"
    with pytest.raises(ConfigError, match=message):
        check_single_instance(config)


@pytest.mark.parametrize("config", [{}, {"instance_group": [{"count": 1, "gpus": []}]}])
def test_one_instance_of_a_model_is_accepted(config):
    check_single_instance({"model_config": json.dumps(config)})


def test_an_empty_variable_is_ignored(tmp_path):
    _, engine = read_settings(args(tmp_path, model="x", seed="3"), {"NEREID_SEED": ""})
    assert engine.seed == 3


@pytest.mark.parametrize(
    ("variable", "similar"),
    [
        ("NEREID_MAX_NUM_SEQ", "NEREID_MAX_NUM_SEQS"),
        ("NEREID_HEARTBEAT", "NEREID_HEARTBEAT_MS"),
        ("NEREID_EMBEDING_DTYPE", "NEREID_EMBEDDING_DTYPE"),
        ("NEREID_RERANK_MAX_REQUEST", "NEREID_RERANK_MAX_REQUESTS"),
        ("NEREID_MAX_BODY_BYTE", "NEREID_MAX_BODY_BYTES"),
        ("NEREID_OPENAI_PROT", "NEREID_OPENAI_PORT"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_most_similar_one(tmp_path, variable, similar):
    with pytest.raises(ConfigError, match=f"^{variable}: .* Did you mean {similar}\\?"):
        read_settings(args(tmp_path, model="x"), {variable: "3"})


def test_an_unknown_parameter_is_refused_with_the_most_similar_one(tmp_path):
    with pytest.raises(ConfigError, match=r"^max_num_seq: .* Did you mean max_num_seqs\?"):
        read_settings(args(tmp_path, model="x", max_num_seq="3"), {})


def test_a_wrong_value_is_named(tmp_path):
    with pytest.raises(
        ConfigError, match="heartbeat_ms: the value must be an integer, but it is 'soon'"
    ):
        read_settings(args(tmp_path, model="x"), {"NEREID_HEARTBEAT_MS": "soon"})
    with pytest.raises(
        ConfigError, match="stale_after_ms: the value must be greater than 0, but it is '0'"
    ):
        read_settings(args(tmp_path, model="x"), {"NEREID_STALE_AFTER_MS": "0"})


def test_more_streams_than_the_memory_can_describe_are_refused(tmp_path):
    environment = {"NEREID_MAX_STREAMS": "1000000000"}
    with pytest.raises(ConfigError, match="max_streams: the value must be at most 1048576"):
        read_settings(args(tmp_path, model="/m"), environment)


def test_the_settings_of_other_programs_are_ignored(tmp_path):
    read_settings(args(tmp_path, model="x"), OTHER_SETTINGS)


# A Python model of the Triton server decodes environment variables as ASCII, so a Python program
# reads the path /data/modèle as this text with surrogates.
PATH_IN_A_MODEL = "/data/modèle".encode().decode("ascii", "surrogateescape")


@pytest.mark.parametrize("path", ["/data/modèle", PATH_IN_A_MODEL])
def test_a_value_outside_ascii_is_refused_because_python_models_cannot_read_it(tmp_path, path):
    with pytest.raises(
        ConfigError, match=r"model: the value /data/modèle contains .* ln -s '/data"
    ):
        read_settings(args(tmp_path), {"NEREID_MODEL": path})
    with pytest.raises(ConfigError, match="embedding_model: the value /data/modèle"):
        read_pooling_settings("embedding", args(tmp_path), {"NEREID_EMBEDDING_MODEL": path})
