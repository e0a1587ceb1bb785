import itertools
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backend.torch_threads import use_threads
from nereid_backend.attention.cpu import compile_kernels, cpu_attention, load_kernels
from nereid_backend.attention.cpu.cpu_attention import CpuKVCache
from nereid_backend.attention.kv_cache import KVCache, gather_rows, row_indices
from nereid_backend.attention.layers import LayerSpec, LayerWindow
from nereid_backend.attention.transformers_hook import PagedForward
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.paths.step_batch import BatchBuilder

CPU = torch.device("cpu")
BLOCK = 16
NUM_BLOCKS = 120  # enough for all sequences of a test
# (number of cached tokens, number of new tokens) of each sequence: short and long sequences with
# one new token, and prompts with and without cached tokens.
SHAPES = [(0, 1), (15, 1), (16, 1), (300, 1), (1000, 1), (40, 1), (0, 23), (37, 9)]

SPECS = {
    "one head": LayerSpec(1, 1, 32, 32),
    "as many key heads as query heads": LayerSpec(4, 4, 64, 64),
    "three query heads a key head": LayerSpec(6, 2, 16, 16),
    "eleven query heads a key head": LayerSpec(11, 1, 16, 16),
    "keys and values of different sizes": LayerSpec(4, 2, 24, 10),
    "window": LayerSpec(4, 2, 16, 16, LayerWindow(size=21)),
    "chunks": LayerSpec(4, 2, 16, 16, LayerWindow(chunk=32)),
    "softcap": LayerSpec(4, 2, 16, 16, softcap=3.0),
    "sinks": LayerSpec(4, 2, 16, 16, has_sinks=True),
}


pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("c++")), reason="no C++ compiler"
)


def attention_of(cache_type, spec, dtype, *, shapes=SHAPES, poison=None):
    """Fill a KV cache in one step, and return the attention outputs of the next step.

    Args:
        cache_type: the class of the cache.
        spec: the attention layer.
        dtype: the data type of the queries, keys and values.
        shapes: the numbers of cached tokens and of new tokens of each sequence.
        poison: the index of a token whose key is NaN in both steps, or None.
    """
    torch.manual_seed(0)
    cache = cache_type([spec], num_blocks=NUM_BLOCKS, block_size=BLOCK, dtype=dtype, device=CPU)
    sinks = torch.randn(spec.num_heads) if spec.has_sinks else None
    cached_chunks, new_chunks = _chunks(shapes)
    _step(cache, spec, dtype, cached_chunks, sinks, poison)
    return _step(cache, spec, dtype, new_chunks, sinks, poison)


def _chunks(shapes):
    """Return the chunks of the cached tokens and the chunks of the new tokens."""
    sequences = _sequences([cached + new for cached, new in shapes])
    cached_chunks, new_chunks = [], []
    for sequence, (cached, new) in zip(sequences, shapes, strict=True):
        if cached:
            cached_chunks.append(
                Chunk(sequence, 0, cached, samples=False, is_first=True, num_logits=0)
            )
        new_chunks.append(
            Chunk(sequence, cached, new, samples=True, is_first=not cached, num_logits=1)
        )
    # In a step, the chunks of one token come before all other chunks.
    return sorted(cached_chunks, key=lambda chunk: chunk.num_tokens > 1), new_chunks


def _step(cache, spec, dtype, chunks, sinks, poison):
    """Return the attention of one step with random queries, keys and values."""
    builder = BatchBuilder(
        max_num_seqs=len(SHAPES), max_model_len=1024, block_size=BLOCK, null_block=cache.null_block
    )
    plan = StepPlan(chunks, sum(chunk.num_tokens for chunk in chunks))
    query = torch.randn(1, spec.num_heads, plan.num_tokens, spec.key_dim).to(dtype)
    key = torch.randn(1, plan.num_tokens, spec.num_kv_heads, spec.key_dim).to(dtype)
    value = torch.randn(1, plan.num_tokens, spec.num_kv_heads, spec.value_dim).to(dtype)
    if poison is not None:
        key[0, poison] = float("nan")
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    forward = PagedForward(cache, builder.build(plan, CPU).attention)
    return forward(torch.nn.Module(), query, key, value, scaling=0.3, s_aux=sinks)


def _sequences(lengths):
    """Return a sequence for each length. The block tables have the blocks in random order."""
    blocks = list(range(NUM_BLOCKS))
    random.Random(0).shuffle(blocks)
    free_blocks = iter(blocks)
    sequences = []
    for row, length in enumerate(lengths):
        sequence = Sequence(str(row), [1] * length, SamplingParams(), max_total_tokens=9999)
        sequence.row = row
        sequence.block_table = list(itertools.islice(free_blocks, -(-length // BLOCK)))
        sequences.append(sequence)
    return sequences


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("threads", [1, 3])
def test_float32_attention_equals_the_reference(spec, threads):
    with use_threads(threads):
        attention = attention_of(CpuKVCache, spec, torch.float32)
    expected = attention_of(KVCache, spec, torch.float32)
    torch.testing.assert_close(attention, expected, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_bfloat16_attention_equals_the_reference_within_its_rounding(spec):
    expected = attention_of(KVCache, spec, torch.bfloat16).float()
    attention = attention_of(CpuKVCache, spec, torch.bfloat16).float()
    torch.testing.assert_close(attention, expected, atol=3e-2, rtol=3e-2)


def test_the_segments_of_a_long_sequence_are_combined_correctly():
    spec = LayerSpec(4, 1, 16, 16, has_sinks=True)
    shapes = [(1001, 1)]
    with use_threads(4):
        attention = attention_of(CpuKVCache, spec, torch.float32, shapes=shapes)
    expected = attention_of(KVCache, spec, torch.float32, shapes=shapes)
    torch.testing.assert_close(attention, expected, atol=3e-6, rtol=1e-5)


def test_nan_affects_only_its_own_sequence():
    spec = SPECS["three query heads a key head"]
    expected = attention_of(CpuKVCache, spec, torch.float32)
    attention = attention_of(CpuKVCache, spec, torch.float32, poison=2)
    assert attention[0, 2].isnan().all()
    torch.testing.assert_close(attention[0, 3], expected[0, 3])


def test_without_kernels_the_plain_cache_is_used_and_the_log_contains_the_reason(caplog):
    assert cpu_attention.cache_type(16, torch.bfloat16, CPU) is CpuKVCache
    assert cpu_attention.cache_type(8, torch.float32, CPU) is KVCache
    assert cpu_attention.cache_type(16, torch.float16, CPU) is KVCache
    assert "block_size is 8" in caplog.text
    assert "float16" in caplog.text


@pytest.mark.parametrize("cache_type", [KVCache, CpuKVCache])
def test_stored_rows_are_gathered_unchanged(cache_type):
    spec = LayerSpec(4, 2, 8, 6)
    torch.manual_seed(0)
    key, value = torch.randn(20, 2, 8), torch.randn(20, 2, 6)
    slots = torch.arange(20) + 16  # The block 0 stays empty.
    cache = cache_type([spec], num_blocks=4, block_size=BLOCK, dtype=torch.float32, device=CPU)

    cache.store(0, key, value, row_indices(slots, 2, BLOCK))
    keys, values = cache.gather(0, gather_rows(torch.tensor([[1, 2]]), 2))

    torch.testing.assert_close(keys[0, :, :20], key.transpose(0, 1), atol=0, rtol=0)
    torch.testing.assert_close(values[0, :, :20], value.transpose(0, 1), atol=0, rtol=0)
    assert not keys[0, :, 20:].any()
    assert not values[0, :, 20:].any()


def test_the_error_for_a_failing_compiler_contains_its_output(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is no C++\n")
    monkeypatch.setattr(compile_kernels, "SOURCES", (broken,))
    monkeypatch.setattr(load_kernels, "SOURCES", (broken,))
    with pytest.raises(compile_kernels.KernelBuildError, match="failed"):
        load_kernels.load_library()
    assert not list((tmp_path / "nereid").iterdir())
    # The compilation may take a minute, so the user gets a message.
    assert "nereid: compiling the CPU kernels" in capsys.readouterr().err


def test_without_a_compiler_the_error_names_the_supported_compilers(monkeypatch):
    monkeypatch.setattr(compile_kernels.shutil, "which", lambda name: None)
    with pytest.raises(compile_kernels.KernelBuildError, match=r"g\+\+"):
        load_kernels.load_library()


def test_the_library_uses_the_openmp_library_of_torch():
    # The program runs in its own process, because other packages may have loaded more OpenMP
    # libraries into this process.
    program = (
        "from nereid_backend.attention.cpu import cpu_library; cpu_library.kernels();"
        "from pathlib import Path; maps = Path('/proc/self/maps').read_text();"
        "print(len({line.split()[-1] for line in maps.splitlines() if 'libgomp' in line}))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "1", result.stderr


def test_of_several_openmp_libraries_that_of_torch_is_chosen(monkeypatch):
    packages = Path(torch.__file__).parent.parent
    library_of_torch = f"{packages}/torch/lib/libgomp-1.so.1"
    other_library = f"{packages}/scikit_learn.libs/libgomp-2.so.1"
    maps = f"0-1 r-xp 0 0 0 {other_library}\n0-1 r-xp 0 0 0 {library_of_torch}\n"
    monkeypatch.setattr(load_kernels.Path, "read_text", lambda self, **_: maps)
    assert load_kernels._openmp_path() == library_of_torch
