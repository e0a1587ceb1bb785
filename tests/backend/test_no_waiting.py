"""Tests that the code that starts a step on a GPU never waits for the GPU.

The CPU waits if it reads a number from the GPU, or if it copies memory that is not pinned to the
GPU. In these tests, torch's meta device replaces the GPU. The meta device computes only shapes, so
reading a number raises an error. The module `device_transfer` copies from pinned memory, so its
copies do not wait.
"""

import random
import sys

import numpy as np
import pytest
import torch
from fakes.modular_guide import ModularGuide
from nereid_backend import SamplingParams, device_transfer
from nereid_backend.attention.choose_backend import step_layout
from nereid_backend.attention.gpu import gpu_attention
from nereid_backend.attention.gpu.gpu_attention import GpuKVCache
from nereid_backend.attention.layers import LayerSpec, LayerWindow
from nereid_backend.attention.transformers_hook import PagedForward
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.paths.model_call import token_inputs
from nereid_backend.paths.step_batch import BatchBuilder
from nereid_backend.step_runner import Runner
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
BLOCK = 4


class Watch(TorchDispatchMode):
    """A context manager that watches the copies from the CPU to the device.

    Attributes:
        num_copies: the number of copies.
        waiting_operators: the names of the operators during which the CPU would wait for the
            device. These operators are copies outside the module `device_transfer`, and operators
            that create a tensor on the device from Python numbers.
    """

    def __init__(self):
        super().__init__()
        self.num_copies = 0
        self.waiting_operators: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor) or result.device != DEVICE:
            return result

        name = func.name()
        is_copy = name.startswith(("aten::to", "aten::_to_copy", "aten::copy_"))
        source_devices = {arg.device for arg in args if isinstance(arg, torch.Tensor)}
        if is_copy and torch.device("cpu") in source_devices:
            self.num_copies += 1
            if not _is_called_from(device_transfer.__file__):
                self.waiting_operators.append(name)
        # torch.tensor and new_tensor call one of these operators at their end.
        if name in ("aten::detach_", "aten::lift_fresh"):
            self.waiting_operators.append(name)
        return result


def _is_called_from(file):
    """Return whether the call stack contains a function of the source file `file`."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False


class MetaPath:
    """A fake forward path that builds batches as the path `packed` does, without real logits."""

    def __init__(self, vocab_size, dtype):
        self.vocab_size, self.dtype = vocab_size, dtype
        self.builder = BatchBuilder(
            max_num_seqs=32, max_model_len=4096, block_size=BLOCK, null_block=4000
        )

    def forward(self, plan, sampled=None):
        batch = self.builder.build(plan, DEVICE, sampled)
        assert batch.input_ids.device == batch.attention.slots.device == DEVICE
        return torch.empty(batch.num_logits, self.vocab_size, dtype=self.dtype, device=DEVICE)

    def clear(self, sequence):
        raise AssertionError("a step failed")


REQUEST_SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 4},
    {},
    {"temperature": 0.7, "min_p": 0.1, "logprobs": 0},
    {"top_p": 0.9},
    {"top_k": 7},
    {"top_k": 7, "top_p": 0.9, "min_p": 0.1, "logprobs": 20},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"bad_words_token_ids": [[1, 2], [7]], "min_tokens": 9, "stop_token_ids": [5]},
    {"logit_bias": {3: 2.0}, "allowed_token_ids": [1, 2, 3]},
    {"prompt_logprobs": 2},
    {"guide": True},
    {"guide": True, "top_p": 0.5, "temperature": 1.3},
]


def start_requests(all_settings, lengths):
    """Return a scheduler with a new request for each item of `all_settings`.

    `lengths` contains the lengths of the random prompts. If the settings contain "guide", the
    request has a guide, which restricts the tokens as a grammar does.
    """
    scheduler = Scheduler(
        BlockPool(4000), block_size=BLOCK, max_num_seqs=32, max_num_batched_tokens=5000
    )
    rng = random.Random(0)
    for number, (request_settings, length) in enumerate(zip(all_settings, lengths, strict=True)):
        settings = dict(request_settings)
        has_guide = settings.pop("guide", False)
        prompt = [rng.randrange(40) for _ in range(length)]
        sequence = Sequence(str(number), prompt, SamplingParams(**settings), max_total_tokens=4000)
        sequence.guide = ModularGuide(45) if has_guide else None
        scheduler.add(sequence)
    return scheduler


# The lengths of the prompts differ so much that the attention code divides the sequences into
# groups in decode steps.
PROMPT_LENGTHS = [3 if number % 3 else 700 for number in range(len(REQUEST_SETTINGS))]


def start_two_steps(scheduler, path):
    """Start a step, and start the next step before the CPU has read the sampled tokens.

    Returns:
        The first step in flight, the plan of the second step, and a `Watch` of the copies of both
        steps. The pending chunks of the plan start with a token that the first step samples. Only
        the device knows this token.
    """
    runner = Runner(path)
    first_plan = scheduler.plan()
    with Watch() as watch:
        first_step = runner.start(first_plan)
        runner.sample(first_step, first_plan)
        second_plan = scheduler.plan_ahead(first_plan)
        runner.start(second_plan, first_step)
    return first_step, second_plan, watch


@pytest.mark.parametrize("vocab_size", [45, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_starts_without_waiting_for_the_device(vocab_size, dtype):
    scheduler = start_requests(REQUEST_SETTINGS, PROMPT_LENGTHS)
    first_step, second_plan, watch = start_two_steps(scheduler, MetaPath(vocab_size, dtype))
    assert watch.waiting_operators == []
    assert watch.num_copies > 0
    assert len(second_plan.pending) == len(second_plan.chunks) == len(REQUEST_SETTINGS)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        first_step.pending.result()


@pytest.mark.parametrize("vocab_size", [45, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_a_single_request_starts_without_waiting_for_the_device(vocab_size, dtype):
    # Each request runs alone, because the sampler has special cases for a single request.
    for request_settings, length in zip(REQUEST_SETTINGS, PROMPT_LENGTHS, strict=True):
        scheduler = start_requests([request_settings], [length])
        _, second_plan, watch = start_two_steps(scheduler, MetaPath(vocab_size, dtype))
        assert watch.waiting_operators == [], request_settings
        assert second_plan.pending


def test_a_greedy_step_copies_once_and_waits_once(monkeypatch):
    """A complete step, from the plan to the sampled tokens, copies once and waits once."""
    waits = []
    monkeypatch.setattr(device_transfer.HostCopy, "wait", lambda self: waits.append(self._tensors))

    scheduler = start_requests([{"temperature": 0.0}] * 4, [3, 700, 3, 1])
    runner = Runner(MetaPath(40_000, torch.bfloat16))
    plan = scheduler.plan()

    with Watch() as watch:
        step = runner.start(plan)
        runner.sample(step, plan)
        with pytest.raises(TypeError):  # the replaced `wait` returns no numbers
            step.pending.result()

    assert watch.num_copies == 1
    assert watch.waiting_operators == []
    assert len(waits) == 1


@pytest.mark.parametrize(
    "copy",
    [
        lambda: torch.tensor([1, 2], device=DEVICE),
        lambda: torch.from_numpy(np.zeros(3)).to(DEVICE),
        lambda: torch.empty(2, device=DEVICE).new_tensor(1.0),
        lambda: torch.empty(2, device=DEVICE).copy_(torch.zeros(2)),
    ],
)
def test_the_watch_records_copies_that_would_wait(copy):
    with torch.inference_mode(), Watch() as watch:
        copy()
    assert len(watch.waiting_operators) == 1


@pytest.mark.parametrize(
    "read",
    [
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor.tolist(),
        lambda tensor: bool((tensor > 0).any()),
    ],
)
def test_reading_a_number_from_the_meta_device_raises_an_error(read):
    with pytest.raises((RuntimeError, NotImplementedError)):
        read(torch.empty(4, device=DEVICE))


def test_packed_arrays_are_aligned_and_keep_their_shapes():
    rng = np.random.default_rng(0)
    shapes = [(3,), (1, 7), (0,), (2, 0), (8,), (5, 9), (1,)]
    arrays = [rng.integers(0, 99, shape) for shape in shapes]
    # This array is not contiguous.
    arrays.append(rng.integers(0, 99, (6, 2)).T)

    packed = device_transfer.pack(arrays)
    unpacked = device_transfer.unpack(packed, arrays)

    for array, tensor in zip(arrays, unpacked, strict=True):
        assert tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array)
        assert (tensor.data_ptr() - packed.data_ptr()) % 64 == 0
    # The unpacked tensors are views of the packed tensor. (Empty tensors have no memory.)
    storages = {tensor.untyped_storage().data_ptr() for tensor in unpacked if tensor.numel()}
    assert storages == {packed.untyped_storage().data_ptr()}


def test_token_ids_and_positions_reach_the_device_in_copies_that_do_not_wait():
    sequence = Sequence("0", list(range(9)), SamplingParams(), max_total_tokens=100)
    chunks = [Chunk(sequence, start, 3, False, False, 0) for start in (0, 6)]
    ids, positions = token_inputs(chunks, torch.device("cpu"))
    assert ids.tolist() == positions.tolist() == [[0, 1, 2], [6, 7, 8]]
    with Watch() as watch:
        token_inputs(chunks, DEVICE)
    assert watch.waiting_operators == []


SPECS = [
    LayerSpec(4, 2, 16, 16),
    LayerSpec(4, 2, 16, 16, LayerWindow(size=64)),
    LayerSpec(4, 2, 16, 16),
]


def record_attention_kernels(monkeypatch):
    """Replace the attention kernels by fakes, because kernels cannot run on the meta device.

    Return a list to which each fake appends the kind of its kernel, "decode" or "prefill". The
    fakes read the inputs of their kernels, because reading an input may cause a copy.
    """
    launched_kernels = []

    def decode(query, call, rows, *_):
        assert rows.count
        launched_kernels.append("decode")

    def prefill(query, call, rows, out, tuning):
        assert rows.tiles(gpu_attention.prefill_tiling(call.spec, tuning)).shape
        launched_kernels.append("prefill")

    monkeypatch.setattr(gpu_attention, "store", lambda *_: None)
    monkeypatch.setattr(gpu_attention, "decode", decode)
    monkeypatch.setattr(gpu_attention, "prefill", prefill)
    return launched_kernels


def chunks_of_lengths(lengths):
    """Return a chunk for each length. The chunks of one token come first.

    A chunk of one token is the last token of a sequence in the decode phase. A longer chunk is a
    whole prompt.
    """
    chunks = []
    for row, length in enumerate(lengths):
        start = 600 * row if length == 1 else 0
        token_ids = [7] * (start + length)
        sequence = Sequence(str(row), token_ids, SamplingParams(), max_total_tokens=4000)
        sequence.row = row
        sequence.block_table = list(range((start + length) // BLOCK + 1))
        chunks.append(Chunk(sequence, start, length, samples=True, is_first=True, num_logits=1))
    return sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)


@pytest.mark.parametrize("lengths", [[1] * 5, [1, 700, 1, 9, 30], [40, 900]])
def test_the_inputs_of_a_step_and_of_its_attention_layers_are_one_copy(lengths, monkeypatch):
    """Check that one copy transfers the inputs of a step and of all its attention layers."""
    cache = GpuKVCache(SPECS, num_blocks=400, block_size=BLOCK, dtype=torch.bfloat16, device=DEVICE)
    builder = BatchBuilder(
        max_num_seqs=32,
        max_model_len=4096,
        block_size=BLOCK,
        null_block=cache.null_block,
        layout=step_layout(cache),
    )
    launched_kernels = record_attention_kernels(monkeypatch)
    num_tokens = sum(lengths)

    with Watch() as watch:
        batch = builder.build(StepPlan(chunks_of_lengths(lengths), num_tokens), DEVICE)
        query, key, value = (
            torch.empty(1, num_heads, num_tokens, 16, dtype=torch.bfloat16, device=DEVICE)
            for num_heads in (4, 2, 2)
        )
        forward = PagedForward(cache, batch.attention)
        for _ in SPECS:
            forward(torch.nn.Module(), query, key, value)

    assert watch.num_copies == 1
    assert watch.waiting_operators == []
    # Each layer launches a decode kernel if there are chunks of one token, and a prefill kernel if
    # there are longer chunks.
    has_decode, has_prefill = min(lengths) == 1, max(lengths) > 1
    assert launched_kernels == (["decode"] * has_decode + ["prefill"] * has_prefill) * len(SPECS)
