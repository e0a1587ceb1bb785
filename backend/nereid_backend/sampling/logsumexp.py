# SPDX-License-Identifier: Apache-2.0
"""Of each row of logits: the likeliest token, and what makes its logits log-probabilities.

A log-probability is the logit less the logarithm of the sum of the row's exponentials. That number
and the likeliest token are all that most steps need of the model's own distribution.
"""

import torch
from torch import Tensor

from nereid_backend.sampling import native_logits
from nereid_backend.sampling.native_logits import RowFacts


def row_facts(logits: Tensor) -> RowFacts:
    """Read rows of logits, [n, vocab_size] of any float dtype."""
    if native_logits.can_read(logits):
        return native_logits.read(logits)
    logits = logits.float()
    return RowFacts(argmax(logits), logits.logsumexp(-1))


def argmax(logits: Tensor) -> Tensor:
    """The first token with the largest logit in each row, [n, vocab_size] float32 to [n] int64."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    # numpy looks for it with vector instructions: a quarter of torch's time.
    return torch.from_numpy(logits.numpy().argmax(-1))
