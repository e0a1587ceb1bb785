"""Tests of the check of the header Host, which protects a server without an API key."""

import socket

import pytest
from nereid_client.settings import SettingsError, settings_from_environment
from nereid_client.workers.listening_sockets import is_loopback

pytestmark = pytest.mark.anyio

KEY_FILE = '[team]\nkey = "sk-team"\n'


async def _status(connect, header, path="/health", **settings):
    """Send a GET request with `header` as the header Host, and return the response's status."""
    async with connect(**settings) as client:
        return (await client.get(path, headers={"Host": header})).status_code


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LocalHost:9000", "localhost.:9000", "llm.localhost", "127.0.0.1:9000"),
        *("[::1]:9000", "10.0.0.5", socket.gethostname(), "llm.example.com", "Gateway:80", ""),
        "host.docker.internal:9000",
    ],
)
async def test_a_known_host_is_accepted(connect, host):
    assert await _status(connect, host, allowed_hosts="gateway, LLM.example.com") == 200


@pytest.mark.parametrize("path", ["/health", "/metrics", "/", "/v1/models"])
@pytest.mark.parametrize(
    "host",
    [
        "evil.example:9000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evillocalhost",
        "evilinternal",
        "[",
    ],
)
async def test_an_unknown_host_is_refused_on_every_route(connect, host, path):
    assert await _status(connect, host, path) == 403


async def test_the_message_names_the_host_and_the_setting(connect):
    async with connect() as client:
        response = await client.post("/v1/completions", json={}, headers={"Host": "evil.example"})
    error = response.json()["error"]
    assert error["code"] == "host_not_allowed"
    assert '"evil.example"' in error["message"]
    assert "NEREID_ALLOWED_HOSTS" in error["message"]
    assert socket.gethostname() not in error["message"]  # the page could read the message


async def test_all_hosts_are_accepted_if_a_key_is_required(connect, tmp_path):
    key_file = tmp_path / "keys.toml"
    key_file.write_text(KEY_FILE)
    assert await _status(connect, "llm.example.com", api_key="secret") == 200
    assert await _status(connect, "llm.example.com", api_key_file=str(key_file)) == 200


async def test_all_hosts_are_accepted_if_other_machines_reach_the_frontend(connect):
    assert await _status(connect, "llm.example.com", host="0.0.0.0") == 200


async def test_the_setting_also_applies_if_other_machines_reach_the_frontend(connect):
    settings = {"host": "0.0.0.0", "allowed_hosts": "llm.example.com"}
    assert await _status(connect, "llm.example.com", **settings) == 200
    assert await _status(connect, "evil.example", **settings) == 403


async def test_a_star_allows_all_hosts(connect):
    assert await _status(connect, "llm.example.com", allowed_hosts="*") == 200


@pytest.mark.parametrize("wrong", ["https://a.org", "a.org:9000", "a.org/v1", "*.a.org", "a b"])
def test_a_setting_that_is_no_host_name_is_refused(wrong):
    with pytest.raises(SettingsError, match=r"^NEREID_ALLOWED_HOSTS: .* such as llm.example.com"):
        settings_from_environment({"NEREID_ALLOWED_HOSTS": f"b.org,{wrong}"})


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(("127.0.0.1", True), ("127.0.0.5", True), ("::1", True), ("localhost", True)),
        *(("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("a" * 64, False)),
    ],
)
def test_a_loopback_address_is_recognised(host, expected):
    assert is_loopback(host) is expected
