"""Tests that several processes with parts of a model generate the same tokens as one process."""

import dataclasses
import os
import signal

import pytest
from backend.exactness import PARAMS, PROMPTS, open_engine, reference, run_cached, run_staggered
from backend.tiny_models import BY_NAME, FAMILIES
from nereid_backend.core.sequence import Sequence
from nereid_backend.errors import LostRankError, RequestError

_LATENT = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
}
# The tested architectures. The plan of "deepseek_v2" divides the heads of latent attention. The
# plans of other types with latent attention divide only the other layers.
DENSE = ["llama", "qwen2", "qwen3", "gemma", "glm", "gpt_neox", "granite", "olmo2", "phi"]
WINDOWS = ["mistral", "gemma2", "gemma3_text", "cohere2", "exaone4", "phi3", "llama4_text"]
EXPERTS = ["qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe"]
TYPES = [*DENSE, *WINDOWS, *EXPERTS, "smollm3", "starcoder2"]


# Architectures in which several processes can compute the same KV head. The plans of the other
# architectures do not divide the KV heads, or one layer computes queries, keys and values.
SHARED_KV_HEADS = [
    *["llama", "qwen2", "qwen3", "gemma", "glm", "granite", "mistral", "gemma2", "gemma3_text"],
    *["cohere2", "exaone4", "llama4_text", "qwen3_moe", "mixtral", "glm4_moe", "smollm3"],
    "starcoder2",
]


def family(model_type, num_kv_heads=4):
    """Return a family of tiny models with 8 query heads, for at most `num_kv_heads` processes."""
    extra = {"num_attention_heads": 8, "num_key_value_heads": num_kv_heads, "head_dim": 16}
    if model_type == "deepseek_v2":
        made = dataclasses.replace(BY_NAME["llama"], name=model_type, model_type=model_type)
        return dataclasses.replace(
            made, extra={**_LATENT, "num_attention_heads": 8, "q_lora_rank": 32}
        )
    if model_type == "glm4_moe":
        made = dataclasses.replace(BY_NAME["llama"], name=model_type, model_type=model_type)
        experts = {name: value for name, value in _LATENT.items() if "expert" in name}
        return dataclasses.replace(
            made, extra={**extra, **experts, "n_group": 1, "topk_group": 1, **_GLM_EXPERTS}
        )
    found = next(one for one in FAMILIES if one.model_type == model_type)
    kept = {name: value for name, value in found.extra.items() if name not in extra}
    if model_type == "deepseek_v3":
        return dataclasses.replace(found, extra={**kept, **_LATENT, "num_attention_heads": 8})
    return dataclasses.replace(found, extra={**kept, **extra})


_GLM_EXPERTS = {"first_k_dense_replace": 1, "moe_intermediate_size": 48, "n_shared_experts": 1}


def run_until_idle(engine):
    while engine.has_work():
        engine.step()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_processes_give_the_tokens_of_one_and_a_lost_process_ends_the_engine(tmp_path, caplog):
    folder = family("qwen3_moe").save(tmp_path)
    with caplog.at_level("INFO"):
        engine = open_engine(folder, block_size=16, tensor_parallel_size=2)
    try:
        assert "2 KV heads and 4 query heads" in caplog.text
        assert run_staggered(engine) == reference(folder)
        os.kill(engine._parts.ranks._processes[0].pid, signal.SIGKILL)
        engine.add_request("lost", PROMPTS[0], PARAMS)
        with pytest.raises(LostRankError, match=r"rank 1 of the model ended \(signal 9\)"):
            run_until_idle(engine)
        assert engine.has_work()
    finally:
        engine.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_processes_clear_the_blocks_of_a_failed_sequence_and_refuse_adapters(tmp_path):
    """The model has sliding windows and one KV head, which the two processes share."""
    folder = family("gemma2", num_kv_heads=1).save(tmp_path)
    engine = open_engine(folder, tensor_parallel_size=2)
    try:
        sequence = Sequence("failed", [1], PARAMS, max_total_tokens=2)
        sequence.block_table = [0, 3]
        engine._parts.runner._path.clear(sequence)
        with pytest.raises(RequestError, match=r"^lora_path: .*tensor_parallel_size=2"):
            engine.load_lora("style", "/adapter")
        assert run_staggered(engine) == reference(folder)
    finally:
        engine.close()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_error_names_the_rank_that_died_and_not_the_ranks_that_failed_after_it(tmp_path):
    engine = open_engine(family("llama").save(tmp_path), tensor_parallel_size=4)
    try:
        engine.add_request("lost", PROMPTS[0], PARAMS)
        engine.step()
        os.kill(engine._parts.ranks._processes[1].pid, signal.SIGKILL)
        with pytest.raises(LostRankError, match=r"^rank 2 of the model ended \(signal 9\)$"):
            run_until_idle(engine)
    finally:
        engine.close()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("model_type", TYPES)
def test_several_processes_give_the_tokens_of_one(tmp_path, model_type, size):
    check_tokens(family(model_type).save(tmp_path), size)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("num_kv_heads", "size"), [(1, 2), (1, 4), (2, 4)])
@pytest.mark.parametrize("model_type", SHARED_KV_HEADS)
def test_processes_that_share_kv_heads_give_the_tokens_of_one(
    tmp_path, model_type, num_kv_heads, size
):
    check_tokens(family(model_type, num_kv_heads).save(tmp_path), size)


def check_tokens(folder, size):
    """Compare the tokens of `size` processes with those of transformers."""
    expected = reference(folder)
    assert len({token for answer in expected for token in answer}) > 8
    engine = open_engine(
        folder, tensor_parallel_size=size, max_num_batched_tokens=9, num_speculative_tokens=2
    )
    try:
        assert run_staggered(engine) == expected
        assert run_cached(engine) == expected
    finally:
        engine.close()
