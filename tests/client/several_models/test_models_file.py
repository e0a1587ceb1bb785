"""Tests of reading the file models.toml, and of writing a model repository for its models."""

import json
import math
import struct
from pathlib import Path

import pytest
from google.protobuf import text_format
from nereid_client.settings import SettingsError
from nereid_client.several_models.model_memory import ModelMemory, estimate_memory
from nereid_client.several_models.models_file import read_models_file
from nereid_client.several_models.repository import write_repository
from tritonclient.grpc import model_config_pb2

SOURCE = Path(__file__).parents[3] / "model_repository"


def read(folder, text):
    path = folder / "models.toml"
    path.write_text(text, encoding="utf-8")
    return read_models_file(path, {}).specs


def weights(folder, name, **tensors):
    """Write a checkpoint's header with tensors of the given (dtype, shape), and return `name`."""
    header, offset = {}, 0
    for key, (dtype, shape) in tensors.items():
        size = math.prod(shape) * {"F32": 4, "BF16": 2, "F16": 2, "I8": 1}[dtype]
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    header_json = json.dumps(header).encode()
    (folder / name).mkdir()
    path = folder / name / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header_json)) + header_json)
    return name


def file_with_budget(folder, budget, text, **defaults):
    path = folder / "models.toml"
    path.write_text(f"memory_budget = {budget}\n{text}", encoding="utf-8")
    return read_models_file(path, defaults)


def test_only_the_weight_files_that_are_loaded_count_as_memory(tmp_path):
    folder = tmp_path / weights(tmp_path, "a", matrix=("BF16", [1000, 1024]))
    content = (folder / "model.safetensors").read_bytes()
    for name in ("consolidated.safetensors", "model-1.safetensors", "adapter_model.safetensors"):
        (folder / name).write_bytes(content)
    index = {"weight_map": {"matrix": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    size_of_model_file = estimate_memory(folder, {}).weights
    (folder / "model.safetensors").unlink()
    size_of_files_in_index = estimate_memory(folder, {}).weights
    (folder / "consolidated.safetensors").unlink()
    (folder / "model.safetensors.index.json").unlink()
    size_without_adapter = estimate_memory(folder, {}).weights
    (tmp_path / "modules.json").write_text('[{"idx": 0, "path": "a"}]')
    size_of_subfolder = estimate_memory(tmp_path, {}).weights

    assert size_of_model_file > 0
    assert size_of_files_in_index == size_of_model_file
    assert size_without_adapter == size_of_model_file
    assert size_of_subfolder == size_of_model_file


def test_the_memory_of_a_model_is_its_weights_and_its_kv_cache(tmp_path):
    name = weights(tmp_path, "a", matrix=("F16", [1000, 1024]), bias=("F16", [10]), q=("I8", [8]))
    tables = {
        "auto": 'kv_cache_memory = "1MiB"',
        "half": 'dtype = "bfloat16"',
        "rounded": 'weight_dtype = "int8"',
        "gpu": 'device = "cuda:0"\ndata_parallel_size = 2',
        "search": 'kind = "embedding"',
        "draft": f'weight_dtype = "int8"\ndraft_model = "{tmp_path / name}"',
    }
    text = "".join(
        f'[{table}]\nmodel = "{name}"\n{settings}\nload_at_start = {str(table == "auto").lower()}\n'
        for table, settings in tables.items()
    )
    models = file_with_budget(tmp_path, '"400MiB"', text)
    memory = {spec.name: spec.memory for spec in models.specs}

    assert models.memory_budget == 400 << 20
    # A quarter of the budget is the default size of a KV cache. The matrix has 1,024,000 elements.
    assert memory["auto"] == ModelMemory(weights=4 * 1_024_010 + 8, kv_cache=1 << 20)
    assert memory["half"] == ModelMemory(weights=2 * 1_024_010 + 8, kv_cache=100 << 20)
    assert memory["rounded"].weights == int(1.04 * 1_024_000 + 4 * 10 + 8)
    assert memory["draft"].weights == 2 * memory["rounded"].weights
    assert memory["gpu"] == ModelMemory(weights=2 * (2 * 1_024_010 + 8), kv_cache=200 << 20)
    assert memory["search"] == ModelMemory(weights=4 * 1_024_010 + 8, kv_cache=0)
    # The engine must get the size of the KV cache that was used to compute the memory of the model.
    half = next(spec for spec in models.specs if spec.name == "half")
    assert half.settings["kv_cache_memory"] == str(100 << 20)


def test_the_memory_of_a_model_takes_the_default_settings_into_account(tmp_path):
    name = weights(tmp_path, "a", matrix=("BF16", [1000, 1024]))
    text = f'[a]\nmodel = "{name}"\n[b]\nmodel = "{name}"\nkv_cache_memory = "3MiB"\n'
    defaults = {"kv_cache_memory": "2MiB", "dtype": "float32", "data_parallel_size": "2"}
    a, b = file_with_budget(tmp_path, '"400MiB"', text, llm=defaults).specs
    assert a.memory == ModelMemory(2 * 4 * 1_024_000, 2 * 2 << 20)
    assert b.memory == ModelMemory(2 * 4 * 1_024_000, 2 * 3 << 20)
    assert a.settings == defaults | {"model": str(tmp_path / name)}


@pytest.mark.parametrize("tensor", [5, {}, {"dtype": "F32", "shape": None, "data_offsets": [0, 4]}])
def test_a_damaged_header_counts_as_the_size_of_its_file(tmp_path, tensor):
    header = json.dumps({"a": tensor}).encode()
    content = struct.pack("<Q", len(header)) + header
    (tmp_path / "model.safetensors").write_bytes(content)
    assert estimate_memory(tmp_path, {}).weights == len(content)


def test_an_unknown_home_folder_of_the_draft_model_is_named(tmp_path):
    table = '[a]\nmodel = "b"\ndraft_model = "~nobody-here/x"\n'
    with pytest.raises(SettingsError, match=r"draft_model: the path .* the home folder is unknown"):
        file_with_budget(tmp_path, '"1GiB"', table)


def test_without_a_budget_the_engine_chooses_the_kv_cache(tmp_path):
    (spec,) = read(tmp_path, '[a]\nmodel = "a"')
    assert spec.memory is None
    assert "kv_cache_memory" not in spec.settings


@pytest.mark.parametrize(
    ("budget", "table", "message"),
    [
        ('"1,5TiB"', "", "memory_budget must be a positive size in bytes"),
        ('"many"', "", 'memory_budget must be a positive size in bytes, for example "12GiB"'),
        ("0", "", "but it is 0"),
        ('"2GiB"', 'kv_cache_memory = "3GiB"', r"needs 3\.98 GiB \(weights 1000 MiB, KV cache 3"),
        ('"4GiB"', 'kv_cache_memory = "big"', r"\[a\] in the file .*: kv_cache_memory must be"),
        ('"2.5GiB"', "", r"at the start need 3\.2 GiB together \(a 1\.6 GiB .*load_at_start"),
    ],
)
def test_models_that_never_fit_are_refused_with_the_numbers(tmp_path, budget, table, message):
    name = weights(tmp_path, "w", matrix=("F32", [1000, 262_144]))
    text = "".join(f'[{key}]\nmodel = "{name}"\n{table}\n' for key in "ab")
    with pytest.raises(SettingsError, match=message):
        file_with_budget(tmp_path, budget, text)


def test_tables_become_models_in_order(tmp_path):
    chat, search = read(
        tmp_path,
        """
        ["org/chat"]
        model = "weights/chat"
        aliases = ["gpt-4o"]
        max_num_seqs = 8
        enable_prefix_caching = false
        [search]
        kind = "embedding"
        model = "/weights/search"
        load_at_start = false
        idle_unload_s = 600
        """,
    )
    assert chat.name == "org/chat"
    assert chat.triton_name == "org-chat"
    assert chat.names == ("org/chat", "gpt-4o")
    assert chat.path == tmp_path.resolve() / "weights" / "chat"
    assert chat.entry.settings == {"max_num_seqs": "8", "enable_prefix_caching": "false"}
    assert search.kind == "embedding"
    assert search.entry.load_at_start is False
    assert search.entry.idle_unload_s == 600


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least one language model"),
        ("x", "cannot be read"),
        ('[a]\nkind = "llm"', "a.model .* is wrong: the key is missing"),
        ('[a]\nmodel = "b"\nkind = "vision"', "a.kind .* is wrong"),
        ('[a]\nmodel = "b"\nidle_unload_s = -1', "a.idle_unload_s .* is wrong: .* it is -1"),
        ('[a]\nmodel = "b"\naliases = "c"', "the value must be a list, but it is 'c'"),
        ('[a]\nmodel = "b"\nserved_model_name = "c"', "name of a model is the name of its table"),
        ('[a]\nmodel = "b"\nlora_adapters = "a=/x"', "the name 'a' twice"),
        (
            '[a]\nmodel = "b"\nlora_adapters = "s=/x"\n[b]\nmodel = "b"\nlora_adapters = " s=/y"',
            "the name 's' twice",
        ),
        ('[a]\nmodel = "b"\naliases = ["c"]\n[c]\nmodel = "b"', "the name 'c' twice"),
        ('["a/b"]\nmodel = "b"\n["a-b"]\nmodel = "b"', "too similar"),
        ('[a]\nmodel = "b"\n[a-executor]\nmodel = "b"', "too similar"),
        ("a = 5", "a .* is wrong: it must be a table, but it is 5"),
        (f"a = {'[' * 5000}", "cannot be read"),
        ('[a]\nmodel = "b\\u0000"', "a.model .* is wrong: .* is not a path"),
        ('[a]\nmodel = "b"\nimage_url_hosts = ["c.org"]', "a.image_url_hosts .* a text in quotes"),
        ('[a]\nmodel = "b"\nchat_template_kwargs = {c = false}', "a.chat_template_kwargs .* text"),
    ],
)
def test_a_wrong_file_is_named_with_the_table(tmp_path, text, words):
    with pytest.raises(SettingsError, match=words):
        read(tmp_path, text)


def parameters_of(config):
    """Return the parameters of a model's configuration: name -> text."""
    return {name: value.string_value for name, value in config.parameters.items()}


def test_the_repository_has_a_valid_configuration_for_each_model(tmp_path):
    models_file = tmp_path / "models.toml"
    models_file.write_text(
        '[chat]\nmodel = "c"\ntool_parser = "a\\"b\\\\é"\n[e]\nkind = "embedding"\nmodel = "e"\n',
        encoding="utf-8",
    )
    models = read_models_file(models_file, {"llm": {"max_num_seqs": "4"}})

    repository = tmp_path / "repository"
    write_repository(repository, SOURCE, models.specs)

    configs = {
        path.parent.name: text_format.Parse(path.read_text("utf-8"), model_config_pb2.ModelConfig())
        for path in repository.glob("*/config.pbtxt")
    }
    steps = ["chat-tokenizer", "chat-executor", "chat-postprocessor"]
    assert set(configs) == {"chat", "e", *steps}
    for name, config in configs.items():
        assert config.name == name
        assert (repository / name / "1").is_dir()
    assert [step.model_name for step in configs["chat"].ensemble_scheduling.step] == steps
    for step in steps:
        assert parameters_of(configs[step]) == {
            "model": str(tmp_path.resolve() / "c"),
            "tool_parser": 'a"b\\é',
            "max_num_seqs": "4",
        }
    assert parameters_of(configs["e"]) == {"model": str(tmp_path.resolve() / "e")}
