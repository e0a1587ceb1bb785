"""A guide for the sampler's tests, small enough to check by hand."""

import numpy as np
from nereid_backend.errors import EngineError


class ModularGuide:
    """Two tokens in a row must not add up to a multiple of three, and some runs are prescribed.

    After a multiple of seven (0 aside) come 8, 9 and 10, whatever they add up to. After a multiple
    of five nothing is limited. Otherwise at most half of the vocabulary is forbidden.

    Attributes:
        accepted: tokens so far.
    """

    PRESCRIBED = (8, 9, 10)

    def __init__(self, vocab_size: int, accepted: tuple[int, ...] = ()) -> None:
        self.vocab_size = vocab_size
        self.accepted: list[int] = []
        self._pending: list[int] = []
        self.accept(list(accepted))

    def allowed(self) -> list[int]:
        """What may come next, in order."""
        if self._pending:
            return [self._pending[0]]
        tokens = range(self.vocab_size)
        if not self.accepted or self.accepted[-1] % 5 == 0:
            return list(tokens)
        return [token for token in tokens if (token + self.accepted[-1]) % 3]

    def accept(self, token_ids: list[int]) -> None:
        """See Guide.accept."""
        for token_id in token_ids:
            if token_id not in self.allowed():
                raise EngineError(f"token {token_id} is not allowed after {self.accepted}")
            if self._pending:
                self._pending.pop(0)
            elif token_id and token_id % 7 == 0:
                self._pending = list(self.PRESCRIBED)
            self.accepted.append(token_id)

    def fork(self) -> "ModularGuide":
        """See Guide.fork."""
        other = ModularGuide(self.vocab_size)
        other.accepted, other._pending = list(self.accepted), list(self._pending)
        return other

    def fill(self, row: np.ndarray) -> bool:
        """See MaskingGuide.fill."""
        allowed = self.allowed()
        if len(allowed) == self.vocab_size:
            return False
        bits = np.zeros(len(row) * 32, np.uint8)
        bits[allowed] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)
        return True

    @classmethod
    def fill_all(
        cls, guides: list["ModularGuide"], rows: np.ndarray, row_indices: list[int]
    ) -> list[bool]:
        """See MaskingGuide.fill_all."""
        return [guide.fill(rows[index]) for guide, index in zip(guides, row_indices, strict=True)]

    def forced(self) -> list[int]:
        """See MaskingGuide.forced."""
        return list(self._pending)
