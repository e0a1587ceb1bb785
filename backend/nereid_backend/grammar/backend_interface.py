# SPDX-License-Identifier: Apache-2.0
"""The interface through which Nereid uses the grammar libraries llguidance and xgrammar.

The classes LLGuidanceBackend and XGrammarBackend implement the interface `GrammarBackend`.
docs/history/sampling-and-constraints.md compares the two libraries.

A matcher does not handle stop tokens. TokenGuide decides when an answer may end.
"""

from collections.abc import Sequence
from typing import Protocol, Self

from nereid_backend.grammar.vocabulary import TokenMask, TokenMasks


class Matcher(Protocol):
    """Tracks how far one sequence has advanced in a grammar."""

    def accept(self, token_id: int) -> bool:
        """Advance by one token.

        Returns:
            Whether the grammar allows the token. If not, the matcher is unchanged.
        """

    def accept_bytes(self, data: bytes) -> bool:
        """Advance the matcher by `data`, which may begin or end in the middle of a token.

        Returns:
            Whether the grammar allows the bytes.
        """

    def fill(self, row: TokenMask) -> None:
        """Write the mask of the possible next tokens into `row`.

        The bits of these tokens are set, and all other bits are cleared.
        """

    @staticmethod
    def fill_all(
        matchers: "Sequence[Matcher]", rows: TokenMasks, row_indices: Sequence[int]
    ) -> None:
        """For each matcher, write the mask of the possible next tokens into a row of `rows`.

        One call for all matchers is faster than one call of `fill` for each matcher. After a
        forward pass, the processor's caches do not contain the code of the grammar library, so each
        switch between Python and the library takes long.

        Args:
            matchers: the matchers, all of this class.
            rows: the masks of the batch, [n, ceil(vocab_size / 32)] int32, one bit for each token.
            row_indices: for each matcher, the index of its row in `rows`.

        Mutates: rows.
        """

    def is_complete(self) -> bool:
        """Return whether the text so far matches the grammar completely."""

    def forced(self) -> bytes:
        """Return the bytes that must follow the text so far, according to the grammar.

        Return b"" if several continuations are possible, or if the answer may end here. Example:
        for the regular expression `ab(c|d)`, a matcher at the start returns b"ab".
        """

    def fork(self) -> Self:
        """Return an independent copy of this matcher, at the same position in the grammar."""


class Compiled(Protocol):
    """A compiled grammar. Any number of sequences can use it."""

    @property
    def num_bytes(self) -> int:
        """The approximate number of bytes of memory that the compiled grammar uses."""

    def matcher(self) -> Matcher:
        """Return a matcher that starts at the beginning of the grammar."""


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary with a grammar library. Thread-safe."""

    def compile(self, kind: str, source: str) -> Compiled:
        """Compile a grammar.

        Args:
            kind: one of core.grammar.KINDS.
            source: the text of the grammar.

        Raises:
            RequestError: if the grammar is not valid, is too large, or contains something that
                this library cannot enforce.
        """
