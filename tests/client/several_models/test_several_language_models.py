"""Tests of requests to a frontend that serves several language models."""

import pytest
from fakes.app_client import client_of
from fakes.fake_backend import FakeBackend
from fakes.fake_pooling import FakePooling
from nereid_client import app as app_module
from nereid_client.errors import BackendError
from nereid_client.request_context import Context, Contexts
from nereid_client.settings import Settings
from nereid_client.several_models.controlled import ControlledBackend
from nereid_client.several_models.model_control import ModelControl
from nereid_client.several_models.models_file import ModelEntry, ModelSpec

pytestmark = pytest.mark.anyio


class Repository:
    """A model repository in which all models except `d` are ready."""

    async def unload_model(self, name):
        pass

    async def is_model_ready(self, name):
        return name != "d"


async def fail_because_the_model_is_unknown(parameters):
    raise BackendError("UNAVAILABLE", "Request for unknown model: 'd-executor' is not found")


@pytest.fixture
def backends():
    """The backends of the models `a`, `b`, `c` and `d`. The model `c` has the adapter `sql`."""
    backends = {name: FakeBackend() for name in "abdc"}
    backends["d"].change_adapters = fail_because_the_model_is_unknown
    backends["c"].adapters["sql"] = "/sql"
    return backends


@pytest.fixture
async def client(monkeypatch, backends):
    """An httpx client of a frontend that serves the models `a`, `b`, `c` and `d`.

    The model `b` is unloaded, and the model `d` was never loaded. The model `c` has the alias
    `gpt`.
    """
    entry = ModelEntry(model="/")
    specs = {name: ModelSpec(name=name, triton_name=name, path="/", entry=entry) for name in "abdc"}
    control = ModelControl(list(specs.values()), Repository())
    await control.unload(specs["b"])
    context_of_each_model = tuple(
        Context(
            Settings(served_model_name=name, ensemble=name, allow_lora_updates=True),
            ControlledBackend(backend, name, control),
            aliases=("gpt",) if name == "c" else (),
        )
        for name, backend in backends.items()
    )
    contexts = Contexts(context_of_each_model, control)
    monkeypatch.setattr(app_module, "create_contexts", lambda *_: contexts)
    app = app_module.create_app(Settings())
    app.state.make_pooling = FakePooling
    async with client_of(app) as client:
        yield client


async def chat(client, model):
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    return await client.post("/v1/chat/completions", json=body)


async def test_an_adapter_is_found_although_another_model_is_not_loaded(client):
    response = await chat(client, "sql")
    assert (response.status_code, response.json()["model"]) == (200, "sql")


async def test_an_unknown_model_is_a_404_although_another_model_is_not_loaded(client):
    response = await chat(client, "unknown")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_an_adapter_is_no_unknown_model_while_the_server_does_not_answer(
    client, backends, monkeypatch
):
    for backend in backends.values():
        backend.is_up = False

    async def is_ready(*_):
        return False

    monkeypatch.setattr(Repository, "is_model_ready", is_ready)
    assert (await chat(client, "sql")).status_code == 503


@pytest.mark.parametrize("name", ["a", "b", "gpt"])
async def test_an_adapter_cannot_have_a_name_of_any_model(client, name):
    body = {"lora_name": name, "lora_path": "/sql"}
    response = await client.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 400
    assert f"but the request has '{name}'" in response.json()["error"]["message"]
