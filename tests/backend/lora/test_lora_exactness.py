"""Tests that a request with an adapter gets the tokens of a model with merged weights.

Requests with other adapters and without an adapter run at the same time.
"""

import dataclasses
import json

import pytest
import torch
from backend.checkpoints.writers import library, quiet
from backend.exactness import MAX_TOKENS, PARAMS, PROMPTS, bytes_for, open_engine, reference
from backend.lora.mixed_adapters import NAMES, adapters, answer_mixed, references, write_both
from backend.tiny_models import BY_NAME, Family
from nereid_backend.linear import native_linear

_PATHS = [
    Family("bloom", "bloom", {"n_head": 4, "n_layer": 2}),
    Family("lfm2", "lfm2", {"layer_types": ["conv", "full_attention"], "block_ff_dim": 96}),
    Family("mamba", "mamba", {"state_size": 8}),
    Family(
        "recurrent_gemma",
        "recurrent_gemma",
        {"head_dim": 16, "lru_width": 64, "block_types": ["recurrent", "attention"]},
    ),
]
_DEEPSEEK = "deepseek_v3, k and v of different sizes"
_PACKED = ("qwen3", "gemma2", "phi3", "gpt_oss", "gpt2", "glm", "opt", _DEEPSEEK)
_LONG = [*_PATHS, *(BY_NAME[name] for name in _PACKED)]
FAMILIES = [
    BY_NAME["llama"],
    *(pytest.param(family, marks=pytest.mark.long) for family in _LONG),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The folder of a model and two adapters, and the tokens of transformers for each of these."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, references(folder, write_both(folder, BY_NAME["llama"].make()))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_mixed_adapters_equal_merged_weights(family, tmp_path):
    expected = references(tmp_path, write_both(tmp_path, family.make()))
    assert expected[0] != expected[1] != expected[2]
    # Prompts are divided into chunks of at most 12 tokens.
    engine = open_engine(
        tmp_path / "0", lora_adapters=adapters(tmp_path), max_num_batched_tokens=12
    )
    assert answer_mixed(engine) == expected
    engine.close()


def test_preempted_requests_keep_their_adapters(llama):
    folder, expected = llama
    engine = open_engine(folder / "0", lora_adapters=adapters(folder))
    # The free blocks have space for 72 tokens. This is enough for the longest sequence, which has
    # 56 tokens, but not for all requests at the same time.
    pool = engine._parts.pool
    withheld_blocks = pool.allocate(pool.num_free - 72 // engine.info.block_size)
    assert answer_mixed(engine, check_blocks=False) == expected
    assert engine.stats().num_preemptions > 0
    pool.release(withheld_blocks)
    engine.close()


def test_native_kernels_and_speculation_give_the_same_tokens(tmp_path):
    expected = references(tmp_path, write_both(tmp_path, BY_NAME["qwen3"].make()))
    engine = open_engine(
        tmp_path / "0",
        lora_adapters=adapters(tmp_path),
        block_size=16,
        num_speculative_tokens=3,
    )
    assert answer_mixed(engine) == expected
    engine.close()


def test_steps_whose_adapters_need_hooks_do_not_use_the_compiled_forward_pass(llama):
    folder, (plain_answers, wide_answers, _) = llama
    # Without draft tokens, each token of an answer needs a step of its own.
    engine = open_engine(
        folder / "0", lora_adapters=adapters(folder), prepack=False, num_speculative_tokens=0
    )
    path = engine._parts.runner._path
    num_compiled_steps = 0

    def run_compiled(batch, attention):
        nonlocal num_compiled_steps
        num_compiled_steps += 1
        return path._run_own_code(batch, attention)

    path.use_compiled(run_compiled)
    with_lora = dataclasses.replace(PARAMS, lora_name="wide")
    (output,) = engine.generate([PROMPTS[0]], with_lora)
    assert output.outputs[0].token_ids == wide_answers[0]
    assert num_compiled_steps == 0

    (output,) = engine.generate([PROMPTS[0]], PARAMS)
    assert output.outputs[0].token_ids == plain_answers[0]
    assert num_compiled_steps == MAX_TOKENS
    engine.close()


@pytest.mark.parametrize("has_kernels", [True, False])
def test_layers_with_hooks_give_the_same_tokens(has_kernels, llama, monkeypatch):
    if not has_kernels:
        # The hooks then call torch, as they do on a GPU.
        monkeypatch.setattr(native_linear, "is_available", lambda: False)
    folder, expected = llama
    engine = open_engine(
        folder / "0",
        lora_adapters=adapters(folder),
        max_num_batched_tokens=12,
        prepack=False,
    )
    assert answer_mixed(engine) == expected
    engine.close()


def test_adapters_work_on_quantised_weights(checkpoint, tmp_path):
    folder = checkpoint("llama")
    write_both(tmp_path, BY_NAME["llama"].make())
    engine = open_engine(folder, lora_adapters=adapters(tmp_path), weight_dtype="int8")
    plain, wide, narrow = answer_mixed(engine, ("", "wide", "narrow"))
    outputs_alone = engine.generate(PROMPTS, dataclasses.replace(PARAMS, lora_name="wide"))
    assert [output.outputs[0].token_ids for output in outputs_alone] == wide
    assert plain != wide != narrow
    engine.close()


def test_the_prefix_cache_separates_adapters(llama):
    folder, expected = llama
    engine = open_engine(folder / "0", lora_adapters=adapters(folder))
    for _ in range(2):
        for name, answers in zip(NAMES, expected, strict=True):
            params = dataclasses.replace(PARAMS, lora_name=name)
            outputs = engine.generate(PROMPTS, params)
            assert [output.outputs[0].token_ids for output in outputs] == answers
    assert engine.stats().num_prefix_cache_hits > 0
    engine.close()


def test_a_small_kv_cache_still_serves_adapters_one_after_the_other(llama):
    folder, expected = llama
    engine = open_engine(folder / "0")
    size = bytes_for(engine, 64)
    engine.close()
    engine = open_engine(
        folder / "0", lora_adapters=adapters(folder), kv_cache_memory=size, max_model_len=60
    )
    assert answer_mixed(engine) == expected
    engine.close()


@pytest.mark.parametrize("use_rslora", [False, True])
def test_adapters_of_peft_equal_its_own_merged_model(use_rslora, tmp_path):
    peft = library("peft")
    model_folder, adapter, merged = (tmp_path / name for name in ("model", "adapter", "merged"))
    model = BY_NAME["qwen3"].make()
    model.save_pretrained(model_folder)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=16,
        use_rslora=use_rslora,
        target_modules="all-linear",
        rank_pattern={"q_proj": 2},
        alpha_pattern={r"layers\.1\.mlp\.down_proj": 5},
        task_type="CAUSAL_LM",
    )
    with quiet():
        adapted_model = peft.get_peft_model(model, config)
        torch.manual_seed(3)
        for name, parameter in adapted_model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted_model.save_pretrained(adapter)
        adapted_model.merge_and_unload().save_pretrained(merged)
    assert json.loads((adapter / "adapter_config.json").read_text())["peft_version"]

    engine = open_engine(model_folder, lora_adapters={"a": str(adapter)})
    assert answer_mixed(engine, names=("a",)) == [reference(merged)]
    engine.close()
