"""models.toml, and the model repository that is written from it."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from nereid_client.settings import SettingsError
from nereid_client.several_models.models_file import read_models_file
from nereid_client.several_models.repository import write_repository
from tritonclient.grpc import model_config_pb2

SOURCE = Path(__file__).parents[3] / "model_repository"


def read(folder, text):
    path = folder / "models.toml"
    path.write_text(text, encoding="utf-8")
    return read_models_file(path)


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
    assert (chat.name, chat.triton_name, chat.names) == (
        "org/chat",
        "org-chat",
        ("org/chat", "gpt-4o"),
    )
    assert chat.path == tmp_path.resolve() / "weights" / "chat"
    assert chat.entry.settings == {"max_num_seqs": "8", "enable_prefix_caching": "false"}
    assert (search.kind, search.entry.load_at_start, search.entry.idle_unload_s) == (
        "embedding",
        False,
        600,
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least one language model"),
        ("x", "cannot be read"),
        ('[a]\nkind = "llm"', "a.model .* is wrong: Field required"),
        ('[a]\nmodel = "b"\nkind = "vision"', "a.kind .* is wrong"),
        ('[a]\nmodel = "b"\nidle_unload_s = -1', "a.idle_unload_s .* is wrong"),
        ('[a]\nmodel = "b"\naliases = ["c"]\n[c]\nmodel = "b"', "the name 'c' twice"),
        ('["a/b"]\nmodel = "b"\n["a-b"]\nmodel = "b"', "too similar"),
        ('[a]\nmodel = "b"\n[a-executor]\nmodel = "b"', "too similar"),
        ("a = 5", "a .* is wrong"),
    ],
)
def test_a_wrong_file_is_named_with_the_table(tmp_path, text, words):
    with pytest.raises(SettingsError, match=words):
        read(tmp_path, text)


def test_the_repository_has_a_valid_configuration_for_each_model(tmp_path):
    specs = read(
        tmp_path,
        '[chat]\nmodel = "c"\ntool_parser = "a\\"b\\\\é"\n[e]\nkind = "embedding"\nmodel = "e"\n',
    )
    folder = tmp_path / "repository"
    defaults = {"llm": {"max_num_seqs": "4"}, "embedding": {}, "rerank": {}}
    write_repository(folder, SOURCE, specs, defaults)
    configs = {}
    for path in folder.glob("*/config.pbtxt"):
        config = text_format.Parse(path.read_text("utf-8"), model_config_pb2.ModelConfig())
        assert config.name == path.parent.name
        assert (path.parent / "1").is_dir()
        configs[config.name] = config
    steps = ("chat-tokenizer", "chat-executor", "chat-postprocessor")
    assert set(configs) == {"chat", "e", *steps}
    used = [step.model_name for step in configs["chat"].ensemble_scheduling.step]
    assert used == list(steps)
    for step in steps:
        parameters = {name: value.string_value for name, value in configs[step].parameters.items()}
        assert parameters == {
            "model": str(tmp_path.resolve() / "c"),
            "tool_parser": 'a"b\\é',
            "max_num_seqs": "4",
        }
    assert configs["e"].parameters["served_model_name"].string_value == "e"
