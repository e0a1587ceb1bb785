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
    """Return the CUDA graphs of an engine, or None if the engine captures no graphs."""
    return engine._parts.runner._path.graphs


def poison(engine):
    """Overwrite the inputs and outputs of the graphs with wrong numbers."""
    graphs = graphs_of(engine)
    # The rows of the inputs are: token ids, positions, slots, lengths.
    wrong_inputs = torch.tensor([[7], [5], [2], [3]])
    for graph in graphs._graphs.values():
        graph.step._inputs.copy_(wrong_inputs.expand_as(graph.step._inputs))
        graph.step._table.zero_()
    if graphs._logits is not None:
        graphs._logits.fill_(float("nan"))


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
    assert run(engine, seed, before_step=poison) == expected
    assert graphs_of(engine).failure is None
    assert graphs_of(engine).num_replays > 2 * graphs_of(engine).num_captures > 4


@pytest.mark.parametrize("name", sampled(BY_NAME, "llama", "gemma3"))
def test_every_tiny_architecture_can_be_captured(name, engine_of):
    prompts, params = [[5, 6, 7], [8] * 15, [9]], SamplingParams(max_tokens=6, ignore_eos=True)
    plain_engine = engine_of(name, capture=None, seed=3)
    expected = plain_engine.generate(prompts, params)
    engine = engine_of(name, capture=record, seed=3)
    outputs = engine.generate(prompts, params)
    assert tokens_of(outputs) == tokens_of(expected)
    assert graphs_of(engine).failure is None
    # Only decode steps are replayed. The first of the six steps computes the prompts.
    assert graphs_of(engine).num_replays == 5


def tokens_of(outputs):
    """Return the tokens of the first answer to each request."""
    return [output.outputs[0].token_ids for output in outputs]


def test_replays_continue_with_preemption_and_with_blocks_from_the_prefix_cache(engine_of):
    small = {"kv_cache_memory": 44 * 1024, "max_num_batched_tokens": 9, "max_model_len": 64}
    engine = engine_of("llama", record, **small)
    assert run(engine, 5, before_step=poison) == run(engine_of("llama"), 5)
    assert engine.stats().num_preemptions > 0
    assert graphs_of(engine).num_replays > 0


def test_replays_give_the_same_tokens_with_async_scheduling(engine_of):
    engine = engine_of("gemma2", record, async_scheduling=True)
    assert run(engine, 7, before_step=poison) == run(engine_of("gemma2"), 7)
    assert graphs_of(engine).num_replays > 0


def test_a_model_that_frees_the_blocks_outside_its_windows_is_replayed(engine_of):
    name = "mistral, sliding window"
    engine = engine_of(name, record)
    assert run(engine, 1, before_step=poison) == run(engine_of(name), 1)
    assert graphs_of(engine).num_replays > 0


@pytest.mark.parametrize("cache_class", [GpuKVCache, GpuInt8KVCache], ids=lambda c: c.__name__)
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
def test_a_padded_step_gives_the_attention_of_the_step_without_padding(name, cache_class, device):
    lengths = [15, 16, 70, 1, 33]
    shapes = [(num_cached, 1) for num_cached in lengths]
    plain, padded = [
        Steps(cache_class, SPECS[name], torch.float32, device, shapes=shapes).fill()
        for _ in range(2)
    ]
    expected = plain.run()
    pad_step(padded, num_sequences=len(lengths), num_rows=8)

    outputs = padded.run()

    assert outputs.isfinite().all()
    torch.testing.assert_close(outputs[: len(lengths)], expected, atol=1e-5, rtol=1e-5)
    for tensor, expected_tensor in zip(padded.cache.tensors(), plain.cache.tensors(), strict=True):
        torch.testing.assert_close(tensor, expected_tensor, atol=0, rtol=0)


def pad_step(steps, num_sequences, num_rows):
    """Make `steps` pad each step to `num_rows` rows, as a CUDA graph does."""
    build = steps._builder.build

    def build_padded(plan, device):
        batch = build(plan, device)
        static_step = StaticStep(num_rows, sizes_of(num_rows, steps.cache.null_block), device)
        static_step._inputs[:3, :] = 2  # wrong values, which `fill` must overwrite
        static_step._table.zero_()
        static_step.fill(dataclasses.replace(batch, num_logits=num_sequences))
        return static_step.batch()

    steps._builder.build = build_padded
    # The rows of the padding also have queries, keys and values. Their numbers do not matter.
    steps._randn = with_padding(steps._randn, num_sequences, num_rows)


def sizes_of(width, null_block=9999):
    """Return the sizes of an engine whose longest sequence has `width` blocks of 16 tokens.

    `null_block` is the number of blocks, and thus the index of the null block.
    """
    return Sizes(null_block, block_size=16, max_num_seqs=8, max_model_len=16 * width)


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
        sequence.row = row
        sequence.block_table = list(range(10 * row, 10 * row + length // 16 + 1))
        chunks.append(Chunk(sequence, length - 1, 1, samples=True, is_first=True, num_logits=1))
    return builder.build(StepPlan(chunks, len(lengths)), device)


@pytest.mark.parametrize("previous_lengths", [[15, 16, 70, 1, 33, 120], [5, 158, 6, 1]])
def test_a_step_overwrites_all_inputs_of_the_previous_step(previous_lengths, device):
    used, fresh = (StaticStep(8, sizes_of(10), device) for _ in range(2))
    used.fill(decodes_of(previous_lengths, device))

    for step in (used, fresh):
        step.fill(decodes_of([40, 2], device))

    assert torch.equal(used._inputs, fresh._inputs)
    assert torch.equal(used._table, fresh._table)
    token_ids, positions, slots, lengths = fresh._inputs.tolist()
    assert token_ids == [7, 7] + [0] * 6
    assert positions == [39, 1] + [0] * 6
    assert slots == [2 * 16 + 7, 10 * 16 + 1] + [-1] * 6
    assert lengths == [40, 2] + [1] * 6
    # All other entries of the block tables contain the index of the null block.
    assert fresh._table[0].tolist() == [0, 1, 2] + [9999] * 7
    assert fresh._table[1].tolist() == [10] + [9999] * 9
    assert (fresh._table[2:] == 9999).all()


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 24])
def test_the_inputs_of_kernels_are_aligned(rows, device):
    step = StaticStep(rows, sizes_of(33), device)
    batch = step.batch()
    decodes = batch.attention.kernel_metadata.decodes
    kernel_inputs = [batch.input_ids, batch.position_ids, batch.attention.slots, batch.logits_index]
    kernel_inputs += [decodes.table, decodes.table_starts, decodes.tokens, decodes.lens]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in kernel_inputs)
    assert all(tensor.is_contiguous() for tensor in kernel_inputs)


def test_the_tables_of_grouped_sequences_are_in_the_rows_of_the_step(device):
    lengths = [3, 1500, 5, 1400, 2]  # short and long sequences are in two groups
    batch = decodes_of(lengths, device)
    assert len(batch.attention.decodes) == 2
    step = StaticStep(8, sizes_of(128), device)
    step.fill(batch)
    assert step._inputs[3].tolist() == [*lengths, 1, 1, 1]
    assert [row.tolist().index(9999) for row in step._table[:5]] == [1, 94, 1, 88, 1]


def with_padding(draw, num_tokens, num_rows):
    """Return a function that calls `draw` and pads its result to `num_rows` tokens.

    Only results with `num_tokens` tokens are padded. The numbers of the padding are ones.
    """

    def draw_and_pad(*shape):
        numbers = draw(*shape)
        if shape[:2] != (1, num_tokens):
            return numbers
        padding = numbers.new_ones(1, num_rows - num_tokens, *shape[2:])
        return torch.cat([numbers, padding], dim=1)

    return draw_and_pad


def test_an_engine_replays_the_kernels(engine_of, device):
    if device.type != "cpu":
        pytest.skip("on a GPU, the engine captures by itself")
    prompts = [[5, 6, 7], [8] * 15, [9]]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    family = with_one_key_head("gpt_oss")  # has attention windows and sinks

    engine = engine_of(family, capture=rerun, cache_class=GpuKVCache)
    outputs = engine.generate(prompts, params)
    plain_engine = engine_of(family, capture=None, cache_class=SkippingCache)
    expected = plain_engine.generate(prompts, params)

    assert tokens_of(outputs) == tokens_of(expected)
    assert graphs_of(engine).num_replays == 3


def test_padding_writes_to_no_block(engine_of, device):
    if device.type != "cpu":
        pytest.skip("runs the kernels in the interpreter")
    family = with_one_key_head("llama", num_hidden_layers=1)
    engine = engine_of(family, capture=rerun, cache_class=GpuKVCache)
    cache = engine._parts.runner._path._cache
    for request_id in ("a", "b", "c"):  # three rows in a graph of four
        engine.add_request(request_id, [5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    engine.step()
    old_tensors = [tensor.clone() for tensor in cache.tensors()]

    engine.step()

    # For each of the three sequences, the replay has changed only the cache of the token 4.
    block_size = cache.keys[0].shape[2]
    for old, new in zip(old_tensors, cache.tensors(), strict=True):
        is_changed = (old != new).any(-1).any(1)  # for each block and each position in it
        _, positions = is_changed.nonzero(as_tuple=True)
        assert is_changed.any(1).sum() == 3
        assert positions.tolist() == [4 % block_size] * 3
    assert graphs_of(engine).num_replays == 2


def test_the_next_replay_does_not_change_the_logits_of_a_replay(engine_of, monkeypatch):
    engine = engine_of("llama", record)
    recorded_logits = []  # pairs of the logits and a copy
    forward = DecodeGraphs.forward

    def forward_and_record(self, batch):
        logits = forward(self, batch)
        if logits is not None:
            recorded_logits.append((logits, logits.clone()))
        return logits

    monkeypatch.setattr(DecodeGraphs, "forward", forward_and_record)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))

    assert len(recorded_logits) == 7
    assert all(torch.equal(logits, copy) for logits, copy in recorded_logits)
    # The steps have different logits, so an overwritten tensor would differ from its copy.
    assert len({logits.sum().item() for logits, _ in recorded_logits}) > 1


def test_a_replay_reads_nothing_from_the_device(engine_of, monkeypatch):
    engine = engine_of("llama", record)
    forward = DecodeGraphs.forward

    def forward_without_reading(self, batch):
        if self.graph_size_for(batch) not in self._graphs:
            return forward(self, batch)
        with Recorder():  # raises an error if a number is read from the device
            return forward(self, batch)

    monkeypatch.setattr(DecodeGraphs, "forward", forward_without_reading)
    engine.generate([[5, 6, 7], [8]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert graphs_of(engine).num_replays == 7


def test_only_steps_with_one_token_and_logits_for_each_sequence_are_replayed(engine_of):
    engine = engine_of("llama", record, max_num_batched_tokens=8)
    long_prompt = list(range(3, 36))  # four chunks of eight tokens, and one chunk of one token
    # The second and the third time, the prefix cache contains the prompt except its last tokens.
    for _ in range(3):
        engine.generate([long_prompt], SamplingParams(max_tokens=1))
    # A step is replayed only if its chunk has one token. Each of the three prompts has at most one
    # chunk of one token.
    num_replays = graphs_of(engine).num_replays
    assert num_replays <= 3

    engine.generate([[3] * 9], SamplingParams(max_tokens=9, ignore_eos=True))

    # The prompt has a chunk of eight tokens, which is not replayed, and a chunk of one token. Then
    # eight steps compute one token of the answer each.
    assert graphs_of(engine).num_replays == num_replays + 9


@pytest.mark.parametrize("failing_capture", [1, 2, 3])
def test_a_failed_capture_is_reported_once_and_steps_run_without_graphs(
    engine_of, failing_capture, caplog
):
    num_captures = 0

    def capture(work):
        nonlocal num_captures
        num_captures += 1
        if num_captures == failing_capture:
            work()
            raise RuntimeError("CUDA error: operation not permitted\nwhen stream is capturing")
        return record(work)

    engine = engine_of("llama", capture)

    assert run(engine, seed=0) == run(engine_of("llama"), seed=0)
    assert graphs_of(engine).failure == "CUDA error: operation not permitted"
    assert num_captures == failing_capture
    assert caplog.text.count("CUDA graphs are off, because a step could not be captured") == 1


def test_without_memory_for_more_graphs_the_captured_graphs_are_replayed(engine_of, caplog):
    num_captures = 0

    def capture_two_graphs(work):
        nonlocal num_captures
        num_captures += 1
        if num_captures > 2:
            raise GraphMemoryError("12 MiB are free")
        return record(work)

    engine = engine_of("llama", capture_two_graphs)

    assert run(engine, seed=0) == run(engine_of("llama"), seed=0)
    assert graphs_of(engine).failure is None
    assert graphs_of(engine).num_captures == 2
    assert graphs_of(engine).num_replays > 2
    assert caplog.text.count("12 MiB are free") == 1


@pytest.mark.parametrize("error", ["does not compute", "logits differ"])
def test_a_graph_with_wrong_logits_is_not_used(engine_of, error):
    def capture_wrong(work):
        replay = record(work)

        def replay_wrong():
            if error == "logits differ":
                replay()
                graphs_of(engine)._logits.mul_(1.2)

        return replay_wrong

    # The engine loads without graphs, and captures the first graph in its first decode step.
    engine = engine_of("llama", capture_wrong)

    assert run(engine, seed=2) == run(engine_of("llama"), seed=2)
    assert "the logits of a replayed CUDA graph differ" in graphs_of(engine).failure
    assert graphs_of(engine).num_replays == 0


def test_a_request_whose_logits_are_not_finite_does_not_end_the_replays(engine_of):
    engine = engine_of("llama", record)
    engine.add_request("a", [5, 6], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.add_request("b", [8, 6], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    # Overwrite the cached values (of keys and values) of one request with NaN.
    first_block = engine._parts.scheduler._running[0].block_table[0]
    with torch.inference_mode():
        engine._parts.runner._path._cache.values[0][first_block] = float("nan")

    finish_reasons = []
    while engine.has_work():
        updates = engine.step()
        finish_reasons += [update.finish_reason for update in updates if update.finish_reason]

    assert sorted(finish_reasons) == ["error", "length"]
    assert graphs_of(engine).failure is None


def test_all_graphs_are_captured_at_load_and_none_in_service(engine_of):
    engine = engine_of("llama", record, max_num_seqs=6)
    graphs = graphs_of(engine)
    graphs.capture_all()
    assert sorted(graphs._graphs) == [1, 2, 4, 8]
    assert run(engine, 0) == run(engine_of("llama", max_num_seqs=6), 0)
    assert graphs.num_captures == 4
    assert graphs.num_replays > 4


def test_one_graph_serves_sequences_of_all_lengths(engine_of):
    engine = engine_of("llama", record)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for prompts in ([[5] * 3, [6] * 90], [[7] * 60, [8] * 2]):
        expected = engine_of("llama").generate(prompts, params)
        assert tokens_of(engine.generate(prompts, params)) == tokens_of(expected)
    assert graphs_of(engine).num_captures == 1


def test_graphs_fit_every_number_of_sequences_with_little_padding():
    assert graph_batch_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    for max_sequences in (1, 3, 7, 100, 256, 500):
        sizes = graph_batch_sizes(max_sequences)
        assert sizes[-1] >= max_sequences > max(sizes[:-1], default=0)
        for num_sequences in range(9, max_sequences):
            smallest_fit = next(size for size in sizes if size >= num_sequences)
            assert smallest_fit - num_sequences < max(8, num_sequences / 4 + 1)
    assert graph_batch_sizes(10_000)[-1] == 512


@pytest.mark.parametrize(
    "window", [LayerWindow(), LayerWindow(size=700), LayerWindow(chunk=4096)], ids=str
)
def test_the_parts_of_a_captured_launch_fill_the_gpu_for_every_length(window, monkeypatch):
    monkeypatch.setattr(decode_splits, "num_processors", lambda device: 132)
    longest = 32768
    num_visible = longest if window.limit is None else window.limit + 64
    for num_sequences in graph_batch_sizes(256):
        rows = decode_rows(num_sequences, longest)
        num_parts = decode_splits.captured_splits(
            rows, window, programs_per_split=8, tile=64, device=CPU
        )

        assert 1 <= num_parts <= 128
        # There are four programs for each multiprocessor, unless parts of two tiles already cover
        # all tokens.
        assert num_parts >= min(4, -(-num_visible // 128))
        num_programs = num_parts * num_sequences * 8
        assert num_programs >= 4 * 132 or num_parts >= num_visible // 128


def decode_rows(num_sequences, longest):
    """Return one group of sequences in the decode phase. Each has at most `longest` tokens.

    The tensors are placeholders, because the division into splits does not read them.
    """
    unused = torch.zeros(1, dtype=torch.int64)
    bounds = [(num_sequences, longest)]
    return DecodeRows(num_sequences, bounds, unused, unused, unused, unused, longest=unused)


@pytest.mark.parametrize("num_cached", [[15, 170, 1], [17, 2, 40]], ids=str)
@pytest.mark.parametrize(
    "window", [LayerWindow(), LayerWindow(size=21), LayerWindow(chunk=32)], ids=str
)
def test_a_captured_launch_is_correct_for_every_length(window, num_cached, device):
    spec = dataclasses.replace(SPECS["three query heads a key head"], window=window)
    shapes = [(count, 1) for count in num_cached]
    plain, captured = [
        Steps(GpuKVCache, spec, torch.float32, device, shapes=shapes).fill() for _ in range(2)
    ]
    expected = plain.run()
    build = captured._builder.build

    def build_as_in_graph(plan, device):
        """Build a batch whose kernels are launched for three sequences of up to 4096 tokens.

        A graph is captured for such bounds, and replayed for shorter sequences.
        """
        batch = build(plan, device)
        decodes = gpu_attention.gpu_batch(batch.attention).decodes
        decodes.longest = decodes.lens.amax(0, keepdim=True)
        decodes.bounds = [(3, 4096)]
        return batch

    captured._builder.build = build_as_in_graph
    torch.testing.assert_close(captured.run(), expected, atol=1e-5, rtol=1e-5)


def start(folder_of, name, monkeypatch, capture=rerun, **settings):
    """Start an engine that captures graphs with the function `capture` instead of CUDA.

    Returns:
        The engine and the text that it logged while it loaded the model.
    """
    log_lines = []
    # The engine behaves as on a GPU: it uses the cache of the GPU kernels, and captures graphs.
    monkeypatch.setattr(make_kv_cache, "unrounded_cache_class", lambda *_: SkippingCache)
    monkeypatch.setattr(packed, "uses_gpu_kernels", lambda cache: True)
    monkeypatch.setattr(accelerate_path, "capture_on", lambda *_: capture)
    # `open_engine` has no argument for a function that logs, so pass the function to `load` here.
    load = startup.load
    monkeypatch.setattr(
        "nereid_backend.engine.engine_parts.load",
        lambda config, hook, _: load(config, hook, log_lines.append),
    )
    # The engine captures all graphs at load. With at most 8 sequences, there are few graphs.
    settings = {"max_num_seqs": 8, "num_speculative_tokens": 0, **settings}
    engine = open_engine(folder_of(name), device="cpu", prepack=False, **settings)
    return engine, "\n".join(log_lines)


def test_replays_are_compared_with_the_model_at_load(folder_of, monkeypatch, engine_of):
    engine, log_text = start(folder_of, "gemma2", monkeypatch, record)
    assert "replayed from captured graphs" in log_text
    assert run(engine, 6) == run(engine_of("gemma2"), 6)
    assert graphs_of(engine).num_replays > 0
    assert engine.info.seconds["graphs"] > 0
    engine.close()


def test_a_model_that_reads_its_numbers_is_not_replayed_and_the_log_says_why(
    folder_of, monkeypatch
):
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward

    def forward_that_reads(self, hidden):
        return forward(self, hidden if hidden.abs().sum().item() >= 0 else -hidden)

    monkeypatch.setattr(LlamaMLP, "forward", forward_that_reads)
    engine, log_text = start(folder_of, "llama", monkeypatch, record)
    assert "not replayed from captured graphs: aten.item" in log_text
    assert graphs_of(engine) is None
    engine.close()


def test_a_replay_that_does_not_compute_is_detected_at_load(folder_of, monkeypatch):
    def capture_for_two_replays(work):
        """Return a function that replays `work` in its first two calls, and then does nothing.

        The first two replays compute the step for which the graph was captured.
        """
        replay = record(work)
        num_replays = 0

        def replay_twice():
            nonlocal num_replays
            num_replays += 1
            if num_replays <= 2:
                replay()

        return replay_twice

    engine, log_text = start(folder_of, "llama", monkeypatch, capture_for_two_replays)
    assert "not replayed from captured graphs: its logits differ from" in log_text
    assert graphs_of(engine) is None
    engine.close()


def test_a_replay_that_stores_no_keys_is_detected_at_load(folder_of, monkeypatch):
    paths = []  # the forward paths that the engine creates
    create_path = packed.PackedPath.__init__

    def create_and_record_path(self, *args):
        create_path(self, *args)
        paths.append(self)

    def capture_without_keys(work):
        """Return a function that replays `work`, and then restores the contents of the cache."""
        replay = record(work)

        def replay_and_restore_cache():
            cache = paths[-1]._cache.tensors()
            old_values = [tensor.clone() for tensor in cache]
            replay()
            for tensor, old_value in zip(cache, old_values, strict=True):
                tensor.copy_(old_value)

        return replay_and_restore_cache

    monkeypatch.setattr(packed.PackedPath, "__init__", create_and_record_path)
    engine, log_text = start(folder_of, "llama", monkeypatch, capture_without_keys)
    assert "not replayed from captured graphs: its logits differ from" in log_text
    engine.close()


def test_a_compiled_forward_pass_is_replayed(folder_of, monkeypatch, engine_of):
    # The time of the compilation is proportional to the number of layers. torch caches the compiled
    # library on this machine.
    family = with_one_key_head("llama", num_hidden_layers=1)
    # A `Recorder` cannot record compiled code, so a replay calls the whole function again.
    engine, log_text = start(folder_of, family, monkeypatch, rerun, compile_forward=True)
    assert "the forward pass is compiled\ndecode steps are replayed" in log_text
    assert "the parts of steps with prefills are replayed from captured graphs" in log_text
    assert run(engine, 8) == run(engine_of(family), 8)
    assert graphs_of(engine).num_replays > 0
    assert engine._parts.runner._path.pieces.num_replays > 0
    engine.close()


def test_the_log_says_which_graphs_could_not_be_captured_after_the_check(folder_of, monkeypatch):
    def fails(self):
        self.failure = "out of memory"

    monkeypatch.setattr(DecodeGraphs, "capture_all", fails)
    engine, log_text = start(folder_of, "llama", monkeypatch, record)
    assert "decode steps are not replayed from captured graphs: out of memory" in log_text
    assert "are replayed" not in log_text
    engine.close()


def test_cuda_graphs_false_captures_nothing(folder_of, monkeypatch):
    engine, log_text = start(folder_of, "llama", monkeypatch, record, cuda_graphs=False)
    assert "graphs" not in log_text
    assert graphs_of(engine) is None
    engine.close()


def test_a_model_on_another_path_is_not_captured(tmp_path, monkeypatch):
    from backend.tiny_models import Family

    bloom = Family("bloom", "bloom", {"n_layer": 2, "n_head": 4}).save(tmp_path)
    engine, log_text = start(lambda _: bloom, "bloom", monkeypatch, record)
    assert 'CUDA graphs require the forward path "packed" and the GPU kernels' in log_text
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

    # CUDA cannot capture a function that reads a number from the GPU.
    with pytest.raises(RuntimeError):
        capture(lambda: target.fill_(source.sum().item()))
    assert not is_lost(device)
    assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
    with pytest.raises(GraphMemoryError):
        capture_on(device, reserve_bytes=2**50)(lambda: None)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_on_a_gpu_captured_steps_give_the_tokens_of_steps_without_graphs(name, folder_of, device):
    if device.type != "cuda":
        pytest.skip("no GPU")

    def open_on_gpu(**settings):
        return open_engine(folder_of(name), device="cuda", max_model_len=128, **settings)

    plain_engine = open_on_gpu(cuda_graphs=False)
    expected = run(plain_engine, seed=9)
    plain_engine.close()
    for settings in ({}, {"async_scheduling": True}):
        engine = open_on_gpu(**settings)
        assert run(engine, seed=9) == expected
        assert graphs_of(engine).failure is None
        assert graphs_of(engine).num_replays > 0
        engine.close()


def test_recorded_code_keeps_numbers_of_python_and_cannot_read_tensors():
    source, target, number = torch.ones(2), torch.zeros(2), [3]
    replay = record(lambda: target.copy_(source * number[0]))
    source.fill_(2.0)
    number[0] = 100
    replay()
    assert target.tolist() == [6.0, 6.0]
    with pytest.raises(CaptureError):
        record(lambda: target.fill_(source.sum().item()))
