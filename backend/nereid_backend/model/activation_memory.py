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
from nereid_backend.model.path_variants import PathSpec
from nereid_backend.model.probe_layers import plain_token_ids
from nereid_backend.paths.model_call import Sizes
from nereid_backend.step_runner import ForwardPath

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
    measure: Callable[[ForwardPath, StepPlan], int | None]
    if checkpoint.device.type == "cuda":
        num_measured_tokens = num_tokens
        measure = partial(_measure_on_gpu, device=checkpoint.device)
    else:
        num_measured_tokens = min(num_tokens, _CPU_TOKENS)
        measure = _measure_on_cpu
    num_blocks = math.ceil(num_measured_tokens / block_size)
    sizes = Sizes(num_blocks, block_size, max_num_seqs=1, max_model_len=num_measured_tokens)
    path = spec.build(sizes)
    plan = _prompt_plan(plain_token_ids(checkpoint)[0], num_measured_tokens, num_blocks)
    measured_bytes = measure(path, plan)
    if measured_bytes is None:
        return None
    # The memory that a forward pass needs is proportional to the number of tokens. On a GPU, all
    # `num_tokens` tokens were measured, so the factor is 1.
    step_bytes = measured_bytes * num_tokens // num_measured_tokens
    # The measured forward pass computed the logits of only one token. The memory for the logits of
    # all sequences is added here.
    logits_bytes = num_seqs * checkpoint.vocab_size * _LOGIT_BYTES
    return step_bytes + logits_bytes


def _measure_on_gpu(path: ForwardPath, plan: StepPlan, device: torch.device) -> int:
    """Run a forward pass, and return the GPU memory in bytes that the forward pass needed."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    path.forward(plan)
    return torch.cuda.max_memory_allocated(device) - before


def _measure_on_cpu(path: ForwardPath, plan: StepPlan) -> int | None:
    """Run a forward pass, and return the main memory in bytes that it needed; None if unknown."""
    bytes_before = _reset_peak()
    if bytes_before is None:
        return None
    path.forward(plan)
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
