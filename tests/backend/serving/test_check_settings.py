"""Tests of the check of all settings. `nereid serve` runs this check before it starts a server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from nereid_backend.serving.check_settings import find_problems

REPOSITORY = Path(__file__).resolve().parents[3] / "model_repository"
CHAT = REPOSITORY.parent / "demo" / "chat"
COMMENTED = """
# parameters { key: "block_size" value { string_value: "bad" } }
parameters { key: "model" value { string_value: "x" } }
parameters { key: "num_threads" value { string_value: "0" } }
"""
SPREAD_OVER_LINES = """
parameters: {
  key: "model"
  value: {
    string_value: "x"
  }
}
parameters: {
  key: "num_threads"
  value: {
    string_value: "0"
  }
}
"""


def test_the_settings_of_the_repository_have_no_problem():
    assert find_problems(REPOSITORY, {}) == []


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NEREID_DTYPE": "float8"}, "dtype: the value must be 'auto', 'float32', "),
        ({"NEREID_KV_CACHE_MEMORY": "-1GiB"}, "kv_cache_memory: the value must be a number of"),
        ({"NEREID_TOOL_PARSER": "mine"}, "tool_parser: There is no format with the name 'mine'"),
        ({"NEREID_BLOCK_SIZE": "0"}, "block_size: the value must be greater than 0, but it is"),
        ({"NEREID_CHAT_TEMPLATE": "/none"}, "chat_template: the file /none cannot be read"),
        ({"NEREID_CHAT_TEMPLATE_KWARGS": "[1]"}, "chat_template_kwargs: the value must be a JSON"),
        ({"NEREID_RERANK_DTYPE": "x"}, "rerank_dtype: the value must be 'auto', "),
        ({"NEREID_DRAFT_MODEL": "/none"}, "draft_model: /none is not a folder with a file config"),
        ({"NEREID_LORA_ADAPTERS": "a=/none"}, "lora_adapters: the folder /none of the adapter 'a'"),
        ({"NEREID_IMAGE_FOLDER": "/none"}, "image_folder: /none is not a folder"),
        ({"NEREID_IMAGE_URL_HOSTS": "https://a.org"}, "image_url_hosts: each item must be a host"),
        ({"NEREID_MAX_NUM_SEQS": "100000000"}, "max_num_seqs: the value must be at most 16384"),
    ],
)
def test_a_wrong_setting_is_reported_once(variables, message):
    [problem] = find_problems(REPOSITORY, variables)
    assert problem.startswith(message)


def test_the_error_about_a_folder_with_several_adapters_names_one_of_them(tmp_path):
    (tmp_path / "sql").mkdir()
    (tmp_path / "sql" / "adapter_config.json").touch()
    [problem] = find_problems(REPOSITORY, {"NEREID_LORA_ADAPTERS": f"a={tmp_path}"})
    assert problem.endswith(f"PEFT's layout, such as {tmp_path}/sql.")


def with_pooling_models(**variables):
    """Return environment variables that select an embedding model and a reranker.

    The function also returns each of `variables`, with the prefix NEREID_.
    """
    models = {f"NEREID_{kind}_MODEL": str(CHAT) for kind in ("EMBEDDING", "RERANK")}
    return {**models, **{f"NEREID_{name}": value for name, value in variables.items()}}


def test_the_shares_of_all_models_on_a_gpu_must_fit():
    assert find_problems(REPOSITORY, with_pooling_models()) == []
    [problem] = find_problems(
        REPOSITORY, with_pooling_models(EMBEDDING_GPU_MEMORY_UTILIZATION="0.2", DEVICE="cuda")
    )
    assert problem == (
        "gpu_memory_utilization: the models on cuda:0 would use 1.15 times its memory "
        "(gpu_memory_utilization 0.9, embedding_gpu_memory_utilization 0.2, "
        "rerank_gpu_memory_utilization 0.05). Lower a share, or set the device of a model to "
        "another GPU."
    )


@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_models_on_other_devices_do_not_share_the_memory(device):
    variables = with_pooling_models(EMBEDDING_GPU_MEMORY_UTILIZATION="0.9", EMBEDDING_DEVICE=device)
    assert find_problems(REPOSITORY, variables) == []


def test_a_length_above_the_limit_of_the_checkpoint_is_reported():
    variables = {"NEREID_MODEL": str(CHAT), "NEREID_MAX_MODEL_LEN": "4096"}
    assert find_problems(REPOSITORY, variables) == []
    [problem] = find_problems(REPOSITORY, variables | {"NEREID_MAX_MODEL_LEN": "4097"})
    assert problem == (
        "max_model_len: the value must be at most 4096 (max_position_embeddings in "
        f"{CHAT / 'config.json'}), but it is 4097."
    )


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": {"max_position_embeddings": 64}},
        {"text_config": None, "max_position_embeddings": 64},
    ],
)
def test_the_limit_of_the_decoder_is_found(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    variables = {"NEREID_MODEL": str(tmp_path), "NEREID_MAX_MODEL_LEN": "65"}
    [problem] = find_problems(REPOSITORY, variables)
    assert problem.startswith("max_model_len: the value must be at most 64 ")


@pytest.mark.parametrize("text", [COMMENTED, SPREAD_OVER_LINES])
def test_the_parameters_of_config_pbtxt_are_checked(tmp_path, text):
    (tmp_path / "executor").mkdir()
    (tmp_path / "executor" / "config.pbtxt").write_text(text)
    [problem] = find_problems(tmp_path, {})
    assert problem.startswith("num_threads: the value must be greater than 0")


def test_other_models_in_a_repository_are_ignored(tmp_path):
    assert find_problems(tmp_path, {"NEREID_MAX_MODEL_LEN": "foo"}) == []


def test_the_check_imports_neither_torch_nor_numpy():
    code = (
        "import sys\nimport nereid_backend.serving.check_settings\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
