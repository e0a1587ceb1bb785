# SPDX-License-Identifier: Apache-2.0
"""Samples the tokens of all rows with one kernel launch on a GPU (triton_sampling.py).

The reference implementation is `random_sampling.sample_rows`. The kernel computes weights with the
fast exponential function of the GPU, and adds the weights without rounding. The sampled token can
differ from the reference only in the rare case that a rounding error decides between two tokens.
"""

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereid_backend.device_transfer import upload
from nereid_backend.errors import first_line
from nereid_backend.sampling.random_sampling import SamplingBatch, sample_rows

# Each program instance of the kernel reads the logits of _TILE tokens at a time, and runs with
# _NUM_WARPS warps. The two numbers are chosen so that all values of the kernel fit into registers
# (loadtest/gpu/compile_kernels.py prints the number of spilled registers).
_TILE = 4096
_NUM_WARPS = 16
# When the model is loaded, the kernel is compared with the reference on a test batch. This is the
# number of rows in the test batch.
_NUM_CHECKED_ROWS = 16
_CHECKED_VOCAB_SIZE = 9000
# The sampling kernel is accepted if its results differ from the reference in at most this many rows
# of the test batch. Rounding can cause such differences.
_MAX_DIFFERING = 1
# The largest accepted difference between a log-probability and its reference.
_MAX_LOGPROB_ERROR = 1e-4

Settings = NDArray[np.float64]


def sample(logits: Tensor, raw: Tensor, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token for each row, without waiting for the device.

    Args:
        logits: [n, vocab_size], float32, bfloat16 or float16, after masks, biases and penalties.
        raw: [n, vocab_size], the model's own logits. If `raw` is the same tensor as `logits`, the
            kernel reads the tensor only once.
        settings: [5, n] on the host. The five rows contain the temperature, top_p, top_k, min_p,
            and a random number in [0, 1). The temperature 0 selects the likeliest token. If several
            tokens are the likeliest, the first of them is selected. top_k=0 turns top_k off.

    Returns:
        Three tensors on the device. The first contains the token ids, [n] int64, which are always
        less than vocab_size. The second contains the log-probabilities of these tokens under `raw`,
        [n] float32. A log-probability is NaN if the row of `raw` contains NaN or infinity. The
        third, [n] bool, is True if at least one token of the row was allowed.
    """
    from nereid_backend.sampling.triton_sampling import sample_kernel

    num_rows, vocab_size = logits.shape
    is_raw = logits is raw
    if logits.stride(1) != 1 or raw.stride(1) != 1:
        logits = logits.contiguous()
        raw = logits if is_raw else raw.contiguous()
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    has_allowed = torch.empty(num_rows, dtype=torch.uint8, device=logits.device)
    # Triton launches kernels on the current device, so the device of the logits must be the current
    # device.
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        device_settings = upload(settings, logits.device)
        sample_kernel[(num_rows,)](
            logits,
            raw,
            device_settings,
            token_ids,
            logprobs,
            has_allowed,
            logits.stride(0),
            raw.stride(0),
            vocab_size,
            num_rows,
            IS_RAW=is_raw,
            TILE=_TILE,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=True,
        )
    return token_ids, logprobs, has_allowed.view(torch.bool)


@functools.cache
def why_unusable(device: torch.device) -> str | None:
    """Return the reason why the sampling kernel does not work on a device; None if it works.

    The kernel is compared with the reference implementation. The result is cached, so each process
    makes this comparison once for each device.
    """
    try:
        num_wrong = num_wrong_rows(device)
    except Exception as error:  # noqa: BLE001
        # A compiler or a driver may raise any exception. After an exception, the kernel is not
        # used, and torch samples the tokens.
        return f"{type(error).__name__}: {first_line(error)}"
    # A small number of differences is accepted, because rounding can change the order of tokens
    # with similar probabilities.
    if num_wrong > _MAX_DIFFERING:
        return (
            f"{num_wrong} of {_NUM_CHECKED_ROWS} tokens differ from the reference "
            "implementation's tokens"
        )
    return None


def _test_batch() -> tuple[Tensor, SamplingBatch]:
    """Return the random logits and the sampling parameters of a test batch.

    The logits are [_NUM_CHECKED_ROWS, _CHECKED_VOCAB_SIZE] float32. There are four sets of sampling
    parameters and four types of logits. Row 4 * i + j has set i and type j.
    """
    random = np.random.default_rng(0)
    normal = random.normal(size=(_NUM_CHECKED_ROWS, _CHECKED_VOCAB_SIZE)).astype(np.float32)
    # Divide the random logits into four tensors [4, _CHECKED_VOCAB_SIZE], one for each type of
    # logits. The rows of a tensor are for the four parameter sets.
    plain, second, third, fourth = torch.from_numpy(normal * 3).view(4, 4, -1).unbind(1)
    with_ties = (second * 2).round()  # Only a few values are possible, so most logits are equal.
    with_forbidden_tokens = third.clone()
    with_forbidden_tokens[:, 1000:] = float("-inf")
    flat = fourth / 10
    types = (plain, with_ties, with_forbidden_tokens, flat)
    logits = torch.stack(types, dim=1).flatten(end_dim=1)
    # Each array contains the value of one parameter in the four sets. `repeat` repeats each value
    # four times, for the four types of logits.
    batch = SamplingBatch(
        temperature=np.array([0.7, 1.0, 0.7, 1.0], dtype=np.float32).repeat(4),
        top_p=np.array([1.0, 0.9, 1.0, 0.6], dtype=np.float32).repeat(4),
        top_k=np.array([0, 0, 50, 400]).repeat(4),
        min_p=np.array([0.01, 0.0, 0.0, 0.0], dtype=np.float32).repeat(4),
        uniform=random.random(_NUM_CHECKED_ROWS),
    )
    return logits, batch


@torch.inference_mode()
def num_wrong_rows(device: torch.device) -> int:
    """Run the kernel on a test batch, and return the number of rows with a wrong result.

    The reference implementation `sample_rows` samples the same batch on the CPU. A row is correct
    if both implementations sample the same token, the log-probability of the token is accurate,
    and the kernel reports that a token is allowed.
    """
    logits, batch = _test_batch()
    # `sample` requires this order of the settings.
    settings = np.stack([batch.temperature, batch.top_p, batch.top_k, batch.min_p, batch.uniform])
    device_logits = logits.to(device)
    # `sample` computes the log-probabilities from its second argument, the model's own logits. In
    # this test, no mask or penalty changes the logits, so both arguments are the same tensor.
    results = sample(device_logits, device_logits, settings)
    token_ids, logprobs, has_allowed = (result.cpu() for result in results)
    has_expected_token = token_ids == sample_rows(logits, batch)
    expected_logprobs = logits.log_softmax(-1).gather(1, token_ids[:, None]).squeeze(1)
    # A comparison with NaN is False, so a log-probability that is NaN is not accurate.
    is_accurate = (logprobs - expected_logprobs).abs() <= _MAX_LOGPROB_ERROR
    is_correct = has_expected_token & is_accurate & has_allowed
    return int((~is_correct).sum())
