# SPDX-License-Identifier: Apache-2.0
"""Applies token masks to logits; see token_masks.py."""

from collections import abc

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereid_backend.device_transfer import upload
from nereid_backend.grammar.vocabulary import TokenMask, TokenMasks

# In a token mask, each byte describes 8 tokens, with one bit for each token. Row i of this table
# [256, 8] float32 contains the biases of the 8 tokens that a byte with the value i describes. A
# bias is 0 for an allowed token, and -inf for a forbidden token.
_BIASES_OF_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0),
    np.float32(-np.inf),
)


def with_masks(logits: Tensor, masks: abc.Mapping[int, TokenMask]) -> Tensor:
    """Return the logits. The logit of every token that is not allowed is replaced by -inf.

    A mask contains one bit for each token, and the bit 1 allows the token.

    Example: the logits are [[1.5, 0.2, 3.0]], and the mask of the row allows the tokens 0 and 2.
    The result is [[1.5, -inf, 3.0]].

    Args:
        logits: [n, vocab_size] float32, finite or -inf. Not changed.
        masks: maps the index of a row to the mask of the row, [ceil(vocab_size / 32)] int32. Every
            token is allowed in rows without an entry.

    Returns:
        A new tensor, even if every token is allowed.
    """
    if not masks:
        return logits.clone()
    rows = sorted(masks)
    packed = np.stack([masks[row] for row in rows])
    if logits.device.type == "cpu":
        return _with_masks_on_cpu(logits, rows, packed)
    return _with_masks_on_gpu(logits, rows, packed)


def _with_masks_on_cpu(logits: Tensor, rows: list[int], packed: TokenMasks) -> Tensor:
    """Compute the result of `with_masks` for logits on a CPU.

    A bias of 0 or -inf is added to each logit. The addition takes the same time for any mask,
    because it has no branches. It is several times as fast as `masked_fill_`.

    Args:
        logits: [n, vocab_size] float32. Not changed.
        rows: the rows with a mask.
        packed: [len(rows), ceil(vocab_size / 32)] int32, the masks of `rows`.
    """
    biases = torch.from_numpy(_biases(packed, logits.shape[1]))
    if len(rows) == len(logits):  # Every row has a mask, so the logits need not be copied.
        return biases.add_(logits)
    masked = logits.clone()
    for row, biases_of_row in zip(rows, biases, strict=True):
        masked[row] += biases_of_row
    return masked


def _biases(packed: TokenMasks, vocab_size: int) -> NDArray[np.float32]:
    """Convert each token mask to biases: 0 for an allowed token, and -inf for a forbidden token.

    Example: a mask with the bits 1, 0 and 1 for the three tokens of a vocabulary gives
    [0, -inf, 0].

    Args:
        packed: [n, ceil(vocab_size / 32)] int32, the masks.
        vocab_size: the number of tokens. The last word of a mask can have bits for further tokens.

    Returns:
        [n, vocab_size] float32.
    """
    mask_bytes = packed.view(np.uint8)  # [n, 4 * ceil(vocab_size / 32)]
    # Every byte is a valid row of the table. With mode="clip", numpy does not check the indices,
    # which saves time.
    biases: NDArray[np.float32] = np.take(_BIASES_OF_BYTE, mask_bytes, axis=0, mode="clip")
    return biases.reshape(len(packed), -1)[:, :vocab_size]


def _with_masks_on_gpu(logits: Tensor, rows: list[int], packed: TokenMasks) -> Tensor:
    """Compute the result of `with_masks` for logits on a GPU.

    Args:
        logits: [n, vocab_size] float32. Not changed.
        rows: the rows with a mask.
        packed: [len(rows), ceil(vocab_size / 32)] int32, the masks of `rows`.
    """
    device = logits.device
    vocab_size = logits.shape[1]
    # Each word of a mask contains the bits of 32 tokens. A bit of 1 allows the token.
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    bits = (upload(packed, device)[:, :, None] >> shifts) & 1
    # The last word of a mask also has bits for tokens after the end of the vocabulary, so the
    # surplus columns are cut off.
    is_forbidden = bits.view(len(rows), -1)[:, :vocab_size] == 0
    device_rows = upload(np.array(rows), device)
    masked_rows = logits[device_rows].masked_fill_(is_forbidden, float("-inf"))
    return logits.index_copy(0, device_rows, masked_rows)
