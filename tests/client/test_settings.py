"""Settings of the frontend: environment variables, flags and wrong values."""

import dataclasses

import pytest
from nereid_client.settings import (
    Settings,
    SettingsError,
    settings_from_environment,
    settings_from_flags,
)


def test_settings_are_read_from_the_environment():
    environment = {"NEREID_OPENAI_PORT": "9100", "NEREID_GRPC_URL": "10.0.0.1:1", "OTHER": "x"}
    settings = settings_from_environment(environment)
    assert (settings.port, settings.grpc_url) == (9100, "10.0.0.1:1")


def test_an_empty_variable_counts_as_unset():
    assert settings_from_environment({"NEREID_OPENAI_PORT": ""}).port == 9000


def test_flags_win_over_the_environment():
    environment = {"NEREID_OPENAI_PORT": "9100", "NEREID_ENSEMBLE": "mine"}
    settings = settings_from_flags(["--port", "9200"], environment)
    assert (settings.port, settings.ensemble) == (9200, "mine")


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"NEREID_SERVED_MODEL_NAME": "pet", "NEREID_MODEL": "/models/big"}, "pet"),
        ({"NEREID_MODEL": "/models/big/"}, "big"),
        ({}, "llm"),
    ],
)
def test_the_model_is_called_as_told_or_as_its_folder_or_as_the_ensemble(environment, name):
    assert settings_from_environment(environment).model_name == name


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NEREID_OPENAI_PORT": "90x"}, "NEREID_OPENAI_PORT must be an integer, but it is '90x'"),
        ({"NEREID_OPENAI_PORT": "70000"}, "port must be from 0 to 65535, but it is 70000"),
        ({"NEREID_MAX_BODY_BYTES": "0"}, "max_body_bytes must be at least 1, but it is 0"),
        (
            {"NEREID_LOG_LEVEL": "loud"},
            "log_level must be one of debug, info, warning, error, but it is 'loud'",
        ),
    ],
)
def test_an_unusable_value_is_named(environment, message):
    with pytest.raises(SettingsError) as caught:
        settings_from_environment(environment)
    assert str(caught.value).startswith(message)


def test_an_unknown_or_shortened_flag_is_an_error(capsys):
    for flag in ("--prot", "--por"):
        with pytest.raises(SystemExit) as caught:
            settings_from_flags([flag, "1"], {})
        assert caught.value.code == 2
        assert flag in capsys.readouterr().err


def test_help_shows_variables_and_values_but_no_key(capsys):
    with pytest.raises(SystemExit):
        settings_from_flags(["--help"], {"NEREID_API_KEY": "s3cret"})
    output = capsys.readouterr().out
    assert "NEREID_GRPC_URL" in output
    assert "127.0.0.1:8001" in output
    assert "s3cret" not in output


def test_settings_are_frozen_and_do_not_print_the_key():
    settings = Settings(api_key="s3cret")
    assert "s3cret" not in repr(settings)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.port = 1
