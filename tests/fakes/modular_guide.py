"""A simple guide for the sampler's tests. A guide decides which tokens may follow."""

import numpy as np
from nereid_backend.errors import EngineError


class ModularGuide:
    """A guide that forbids a token if its sum with the previous token is a multiple of three.

    Two exceptions: after a multiple of seven (except 0), the tokens 8, 9 and 10 must follow in this
    order. After a multiple of five, all tokens are allowed.

    Attributes:
        accepted: the tokens that were accepted so far.
    """

    PRESCRIBED = (8, 9, 10)

    def __init__(self, vocab_size: int, accepted: tuple[int, ...] = ()) -> None:
        self.vocab_size = vocab_size
        self.accepted: list[int] = []
        self._pending: list[int] = []
        self.accept(list(accepted))

    def allowed(self) -> list[int]:
        """Return the tokens that are allowed as the next token, in ascending order."""
        if self._pending:
            return [self._pending[0]]
        tokens = range(self.vocab_size)
        if not self.accepted or self.accepted[-1] % 5 == 0:
            return list(tokens)
        return [token for token in tokens if (token + self.accepted[-1]) % 3]

    def accept(self, token_ids: list[int]) -> None:
        """Implement `Guide.accept`: append the tokens, or raise an error at a forbidden token."""
        for token_id in token_ids:
            if token_id not in self.allowed():
                raise EngineError(f"token {token_id} is not allowed after {self.accepted}")
            if self._pending:
                self._pending.pop(0)
            elif token_id and token_id % 7 == 0:
                self._pending = list(self.PRESCRIBED)
            self.accepted.append(token_id)

    def fork(self) -> "ModularGuide":
        """Implement `Guide.fork`: return an independent copy of the guide."""
        other = ModularGuide(self.vocab_size)
        other.accepted, other._pending = list(self.accepted), list(self._pending)
        return other

    def fill(self, row: np.ndarray) -> bool:
        """Implement `MaskingGuide.fill`: write the bit mask of the allowed tokens into `row`.

        Return False and leave `row` unchanged if all tokens are allowed. One element has 32 bits.
        """
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
        """Implement `MaskingGuide.fill_all`: call `fill` for each guide."""
        return [guide.fill(rows[index]) for guide, index in zip(guides, row_indices, strict=True)]

    def forced(self) -> list[int]:
        """Implement `MaskingGuide.forced`: return the tokens that must follow next."""
        return list(self._pending)
