"""A model for the runner's tests whose logits depend only on the last three tokens."""

import numpy as np
import torch
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import StepPlan
from torch import Tensor


class HashedPath:
    """A model with random logits. Sequences with the same last three tokens have the same logits.

    Attributes:
        cleared: the sequences for which `clear` was called, in order.
        broken_after: if the last token of a sequence is this token, all logits are NaN.
    """

    def __init__(
        self, vocab_size: int, *, spread: float = 1.5, broken_after: int | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.broken_after = broken_after
        self.cleared: list[Sequence] = []
        self._spread = spread

    def logits_after(self, token_ids: list[int]) -> Tensor:
        """Return the logits that follow a sequence: a float32 tensor of the shape [vocab_size]."""
        rng = np.random.default_rng(token_ids[-3:])
        logits = rng.standard_normal(self.vocab_size, dtype=np.float32) * self._spread
        if token_ids[-1] == self.broken_after:
            logits[:] = np.nan
        return torch.from_numpy(logits)

    def forward(self, plan: StepPlan, sampled: Tensor | None = None) -> Tensor:
        """Implement `forward`: return the logits of each chunk's last `num_logits` tokens."""
        assert sampled is None
        rows = []
        for sequence, start, num_tokens, _, _, num_logits in plan.chunks:
            token_ids = sequence.token_ids + list(getattr(sequence, "draft_token_ids", ()))
            end = start + num_tokens
            assert end <= len(token_ids), "more tokens than there are"
            rows += [self.logits_after(token_ids[:i]) for i in range(end - num_logits + 1, end + 1)]
        return torch.stack(rows) if rows else torch.zeros(0, self.vocab_size)

    def clear(self, sequence: Sequence) -> None:
        """Implement `ForwardPath.clear`: record the sequence."""
        self.cleared.append(sequence)
