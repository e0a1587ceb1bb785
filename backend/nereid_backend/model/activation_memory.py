# SPDX-License-Identifier: Apache-2.0
"""Measures how much memory a step needs in addition to the weights and the KV cache."""

from pathlib import Path

import torch

from nereid_backend.checkpoint import Checkpoint
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.model.path_variants import PathSpec
from nereid_backend.model.probe_layers import plain_token_ids
from nereid_backend.paths.model_call import Sizes

# The largest number of tokens in the measured step on a CPU, where a long step of a large model
# takes seconds.
_CPU_TOKENS = 64
_LOGIT_BYTES = 4
# The value that resets the peak memory (VmHWM) when it is written to clear_refs; see proc(5).
_RESET_PEAK = "5"


@torch.inference_mode()
def measure_activations(
    checkpoint: Checkpoint, spec: PathSpec, *, num_tokens: int, num_seqs: int, block_size: int
) -> int | None:
    """Return how many bytes of memory the largest step needs, including its logits.

    On a GPU, the largest step is computed and measured. On a CPU, a step of at most 64 tokens is
    measured, and the result is scaled. Example: if 64 tokens need 10 MB, 512 tokens need 80 MB.

    Args:
        checkpoint: the model. Its attention implementation must be that of the path.
        spec: the execution path of the model.
        num_tokens: the largest number of tokens in one step.
        num_seqs: the largest number of sequences that are sampled in one step.
        block_size: the number of tokens in one block.

    Returns:
        The number of bytes. None if the memory cannot be measured, which is the case on a CPU if
        the operating system is not Linux.
    """
    on_gpu = checkpoint.device.type == "cuda"
    num_measured = num_tokens if on_gpu else min(num_tokens, _CPU_TOKENS)
    num_blocks = -(-num_measured // block_size)
    path = spec.build(Sizes(num_blocks, block_size, 1, num_measured))
    plan = _prompt_plan(plain_token_ids(checkpoint)[0], num_measured, num_blocks)
    if on_gpu:
        torch.cuda.synchronize(checkpoint.device)
        before = torch.cuda.memory_allocated(checkpoint.device)
        torch.cuda.reset_peak_memory_stats(checkpoint.device)
        path.forward(plan)
        used = torch.cuda.max_memory_allocated(checkpoint.device) - before
    else:
        before_bytes = _reset_peak()
        if before_bytes is None:
            return None
        path.forward(plan)
        peak_bytes = _status_bytes("VmHWM") or 0
        used = max(0, peak_bytes - before_bytes) * num_tokens // num_measured
    return used + num_seqs * checkpoint.vocab_size * _LOGIT_BYTES


def _prompt_plan(token_id: int, num_tokens: int, num_blocks: int) -> StepPlan:
    """Return the plan of a step that computes one prompt of equal tokens."""
    prompt = [token_id] * num_tokens
    sequence = Sequence("", prompt, SamplingParams(), max_total_tokens=num_tokens + 1)
    sequence.row = 0
    sequence.block_table = list(range(num_blocks))
    chunk = Chunk(
        sequence, start=0, num_tokens=num_tokens, samples=True, is_first=True, num_logits=1
    )
    return StepPlan([chunk], num_tokens)


def _reset_peak() -> int | None:
    """Reset the peak of this process's memory, and return its current memory in bytes.

    Return None if the operating system cannot reset the peak.
    """
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return None
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int | None:
    """Return a value of /proc/self/status in bytes; None if the file lacks the value.

    Example: `_status_bytes("VmRSS")` returns the present memory of this process.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    kibibytes = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(kibibytes[0]) * 1024 if kibibytes else None
