"""Tests of the frontend's settings: environment variables, flags and wrong values."""

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


def test_flags_take_precedence_over_the_environment():
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
def test_the_name_of_the_model_is_the_setting_else_the_folder_else_the_ensemble(environment, name):
    assert settings_from_environment(environment).model_name == name


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NEREID_OPENAI_PORT": "90x"}, "must be a valid integer, but it is '90x'."),
        (
            {"NEREID_OPENAI_PORT": "70000"},
            "must be less than or equal to 65535, but it is '70000'.",
        ),
        ({"NEREID_MAX_BODY_BYTES": "0"}, "must be greater than 0, but it is '0'."),
        (
            {"NEREID_MAX_BODY_BYTES": "4,096"},
            "must be a number of bytes, such as 65536 or 64MiB, but it is '4,096'.",
        ),
        (
            {"NEREID_LOG_LEVEL": "loud"},
            "must be 'debug', 'info', 'warning' or 'error', but it is 'loud'.",
        ),
    ],
)
def test_the_message_names_the_variable_the_limit_and_the_value(environment, message):
    with pytest.raises(SettingsError) as raised:
        settings_from_environment(environment)
    [variable] = environment
    assert str(raised.value) == f"{variable}: the value {message}"


WRONG_ORIGINS = [
    *("b.org", "https://b.org/", "https://B.org", "https://*.b.org", "http://b.org:*"),
    *("hTTPS://b.org", "https://b.org?x", "https://b.org#x", "https://user@b.org"),
]


@pytest.mark.parametrize("wrong", WRONG_ORIGINS)
def test_an_origin_that_no_browser_sends_is_refused(wrong):
    message = "NEREID_CORS_ORIGINS: the value must contain origins such as https://example.org"
    with pytest.raises(SettingsError, match=message):
        settings_from_environment({"NEREID_CORS_ORIGINS": f"https://a.org, {wrong}"})


@pytest.mark.parametrize("origin", ["*", "null", "http://[::1]:3000", "chrome-extension://abc", ""])
def test_an_origin_that_a_browser_sends_is_accepted(origin):
    settings = settings_from_environment({"NEREID_CORS_ORIGINS": f"https://a.org,{origin}"})
    assert settings.origins == ["https://a.org", *filter(None, [origin])]


def test_the_message_names_the_flag_of_a_wrong_value():
    with pytest.raises(SettingsError, match=r"^--port: the value must be .* but it is '-1'\.$"):
        settings_from_flags(["--port=-1"], {"NEREID_OPENAI_PORT": "9000"})
    with pytest.raises(SettingsError, match=r"^--host: the value must have at least 1 character"):
        settings_from_flags(["--host", ""], {})


def test_the_constructor_names_the_setting_of_a_wrong_value():
    with pytest.raises(SettingsError, match=r"^port: the value must be greater than or equal to 0"):
        Settings(port=-1)


@pytest.mark.parametrize(("text", "size"), [("64MiB", 2**26), ("1.5 GB", 1_500_000_000), ("9", 9)])
def test_a_size_is_a_number_or_a_text_with_a_unit(text, size):
    assert settings_from_environment({"NEREID_MAX_BODY_BYTES": text}).max_body_bytes == size


def test_an_unknown_or_shortened_flag_is_an_error(capsys):
    for flag in ("--prot", "--por"):
        with pytest.raises(SystemExit) as raised:
            settings_from_flags([flag, "1"], {})
        assert raised.value.code == 2
        assert flag in capsys.readouterr().err


def test_help_shows_variables_and_values_but_not_the_key(capsys):
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


@pytest.mark.parametrize("key", ["s3cret\n", " s3cret", "s3\0cret"])
def test_a_key_that_no_client_can_send_is_refused_without_its_value(key):
    with pytest.raises(SettingsError, match=r"NEREID_API_KEY: .* no line end") as raised:
        settings_from_environment({"NEREID_API_KEY": key})
    assert "cret" not in str(raised.value)
