# SPDX-License-Identifier: Apache-2.0
"""Calls compiled CPU kernels (cpu_logits.cpp) that process rows of logits.

The kernels are available if a C++ compiler is installed. The kernels read every logit only once, in
the model's dtype. Torch would read all logits several times and write intermediate results of the
same size. The result of a row does not depend on other rows.

`argmax_logsumexp` and `argmax` work without the kernels, too. The other functions may be called
only if `has_kernels_for` returns True.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereid_backend.attention.cpu.cpu_library import has_kernels, kernels


class ArgmaxLogsumexp(NamedTuple):
    """The likeliest token and the logsumexp of each row of logits.

    The logsumexp is the logarithm of the sum of the exponentials of a row. A log-probability is a
    logit minus the logsumexp of its row.

    Attributes:
        likeliest: [n] int64, the first token with the largest logit.
        logsumexp: [n] float32. The value is not finite if the row contains NaN or +inf, or if all
            its logits are -inf.
    """

    likeliest: Tensor
    logsumexp: Tensor


def has_kernels_for(logits: Tensor) -> bool:
    """Return whether compiled CPU kernels are available and support the tensor `logits`."""
    has_supported_dtype = logits.dtype in (torch.float32, torch.bfloat16)
    is_on_cpu = logits.device.type == "cpu"
    return is_on_cpu and has_supported_dtype and logits.shape[1] > 0 and has_kernels()


def argmax_logsumexp(logits: Tensor) -> ArgmaxLogsumexp:
    """Return the likeliest token and the logsumexp of each row of logits.

    If the kernels cannot be used, torch computes the result.

    Args:
        logits: [n, vocab_size], any float dtype.
    """
    if has_kernels_for(logits):
        return _argmax_logsumexp_with_kernel(logits)
    logits = logits.float()
    return ArgmaxLogsumexp(argmax(logits), logits.logsumexp(-1))


def _argmax_logsumexp_with_kernel(logits: Tensor) -> ArgmaxLogsumexp:
    """Compute the likeliest token and the logsumexp of each row with a CPU kernel.

    The kernel reads each logit once. `logits` is [n, vocab_size].
    """
    likeliest_ids = torch.empty(len(logits), dtype=torch.int64)
    logsumexp = torch.empty(len(logits))
    logits = _with_contiguous_rows(logits)
    # The kernel writes the results into the memory of the two tensors.
    kernels().nereid_read_logits(
        *_logits_arguments(logits),
        likeliest_ids.data_ptr(),
        logsumexp.data_ptr(),
        torch.get_num_threads(),
    )
    return ArgmaxLogsumexp(likeliest_ids, logsumexp)


def argmax(logits: Tensor) -> Tensor:
    """Return the first token with the largest logit in each row, [n] int64.

    Args:
        logits: [n, vocab_size] float32.
    """
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    # On a CPU, numpy needs only a quarter of torch's time, because numpy uses vector instructions.
    return torch.from_numpy(logits.numpy().argmax(-1))


def sample(
    logits: Tensor, temperature: NDArray[np.float32], uniform: NDArray[np.float64]
) -> Tensor:
    """Sample one token for each row from the whole vocabulary, without filters.

    The random number of a row selects the token: the first token at which the cumulative
    probabilities exceed the random number.

    Args:
        logits: [n, vocab_size].
        temperature: [n], greater than 0.
        uniform: [n], random numbers in [0, 1).

    Returns:
        Token ids [n] int64.
    """
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    logits = _with_contiguous_rows(logits)
    scales = 1 / temperature  # The kernel multiplies the logits by these numbers.
    uniform = np.ascontiguousarray(uniform)
    # The kernel writes the result into the memory of `token_ids`.
    kernels().nereid_sample(
        *_logits_arguments(logits),
        scales.ctypes.data,
        uniform.ctypes.data,
        token_ids.data_ptr(),
        torch.get_num_threads(),
    )
    return token_ids


def likeliest(
    logits: Tensor, temperature: NDArray[np.float32], width: int
) -> tuple[Tensor, Tensor]:
    """Return the `width` likeliest tokens of each row and their probabilities.

    Args:
        logits: [n, vocab_size].
        temperature: [n], greater than 0.
        width: the number of tokens to find.

    Returns:
        Probabilities [n, width] float32 in descending order, and token ids [n, width] int64. If a
        row has fewer than `width` tokens, the remaining elements have the probability 0 and the id
        -1.
    """
    probs = torch.empty(len(logits), width)
    token_ids = torch.empty(len(logits), width, dtype=torch.int64)
    logits = _with_contiguous_rows(logits)
    scales = 1 / temperature  # The kernel multiplies the logits by these numbers.
    # The kernel writes the results into the memory of the two tensors.
    kernels().nereid_likeliest(
        *_logits_arguments(logits),
        scales.ctypes.data,
        width,
        token_ids.data_ptr(),
        probs.data_ptr(),
        torch.get_num_threads(),
    )
    return probs, token_ids


def _with_contiguous_rows(logits: Tensor) -> Tensor:
    """Return the logits with a contiguous last dimension, which the kernels require."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _logits_arguments(logits: Tensor) -> tuple[bool, int, int, int, int]:
    """Return those arguments of a kernel call that describe the logits.

    There are five arguments: a bool that is True for bfloat16, the address, the number of rows, the
    distance between two rows (in elements), and the size of the vocabulary. The rows must be
    contiguous, and the caller must keep `logits` alive during the call.
    """
    is_bfloat16 = logits.dtype == torch.bfloat16
    return is_bfloat16, logits.data_ptr(), len(logits), logits.stride(0), logits.shape[1]
