"""Tests that an engine with the GPU kernels gives the answers of an engine with the reference."""

import pytest
from backend.gpu.engines import with_one_key_head
from backend.gpu.steps import sampled
from nereid_backend import Engine, EngineConfig, SamplingParams
from nereid_backend.attention.gpu.gpu_attention import GpuKVCache
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import single_group
from nereid_backend.model import cache_plan
from nereid_backend.model.forward_path import make_kv_cache

PROMPTS = [[3, 5, 7, 9, 11], [4] * 19, [6, 8]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def answers(folder, cache_class, monkeypatch, **settings):
    """Return the answers of an engine that uses the given class of KV cache, and `engine.info`."""
    monkeypatch.setattr(make_kv_cache, "unrounded_cache_class", lambda *args: cache_class)
    # On a GPU, all layers form one group, so this engine on a CPU must also have only one group.
    monkeypatch.setattr(
        cache_plan,
        "choose_layer_groups",
        lambda config, spec, *_: (single_group(spec.layers), "test"),
    )
    config = EngineConfig(
        str(folder),
        device="cpu",
        num_threads=1,
        block_size=8,
        kv_cache_memory="4MiB",
        max_num_batched_tokens=16,
        max_num_seqs=4,
        **settings,
    )
    engine = Engine(config)
    assert engine.info.path == "packed"
    try:
        outputs = engine.generate(PROMPTS, PARAMS)
        return [output.outputs[0].token_ids for output in outputs], engine.info
    finally:
        engine.close()


def test_an_engine_gives_the_same_answers_with_the_kernels_and_the_reference(
    tmp_path, device, monkeypatch
):
    if device.type != "cpu":
        pytest.skip("on a GPU, the engine uses the kernels by itself")
    folder = with_one_key_head("gpt_oss").save(tmp_path)  # has attention windows and sinks
    kernel_answers, info = answers(folder, GpuKVCache, monkeypatch)
    reference_answers, _ = answers(folder, KVCache, monkeypatch)
    assert kernel_answers == reference_answers
    assert info.self_check_difference < 1e-4


@pytest.mark.parametrize("kv_cache_dtype", sampled(["int8", "fp8"], "fp8"))
def test_an_engine_with_the_kernels_answers_from_an_8_bit_cache(
    kv_cache_dtype, tmp_path, device, monkeypatch
):
    if device.type != "cpu":
        pytest.skip("on a GPU, the engine uses the kernels by itself")
    folder = with_one_key_head("llama", num_hidden_layers=1).save(tmp_path)
    kernel_answers, info = answers(folder, GpuKVCache, monkeypatch, kv_cache_dtype=kv_cache_dtype)
    assert [len(tokens) for tokens in kernel_answers] == [4, 4, 4]
    assert info.self_check_difference < 0.2
