"""The plan of `nereid serve`: which flags and variables determine the addresses and settings."""

import pytest
from fakes.live_server import ECHO_REPOSITORY, make_checkpoint
from nereid_client.cli.main import build_parser
from nereid_client.cli.serve_command import make_plan

from loadtest.server.served import free_ports


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Return a function that makes the plan for flags and environment variables."""
    program = tmp_path / "tritonserver"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    where = [f"--model={make_checkpoint(tmp_path)}", f"--model-repository={ECHO_REPOSITORY}"]
    where += [f"--tritonserver={program}"]
    where += [
        f"--{name}-port={port}"
        for name, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True)
    ]

    def make(*flags, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return make_plan(build_parser().parse_args(["serve", *where, *flags]))

    return make


def test_the_frontend_listens_where_its_variables_say(plan):
    [port] = free_ports(1)
    made = plan(NEREID_OPENAI_HOST="0.0.0.0", NEREID_OPENAI_PORT=str(port))
    assert dict(made.endpoints)["OpenAI API"] == f"http://127.0.0.1:{port}/v1"
    assert made.frontend_program.environment["NEREID_OPENAI_HOST"] == "0.0.0.0"
    assert "--http-address=127.0.0.1" in made.server.command


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
