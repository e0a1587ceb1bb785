# SPDX-License-Identifier: Apache-2.0
"""Measures how much memory a step needs in addition to the weights and the KV cache."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.model.forward_path.path_spec import PathSpec
from nereid_backend.model.forward_path.probe_layers import plain_token_ids
from nereid_backend.paths.model_call import Sizes

# On a CPU, the memory is measured in a forward pass over at most `_CPU_TOKENS` tokens. More tokens
# would take seconds in a large model.
_CPU_TOKENS = 64
_LOGIT_BYTES = 4
# Writing this value to /proc/self/clear_refs resets the peak memory of the process (VmHWM); see
# proc(5).
_RESET_PEAK = "5"


@torch.inference_mode()
def measure_activations(
    checkpoint: Checkpoint, spec: PathSpec, *, num_tokens: int, num_seqs: int, block_size: int
) -> int | None:
    """Return the memory in bytes that the largest forward pass needs, including the logits.

    On a GPU, the memory of the largest step is measured. On a CPU, the memory of a step of at most
    64 tokens is measured, because the largest step would take seconds. The result is then
    multiplied. Example: if 64 tokens need 10 MB, 512 tokens need 80 MB.

    Args:
        checkpoint: the model. It must use the attention implementation that the path needs.
        spec: the forward path of the model.
        num_tokens: the largest number of tokens in one step.
        num_seqs: the largest number of sequences that are sampled in one step.
        block_size: the number of tokens in one block.

    Returns:
        The number of bytes, or None if the memory cannot be measured. On a CPU, the memory can be
        measured only if the operating system is Linux.
    """
    if checkpoint.device.type == "cuda":
        run_step = _prepare_step(checkpoint, spec, num_tokens, block_size)
        step_bytes = _measure_on_gpu(run_step, checkpoint.device)
    else:
        # The memory that a forward pass needs is proportional to the number of tokens.
        num_measured_tokens = min(num_tokens, _CPU_TOKENS)
        run_step = _prepare_step(checkpoint, spec, num_measured_tokens, block_size)
        measured_bytes = _measure_on_cpu(run_step)
        if measured_bytes is None:
            return None
        step_bytes = measured_bytes * num_tokens // num_measured_tokens
    # The measured forward pass computed the logits of only one token. The memory for the logits of
    # all sequences is added here.
    logits_bytes = num_seqs * checkpoint.vocab_size * _LOGIT_BYTES
    return step_bytes + logits_bytes


def _prepare_step(
    checkpoint: Checkpoint, spec: PathSpec, num_tokens: int, block_size: int
) -> Callable[[], object]:
    """Return a function that runs a forward pass over a prompt of `num_tokens` tokens.

    `spec` describes the forward path of the model, and a block contains `block_size` tokens.
    """
    num_blocks = math.ceil(num_tokens / block_size)
    path = spec.build(Sizes(num_blocks, block_size, max_num_seqs=1, max_model_len=num_tokens))
    plan = _prompt_plan(plain_token_ids(checkpoint)[0], num_tokens, num_blocks)
    return partial(path.forward, plan)


def _measure_on_gpu(run_step: Callable[[], object], device: torch.device) -> int:
    """Call `run_step`, and return the GPU memory in bytes that the call needed."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_step()
    return torch.cuda.max_memory_allocated(device) - before


def _measure_on_cpu(run_step: Callable[[], object]) -> int | None:
    """Call `run_step`, and return the main memory that it needed in bytes; None if unknown."""
    bytes_before = _reset_peak()
    if bytes_before is None:
        return None
    run_step()
    peak_bytes = _status_bytes("VmHWM") or 0
    return max(0, peak_bytes - bytes_before)


def _prompt_plan(token_id: int, num_tokens: int, num_blocks: int) -> StepPlan:
    """Return a `StepPlan` for a forward pass over a prompt that repeats the token `token_id`."""
    prompt = [token_id] * num_tokens
    sequence = Sequence("", prompt, SamplingParams(), max_total_tokens=num_tokens + 1)
    sequence.row = 0
    sequence.block_table = list(range(num_blocks))
    chunk = Chunk(
        sequence, start=0, num_tokens=num_tokens, samples=True, is_first=True, num_logits=1
    )
    return StepPlan([chunk], num_tokens)


def _reset_peak() -> int | None:
    """Reset the peak memory that Linux records for this process. Return the current memory.

    The result is a number of bytes.
    Return None if the operating system cannot reset the peak.
    """
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return None
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int | None:
    """Read a memory size of this process from /proc/self/status, and return the size in bytes.

    Return None if the file does not contain the size `name`.

    Example: `_status_bytes("VmRSS")` returns the size of the memory that this process uses now.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):  # such as "VmRSS:     9216 kB"
            kibibytes = int(line.split()[1])
            return kibibytes * 1024
    return None
