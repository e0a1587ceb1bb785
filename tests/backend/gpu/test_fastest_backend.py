"""Tests that attention libraries are used only if they are correct and faster than own kernels."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from nereid_backend.attention import choose_backend, reference
from nereid_backend.attention.gpu import fastest_backend, gpu_attention
from nereid_backend.attention.gpu.backends import torch_varlen
from nereid_backend.attention.gpu.backends.attention_backend import Situation
from nereid_backend.attention.gpu.backends.cudnn_sdpa import CudnnSdpa
from nereid_backend.attention.gpu.backends.flashinfer_prefill import FlashInferPrefill
from nereid_backend.attention.gpu.backends.torch_varlen import TorchVarlen
from nereid_backend.attention.gpu.gpu_attention import GpuInt8KVCache, GpuKVCache
from nereid_backend.attention.gpu.gpu_check import TrialLayer
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec, LayerWindow
from torch.nn.attention import SDPBackend

SPEC = LayerSpec(4, 2, 16, 16)
CPU = torch.device("cpu")


class ReferenceBackend:
    """A fake attention library that computes with the reference implementation.

    The results are multiplied by `factor`. If `error` is given, the library raises this error.
    """

    name = "a library"
    situations = frozenset(Situation)

    def __init__(self, factor=1.0, error=None):
        self.factor, self.error = factor, error

    def refusal(self, spec, block_size, dtype):
        return None

    def attend(self, situation, inputs, out):
        if self.error is not None:
            raise self.error
        call, batch = inputs.call, inputs.batch
        cache = KVCache([call.spec], num_blocks=1, block_size=1, dtype=out.dtype, device=CPU)
        cache.keys, cache.values = [call.keys], [call.values]
        # A call without new keys and values must read only the cache. If it reads these values of
        # NaN, its result is wrong.
        unread = torch.full_like(inputs.query[: call.spec.num_kv_heads], float("nan"))
        key, value = inputs.new or (unread, unread)
        attended = reference.attend((inputs.query, key, value), 0, cache, batch, scale=call.scale)
        is_decode = situation is Situation.DECODE
        rows = slice(0, batch.num_decodes) if is_decode else slice(batch.num_decodes, None)
        out[rows] = attended[rows] * self.factor


@pytest.fixture(autouse=True)
def reference_kernels(monkeypatch):
    """Replace Nereid's own kernels with the reference, which is faster than the interpreter."""
    reference_backend = ReferenceBackend()

    def store(key, value, call, slots):
        block_size = call.values.shape[2]
        blocks, positions = slots // block_size, slots % block_size
        call.keys[blocks, :, positions] = key.transpose(0, 1)
        call.values[blocks, :, positions] = value.transpose(0, 1)

    monkeypatch.setattr(gpu_attention, "_launch_kernels", reference_backend.attend)
    monkeypatch.setattr(gpu_attention, "store", store)
    # Measure the time of small steps: the steps whose results are compared.
    small_steps = {situation: fastest_backend._CHECKED[situation] for situation in Situation}
    monkeypatch.setattr(fastest_backend, "_MEASURED", small_steps)


def choose(backends, times, spec=SPEC):
    """Return the fastest library for each situation of a layer, given measured times.

    `times` contains the times in milliseconds, situation by situation: first the time of Nereid's
    own kernels, then the time of each library.
    """
    remaining_times = iter(times)
    layer = TrialLayer(GpuKVCache, spec, 4, torch.float32, CPU)
    return fastest_backend.fastest_backends(
        [layer], backends, timer=lambda work: next(remaining_times)
    )


def test_a_library_is_used_only_where_it_is_faster():
    library = ReferenceBackend()
    # The library is twice as fast in the first situation, slower in the second situation, and
    # not fast enough in the third situation.
    chosen = choose([library], [2.0, 1.0, 1.0, 2.0, 1.0, 0.97])
    assert chosen == {(SPEC, Situation.DECODE): library}


def test_the_fastest_of_several_libraries_is_used():
    slow, fast = ReferenceBackend(), ReferenceBackend()
    slow.situations = fast.situations = frozenset({Situation.PROMPT})
    assert choose([slow, fast], [3.0, 2.0, 1.0]) == {(SPEC, Situation.PROMPT): fast}


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (ReferenceBackend(factor=1.2), "differs from the reference"),
        (ReferenceBackend(error=RuntimeError("no kernel image\nis available")), "no kernel image."),
    ],
)
def test_a_library_that_fails_or_differs_is_named_and_not_used(library, reason, caplog):
    assert choose([library], []) == {}
    assert caplog.text.count("a library does not compute") == len(Situation)
    assert reason in caplog.text


def test_libraries_are_not_measured_for_caches_of_8_bits(caplog):
    caplog.set_level(logging.INFO)
    cache = GpuInt8KVCache([SPEC], num_blocks=1, block_size=4, dtype=torch.float32, device=CPU)
    assert choose_backend.use_fastest_backends(cache) == 0
    assert "8-bit caches" in caplog.text


@pytest.mark.parametrize("backend", [CudnnSdpa(), TorchVarlen(), FlashInferPrefill()])
def test_every_library_refuses_layers_that_it_does_not_support(backend):
    with_sinks = LayerSpec(4, 2, 16, 16, has_sinks=True)
    with_chunks = LayerSpec(4, 2, 16, 16, LayerWindow(chunk=8))
    assert backend.refusal(with_sinks, 16, torch.bfloat16) is not None
    assert backend.refusal(with_chunks, 16, torch.bfloat16) is not None
    assert backend.refusal(SPEC, 16, torch.float32) is not None


def test_cudnn_refuses_layers_with_a_sliding_window():
    window = LayerSpec(4, 2, 16, 16, LayerWindow(size=8))
    assert CudnnSdpa().refusal(window, 16, torch.bfloat16) == "the layer has a sliding window"


def test_sdpa_of_prompts_equals_the_reference(monkeypatch):
    monkeypatch.setattr(CudnnSdpa, "refusal", lambda *_: None)
    monkeypatch.setattr(CudnnSdpa, "implementation", SDPBackend.MATH)
    backend = CudnnSdpa()
    assert choose([backend], [2.0, 1.0]) == {(SPEC, Situation.PROMPT): backend}


def paged_attention(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
    """A fake of torch's `varlen_attn` with a block table.

    The function follows the documentation and computes attention by its definition.
    """
    lengths, block_table = options["seqused_k"], options["block_table"]
    assert cu_seq_k is None
    assert cu_seq_q.dtype == lengths.dtype == block_table.dtype == torch.int32
    window_left, window_right = options["window_size"]
    assert window_right == 0
    outputs = []
    for index, length in enumerate(lengths.tolist()):
        new_rows = query[cu_seq_q[index] : cu_seq_q[index + 1]]
        assert len(new_rows) <= max_q
        assert length <= max_k
        blocks = block_table[index].long()
        keys, values = (tensor[blocks].flatten(0, 1)[:length] for tensor in (key, value))
        outputs.append(_causal_attention(new_rows, keys, values, window_left, options["scale"]))
    return torch.cat(outputs)


def _causal_attention(query, keys, values, window_left, scale):
    """Return the attention of the last tokens of a sequence over all of its tokens.

    A token sees itself and `window_left` earlier tokens. If `window_left` is negative, it sees all
    earlier tokens.
    """
    group_size = query.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(group_size, 1) for tensor in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    key_positions = torch.arange(len(keys))[None]
    query_positions = torch.arange(len(keys) - len(query), len(keys))[:, None]
    is_hidden = key_positions > query_positions
    if window_left >= 0:
        is_hidden |= key_positions < query_positions - window_left
    weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


@pytest.mark.parametrize("window", [LayerWindow(), LayerWindow(size=9)])
def test_variable_length_attention_equals_the_reference(monkeypatch, window):
    monkeypatch.setattr(TorchVarlen, "refusal", lambda *_: None)
    monkeypatch.setattr(torch_varlen, "varlen_attn", paged_attention)
    backend = TorchVarlen()
    spec = LayerSpec(4, 2, 16, 16, window)
    chosen = choose([backend], [2.0, 1.0] * 3, spec)
    assert chosen == {(spec, situation): backend for situation in Situation}


class PrefillWrapper:
    """A fake of FlashInfer's wrapper for prefills with the layout HND.

    The class follows the documentation and computes attention by its definition.
    """

    num_plans = 0

    def __init__(self, workspace, *, kv_layout):
        assert (workspace.dtype, kv_layout) == (torch.uint8, "HND")

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        **options,
    ):
        index_tensors = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert {tensor.dtype for tensor in index_tensors} == {torch.int32}
        assert options.pop("causal")
        assert options.pop("head_dim_vo") == head_dim_qk == SPEC.key_dim
        assert (num_qo_heads, num_kv_heads) == (SPEC.num_heads, SPEC.num_kv_heads)
        assert options.pop("q_data_type") == options.pop("kv_data_type") == torch.float32
        assert options.pop("logits_soft_cap") is None
        tables = paged_kv_indices.tensor_split(paged_kv_indptr[1:-1].long())
        lens = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        self.step = {
            "seqused_k": lens,
            "block_table": torch.nn.utils.rnn.pad_sequence(tables, batch_first=True),
            "window_size": (options.pop("window_left"), 0),
            "scale": options.pop("sm_scale"),
        }
        self.starts, self.max_new = qo_indptr, int(qo_indptr.diff().max())
        assert options == {}
        PrefillWrapper.num_plans += 1

    def run(self, query, cache):
        keys, values = (tensor.transpose(1, 2) for tensor in cache)
        longest = int(self.step["seqused_k"].max())
        return paged_attention(
            query, keys, values, self.starts, None, self.max_new, longest, **self.step
        )


@pytest.mark.parametrize("window", [LayerWindow(), LayerWindow(size=9)])
def test_flashinfer_gets_the_blocks_and_lengths_of_the_prefills(monkeypatch, window):
    module = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(FlashInferPrefill, "refusal", lambda *_: None)
    monkeypatch.setattr(PrefillWrapper, "num_plans", 0)
    backend = FlashInferPrefill()
    spec = LayerSpec(4, 2, 16, 16, window)

    # FlashInfer supports two situations, and is twice as fast as Nereid in each of them.
    chosen = choose([backend], [2.0, 1.0] * 2, spec)

    assert set(chosen) == {(spec, Situation.PROMPT), (spec, Situation.CHUNK)}
    # The choice compares two steps with the reference, and each step is planned once. The fake
    # timer of this test runs no further steps.
    assert PrefillWrapper.num_plans == 2
