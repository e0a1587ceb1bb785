"""Tests of CUDA graphs for decode steps: capture, replay, padding and the checks at load."""

import dataclasses
import itertools

import pytest
import torch
from backend.exactness import open_engine
from backend.gpu.engines import SkippingCache, run, with_one_key_head
from backend.gpu.recorded import CaptureError, Recorder, record, rerun
from backend.gpu.steps import SPECS, Steps, sampled
from backend.tiny_models import BY_NAME
from nereid_backend import SamplingParams
from nereid_backend.attention.gpu import decode_splits, gpu_attention
from nereid_backend.attention.gpu.gpu_attention import GpuInt8KVCache, GpuKVCache
from nereid_backend.attention.gpu.gpu_batch import DecodeRows
from nereid_backend.attention.layers import LayerWindow
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.model import accelerate_path, startup
from nereid_backend.model.forward_path import make_kv_cache
from nereid_backend.paths import packed
from nereid_backend.paths.cuda_graphs.cuda_capture import GraphMemoryError, capture_on, is_lost
from nereid_backend.paths.cuda_graphs.decode_graphs import (
    DecodeGraphs,
    StaticStep,
    graph_batch_sizes,
)
from nereid_backend.paths.model_call import Sizes
from nereid_backend.paths.step_batch import BatchBuilder

CPU = torch.device("cpu")


def graphs_of(engine):
    return engine._parts.runner._path.graphs


def poison(engine):
    """Overwrite the inputs and outputs of the graphs with wrong numbers."""
    found = graphs_of(engine)
    for graph in found._graphs.values():
        step = graph.step
        step._inputs.copy_(torch.tensor([[7], [5], [2], [3]]).expand_as(step._inputs))
        step._table.zero_()
    if found._logits is not None:
        found._logits.fill_(float("nan"))


@pytest.mark.parametrize(
    ("name", "seed"),
    sampled(
        itertools.product(
            ["llama", "gemma2", "gemma3", "deepseek_v3, k and v of different sizes", "gpt_oss"],
            range(2),
        ),
        ("gemma2", 0),
        ("deepseek_v3, k and v of different sizes", 1),
        ("gpt_oss", 0),
    ),
)
def test_replayed_steps_give_the_tokens_of_steps_without_graphs(name, seed, engine_of):
    expected = run(engine_of(name), seed)
    engine = engine_of(name, record)
    assert run(engine, seed, poisoned=poison) == expected
    assert graphs_of(engine).failure is None
    assert graphs_of(engine).num_replays > 2 * graphs_of(engine).num_captures > 4


@pytest.mark.parametrize("name", sampled(BY_NAME, "llama", "gemma3", "gpt_oss"))
def test_every_tiny_architecture_can_be_captured(name, engine_of):
    prompts, params = [[5, 6, 7], [8] * 15, [9]], SamplingParams(max_tokens=6, ignore_eos=True)
    answers = []
    for capture in (None, record):
        engine = engine_of(name, capture, seed=3)
        outputs = engine.generate(prompts, params)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
    assert graphs_of(engine).failure is None
    assert graphs_of(engine).num_replays == 5


def test_replays_continue_with_preemption_and_with_blocks_from_the_prefix_cache(engine_of):
    small = {"kv_cache_memory": 44 * 1024, "max_num_batched_tokens": 9, "max_model_len": 64}
    engine = engine_of("llama", record, **small)
    assert run(engine, 5, poisoned=poison) == run(engine_of("llama"), 5)
    assert engine.stats().num_preemptions > 0
    assert graphs_of(engine).num_replays > 0


def test_replays_give_the_same_tokens_with_async_scheduling(engine_of):
    engine = engine_of("gemma2", record, async_scheduling=True)
    assert run(engine, 7, poisoned=poison) == run(engine_of("gemma2"), 7)
    assert graphs_of(engine).num_replays > 0


def test_a_model_that_frees_the_blocks_outside_its_windows_is_replayed(engine_of):
    name = "mistral, sliding window"
    engine = engine_of(name, record)
    assert run(engine, 1, poisoned=poison) == run(engine_of(name), 1)
    assert graphs_of(engine).num_replays > 0


@pytest.mark.parametrize("kind", [GpuKVCache, GpuInt8KVCache], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "name",
    sampled(
        [
            *("three query heads a key head", "keys and values of 24 and 10", "window and chunks"),
            *("chunks", "window, softcap and sinks"),
        ],
        *("keys and values of 24 and 10", "window, softcap and sinks"),
    ),
)
def test_a_padded_step_gives_the_attention_of_the_step_without_padding(name, kind, device):
    lengths = [15, 16, 70, 1, 33]
    plain, padded = [
        Steps(kind, SPECS[name], torch.float32, device, shapes=[(n, 1) for n in lengths]).fill()
        for _ in range(2)
    ]
    expected = plain.run()
    build = padded._builder.build

    def build_padded(plan, device):
        batch = build(plan, device)
        step = StaticStep(8, sizes_of(8, padded.cache.null_block), device)
        step._inputs[:3, :] = 2  # wrong values, which `fill` must overwrite
        step._table.zero_()
        step.fill(dataclasses.replace(batch, num_logits=len(lengths)))
        return step.batch()

    padded._builder.build = build_padded
    # The rows of the padding also have queries, keys and values. Their numbers do not matter.
    padded._randn = more_rows(padded._randn, len(lengths), 8)
    found = padded.run()
    assert found.isfinite().all()
    torch.testing.assert_close(found[: len(lengths)], expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(padded.cache.tensors(), plain.cache.tensors(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def sizes_of(width, null_block=9999):
    """Return the sizes of an engine whose longest sequence has `width` blocks of 16 tokens."""
    return Sizes(null_block, 16, 8, 16 * width)


def decodes_of(lengths, device):
    """Return the batch of a step with one new token for each sequence.

    `lengths` contains the lengths of the sequences, including the new token. A block has 16 tokens.
    """
    builder = BatchBuilder(
        max_num_seqs=len(lengths), max_model_len=max(lengths), block_size=16, null_block=9999
    )
    chunks = []
    for row, length in enumerate(lengths):
        sequence = Sequence(str(row), [7] * length, SamplingParams(), max_total_tokens=length + 1)
        sequence.row, sequence.block_table = row, list(range(10 * row, 10 * row + length // 16 + 1))
        chunks.append(Chunk(sequence, length - 1, 1, True, True, 1))
    return builder.build(StepPlan(chunks, len(lengths)), device)


@pytest.mark.parametrize("many", [[15, 16, 70, 1, 33, 120], [5, 158, 6, 1]])
def test_a_step_overwrites_all_inputs_of_the_previous_step(many, device):
    used, fresh = (StaticStep(8, sizes_of(10), device) for _ in range(2))
    used.fill(decodes_of(many, device))
    for step in (used, fresh):
        step.fill(decodes_of([40, 2], device))
    assert torch.equal(used._inputs, fresh._inputs)
    assert torch.equal(used._table, fresh._table)
    assert fresh._inputs.tolist() == [[7, 7] + [0] * 6, [39, 1] + [0] * 6,
        [2 * 16 + 7, 10 * 16 + 1] + [-1] * 6, [40, 2] + [1] * 6]  # fmt: skip
    assert fresh._table[0].tolist() == [0, 1, 2] + [9999] * 7
    assert fresh._table[1].tolist() == [10] + [9999] * 9
    assert (fresh._table[2:] == 9999).all()


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 24])
def test_the_inputs_of_kernels_are_aligned(rows, device):
    step = StaticStep(rows, sizes_of(33), device)
    batch = step.batch()
    decodes = batch.attention.kernel_metadata.decodes
    read = [batch.input_ids, batch.position_ids, batch.attention.slots, batch.logits_index]
    read += [decodes.table, decodes.table_starts, decodes.tokens, decodes.lens]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in read)
    assert all(tensor.is_contiguous() for tensor in read)


def test_the_tables_of_grouped_sequences_are_in_the_rows_of_the_step(device):
    lengths = [3, 1500, 5, 1400, 2]  # short and long sequences are in two groups
    batch = decodes_of(lengths, device)
    assert len(batch.attention.decodes) == 2
    step = StaticStep(8, sizes_of(128), device)
    step.fill(batch)
    assert step._inputs[3].tolist() == [*lengths, 1, 1, 1]
    assert [row.tolist().index(9999) for row in step._table[:5]] == [1, 94, 1, 88, 1]


def more_rows(draw, count, rows):
    """Return a function that calls `draw` and appends ones to results with `count` tokens.

    The appended result has `rows` tokens.
    """

    def drawn(*shape):
        found = draw(*shape)
        if shape[:2] != (1, count):
            return found
        return torch.cat([found, found.new_ones(1, rows - count, *shape[2:])], dim=1)

    return drawn


def test_an_engine_replays_the_kernels(engine_of, device):
    if device.type != "cpu":
        pytest.skip("on a GPU the engine captures by itself")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    answers = []
    for kind, capture in ((GpuKVCache, rerun), (SkippingCache, None)):
        family = with_one_key_head("gpt_oss")  # has attention windows and sinks
        engine = engine_of(family, capture, kind=kind)
        outputs = engine.generate([[5, 6, 7], [8] * 15, [9]], params)
        answers.append([output.outputs[0].token_ids for output in outputs])
        if capture is not None:
            assert graphs_of(engine).num_replays == 3
    assert answers[0] == answers[1]


def test_padding_writes_to_no_block(engine_of, device):
    if device.type != "cpu":
        pytest.skip("runs the kernels in the interpreter")
    family = with_one_key_head("llama", num_hidden_layers=1)
    engine = engine_of(family, rerun, kind=GpuKVCache)
    cache = engine._parts.runner._path._cache
    for name in ("a", "b", "c"):  # three rows in a graph of four
        engine.add_request(name, [5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    engine.step()
    before = [tensor.clone() for tensor in cache.tensors()]
    engine.step()
    size = cache.keys[0].shape[2]
    for old, new in zip(before, cache.tensors(), strict=True):
        changed = (old != new).flatten(2).any(-1).any(-1)
        assert changed.sum() == 3
        places = (old != new).any(-1).any(1)[changed].nonzero()[:, 1]
        assert places.tolist() == [4 % size] * 3
    assert graphs_of(engine).num_replays == 2


def test_the_next_replay_does_not_change_the_logits_of_a_replay(engine_of, monkeypatch):
    engine = engine_of("llama", record)
    kept = []
    forward = DecodeGraphs.forward

    def keep(self, batch):
        logits = forward(self, batch)
        if logits is not None:
            kept.append((logits, logits.clone()))
        return logits

    monkeypatch.setattr(DecodeGraphs, "forward", keep)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(kept) == 7
    assert all(torch.equal(logits, copy) for logits, copy in kept)
    assert len({logits.sum().item() for logits, _ in kept}) > 1


def test_a_replay_reads_nothing_from_the_device(engine_of, monkeypatch):
    engine = engine_of("llama", record)
    forward = DecodeGraphs.forward

    def watched(self, batch):
        if self.graph_size_for(batch) not in self._graphs:
            return forward(self, batch)
        with Recorder():  # raises an error if a number is read from the device
            return forward(self, batch)

    monkeypatch.setattr(DecodeGraphs, "forward", watched)
    engine.generate([[5, 6, 7], [8]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert graphs_of(engine).num_replays == 7


def test_only_steps_with_one_token_and_logits_for_each_sequence_are_replayed(engine_of):
    engine = engine_of("llama", record, max_num_batched_tokens=8)
    long = list(range(3, 36))  # four chunks of eight tokens, and one chunk with a single token
    for _ in range(3):
        engine.add_request("a", long, SamplingParams(max_tokens=1))
        while engine.has_work():
            engine.step()
    # The second and the third time, the prefix cache contains the prompt except its last tokens.
    assert graphs_of(engine).num_replays <= 3
    engine.add_request("a", [3] * 9, SamplingParams(max_tokens=9, ignore_eos=True))
    before = graphs_of(engine).num_replays
    while engine.has_work():
        engine.step()
    assert graphs_of(engine).num_replays == before + 9


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_failed_capture_is_reported_once_and_steps_run_without_graphs(engine_of, at, caplog):
    captured = []

    def failing(work):
        captured.append(work)
        if len(captured) == at:
            work()
            raise RuntimeError("CUDA error: operation not permitted\nwhen stream is capturing")
        return record(work)

    engine = engine_of("llama", failing)
    assert run(engine, 0) == run(engine_of("llama"), 0)
    assert graphs_of(engine).failure == "CUDA error: operation not permitted"
    assert len(captured) == at
    assert caplog.text.count("CUDA graphs are off, because a step could not be captured") == 1


def test_without_memory_for_more_graphs_the_captured_graphs_are_replayed(engine_of, caplog):
    captured = []

    def full(work):
        captured.append(work)
        if len(captured) > 2:
            raise GraphMemoryError("12 MiB are free")
        return record(work)

    engine = engine_of("llama", full)
    assert run(engine, 0) == run(engine_of("llama"), 0)
    assert graphs_of(engine).failure is None
    assert graphs_of(engine).num_captures == 2
    assert graphs_of(engine).num_replays > 2
    assert caplog.text.count("12 MiB are free") == 1


@pytest.mark.parametrize("wrong", [lambda logits: None, lambda logits: logits.mul_(1.2)])
def test_a_graph_with_wrong_logits_is_not_used(engine_of, wrong, monkeypatch):
    kept = []

    def off(work):
        replay = record(work)

        def run_wrong():
            if wrong(kept[0]._logits) is not None:
                replay()
                wrong(kept[0]._logits)

        return run_wrong

    engine = engine_of("llama", off)
    kept.append(graphs_of(engine))
    assert run(engine, 2) == run(engine_of("llama"), 2)
    assert "the logits of a replayed CUDA graph differ" in graphs_of(engine).failure
    assert graphs_of(engine).num_replays == 0


def test_a_request_whose_logits_are_not_finite_does_not_end_the_replays(engine_of):
    engine = engine_of("llama", record)
    engine.add_request("a", [5, 6], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.add_request("b", [8, 6], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    with torch.inference_mode():
        table = engine._parts.scheduler._running[0].block_table
        engine._parts.runner._path._cache.values[0][table[0]] = float("nan")
    ends = {}
    while engine.has_work():
        ends |= {u.request_id: u.finish_reason for u in engine.step() if u.finish_reason}
    assert sorted(ends.values()) == ["error", "length"]
    assert graphs_of(engine).failure is None


def test_all_graphs_are_captured_at_load_and_none_in_service(engine_of):
    engine = engine_of("llama", record, max_num_seqs=6)
    found = graphs_of(engine)
    found.capture_all()
    assert sorted(found._graphs) == [1, 2, 4, 8]
    assert run(engine, 0) == run(engine_of("llama", max_num_seqs=6), 0)
    assert found.num_captures == 4
    assert found.num_replays > 4


def test_one_graph_serves_sequences_of_all_lengths(engine_of):
    engine = engine_of("llama", record)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for prompts in ([[5] * 3, [6] * 90], [[7] * 60, [8] * 2]):
        expected = engine_of("llama").generate(prompts, params)
        outputs = engine.generate(prompts, params)
        assert [o.outputs[0].token_ids for o in outputs] == [
            o.outputs[0].token_ids for o in expected
        ]
    assert graphs_of(engine).num_captures == 1


def test_graphs_fit_every_number_of_sequences_with_little_padding():
    assert graph_batch_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    for most in (1, 3, 7, 100, 256, 500):
        counts = graph_batch_sizes(most)
        assert counts[-1] >= most > (counts[-2] if len(counts) > 1 else 0)
        for count in range(9, most):
            rows = next(n for n in counts if n >= count)
            assert rows - count < max(8, count / 4 + 1)
    assert graph_batch_sizes(10_000)[-1] == 512


@pytest.mark.parametrize(
    "window", [LayerWindow(), LayerWindow(size=700), LayerWindow(chunk=4096)], ids=str
)
def test_the_parts_of_a_captured_launch_fill_the_gpu_for_every_length(window, monkeypatch):
    monkeypatch.setattr(decode_splits, "num_processors", lambda device: 132)
    nothing = torch.zeros(1, dtype=torch.int64)
    for count in graph_batch_sizes(256):
        rows = DecodeRows(count, [(count, 32768)], *[nothing] * 4, longest=nothing)
        parts = decode_splits.captured_splits(rows, window, 8, 64, CPU)
        limit = 32768 if window.limit is None else window.limit + 64
        assert 1 <= parts <= 128
        # There are four programs for each multiprocessor, unless parts of two tiles already cover
        # all tokens.
        assert parts >= min(4, -(-limit // 128))
        assert parts * count * 8 >= 528 or parts >= limit // 128


@pytest.mark.parametrize(
    "window", [LayerWindow(), LayerWindow(size=21), LayerWindow(chunk=32)], ids=str
)
def test_a_captured_launch_is_correct_for_every_length(window, device):
    spec = dataclasses.replace(SPECS["three query heads a key head"], window=window)
    for lengths in ([15, 170, 1], [17, 2, 40]):
        plain, captured = [
            Steps(GpuKVCache, spec, torch.float32, device, shapes=[(n, 1) for n in lengths]).fill()
            for _ in range(2)
        ]
        expected = plain.run()
        build = captured._builder.build

        def build_captured(plan, device, build=build):
            batch = build(plan, device)
            rows = gpu_attention.gpu_batch(batch.attention)
            rows.decodes.longest = rows.decodes.lens.amax(0, keepdim=True)
            rows.decodes.bounds = [(3, 4096)]
            return batch

        captured._builder.build = build_captured
        torch.testing.assert_close(captured.run(), expected, atol=1e-5, rtol=1e-5)


def start(folder_of, name, monkeypatch, capture=rerun, **settings):
    """Start an engine that captures graphs with the function `capture` instead of CUDA.

    Returns:
        The engine and the lines that it logged while it loaded the model.
    """
    lines = []
    monkeypatch.setattr(make_kv_cache, "unrounded_cache_class", lambda *_: SkippingCache)
    monkeypatch.setattr(packed, "uses_gpu_kernels", lambda cache: True)
    monkeypatch.setattr(accelerate_path, "capture_on", lambda *_: capture)
    load = startup.load
    monkeypatch.setattr(
        "nereid_backend.engine.engine_parts.load",
        lambda config, hook, _: load(config, hook, lines.append),
    )
    # The engine captures all graphs at load. With at most 8 sequences, there are few graphs.
    settings = {"max_num_seqs": 8, "num_speculative_tokens": 0, **settings}
    engine = open_engine(folder_of(name), device="cpu", prepack=False, **settings)
    return engine, "\n".join(lines)


def test_replays_are_compared_with_the_model_at_load(folder_of, monkeypatch, engine_of):
    engine, said = start(folder_of, "gemma2", monkeypatch, record)
    assert "replayed from captured graphs" in said
    assert run(engine, 6) == run(engine_of("gemma2"), 6)
    assert graphs_of(engine).num_replays > 0
    assert engine.info.seconds["graphs"] > 0
    engine.close()


def test_a_model_that_reads_its_numbers_is_not_replayed_and_the_log_says_why(
    folder_of, monkeypatch
):
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward

    def reads(self, hidden):
        return forward(self, hidden if hidden.abs().sum().item() >= 0 else -hidden)

    monkeypatch.setattr(LlamaMLP, "forward", reads)
    engine, said = start(folder_of, "llama", monkeypatch, record)
    assert "not replayed from captured graphs: aten.item" in said
    assert graphs_of(engine) is None
    engine.close()


def test_a_replay_that_does_not_compute_is_detected_at_load(folder_of, monkeypatch):
    def stale(work):
        replay, runs = record(work), []

        def sometimes():
            runs.append(None)
            if len(runs) <= 2:  # the replays of the step for which the graph was captured
                replay()

        return sometimes

    engine, said = start(folder_of, "llama", monkeypatch, stale)
    assert "not replayed from captured graphs: its logits differ from" in said
    assert graphs_of(engine) is None
    engine.close()


def test_a_replay_that_stores_no_keys_is_detected_at_load(folder_of, monkeypatch):
    paths = []  # the forward paths that the engine creates
    create_path = packed.PackedPath.__init__

    def create_and_note_path(self, *args):
        create_path(self, *args)
        paths.append(self)

    def capture_without_keys(work):
        """Return a replay of `work` that leaves the keys and values in the cache unchanged."""
        replay = record(work)

        def replay_and_restore_cache():
            cache = paths[-1]._cache.tensors()
            old_values = [tensor.clone() for tensor in cache]
            replay()
            for tensor, old_value in zip(cache, old_values, strict=True):
                tensor.copy_(old_value)

        return replay_and_restore_cache

    monkeypatch.setattr(packed.PackedPath, "__init__", create_and_note_path)
    engine, said = start(folder_of, "llama", monkeypatch, capture_without_keys)
    assert "not replayed from captured graphs: its logits differ from" in said
    engine.close()


def test_a_compiled_forward_pass_is_replayed(folder_of, monkeypatch, engine_of):
    # The time of the compilation is proportional to the number of layers. torch caches the compiled
    # library on this machine.
    family = with_one_key_head("llama", num_hidden_layers=1)
    # A `Recorder` cannot record compiled code, so a replay calls the whole function again.
    engine, said = start(folder_of, family, monkeypatch, rerun, compile_forward=True)
    assert "the forward pass is compiled\ndecode steps are replayed" in said
    assert "the parts of steps with prefills are replayed from captured graphs" in said
    assert run(engine, 8) == run(engine_of(family), 8)
    assert graphs_of(engine).num_replays > 0
    assert engine._parts.runner._path.pieces.num_replays > 0
    engine.close()


def test_the_log_says_which_graphs_could_not_be_captured_after_the_check(folder_of, monkeypatch):
    def fails(self):
        self.failure = "out of memory"

    monkeypatch.setattr(DecodeGraphs, "capture_all", fails)
    engine, said = start(folder_of, "llama", monkeypatch, record)
    assert "decode steps are not replayed from captured graphs: out of memory" in said
    assert "are replayed" not in said
    engine.close()


def test_cuda_graphs_false_captures_nothing(folder_of, monkeypatch):
    engine, said = start(folder_of, "llama", monkeypatch, record, cuda_graphs=False)
    assert "graphs" not in said
    assert graphs_of(engine) is None
    engine.close()


def test_a_model_on_another_path_is_not_captured(tmp_path, monkeypatch):
    from backend.tiny_models import Family

    bloom = Family("bloom", "bloom", {"n_layer": 2, "n_head": 4}).save(tmp_path)
    engine, said = start(lambda _: bloom, "bloom", monkeypatch, record)
    assert 'CUDA graphs require the forward path "packed" and the GPU kernels' in said
    engine.close()


def test_nothing_is_captured_on_a_cpu():
    assert capture_on(CPU) is None
    assert not is_lost(CPU)


@pytest.mark.gpu
def test_a_replay_reads_the_current_values_of_its_tensors(device):
    if device.type != "cuda":
        pytest.skip("no GPU")
    source, target = (torch.zeros(8, device=device) for _ in range(2))
    capture = capture_on(device)
    replay = capture(lambda: target.copy_(source.sin() + 1))
    for value in (1.0, 2.0):
        source.fill_(value)
        replay()
        torch.testing.assert_close(target, source.sin() + 1)
    with pytest.raises(RuntimeError):
        capture(lambda: target.fill_(source.sum().item()))
    assert not is_lost(device)
    assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
    with pytest.raises(GraphMemoryError):
        capture_on(device, 2**50)(lambda: None)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_on_a_gpu_captured_steps_give_the_tokens_of_steps_without_graphs(name, folder_of, device):
    if device.type != "cuda":
        pytest.skip("no GPU")
    answers = []
    for settings in ({"cuda_graphs": False}, {}, {"async_scheduling": True}):
        engine = open_engine(folder_of(name), device="cuda", max_model_len=128, **settings)
        answers.append(run(engine, 9))
        if settings.get("cuda_graphs", True):
            assert graphs_of(engine).failure is None
            assert graphs_of(engine).num_replays > 0
        engine.close()
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]


def test_recorded_code_keeps_numbers_of_python_and_cannot_read_tensors():
    source, target, number = torch.ones(2), torch.zeros(2), [3]
    replay = record(lambda: target.copy_(source * number[0]))
    source.fill_(2.0)
    number[0] = 100
    replay()
    assert target.tolist() == [6.0, 6.0]
    with pytest.raises(CaptureError):
        record(lambda: target.fill_(source.sum().item()))
