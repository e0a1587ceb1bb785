"""Tests of `nereid serve --config`, which serves several models with one frontend."""

import json

import httpx
import openai
import pytest
import tritonclient.grpc as grpcclient
from e2e.scripted import DEMO, ROOT
from fakes.live_frontend import wait_for
from fakes.live_server import serve
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.triton

SCRIPT = [
    {"when": "slow", "text": "word " * 60, "delay_ms": 30},
    {"when": "fault", "text": "never", "fault": "the device is lost"},
    {"when": "", "text": "fast"},
]
MODELS = f"""
[chat]
model = "{DEMO}"
aliases = ["gpt-4o"]
max_num_seqs = 7

[other]
model = "{DEMO}"
load_at_start = false
idle_unload_s = 2

["org/search"]
kind = "embedding"
model = "{ROOT / "demo" / "embed"}"
load_at_start = false
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory, fork_server):
    """A server with the models in `MODELS`. Both language models answer from `SCRIPT`."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "models.toml").write_text(MODELS)
    script = folder / "script.json"
    script.write_text(json.dumps(SCRIPT))
    with serve(
        folder,
        f"--config={folder / 'models.toml'}",
        f"--model-repository={ROOT / 'model_repository'}",
        "--",
        # By default, the HTTP endpoints that `states` calls require a key. This flag replaces the
        # default: only the endpoints for shared memory require a key.
        "--http-restricted-api=shared-memory:key=secret",
        NEREID_ENGINE="scripted",
        NEREID_SCRIPT=str(script),
        XDG_STATE_HOME=str(folder / "state"),
        **fork_server,
    ) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture
def client(server):
    url = f"http://127.0.0.1:{server.ports['openai']}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def chat(client, model, text="hello", **fields):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=model, messages=messages, **fields)


def states(server):
    """Return the state of each model in Triton's model repository, such as "READY"."""
    url = f"http://127.0.0.1:{server.ports['http']}/v2/repository/index"
    return {model["name"]: model.get("state") for model in httpx.post(url).json()}


def test_only_the_frontend_can_send_the_code_of_a_model(server):
    config = {"name": "evil", "backend": "python"}
    with (
        grpcclient.InferenceServerClient(f"127.0.0.1:{server.ports['grpc']}") as triton,
        pytest.raises(InferenceServerException, match="This protocol is restricted"),
    ):
        triton.load_model("evil", config=json.dumps(config), files={"file:1/model.py": b"0"})


def test_requests_select_a_model_by_its_name_or_alias(client, server):
    assert [model.id for model in client.models.list()] == ["chat", "gpt-4o", "other", "org/search"]
    assert client.models.retrieve("gpt-4o").root == "chat"
    assert states(server).get("other") != "READY"  # listing the models must not load a model
    for requested_name, model in (("chat", "chat"), ("gpt-4o", "chat"), ("other", "other")):
        answer = chat(client, requested_name)
        assert (answer.model, answer.choices[0].message.content) == (model, "fast")
    assert states(server)["other"] == "READY"
    tokens = client.post("/tokenize", cast_to=object, body={"model": "other", "prompt": "hello"})
    assert tokens["count"] >= 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/search", "'org/search' is an embedding model. Use 'chat' or 'other'"),
        ("nope", "'nope' does not exist. Use 'chat' or 'other'"),
    ],
)
def test_a_chat_request_for_another_model_says_what_the_model_is(client, model, message):
    with pytest.raises(openai.NotFoundError, match=message):
        chat(client, model)


def test_an_embedding_request_for_a_language_model_says_what_the_model_is(client):
    with pytest.raises(openai.BadRequestError, match="'gpt-4o' is a language model"):
        client.embeddings.create(model="gpt-4o", input="a")


def test_a_model_is_unloaded_by_a_client_until_a_client_loads_it(client, server):
    chat(client, "other")
    assert client.post("/models/other/unload", cast_to=object)["loaded"] is False
    wait_for(lambda: states(server)["other-executor"] == "UNAVAILABLE")
    with pytest.raises(openai.NotFoundError, match="POST /v1/models/other/load"):
        chat(client, "other")
    assert client.post("/models/other/load", cast_to=object)["loaded"] is True
    assert chat(client, "other").choices[0].message.content == "fast"


@pytest.mark.long
def test_an_idle_model_is_unloaded_and_the_next_request_loads_it(client, server):
    chat(client, "other")
    wait_for(lambda: states(server)["other-executor"] == "UNAVAILABLE")
    assert states(server)["chat"] == "READY"
    assert chat(client, "other").choices[0].message.content == "fast"


def test_a_fault_in_one_model_leaves_the_streams_of_another(client):
    chat(client, "other")  # load the model
    stream = chat(client, "chat", "slow", stream=True)
    texts = [next(stream).choices[0].delta.content or "" for _ in range(6)]

    with pytest.raises(openai.APIStatusError) as caught:
        chat(client, "other", "fault")

    assert caught.value.status_code in (500, 503)
    texts += [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
    assert "".join(texts).split() == ["word"] * 60
    wait_for(lambda: answers(client, "other"))


def answers(client, model):
    """Return whether a model answers. While its engine restarts, the requests fail."""
    try:
        return chat(client, model).choices[0].message.content == "fast"
    except openai.APIStatusError:
        return False


def test_settings_of_a_model_are_its_own(server):
    folder = server.log.parent / "state" / "nereid" / f"models-{server.ports['openai']}"
    settings = {
        name: model_settings(folder / f"{name}-executor" / "config.pbtxt")
        for name in ("chat", "other")
    }
    assert settings["chat"]["max_num_seqs"] == "7"
    assert "max_num_seqs" not in settings["other"]


def model_settings(path):
    """Return the parameters in a config.pbtxt: name -> value."""
    config = text_format.Parse(path.read_text(), ModelConfig())
    return {name: value.string_value for name, value in config.parameters.items()}
