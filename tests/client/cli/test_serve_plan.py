"""Tests of how flags and environment variables determine the plan of `nereid serve`.

The plan contains the commands, environments and addresses of the servers.
"""

import functools
from pathlib import Path

import pytest
from fakes.live_server import ECHO_REPOSITORY, make_checkpoint
from nereid_client.cli.flag_commands import build_parser
from nereid_client.cli.serve_command import make_plan
from nereid_client.console import CliError
from nereid_client.several_models.model_variables import default_settings
from nereid_client.several_models.models_file import read_models_file

from loadtest.server.served import free_ports

REPOSITORY = Path(__file__).parents[3] / "model_repository"


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A function that makes the plan for flags and environment variables."""
    program = tmp_path / "tritonserver"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    http_port, grpc_port, metrics_port = free_ports(3)
    flags_of_server = [
        f"--tritonserver={program}",
        f"--http-port={http_port}",
        f"--grpc-port={grpc_port}",
        f"--metrics-port={metrics_port}",
    ]

    def make(*flags, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return make_plan(build_parser().parse_args(["serve", *flags_of_server, *flags]))

    return make


@pytest.fixture
def plan(tmp_path, make):
    """A function that makes the plan for one model, with flags and environment variables."""
    model = f"--model={make_checkpoint(tmp_path)}"
    return functools.partial(make, model, f"--model-repository={ECHO_REPOSITORY}")


@pytest.fixture
def plan_of_file(tmp_path, make):
    """A function that makes the plan for the text of a models.toml file and for flags."""
    make_checkpoint(tmp_path)
    file = tmp_path / "models.toml"

    def make_for_file(text, *flags):
        file.write_text(text)
        [port] = free_ports(1)
        files = (f"--model-repository={REPOSITORY}", f"--config={file}")
        return make(*files, f"--openai-port={port}", *flags, XDG_STATE_HOME=str(tmp_path))

    return make_for_file


def test_the_frontend_listens_where_its_variables_say(plan):
    [port] = free_ports(1)
    made = plan(NEREID_OPENAI_HOST="0.0.0.0", NEREID_OPENAI_PORT=str(port))
    assert dict(made.endpoints)["OpenAI API"] == f"http://127.0.0.1:{port}/v1"
    assert made.frontend_program.environment["NEREID_OPENAI_HOST"] == "0.0.0.0"
    assert "--http-address=127.0.0.1" in made.server.command


@pytest.mark.parametrize(
    ("host", "key", "is_warned"),
    [("0.0.0.0", "", True), ("0.0.0.0", "secret", False), ("127.0.0.1", "", False)],
)
def test_an_open_frontend_without_an_api_key_is_warned_about(plan, host, key, is_warned):
    [port] = free_ports(1)
    made = plan(f"--openai-port={port}", NEREID_OPENAI_HOST=host, NEREID_API_KEY=key)
    assert any("no API key is required" in warning for warning in made.warnings) == is_warned


@pytest.mark.parametrize("host", ["::1", "::"])
def test_the_url_of_a_frontend_with_an_ipv6_address_has_brackets(plan, monkeypatch, host):
    # A machine without IPv6 cannot reserve a port of this address.
    monkeypatch.setattr(
        "nereid_client.supervise.startup_checks.check_ports", lambda addresses: None
    )
    [port] = free_ports(1)
    made = plan(NEREID_OPENAI_HOST=host, NEREID_OPENAI_PORT=str(port))
    assert dict(made.endpoints)["OpenAI API"] == f"http://[::1]:{port}/v1"
    assert f"http://[::1]:{port}/" in made.frontend.curl("/v1/models", {})


def test_an_ipv6_address_for_the_triton_server_is_refused(plan):
    [port] = free_ports(1)
    with pytest.raises(CliError, match=r"cannot listen on the IPv6 address ::1.*OPENAI_HOST=::1"):
        plan(f"--openai-port={port}", "--host=::1")


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "http://127.0.0.1"])
def test_a_host_with_a_port_or_a_scheme_is_not_called_an_ipv6_address(plan, host):
    [port] = free_ports(1)
    with pytest.raises(CliError, match=f"--host: {host} is not an address of this machine"):
        plan(f"--openai-port={port}", f"--host={host}")


def test_a_time_that_python_cannot_wait_for_is_refused(plan, capsys):
    with pytest.raises(SystemExit):
        plan("--hang-timeout=1e300")
    assert "must be at least 0 and at most 1000000000, but it is 1e300" in capsys.readouterr().err


def test_flags_take_precedence_over_the_variables_of_the_frontend(plan):
    [port] = free_ports(1)
    made = plan(
        f"--openai-port={port}",
        "--host=localhost",
        "--log-level=error",
        NEREID_OPENAI_HOST="0.0.0.0",
        NEREID_OPENAI_PORT="1",
        NEREID_LOG_LEVEL="debug",
    )
    environment = made.frontend_program.environment
    assert environment["NEREID_OPENAI_HOST"] == "localhost"
    assert environment["NEREID_OPENAI_PORT"] == str(port)
    assert environment["NEREID_LOG_LEVEL"] == "error"
    assert "--http-address=localhost" in made.server.command
    assert "--log-verbose=1" not in made.server.command


@pytest.mark.parametrize(
    "flag", ["--model=", "--draft-model=", "--lora=a=", "--log-file=", "--model-repository="]
)
def test_an_unknown_home_folder_in_a_path_is_a_wrong_setting(plan, flag):
    [port] = free_ports(1)
    with pytest.raises(CliError, match="~nobody-here/x begins with ~, but the home folder"):
        plan(f"--openai-port={port}", f"{flag}~nobody-here/x")


def test_an_unknown_home_folder_in_the_file_of_models_is_a_wrong_setting(plan_of_file):
    with pytest.raises(CliError, match=r"a\.model .* ~nobody-here/x begins with ~, but the home"):
        plan_of_file('[a]\nmodel = "~nobody-here/x"\n')


def test_a_user_without_a_home_folder_needs_a_folder_for_logs(plan, monkeypatch):
    [port] = free_ports(1)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(CliError, match="Set the environment variable XDG_STATE_HOME"):
        plan(f"--openai-port={port}")


@pytest.mark.parametrize("path", ["~/serve.log", "serve.log", "-"])
def test_the_path_of_the_log_may_begin_with_the_home_folder(plan, path, tmp_path, monkeypatch):
    [port] = free_ports(1)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    wanted = Path("-") if path == "-" else tmp_path / "serve.log"
    assert plan(f"--openai-port={port}", f"--log-file={path}").log_path == wanted


def test_an_ensemble_that_the_model_repository_does_not_have_is_a_wrong_setting(plan):
    [port] = free_ports(1)
    with pytest.raises(CliError, match=r"NEREID_ENSEMBLE: the model repository .* no model 'nope'"):
        plan(f"--openai-port={port}", NEREID_ENSEMBLE="nope")


def test_servers_with_the_same_process_id_have_different_shared_memory(plan):
    prefixes = {plan(f"--openai-port={port}").shm_prefix for port in free_ports(2)}
    assert len(prefixes) == 2


def restrictions(made):
    """Return the restricted endpoints of each protocol, and check that they need the same key."""
    flags = [argument for argument in made.server.command if "-restricted-" in argument]
    key = made.frontend_program.environment["_NEREID_MANAGEMENT_KEY"]
    assert all(flag.endswith(f":nereid-management-key={key}") for flag in flags)
    return {flag.split("=")[0]: flag.split("=")[1].split(":")[0] for flag in flags}


def test_a_key_protects_the_management_of_the_triton_server(plan):
    [port] = free_ports(1)
    endpoints = "shared-memory,trace,logging"
    assert restrictions(plan(f"--openai-port={port}")) == {
        "--http-restricted-api": endpoints,
        "--grpc-restricted-protocol": endpoints,
    }


def test_a_key_protects_the_loading_of_models(plan_of_file):
    made = plan_of_file('[a]\nmodel = "echo-model"\n')
    endpoints = "shared-memory,trace,logging,model-repository"
    assert set(restrictions(made).values()) == {endpoints}


def test_own_restrictions_of_the_triton_server_are_not_repeated(plan):
    [port] = free_ports(1)
    own = "--http-restricted-api=trace:name=value"
    command = plan(f"--openai-port={port}", "--", own).server.command
    assert [flag for flag in command if flag.startswith("--http-restricted-api")] == [own]


@pytest.mark.parametrize("argument", ["--grpc-port=19", "--http-address", "--model-repository=/x"])
def test_an_argument_of_the_triton_server_that_has_a_flag_is_refused(plan, argument):
    [port] = free_ports(1)
    with pytest.raises(CliError, match=f"-- {argument.partition('=')[0]}: .* with the flag --"):
        plan(f"--openai-port={port}", "--", argument)


def test_the_variable_of_the_log_level_applies_to_both_programs(plan):
    [port] = free_ports(1)
    made = plan(f"--openai-port={port}", NEREID_LOG_LEVEL="debug")
    assert "--log-verbose=1" in made.server.command
    assert made.frontend_program.environment["NEREID_LOG_LEVEL"] == "debug"


def test_the_address_of_another_triton_server_is_reported_as_having_no_effect(plan, capsys):
    [port] = free_ports(1)
    made = plan(f"--openai-port={port}", NEREID_GRPC_URL="10.0.0.5:8001")
    address = made.frontend_program.environment["NEREID_GRPC_URL"]
    assert address == dict(made.endpoints)["Triton gRPC"] != "10.0.0.5:8001"
    assert "NEREID_GRPC_URL=10.0.0.5:8001 has no effect" in capsys.readouterr().err


def test_a_flag_sets_the_default_of_models_that_have_a_memory_budget(plan_of_file, tmp_path):
    text = 'memory_budget = "400MiB"\n[a]\nmodel = "echo-model"\n'
    made = plan_of_file(text, "--kv-cache-memory=5MiB")
    [config] = tmp_path.glob("nereid/models-*/a-executor/config.pbtxt")
    assert 'key: "kv_cache_memory"\n  value {\n    string_value: "5MiB"' in config.read_text()
    # A model uses the environment variable instead of the value in config.pbtxt, so the variable
    # must not be set.
    assert "NEREID_KV_CACHE_MEMORY" not in made.server.environment
    # The frontend needs the variable, because the frontend computes the memory of the models.
    defaults = default_settings(made.frontend_program.environment)
    [model] = read_models_file(tmp_path / "models.toml", defaults).specs
    assert model.memory.kv_cache == 5 << 20


def test_the_model_repository_of_a_running_server_is_not_replaced(make, tmp_path):
    make_checkpoint(tmp_path)
    file = tmp_path / "models.toml"
    file.write_text('[a]\nmodel = "echo-model"\n')
    [port] = free_ports(1)
    flags = (f"--model-repository={REPOSITORY}", f"--openai-port={port}", f"--config={file}")
    make(*flags, XDG_STATE_HOME=str(tmp_path))
    # A server in another container can use the same port, so a free port is no proof that the
    # repository is unused.
    with pytest.raises(CliError, match="another server, possibly in another container, uses"):
        make(*flags)


@pytest.mark.parametrize("setting", ["MAX_MODEL_LEN", "embedding_max_model_len", "openai_port"])
def test_a_setting_that_a_model_of_the_file_does_not_have_is_refused(plan_of_file, setting):
    with pytest.raises(CliError, match=rf"\[a\] in .*: {setting} is not a setting of a model"):
        plan_of_file(f'[a]\nmodel = "echo-model"\n{setting} = 5\n')


@pytest.mark.parametrize("variables", [{}, {"NEREID_LORA_ADAPTERS": "other=/x, echo-model=/y"}])
def test_an_adapter_with_the_name_of_the_model_is_refused(plan, variables):
    flags = [] if variables else ["--lora=echo-model=/y"]
    [port] = free_ports(1)
    with pytest.raises(CliError, match="an adapter and a model have the name 'echo-model'"):
        plan(f"--openai-port={port}", *flags, **variables)


def test_a_state_folder_that_cannot_store_files_turns_the_batch_api_off(plan):
    [port] = free_ports(1)
    made = plan(f"--openai-port={port}", "--log-file=-", XDG_STATE_HOME="/dev/null")
    assert "NEREID_BATCH_FOLDER" not in made.frontend_program.environment
    assert made.warnings[0].startswith("The Batch API is turned off. NEREID_BATCH_FOLDER: files")
