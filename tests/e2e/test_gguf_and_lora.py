"""Tests of a real server with a GGUF file and LoRA adapters, some of them loaded by requests."""

import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from backend.checkpoints.gguf_writer import write_gguf
from backend.lora.adapter_writer import linear_layers, write_adapter
from transformers import AutoModelForCausalLM

from loadtest.server.served import ALONE, Served

DEMO = Path(__file__).resolve().parents[2] / "demo"

pytestmark = pytest.mark.triton


def call(server, path, body=None):
    """Send a request, and return the HTTP status and the text of the response."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.openai_url + path, data)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def chat(server, model):
    """Return a model's answer to a greeting. The answer does not depend on chance."""
    messages = [{"role": "user", "content": "Hello!"}]
    body = {"model": model, "messages": messages, "max_tokens": 20, "temperature": 0}
    status, text = call(server, "/chat/completions", body)
    assert status == 200, text
    completion = json.loads(text)
    assert completion["model"] == model
    return completion["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """The folder of a LoRA adapter whose weights are large enough to change each answer."""
    folder = tmp_path_factory.mktemp("adapter") / "a"
    model = AutoModelForCausalLM.from_pretrained(DEMO / "chat")
    write_adapter(folder, model, linear_layers(model), rank=4, seed=1, lora_alpha=80)
    return str(folder)


@pytest.fixture(scope="module")
def server(adapter, tmp_path_factory, fork_server):
    folder = shutil.copytree(DEMO / "chat", tmp_path_factory.mktemp("checkpoint") / "chat")
    file = write_gguf(folder, "qwen3", "Q8_0", metadata={"rope.freq_base": 10000.0})
    environment = {
        "NEREID_ALLOW_LORA_UPDATES": "true",
        "NEREID_KV_CACHE_MEMORY": "64MiB",
        **fork_server,
    }
    arguments = [*ALONE, "--served-model-name=file", f"--lora=first={adapter}"]
    with Served(model=file, environment=environment, arguments=arguments) as server:
        yield server


def test_a_gguf_file_answers_a_chat(server):
    assert len(chat(server, "file")) > 5


def test_adapters_are_selected_loaded_and_unloaded(server, adapter):
    plain_answer = chat(server, "file")
    adapted_answer = chat(server, "first")
    assert adapted_answer != plain_answer

    status, _ = call(server, "/load_lora_adapter", {"lora_name": "second", "lora_path": adapter})
    assert status == 200
    models = json.loads(call(server, "/models")[1])["data"]
    assert [model["id"] for model in models] == ["file", "first", "second"]
    assert chat(server, "second") == adapted_answer

    assert call(server, "/unload_lora_adapter", {"lora_name": "second"})[0] == 200
    assert call(server, "/chat/completions", {"model": "second", "messages": []})[0] in (400, 404)

    status, text = call(server, "/load_lora_adapter", {"lora_name": "second", "lora_path": "/none"})
    assert status == 400
    assert "/none/adapter_config.json: the file cannot be read" in text
    assert chat(server, "file") == plain_answer
