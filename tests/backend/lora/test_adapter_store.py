"""Tests of loading, unloading, replacing, evicting and refusing adapters."""

import dataclasses
import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from backend.exactness import PARAMS, PROMPTS, open_engine
from backend.lora.adapter_writer import linear_layers, write_adapter, write_config
from backend.tiny_models import BY_NAME
from nereid_backend import CapacityError, ConfigError, RequestError
from safetensors.torch import load_file, save_file

_PROMPT = PROMPTS[4]


def with_adapter(name):
    """Return the sampling parameters of a request that uses an adapter."""
    return dataclasses.replace(PARAMS, lora_name=name)


def answer(engine, name=""):
    """Return the tokens of an answer with an adapter, or without an adapter if `name` is empty."""
    return engine.generate([_PROMPT], with_adapter(name))[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def model():
    return BY_NAME["llama"].make()


@pytest.fixture(scope="module")
def folders(model, tmp_path_factory):
    """The folders of three adapters of the same size."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("abc"):
        write_adapter(root / name, model, linear_layers(model), rank=4, seed=seed)
    return {name: str(root / name) for name in "abc"}


@pytest.fixture(scope="module")
def size(folders, checkpoint):
    """The memory in bytes that one adapter needs in an engine."""
    engine = open_engine(checkpoint("llama"), lora_adapters={"a": folders["a"]})
    [resident] = engine._parts.adapters._resident.values()
    engine.close()
    return resident


@pytest.fixture
def engine(checkpoint):
    engine = open_engine(checkpoint("llama"))
    yield engine
    engine.close()


def test_an_adapter_is_loaded_replaced_and_unloaded_at_run_time(engine, folders):
    plain_answer = answer(engine)
    engine.load_lora("x", folders["a"])
    first_answer = answer(engine, "x")
    engine.load_lora("x", folders["b"])
    second_answer = answer(engine, "x")
    assert plain_answer != first_answer != second_answer
    assert engine.lora_names == ["x"]

    engine.unload_lora("x")
    assert engine.lora_names == []
    with pytest.raises(RequestError, match=r"no adapter has the name 'x'. No adapter is loaded"):
        answer(engine, "x")
    assert answer(engine) == plain_answer


def test_unfinished_requests_keep_an_adapter_that_is_unloaded_or_replaced(engine, folders):
    engine.load_lora("x", folders["a"])
    expected = answer(engine, "x")
    engine.add_request("r", _PROMPT, with_adapter("x"))
    tokens = [token for update in engine.step() for token in update.new_token_ids]

    engine.load_lora("x", folders["b"])
    engine.unload_lora("x")
    while engine.has_work():
        tokens += [token for update in engine.step() for token in update.new_token_ids]

    assert tokens == expected
    # Unloaded adapters stay in memory until the next adapter is loaded.
    engine.load_lora("y", folders["c"])
    assert len(engine._parts.adapters._resident) == 1


def test_hooks_are_removed_with_the_last_adapter(engine, folders):
    engine.load_lora("x", folders["a"])
    engine.unload_lora("x")
    assert not any(module._forward_hooks for module in engine._parts.runner._path._model.modules())


def test_adapters_over_the_limit_are_read_from_disk_again(checkpoint, folders, size):
    engine = open_engine(checkpoint("llama"), lora_adapters=folders, lora_memory=2 * size)
    assert engine.lora_names == ["a", "b", "c"]
    expected = {name: answer(engine, name) for name in "abc"}
    for name in "cabacb":
        assert answer(engine, name) == expected[name]
        assert sum(engine._parts.adapters._resident.values()) <= 2 * size
    engine.close()


def test_a_request_is_refused_while_adapters_in_use_fill_the_memory(checkpoint, folders, size):
    engine = open_engine(checkpoint("llama"), lora_adapters=folders, lora_memory=size)
    engine.add_request("r", _PROMPT, with_adapter("a"))
    with pytest.raises(CapacityError, match="the adapters of unfinished requests leave only"):
        engine.add_request("s", _PROMPT, with_adapter("b"))

    while engine.has_work():
        engine.step()
    engine.add_request("s", _PROMPT, with_adapter("b"))
    while engine.has_work():
        engine.step()
    engine.close()


def test_changed_or_missing_files_refuse_only_requests_of_the_adapter(
    checkpoint, folders, size, tmp_path
):
    paths = {name: shutil.copytree(folders[name], str(tmp_path / name)) for name in "ab"}
    # The memory has space for only one adapter, so each change of the adapter reads its files.
    engine = open_engine(checkpoint("llama"), lora_adapters=paths, lora_memory=size)

    shutil.copy(f"{folders['c']}/adapter_model.safetensors", paths["a"])
    with pytest.raises(RequestError, match="the files of the adapter a have changed"):
        answer(engine, "a")

    shutil.rmtree(paths["a"])
    with pytest.raises(RequestError, match=r"the adapter a cannot be read again: .*No such file"):
        answer(engine, "a")

    answer(engine, "b")
    engine.close()


def test_an_adapter_larger_than_the_limit_is_refused(checkpoint, folders, size):
    with pytest.raises(ConfigError, match=r"lora_adapters: .*\(lora_memory\). Raise lora_memory"):
        open_engine(checkpoint("llama"), lora_adapters={"a": folders["a"]}, lora_memory=size - 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: .*\(\['lm_head'\]\)"),
        ({"modules_to_save": True}, r"modules_to_save: .*\(True\)"),
        ({"use_dora": True}, "the setting use_dora has the value True"),
        ({"target_parameters": ["mlp.gate"]}, "the setting target_parameters"),
        ({"bias": "all"}, "bias must be 'none', but the file has 'all'. Merge the adapter"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"peft_type": "LOHA"}, "peft_type must be LORA, but the file has 'LOHA'. Merge"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number .* but the file has '8'"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number .* but the file has 1000"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern must be an object whose keys are regular"),
        ({"rank_pattern": {f"a{{{10**20}}}": 4}}, "rank_pattern must be an object whose keys are"),
        ({"alpha_pattern": [4]}, r"alpha_pattern must be an object .* but the file has \[4\]"),
    ],
)
def test_an_unsuitable_setting_is_refused_by_name(settings, message, engine, folders, tmp_path):
    folder = shutil.copytree(folders["a"], tmp_path / "x")
    write_config(folder, **settings)
    with pytest.raises(RequestError, match=f"lora_path: .*adapter_config.json: .*{message}"):
        engine.load_lora("x", str(folder))
    assert engine.lora_names == []


def test_a_pattern_that_takes_exponential_time_in_python_does_not_block_the_engine(
    engine, folders, tmp_path
):
    folder = shutil.copytree(folders["a"], tmp_path / "x")
    write_config(folder, r=4, rank_pattern={"(.*)*x": 9})
    engine.load_lora("x", str(folder))
    assert engine.lora_names == ["x"]
    engine.unload_lora("x")


_Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{_Q}.lora_A.weight": None}, "q_proj: the matrix lora_A is missing"),
        ({f"{_Q}.lora_A.weight": (4, 63)}, r"q_proj: .* the shapes \(4, 63\) and \(64, 4\)"),
        ({f"{_Q}.lora_A.weight": ()}, r"q_proj: .* the shapes \(\) and \(64, 4\)"),
        ({f"{_Q}.lora_B.weight": "nan"}, "lora_B.weight must contain finite"),
        (
            {f"{_Q}.lora_B.weight": "huge"},
            "too large for the model's type torch.float32",
        ),
        ({f"{_Q}.lora_A.other.weight": (4, 64)}, "q_proj: the file contains two matrices lora_A"),
        (
            {f"{_Q}.lora_magnitude_vector": (64,)},
            "lora_magnitude_vector is neither the lora_A matrix",
        ),
        (
            {
                "base_model.model.lm_head.lora_A.weight": (4, 64),
                "base_model.model.lm_head.lora_B.weight": (320, 4),
            },
            "lm_head: the model has no such linear layer.* Merge the adapter into the model",
        ),
        (
            {
                "base_model.model.language_model.model.layers.0.mlp.up_proj.lora_A.weight": (4, 64),
                "base_model.model.language_model.model.layers.0.mlp.up_proj.lora_B.weight": (96, 4),
            },
            r"but has the layer model\.layers\.0\.mlp\.up_proj\. .* Rename the tensors",
        ),
    ],
)
def test_an_unsuitable_tensor_is_refused_by_name(changes, message, engine, folders, tmp_path):
    # A change is None (remove the tensor), "nan" or "huge" (insert such numbers), or a shape
    # (replace the tensor by one with this shape).
    folder = shutil.copytree(folders["a"], tmp_path / "x")
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, change in changes.items():
        if change is None:
            del tensors[name]
        elif change == "nan":
            tensors[name][0, 0] = torch.nan
        elif change == "huge":
            tensors[name] = torch.full_like(tensors[name], torch.finfo(torch.float32).max)
        else:
            tensors[name] = torch.ones(change)
    save_file(tensors, folder / "adapter_model.safetensors")

    with pytest.raises(RequestError, match=message):
        engine.load_lora("x", str(folder))


@pytest.mark.parametrize("settings", [{"r": 8}, {"r": 4, "rank_pattern": {"down_proj": 8}}])
def test_a_rank_that_differs_from_the_matrices_is_refused(settings, engine, folders, tmp_path):
    folder = shutil.copytree(folders["a"], tmp_path / "x")
    write_config(folder, **settings)
    message = (
        r"x/adapter_model.safetensors: .*_proj: the matrix lora_A has the rank 4, but "
        r".*x/adapter_config.json gives this layer the rank 8"
    )
    with pytest.raises(RequestError, match=message):
        engine.load_lora("x", str(folder))
    assert engine.lora_names == []

    # The wrong rank `r` has no effect if `rank_pattern` sets the right rank for all layers.
    write_config(folder, r=8, rank_pattern={r".*_proj": 4})
    engine.load_lora("x", str(folder))


def test_an_adapter_with_float8_matrices_is_loaded(engine, folders, tmp_path):
    folder = shutil.copytree(folders["a"], tmp_path / "x")
    tensors = load_file(folder / "adapter_model.safetensors")
    small = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()}
    save_file(small, folder / "adapter_model.safetensors")
    engine.load_lora("x", str(folder))
    assert answer(engine, "x") != answer(engine)


def test_a_folder_of_adapters_is_refused_with_the_folder_of_one_adapter(engine, tmp_path):
    with pytest.raises(RequestError, match=r"adapter_config.json: the file cannot be read"):
        engine.load_lora("x", str(tmp_path))
    (tmp_path / "sql").mkdir()
    write_config(tmp_path / "sql")
    with pytest.raises(RequestError, match=rf"folder of one adapter, such as {tmp_path}/sql\."):
        engine.load_lora("x", str(tmp_path))


def test_missing_and_broken_weights_are_refused_by_name(engine, tmp_path):
    write_config(tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(RequestError, match=r"adapter_model.safetensors: .*safe_serialization"):
        engine.load_lora("x", str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(RequestError, match=r"adapter_model.safetensors: the file is broken"):
        engine.load_lora("x", str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps([1]), "peft_type must be LORA, but the file has None"),
        ("[" * 100_000, r"adapter_config.json: the file is not valid JSON"),
    ],
    ids=["a list", "deep nesting"],
)
def test_a_broken_config_of_an_adapter_is_refused_by_name(content, message, engine, tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\0" * 100)
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(RequestError, match=message):
        engine.load_lora("x", str(tmp_path))


def test_an_adapter_that_may_not_be_read_is_refused(engine, folders, monkeypatch):
    def refuse(path, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(RequestError, match=r"^lora_path: .* cannot be read \(Permission denied\)"):
        engine.load_lora("x", folders["a"])


def test_an_invalid_path_or_name_of_an_adapter_is_refused(engine, folders):
    with pytest.raises(RequestError, match="is not a valid path"):
        engine.load_lora("x", "/adapters\0x")
    with pytest.raises(RequestError, match=r"cannot be read \(File name too long\)"):
        engine.load_lora("x", "/" + "x" * 5000)
    with pytest.raises(RequestError, match="lora_name: the name of an adapter must not be empty"):
        engine.load_lora("a=b", folders["a"])
