# SPDX-License-Identifier: Apache-2.0
"""What the guides need of a grammar library; two of them stand behind it (docs/constraints.md).

A matcher knows nothing of the end of an answer: which tokens stop it is the guide's business.
"""

from collections.abc import Sequence
from typing import Protocol, Self

from nereid_backend.grammar.vocabulary import Row, Rows


class Matcher(Protocol):
    """Where one sequence stands in a grammar."""

    def accept(self, token_id: int) -> bool:
        """Take in a token; false, and nothing changed, where the grammar does not allow it."""

    def accept_bytes(self, data: bytes) -> bool:
        """Take in text that is no whole token; false where the grammar does not allow it."""

    def fill(self, row: Row) -> None:
        """Set the bits of the tokens that may follow and clear all others. Mutates: row."""

    @staticmethod
    def fill_all(matchers: "Sequence[Matcher]", rows: Rows, places: Sequence[int]) -> None:
        """Fill the rows at some places, one for each of these matchers of this class.

        One after another with little between them: after the forward pass the processor's caches
        are cold, and going to and fro between Python and the library costs more than the masks do.
        Mutates: rows.
        """

    def is_complete(self) -> bool:
        """Whether the text so far is a whole sentence of the grammar."""

    def forced(self) -> bytes:
        """Bytes that must follow; b"" where there is a choice, or where the answer may end."""

    def fork(self) -> Self:
        """A matcher that starts where this one stands."""


class Compiled(Protocol):
    """A grammar, ready for any number of sequences."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""

    def matcher(self) -> Matcher:
        """A matcher at the grammar's start."""


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary. Called by several threads at once."""

    def compile(self, kind: str, source: str) -> Compiled:
        """Compile a grammar of one of core.guide.KINDS.

        Raises:
            RequestError: it is wrong, too big, or asks for what this backend does not enforce.
        """
