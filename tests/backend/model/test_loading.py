import dataclasses
import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from backend.exactness import PARAMS, open_engine
from nereid_backend import ConfigError, ModelError, UnsupportedModelError
from nereid_backend.attention.layers import LayerWindow
from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.checkpoints import weight_arguments
from nereid_backend.checkpoints.read_config import check_files
from nereid_backend.checkpoints.safetensors_files import open_tensors
from nereid_backend.load_checkpoint import load_checkpoint
from nereid_backend.model.forward_path.length_limits import model_limit
from nereid_backend.model.forward_path.make_kv_cache import make_blocks
from nereid_backend.model.forward_path.path_spec import set_attention
from nereid_backend.model.forward_path.probe_layers import probe_layers
from nereid_backend.model.forward_path.reference_logits import compute_reference
from nereid_backend.model.forward_path.self_check import check_path
from nereid_backend.paths.model_call import UnfitError
from nereid_backend.paths.packed import PackedPath
from safetensors.torch import load_file, save_file
from transformers import AutoConfig


@pytest.fixture
def copy(checkpoint, tmp_path):
    """A copy of a checkpoint. A test may damage the copy."""
    return shutil.copytree(checkpoint("llama"), tmp_path / "copy")


def load(folder, hook, dtype="float32"):
    """Load a checkpoint on the CPU. The model computes attention with the function of `hook`."""
    return load_checkpoint(
        str(folder),
        dtype=dtype,
        device=torch.device("cpu"),
        attention=hook.name,
        progress=lambda line: None,
    )


def change_config(folder, changes, name="config.json"):
    """Add or replace fields in the JSON file `name` of a checkpoint."""
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def answer(folder, **settings):
    """Return the tokens with which an engine answers a short prompt."""
    engine = open_engine(folder, **settings)
    tokens = engine.generate([[5, 9]], PARAMS)[0].outputs[0].token_ids
    engine.close()
    return tokens


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ModelError, match="nowhere is not a folder"):
        open_engine(tmp_path / "nowhere")


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        open_engine(tmp_path)


def test_a_checkpoint_without_safetensors_says_how_to_get_them(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors files\. Download"):
        open_engine(copy)
    (copy / "training_args.bin").touch()
    with pytest.raises(ModelError, match=r"no \.safetensors files\. Download"):
        open_engine(copy)
    (copy / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle file.*this command"):
        open_engine(copy)


@pytest.mark.parametrize("has_peft", [False, True])
def test_an_adapter_beside_the_model_is_reported_and_never_applied_to_the_model(
    has_peft, copy, caplog, monkeypatch
):
    monkeypatch.setattr(weight_arguments, "is_peft_available", lambda: has_peft)
    (copy / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    config = AutoConfig.from_pretrained(copy)
    arguments = weight_arguments.weight_arguments(copy, config, torch.float32)
    # If PEFT is installed, transformers would apply an adapter in a folder.
    assert (arguments["pretrained_model_name_or_path"] is None) == has_peft
    assert "copy also contains an adapter, which is not applied" in caplog.text


def test_a_folder_with_only_the_weights_of_an_adapter_is_called_an_adapter(copy):
    (copy / "model.safetensors").rename(copy / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"copy is a LoRA adapter\. For a language model, set"):
        open_engine(copy)


@pytest.mark.parametrize(
    "change", [{"rope_parameters": 5}, {"num_attention_heads": 0}, {"eos_token_id": "x"}]
)
def test_a_config_with_wrong_types_is_refused(change, copy):
    change_config(copy, change)
    with pytest.raises(UnsupportedModelError, match=r"transformers cannot load .*config\.json"):
        open_engine(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": 5}, "architectures must be a list of class names, but it is 5"),
        ({"architectures": [5]}, r"architectures must be a list of class names, but it is \[5\]"),
        ({"head_dim": "16"}, r"Validation error for field 'head_dim': TypeError: .*'16'"),
        ({"hidden_act": "foo"}, "the value 'foo' is unknown"),
        ({"text_config": {}}, "of the type llama must not have the field text_config"),
        ({"dtype": "bf16"}, r"config\.json: dtype must be a data type .* but it is 'bf16'"),
        ({"torch_dtype": "Tensor"}, r"config\.json: torch_dtype must be a data type of torch"),
        (
            {"vocab_size": 100},
            r"the tensor \S+ in \S+/model\.safetensors has the shape \(320, 64\), but "
            r"\S+/config\.json requires the shape \(100, 64\)",
        ),
    ],
)
def test_the_error_names_the_wrong_value_of_a_config(change, message, copy):
    change_config(copy, change)
    with pytest.raises(ModelError, match=message):
        open_engine(copy)


@pytest.mark.parametrize("settings", [{}, {"weight_dtype": "int8"}])
def test_the_prefix_that_a_wrapper_added_to_the_names_of_weights_is_named(settings, copy):
    file = copy / "model.safetensors"
    weights = {f"_orig_mod.{name}": weight for name, weight in load_file(file).items()}
    save_file(weights, file)
    message = r"contain _orig_mod\.lm_head\.weight instead.*added the prefix '_orig_mod\.'"
    with pytest.raises(ModelError, match=message):
        open_engine(copy, **settings)


def test_a_folder_with_a_gguf_file_says_how_to_use_it(tmp_path):
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelError, match=r"Set model to a GGUF file, such as \S+/m\.gguf"):
        open_engine(tmp_path)


@pytest.mark.parametrize("num_layers", [10**6, 10**30])
def test_a_config_with_far_more_layers_than_tensors_is_refused_at_once(num_layers, copy):
    change_config(copy, {"num_hidden_layers": num_layers})
    with pytest.raises(ModelError, match=rf"num_hidden_layers is {num_layers}, but the weight"):
        open_engine(copy)


def test_shards_without_an_index_are_loaded(copy):
    expected = answer(copy)
    tensors = list(load_file(copy / "model.safetensors").items())
    (copy / "model.safetensors").unlink()
    save_file(dict(tensors[0::2]), copy / "model-00001-of-00002.safetensors")
    save_file(dict(tensors[1::2]), copy / "model-00002-of-00002.safetensors")
    assert answer(copy) == expected


@pytest.mark.parametrize("content", ["{", "[]", '{"max_new_tokens": -5}'])
def test_a_damaged_generation_config_is_named(content, copy):
    (copy / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read"):
        open_engine(copy)


def test_a_gguf_file_beside_safetensors_files_is_not_read(copy):
    (copy / "model.gguf").write_bytes(b"GGUF of another model")
    open_engine(copy).close()


def test_a_link_of_the_hub_without_its_target_counts_as_missing(copy):
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").symlink_to(copy / "blobs" / "missing")
    with pytest.raises(ModelError, match=r"no \.safetensors files\. Download"):
        open_engine(copy)


def test_eos_tokens_outside_the_vocabulary_are_ignored(copy):
    file = copy / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [2, -1, 10**6, None]}))
    engine = open_engine(copy)
    assert engine.info.eos_token_ids == (2,)
    engine.close()


def test_a_missing_shard_is_named(copy):
    (copy / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    message = r"lacks 2 of 2 weight files, such as model-1\.safetensors"
    with pytest.raises(ModelError, match=message):
        open_engine(copy)


def test_a_broken_index_is_named(copy):
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelError, match=r"index\.json cannot be read"):
        open_engine(copy)


def test_a_truncated_weight_file_is_an_error(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ModelError, match=r"model\.safetensors is incomplete or damaged"):
        open_engine(copy)


@pytest.mark.parametrize("has_metadata", [False, True])
def test_a_tensor_that_is_only_in_the_index_is_an_error_only_if_the_model_needs_it(
    has_metadata, copy
):
    expected = answer(copy)
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").rename(copy / "model-1.safetensors")
    names = [*weights, "model.norm.other"]
    index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    index |= {"metadata": {}} if has_metadata else {}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert answer(copy) == expected

    del weights["model.norm.weight"]
    save_file(weights, copy / "model-1.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights, such as model\.norm\.weight"):
        open_engine(copy)


def test_the_index_decides_which_file_provides_a_tensor_that_two_files_contain(tmp_path):
    zeros, ones = torch.zeros(2), torch.ones(2)
    save_file({"x": zeros}, tmp_path / "model-1.safetensors")
    save_file({"x": ones, "y": zeros}, tmp_path / "model-2.safetensors")
    with pytest.raises(ModelError, match=r"model-1\.safetensors and .* both contain the tensor x"):
        open_tensors(tmp_path)
    index = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_tensors(tmp_path)["x"].read().equal(zeros)


@pytest.mark.parametrize("settings", [{}, {"weight_dtype": "int8"}])
def test_an_index_of_older_files_beside_model_safetensors_is_ignored(settings, copy):
    expected = answer(copy, **settings)
    weights = load_file(copy / "model.safetensors")
    older_weights = {name: weight + 1 for name, weight in weights.items()}
    save_file(older_weights, copy / "model-1.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(older_weights, "model-1.safetensors")}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert answer(copy, **settings) == expected


def test_an_index_without_metadata_is_read(copy):
    (copy / "model.safetensors").rename(copy / "model-1.safetensors")
    names = load_file(copy / "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    open_engine(copy).close()


def test_an_index_cannot_name_a_file_outside_of_the_folder(copy):
    (copy / "model.safetensors").rename(copy / "model-1.safetensors")
    index = {"weight_map": {"a": "../copy/model-1.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="weight files must be directly in"):
        open_engine(copy)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xff" * 8,
        (10**9).to_bytes(8, "little") + b"{",
        (2).to_bytes(8, "little") + b"[]",
        *(
            len(text).to_bytes(8, "little") + text + bytes(64)
            for text in (
                b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,999]}}',
                b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
                b'"b":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}}',
                b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,64]}}',
                b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}}',
                b'{"a":' * 1000 + b"0" + b"}" * 1000,
            )
        ),
    ],
)
def test_a_hostile_header_is_refused(header, copy):
    (copy / "model.safetensors").write_bytes(header)
    with pytest.raises(ModelError, match=r"model\.safetensors is incomplete or damaged"):
        open_engine(copy)


def test_a_checkpoint_that_lacks_weights_is_refused_instead_of_answering_at_random(copy):
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    message = r"lacks 1 weights, such as model\.layers\.1\.mlp\.up_proj"
    with pytest.raises(ModelError, match=message):
        open_engine(copy)


@pytest.mark.parametrize("is_zero", [False, True])
def test_a_bias_that_the_model_lacks_is_refused_unless_it_is_zero(is_zero, copy):
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    size = len(weights["model.layers.0.self_attn.q_proj.weight"])
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.full((size,), float(not is_zero))
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    if is_zero:
        open_engine(copy).close()
        return
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.bias, so .* such as attention_bias"):
        open_engine(copy)


def test_a_bias_that_the_model_lacks_is_refused_in_files_without_the_prefix_of_the_model(copy):
    from safetensors.torch import load_file, save_file

    # Files that were saved by a class without an output layer have names without "model.".
    weights = {
        name.removeprefix("model."): weight
        for name, weight in load_file(copy / "model.safetensors").items()
    }
    weights["layers.0.self_attn.q_proj.bias"] = torch.ones(
        len(weights["layers.0.self_attn.q_proj.weight"])
    )
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"as layers\.0\.self_attn\.q_proj\.bias, so"):
        open_engine(copy)


def test_a_weight_of_a_layer_that_the_model_ignores_is_reported(copy, caplog):
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    weights["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    weights["mtp.layers.0.norm.weight"] = torch.ones(64)  # belongs to another model
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    open_engine(copy).close()
    assert "does not use 1 weights of its layers, such as model.layers.0" in caplog.text


def test_the_error_about_a_larger_embedding_names_the_number_of_tokens(copy):
    config = json.loads((copy / "config.json").read_text())
    num_tokens = config["vocab_size"]
    config["vocab_size"] -= 20
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"Set vocab_size to {num_tokens}, or download"):
        open_engine(copy)


def test_the_error_about_a_missing_output_layer_names_the_setting_for_shared_weights(copy):
    weights = load_file(copy / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"set tie_word_embeddings to true in config\.json"):
        open_engine(copy)


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_is_named(number, copy):
    name = "model.layers.1.mlp.up_proj.weight"
    weights = load_file(copy / "model.safetensors")
    weights[name][3, 4] = number
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"copy: the weight {name} contains NaN or infinity"):
        open_engine(copy)


def test_a_model_type_that_transformers_does_not_know_is_refused(copy):
    change_config(copy, {"model_type": "no_such_type"})
    with pytest.raises(UnsupportedModelError, match="no_such_type"):
        open_engine(copy)


def write_sparse(folder, shape):
    """Write a weight file of zeros that takes no space on the disk."""
    num_bytes = 2 * math.prod(shape)  # A bfloat16 number has two bytes.
    tensor = {"dtype": "BF16", "shape": shape, "data_offsets": [0, num_bytes]}
    header = json.dumps({"model.huge.weight": tensor}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_bytes)


def test_a_checkpoint_larger_than_the_memory_is_refused_before_it_is_read(copy):
    write_sparse(copy, [2**19, 2**19])
    with pytest.raises(ConfigError, match=r"model: the weights need 1024\.0 GiB as float32, but"):
        open_engine(copy)


def test_a_config_for_a_newer_transformers_is_reported(copy):
    change_config(copy, {"model_type": "from_the_future", "transformers_version": "99.1.0"})
    with pytest.raises(UnsupportedModelError, match=r"written for transformers 99\.1\.0"):
        open_engine(copy)


def test_a_config_that_is_no_object_is_reported(copy):
    (copy / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json must contain a JSON object"):
        open_engine(copy)


def test_code_that_comes_with_a_checkpoint_is_not_run(copy):
    auto_map = {"AutoConfig": "their_config.Config"}
    change_config(copy, {"model_type": "their_own", "auto_map": auto_map})
    (copy / "their_config.py").write_text("raise SystemExit('this must not run')")
    with pytest.raises(UnsupportedModelError, match="is only run if trust_remote_code is true"):
        open_engine(copy)


REMOTE_CONFIG = """
from transformers import LlamaConfig
class Config(LlamaConfig):
    model_type = "their_own"
"""
REMOTE_MODEL = """
from transformers import LlamaForCausalLM
from .their_config import Config
class Model(LlamaForCausalLM):
    config_class = Config
"""


@pytest.fixture
def remote_modules(monkeypatch, tmp_path):
    """Let transformers write the code of checkpoints to a temporary folder."""
    from transformers import dynamic_module_utils

    # An earlier test may have added the user's cache to `sys.path`. Python would then look for the
    # package `transformers_modules` only in the user's cache.
    user_cache = dynamic_module_utils.HF_MODULES_CACHE
    monkeypatch.setattr("sys.path", [folder for folder in sys.path if folder != user_cache])
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    # An earlier test may have imported code of another checkpoint from another folder.
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)


def test_code_that_comes_with_a_checkpoint_runs_where_that_is_allowed(copy, remote_modules):
    expected = answer(copy)
    auto_map = {
        "AutoConfig": "their_config.Config",
        "AutoModelForCausalLM": "their_model.Model",
    }
    changes = {"model_type": "their_own", "architectures": ["Model"], "auto_map": auto_map}
    change_config(copy, changes)
    (copy / "their_config.py").write_text(REMOTE_CONFIG)
    (copy / "their_model.py").write_text(REMOTE_MODEL)
    assert answer(copy, trust_remote_code=True) == expected


def test_end_tokens_come_from_generation_config_and_config(copy):
    change_config(copy, {"eos_token_id": [7, 9]}, name="generation_config.json")
    engine = open_engine(copy)
    assert engine.info.eos_token_ids == (2, 7, 9)
    engine.close()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "tokenizer_config.json": {"eos_token": "<|im_end|>"},
                "tokenizer.json": {"added_tokens": [{"id": 5, "content": "<|im_end|>"}]},
            },
            (2, 5),
        ),
        (
            {
                "tokenizer_config.json": {
                    "eos_token": {"content": "<|im_end|>"},
                    "added_tokens_decoder": {"5": {"content": "<|im_end|>"}},
                }
            },
            (2, 5),
        ),
        (
            {
                "special_tokens_map.json": {"eos_token": "<|im_end|>"},
                "tokenizer.json": {"added_tokens": [{"id": 999, "content": "<|im_end|>"}]},
            },
            (2,),  # The token 999 is outside the vocabulary.
        ),
        ({"tokenizer_config.json": [], "tokenizer.json": {"added_tokens": 5}}, (2,)),
    ],
)
def test_the_end_token_of_the_tokenizer_ends_answers(files, expected, copy):
    for name, content in files.items():
        (copy / name).write_text(json.dumps(content))
    engine = open_engine(copy)
    assert engine.info.eos_token_ids == expected
    engine.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up its permissions")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_without_permission_is_reported_as_such(name, checkpoint):
    user_without_permissions = 65534  # the user "nobody"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(checkpoint("llama"), folder, dirs_exist_ok=True)
        Path(folder).chmod(0o755)
        (Path(folder) / name).chmod(0)
        os.seteuid(user_without_permissions)
        try:
            with pytest.raises(ModelError, match=f"{name} cannot be read, because .* permission"):
                check_files(Path(folder))
        finally:
            os.seteuid(0)


def packed_path(checkpoint, hook, layers, sizes):
    """Return a packed forward path. `layers` contains the description of each attention layer."""
    cache, builder = make_blocks(checkpoint, layers, sizes)
    return PackedPath(checkpoint, hook, cache, builder)


def change_window(layer):
    return dataclasses.replace(layer, window=LayerWindow(size=11))


def drop_window(layer):
    return dataclasses.replace(layer, window=LayerWindow())


def drop_softcap(layer):
    return dataclasses.replace(layer, softcap=None)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mistral, sliding window", drop_window),
        ("mistral, sliding window", change_window),
        ("gemma2", drop_softcap),
        ("gpt_oss", drop_window),
    ],
)
@pytest.mark.parametrize("block_size", [4, 16])
def test_the_self_check_notices_what_a_layer_lacks(checkpoint, family, change, block_size):
    hook = AttentionHook()
    loaded = load(checkpoint(family), hook)
    layers = probe_layers(loaded, hook)
    # The model computes the expected logits with its own attention instead of the hook.
    set_attention(loaded, None)
    reference = compute_reference(loaded, layers, max_len=256, block_size=block_size)
    set_attention(loaded, hook)
    correct_path = packed_path(loaded, hook, layers, reference.sizes)
    assert check_path(correct_path, reference, torch.float32) < 1e-5

    wrong_layers = [change(layer) for layer in layers]
    wrong_path = packed_path(loaded, hook, wrong_layers, reference.sizes)
    with pytest.raises(UnfitError, match="differ from the logits of the unmodified model"):
        check_path(wrong_path, reference, torch.float32)
    hook.remove()


def test_the_probe_sees_each_layers_window_and_heads(checkpoint):
    hook = AttentionHook()
    layers = probe_layers(load(checkpoint("gpt_oss"), hook), hook)
    assert [layer.window.size for layer in layers] == [12, None]
    assert all(layer.has_sinks and layer.num_kv_heads == 2 for layer in layers)
    hook.remove()


def test_half_precision_loads_and_passes_the_self_check(checkpoint):
    engine = open_engine(checkpoint("llama"), dtype="bfloat16")
    assert engine.info.dtype == "bfloat16"
    assert engine.info.self_check_difference < 0.1
    engine.close()


def test_positions_that_depend_on_the_longest_request_limit_the_length():
    config = AutoConfig.for_model(
        "phi3",
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=512,
        original_max_position_embeddings=128,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 128,
        },
    )
    limit = model_limit(config)
    assert limit.num_tokens == 128
    assert "longrope" in limit.reason


@pytest.mark.parametrize(
    ("max_length", "original", "expected"), [(512, 512, 2048), (512, None, 2048), (4096, 512, 4096)]
)
def test_yarn_extends_the_length_limit(max_length, original, expected):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
    config = AutoConfig.for_model(
        "qwen2",
        max_position_embeddings=max_length,
        rope_scaling={name: value for name, value in scaling.items() if value is not None},
    )
    assert model_limit(config).num_tokens == expected


def test_a_scale_that_counts_positions_in_the_batch_limits_the_length_of_batches():
    config = AutoConfig.for_model("inkling2_text", log_scaling_n_floor=1000)
    assert model_limit(config).num_tokens == 1000
    assert "log_scaling_n_floor" in model_limit(config).reason
    assert model_limit(config, is_batched=False).num_tokens > 1000
