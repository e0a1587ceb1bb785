# SPDX-License-Identifier: Apache-2.0
"""How much memory a step takes besides weights and cache, found out by running one."""

from pathlib import Path

import torch

from nereid_backend.checkpoint import Checkpoint
from nereid_backend.core.request import Request
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.model.choose_path import Tier
from nereid_backend.model.probe_layers import plain_token_ids
from nereid_backend.paths.model_call import Sizes

# A CPU takes seconds for a long step of a large model, so a short one is measured there and scaled.
_CPU_TOKENS = 64
_CPU_LOGITS_BYTES = 4


@torch.inference_mode()
def measure_activations(
    checkpoint: Checkpoint, tier: Tier, *, num_tokens: int, num_seqs: int, block_size: int
) -> int | None:
    """Bytes that the largest step takes while it runs, logits included.

    Args:
        checkpoint: the model, with the tier's attention set.
        tier: the path that steps take.
        num_tokens: the most that a step holds.
        num_seqs: the most that are sampled from in one step.
        block_size: tokens in one block.

    Returns:
        None where the system does not tell: off Linux, without a GPU.
    """
    on_gpu = checkpoint.device.type == "cuda"
    tried = num_tokens if on_gpu else min(num_tokens, _CPU_TOKENS)
    path = tier.build(Sizes(-(-tried // block_size), block_size, 1, tried))
    token_id = plain_token_ids(checkpoint)[0]
    request = Request("", [token_id] * tried, SamplingParams(), max_total_tokens=tried + 1)
    request.row, request.block_table = 0, list(range(-(-tried // block_size)))
    plan = StepPlan([Chunk(request, 0, tried, True, True, 1)], tried)
    if on_gpu:
        torch.cuda.synchronize(checkpoint.device)
        before = torch.cuda.memory_allocated(checkpoint.device)
        torch.cuda.reset_peak_memory_stats(checkpoint.device)
        path.forward(plan)
        used = torch.cuda.max_memory_allocated(checkpoint.device) - before
    else:
        found = _resident_before()
        if found is None:
            return None
        path.forward(plan)
        used = max(0, (_status_bytes("VmHWM") or 0) - found) * num_tokens // tried
    return used + num_seqs * checkpoint.vocab_size * _CPU_LOGITS_BYTES


def _resident_before() -> int | None:
    """This process's resident bytes, from which its peak is counted anew; None: cannot be told."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, proc(5)
    except OSError:
        return None
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 if found else None
