"""Tests that an engine replaces its weights without a restart, as in reinforcement learning."""

import shutil

import pytest
import torch
from backend.exactness import PROMPTS, open_engine, run_alone, run_staggered
from backend.lora.adapter_writer import linear_layers, write_adapter
from backend.tiny_models import BY_NAME
from nereid_backend import RequestError, SamplingParams
from nereid_backend.serving.executor.engine_process import EngineService
from nereid_backend.serving.wire import pack_params
from tokenizers import Tokenizer
from tokenizers.models import WordLevel


def save(folder, seed):
    """Save a tiny Llama checkpoint whose weights depend on `seed`, and return the model."""
    torch.manual_seed(seed)
    model = BY_NAME["llama"].make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02 * seed)
    model.save_pretrained(folder)
    return model


def answers_of_new_engine(folder):
    engine = open_engine(folder)
    answers = run_alone(engine)
    engine.close()
    return answers


def test_the_tokens_after_a_reload_are_those_of_a_fresh_engine(tmp_path, monkeypatch):
    model = save(tmp_path / "a", 1)
    engine = open_engine(tmp_path / "a", enable_prefix_caching=True)
    adapter = tmp_path / "adapter"
    write_adapter(adapter, model, linear_layers(model), rank=2, seed=1)
    engine.load_lora("style", str(adapter))
    old_answers = run_alone(engine)
    for seed in (2, 3):
        save(tmp_path / "a", seed)
        if seed == 3:  # The memory is too small for the old and the new weights at the same time.
            monkeypatch.setattr("nereid_backend.engine.reload_weights.available_memory", lambda: 0)
        engine.reload()
        expected = answers_of_new_engine(tmp_path / "a")
        assert expected != old_answers
        assert run_staggered(engine) == expected
        assert engine.lora_names == ["style"]
        old_answers = expected
    engine.close()


def test_missing_files_of_an_adapter_leave_the_old_weights(tmp_path, monkeypatch):
    model = save(tmp_path / "a", 1)
    engine = open_engine(tmp_path / "a")
    adapter = tmp_path / "adapter"
    write_adapter(adapter, model, linear_layers(model), rank=2, seed=1)
    engine.load_lora("style", str(adapter))
    old_answers = run_alone(engine)
    shutil.rmtree(adapter)
    monkeypatch.setattr("nereid_backend.engine.reload_weights.available_memory", lambda: 0)
    with pytest.raises(RequestError, match=r"^path: the new weights cannot be loaded: .*adapter/"):
        engine.reload()
    assert run_alone(engine) == old_answers
    assert engine.lora_names == ["style"]
    engine.close()


def test_a_refused_checkpoint_leaves_the_old_weights(tmp_path):
    save(tmp_path / "a", 1)
    engine = open_engine(tmp_path / "a")
    old_answers = run_alone(engine)
    save(tmp_path / "broken", 2)
    file = tmp_path / "broken" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(RequestError, match="incomplete or damaged"):
        engine.reload(str(tmp_path / "broken"))
    with pytest.raises(RequestError, match="is not a folder"):
        engine.reload(str(tmp_path / "none"))
    # This test also runs as root, who may read every file. The path is therefore too long, which
    # the system refuses in the same way as a path that a user may not read.
    with pytest.raises(RequestError, match=r"^path: the checkpoint cannot be read \(.*too long"):
        engine.reload("/" + "a" * 300)

    BY_NAME["gemma2"].make().save_pretrained(tmp_path / "other")
    with pytest.raises(RequestError, match=r"path: the (tensor|new checkpoint) .*"):
        engine.reload(str(tmp_path / "other"))

    engine.add_request("0", PROMPTS[0], SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match="only while no request runs"):
        engine.reload()
    while engine.has_work():
        engine.step()
    assert run_alone(engine) == old_answers
    engine.close()


def test_another_tokenizer_is_refused_before_anything_changes(tmp_path):
    for name, tokens in (("a", "ab"), ("b", "ba")):
        save(tmp_path / name, 1)
        vocabulary = {token: index for index, token in enumerate(tokens)}
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="a"))
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    engine = open_engine(tmp_path / "a")
    old_answers = run_alone(engine)
    with pytest.raises(RequestError, match=r"path: the file tokenizer\.json of the new checkpoint"):
        engine.reload(str(tmp_path / "b"))
    # The new tokenizer is also refused if it replaces the file in the folder of the loaded
    # checkpoint.
    shutil.copy(tmp_path / "b" / "tokenizer.json", tmp_path / "a" / "tokenizer.json")
    with pytest.raises(RequestError, match=r"path: the file tokenizer\.json of the new checkpoint"):
        engine.reload()
    assert run_alone(engine) == old_answers
    engine.close()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", '{"architectures": 5}'),
        ("config.json", "[" * 100_000),
        ("tokenizer.json", "[" * 100_000),
    ],
)
def test_a_damaged_file_of_the_new_checkpoint_leaves_the_old_weights(name, content, tmp_path):
    save(tmp_path / "a", 1)
    engine = open_engine(tmp_path / "a")
    old_answers = run_alone(engine)
    save(tmp_path / "b", 2)
    (tmp_path / "b" / name).write_text(content)
    with pytest.raises(RequestError, match=rf"^path: .*{name}"):
        engine.reload(str(tmp_path / "b"))
    assert run_alone(engine) == old_answers
    engine.close()


@pytest.mark.parametrize("mode", ["finish", "refuse"])
def test_requests_around_a_reload(mode, tmp_path):
    save(tmp_path / "a", 1)
    save(tmp_path / "b", 3)
    answer_of_a = answers_of_new_engine(tmp_path / "a")[3]
    answer_of_b = answers_of_new_engine(tmp_path / "b")[3]
    sent = []
    service = EngineService(open_engine(tmp_path / "a"), sent.append)
    params = pack_params(SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    prompt = torch.tensor(PROMPTS[3], dtype=torch.int32).numpy().tobytes()

    service.handle("add", ["before", prompt, params, 1])
    for _ in range(3):
        service.advance()
    service.handle("reload_weights", ["call", str(tmp_path / "b"), mode])
    service.handle("add", ["after", prompt, params, 1])
    while service.has_work():
        service.advance()

    refusals = [message[1:3] for message in sent if message[0] == "refused"]
    answers = {"before": [], "after": []}
    for _, updates in (message for message in sent if message[0] == "updates"):
        for request_id, new_token_ids, *_ in updates:
            answers[request_id] += new_token_ids
    assert answers["after"] == answer_of_b
    assert ["adapters", "call", []] in sent  # This message reports that the reload succeeded.
    if mode == "finish":
        assert answers["before"] == answer_of_a
        assert not refusals
    else:
        assert refusals == [["before", "CapacityError"]]
