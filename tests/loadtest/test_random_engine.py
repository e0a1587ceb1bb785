"""Tests of the engine with random weights that the GPU benchmarks measure."""

from nereid_backend import SamplingParams

from loadtest.gpu.random_engine import random_engine


def test_a_model_with_random_weights_generates(tmp_path):
    lines = []
    engine = random_engine(
        tmp_path, "demo", "float32", lines.append, fused_norms=True, kv_cache_memory="4MiB"
    )
    try:
        outputs = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True))
    finally:
        engine.close()
    assert len(outputs[0].outputs[0].token_ids) == 2
    assert any("packed" in line for line in lines)
    assert not any("rounded" in line for line in lines)
