"""Tests that a real server loads new weights while requests run, and refuses damaged weights."""

import json
import shutil
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from nereid_backend import Engine, EngineConfig, SamplingParams
from safetensors.torch import load_file, save_file

from loadtest.server.served import ALONE, Served

DEMO = Path(__file__).resolve().parents[2] / "demo"
PROMPT = [10, 20, 30, 40]

pytestmark = pytest.mark.triton


def call(server, path, body):
    """Send a request, and return the HTTP status and the JSON of the response."""
    request = urllib.request.Request(server.openai_url + path, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def answer(server, max_tokens=30):
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    status, completion = call(server, "/completions", body)
    assert status == 200, completion
    return completion["choices"][0]["text"]


def answer_of_new_engine(folder):
    """Return the same answer from an engine in this process that loads the weights at its start."""
    engine = Engine(EngineConfig(str(folder), kv_cache_memory="64MiB"))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    [output] = engine.generate([PROMPT], params)
    engine.close()
    return output.outputs[0].text


def test_new_weights_and_broken_weights(tmp_path, fork_server):
    old, new = (shutil.copytree(DEMO / "chat", tmp_path / name) for name in ("old", "new"))
    weights = load_file(old / "model.safetensors")
    for name in weights:
        if "mlp.up_proj" in name:
            weights[name] = weights[name].roll(1, 0)
    save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
    environment = {
        "NEREID_ALLOW_LORA_UPDATES": "true",
        "NEREID_KV_CACHE_MEMORY": "64MiB",
        **fork_server,
    }

    with Served(model=old, environment=environment, arguments=ALONE) as server:
        old_answer, long_old_answer = answer(server), answer(server, max_tokens=300)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(answer, server, max_tokens=300)
            status, result = call(server, "/reload", {"path": str(new)})
            answer_during_reload = running.result()
        assert status == 200, result
        new_answer = answer(server)
        assert new_answer != old_answer
        # The request started before the reload (old text) or after the reload (new text).
        is_old = answer_during_reload == long_old_answer
        assert is_old or answer_during_reload.startswith(new_answer[:20])

        damaged_file = old / "model.safetensors"
        damaged_file.write_bytes(damaged_file.read_bytes()[:-9])
        status, result = call(server, "/reload", {"path": str(old)})
        assert status == 400
        assert "incomplete or damaged" in result["error"]["message"]
        assert result["error"]["param"] == "path"
        assert answer(server) == new_answer

    assert answer_of_new_engine(new) == new_answer
