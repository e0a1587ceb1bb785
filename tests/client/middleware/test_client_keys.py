"""Tests of the API keys of several clients: the key file, the limits, and the clients' shares."""

import functools
import hashlib
import itertools
import os
from types import SimpleNamespace

import pytest
from nereid_client.middleware.client_keys import Bucket, KeyFile
from nereid_client.middleware.request_metrics import SUPERVISOR_USER_AGENT
from nereid_client.middleware.shared_budget import SharedBudget
from nereid_client.settings import SettingsError

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TWO = '[a]\nkey = "key-a"\n[b]\nkey = "key-b"\nweight = 3\n'


@pytest.fixture
def write(tmp_path):
    """A function that writes a key file and returns the path of the file."""
    path = tmp_path / "keys.toml"
    modification_times = itertools.count(1)

    def write_text(text):
        path.write_text(text)
        # Two writes within one tick of the file system's clock would get the same time, and the
        # frontend would not notice the second write.
        os.utime(path, (0, next(modification_times)))
        return path

    return write_text


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


async def test_each_key_of_the_file_is_accepted_and_no_other_one(connect, write):
    async with connect(api_key_file=str(write(TWO))) as client:
        for key, status in (("key-a", 200), ("key-b", 200), ("key-c", 401), ("", 401)):
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=bearer(key))
            assert answer.status_code == status


async def test_the_key_of_the_setting_is_valid_beside_the_file(connect, write):
    async with connect(api_key_file=str(write(TWO)), api_key="operator") as client:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=bearer("operator"))
        assert answer.status_code == 200


async def test_a_key_may_contain_any_characters(connect, write):
    async with connect(api_key_file=str(write('[a]\nkey = "ключ"\n'))) as client:
        for key, status in (("ключ", 200), ("????", 401), ("клич", 401)):
            headers = {"Authorization": f"Bearer {key}".encode()}
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert answer.status_code == status


def test_a_key_can_be_given_as_its_digest(write):
    digest = hashlib.sha256(b"secret").hexdigest()
    assert KeyFile(write(f'[a]\nkey_sha256 = "{digest}"')).find("secret").name == "a"


def test_a_changed_file_is_read_again_within_a_second(write):
    now = [0.0]
    path = write(TWO)
    keys = KeyFile(path, lambda: now[0])
    known = keys.find("key-a")
    write('[a]\nkey = "new"\nweight = 5\n')
    assert keys.find("key-a") is known
    now[0] = 1.1
    assert keys.find("key-a") is None
    assert keys.find("new") is known
    assert known.weight == 5


def test_a_damaged_change_leaves_the_previous_keys_valid(write, caplog):
    now = [0.0]
    keys = KeyFile(write(TWO), lambda: now[0])
    write("[a\n")
    now[0] = 1.1
    assert keys.find("key-a").name == "a"
    assert "The frontend continues with the previous API keys" in caplog.text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "contains no API key"),
        ("[a]\nweight = 1", "give exactly one of key and key_sha256"),
        ('[a]\nkey = "k"\nweight = 0', "a.weight"),
        ('[a]\nkey = "k"\nrequests = 5', "this key does not exist"),
        (f'[a]\nkey = "k"\nrequests_per_minute = {10**400}', "a.requests_per_minute"),
        ('[a]\nkey = "k\\n"', "no line end"),
        ('[a]\nkey = "k"\n[b]\nkey = "k"', "the same key twice"),
        ("[a", "cannot be read"),
        (f"a = {'[' * 5000}", "cannot be read"),
        ('[""]\nkey = "k"', "1 to 64 characters"),
        (f'[{"a" * 65}]\nkey = "k"', "1 to 64 characters"),
        (f'[a]\nkey_sha256 = "{hashlib.sha256().hexdigest()}"', "an empty key"),
    ],
)
def test_a_wrong_file_is_reported_with_the_name_of_the_field(write, text, reason):
    path = write(text)
    with pytest.raises(SettingsError, match="api_key_file") as raised:
        KeyFile(path)
    assert str(path) in str(raised.value)
    assert reason in str(raised.value)


@pytest.mark.parametrize(("name", "limit"), [("requests_per_minute", 2), ("tokens_per_minute", 1)])
async def test_a_key_over_its_limit_gets_a_429_that_names_the_limit(connect, write, name, limit):
    path = write(f'[limited]\nkey = "a"\n{name} = {limit}\n[unlimited]\nkey = "b"')
    async with connect(api_key_file=str(path)) as client:
        send_chat = functools.partial(client.post, "/v1/chat/completions", json=CHAT)
        first_answer, _, third_answer = [await send_chat(headers=bearer("a")) for _ in range(3)]
        answer_of_unlimited = await send_chat(headers=bearer("b"))

    assert first_answer.status_code == 200
    assert third_answer.status_code == 429
    assert name in third_answer.json()["error"]["message"]
    assert 0 < int(third_answer.headers["retry-after"]) <= 120
    assert answer_of_unlimited.status_code == 200


async def test_the_user_agent_of_nereid_serve_does_not_lift_the_limits_of_a_key(connect, write):
    path = write('[a]\nkey = "a"\nrequests_per_minute = 1')
    headers = {**bearer("a"), "User-Agent": SUPERVISOR_USER_AGENT}
    async with connect(api_key_file=str(path)) as client:
        for status in (200, 429):
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert answer.status_code == status
        page = (await client.get("/metrics")).text
    assert 'nereid_frontend_client_requests_total{client="a",status="200"} 1.0' in page
    assert 'nereid_frontend_client_requests_total{client="a",status="429"} 1.0' in page


def test_a_bucket_fills_up_within_a_minute():
    bucket = Bucket(60)
    bucket.take(60, 0.0)
    assert bucket.wait_s(0.0) == pytest.approx(1.0)
    assert bucket.wait_s(1.0) == 0.0
    bucket.take(120, 1.0)
    assert bucket.wait_s(1.0) == pytest.approx(120.0)


def test_a_change_of_the_key_file_keeps_what_every_client_has_used(write):
    clock = SimpleNamespace(now=0.0)
    text = '[a]\nkey = "a"\nrequests_per_minute = 2\n[b]\nkey = "b"\nrequests_per_minute = {}\n'
    keys = KeyFile(write(text.format(2)), lambda: clock.now)
    client_a, client_b = keys.find("a"), keys.find("b")
    for client in (client_a, client_b):
        client.count_request(now=1.0)
        client.count_request(now=1.0)

    clock.now = 1.1
    write(text.format(3))

    assert keys.find("a").rejection(now=1.1) is not None
    assert keys.find("b").rejection(now=1.1) is None  # the new limit allows one more request
    client_b.count_request(now=1.1)
    assert client_b.rejection(now=1.1) is not None


def test_no_client_can_use_all_of_a_shared_limit():
    budget = SharedBudget(100)
    while budget.fits("greedy", 1):
        budget.add("greedy", 1)
    assert budget.used == 75
    assert budget.fits("patient", 18)
    assert not budget.fits("", 26)
    budget.remove("greedy", 75)
    assert budget.used == 0
    assert budget.fits("", 100)


def test_a_client_that_uses_nothing_may_use_all_that_is_left():
    budget = SharedBudget(1)
    assert budget.fits("only", 1)
    budget.add("only", 1)
    assert not budget.fits("only", 1)
    assert not budget.fits("other", 1)
