# SPDX-License-Identifier: Apache-2.0
"""Sampling in one kernel launch on a GPU. The kernel is in `triton_sampling.py`.

The reference implementation is `random_sampling.draw`. The kernel computes weights with the GPU's
fast exponential function and adds the weights exactly. Its result therefore differs from the
reference only where rounding decides which token is sampled.
"""

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereid_backend.device_transfer import upload
from nereid_backend.sampling.random_sampling import SamplingBatch, draw

# Tokens in one tile, and warps in one program. With these numbers, the kernel keeps all its values
# in registers (loadtest/gpu/compile_kernels.py prints the number of spilled registers).
_TILE, _NUM_WARPS = 4096, 16
# The comparison of the kernel with the reference when the model is loaded: the number of rows, the
# size of the vocabulary, and the number of tokens that may differ because of rounding.
_ROWS, _VOCAB_SIZE, _DIFFERING = 16, 9000, 1

Settings = NDArray[np.float64]


def sample(logits: Tensor, raw: Tensor, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token for each row, without waiting for the device.

    Args:
        logits: [n, vocab_size], float32, bfloat16 or float16, after masks, biases and penalties.
        raw: [n, vocab_size], the model's own logits. If `raw` is the same tensor as `logits`, the
            kernel reads the tensor only once.
        settings: [5, n] on the host. The five rows contain the temperature (0 selects the first of
            the likeliest tokens), top_p, top_k (0 turns the filter off), min_p, and a random number
            in [0, 1).

    Returns:
        Three tensors on the device: token ids [n] int64, which are always less than vocab_size;
        the log-probabilities of these tokens under `raw` [n] float32, which are NaN if the row of
        `raw` contains NaN or infinity; and whether any token was allowed [n] bool.
    """
    from nereid_backend.sampling.triton_sampling import sample_kernel

    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1 or raw.stride(1) != 1:
        logits, raw = logits.contiguous(), raw.contiguous()
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    is_left = torch.empty(num_rows, dtype=torch.uint8, device=logits.device)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        sample_kernel[(num_rows,)](
            *(logits, raw, upload(settings, logits.device), token_ids, logprobs, is_left),
            *(logits.stride(0), raw.stride(0), vocab_size, num_rows),
            IS_RAW=logits is raw,
            TILE=_TILE,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=True,
        )
    return token_ids, logprobs, is_left.view(torch.bool)


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Return the reason why a device cannot use the kernel; None if the device can use the kernel.

    The kernel is tried once for each device in each process.
    """
    try:
        differing = num_differing(device)
    except Exception as error:  # noqa: BLE001 - compilers and drivers fail in any way
        return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"
    if differing > _DIFFERING:
        return f"{differing} of {_ROWS} tokens differ from the reference implementation's tokens"
    return None


@torch.inference_mode()
def num_differing(device: torch.device) -> int:
    """Return how many tokens of a test batch differ from the reference implementation's tokens."""
    random = np.random.default_rng(0)
    logits = torch.from_numpy(random.normal(size=(_ROWS, _VOCAB_SIZE)).astype(np.float32) * 3)
    logits[1::4] = (logits[1::4] * 2).round()  # many equal logits
    logits[2::4, 1000:] = float("-inf")
    logits[3::4] /= 10  # nearly flat
    quarters = np.arange(_ROWS) // 4
    batch = SamplingBatch(
        temperature=np.where(quarters % 2, 1.0, 0.7).astype(np.float32),
        top_p=np.array([1.0, 0.9, 1.0, 0.6], dtype=np.float32)[quarters % 4],
        top_k=np.array([0, 0, 50, 400])[quarters % 4],
        min_p=np.where(quarters == 0, 0.01, 0.0).astype(np.float32),
        uniform=random.random(_ROWS),
    )
    settings = np.stack([batch.temperature, batch.top_p, batch.top_k, batch.min_p, batch.uniform])
    given = logits.to(device)
    token_ids, logprobs, is_left = sample(given, given, settings)
    expected = logits.log_softmax(-1).gather(1, token_ids.cpu()[:, None]).squeeze(1)
    is_off = (token_ids.cpu() != draw(logits, batch)) | ~is_left.cpu()
    # A comparison with NaN is False, so `~(... <= ...)` also counts log-probabilities that are NaN.
    is_off |= ~((logprobs.cpu() - expected).abs() <= 1e-4)
    return int(is_off.sum())
