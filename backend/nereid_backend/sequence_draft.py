# SPDX-License-Identifier: Apache-2.0
"""Data about one sequence for which the draft model generates tokens."""

from dataclasses import dataclass

from nereid_backend.core.sequence import Sequence
from nereid_backend.core.updates import common_prefix_len


@dataclass(slots=True)
class SequenceDraft:
    """Data about one sequence for which the draft model generates tokens.

    Attributes:
        target: the sequence in the large model.
        sequence: the sequence in the draft model, with its own row and blocks. Its tokens are the
            known tokens of `target`, followed by the draft tokens.
        num_skipped: the number of tokens at the start of `target` that `sequence` leaves out: 0, or
            1 if the draft model is an MTP layer.
        num_known: the number of known tokens in `sequence`.
        length: the number of draft tokens that are generated for the next step.
        is_new: whether the draft model has not computed any token of `sequence` yet.
    """

    target: Sequence
    sequence: Sequence
    num_skipped: int
    num_known: int
    length: int = 0
    is_new: bool = True

    @property
    def draft_tokens(self) -> list[int]:
        """The draft tokens for the next forward pass of the large model."""
        return self.sequence.token_ids[self.num_known :]

    @property
    def is_full(self) -> bool:
        """Whether the draft model has generated `length` draft tokens."""
        return len(self.sequence.token_ids) >= self.num_known + self.length

    @property
    def num_missing(self) -> int:
        """The number of tokens in `sequence` that the draft model must still process."""
        return len(self.sequence.token_ids) - self.sequence.num_computed_tokens

    def update(self, *, recomputes_accepted: bool) -> None:
        """Replace the draft tokens with the tokens that the large model has chosen.

        Example: the sequence has the known tokens [5, 6] and the draft tokens [7, 8], and the large
        model has chosen 7 and 9. The known tokens become [5, 6, 7, 9]. The draft model has already
        computed 5, 6 and the accepted draft token 7, so the next pass computes only 9.

        Args:
            recomputes_accepted: whether the next pass computes accepted draft tokens again.

        Mutates: `num_known`, and the tokens and `num_computed_tokens` of `sequence`.
        """
        chosen_tokens = self._chosen_tokens()
        # The number of tokens at the beginning of the sequence for which the draft model's KV cache
        # stays valid.
        num_reusable = self.num_known
        if not recomputes_accepted:
            num_reusable += common_prefix_len(self.draft_tokens, chosen_tokens)
        sequence = self.sequence
        sequence.token_ids[self.num_known :] = chosen_tokens
        self.num_known = len(sequence.token_ids)
        # The last token is always computed again, because sampling needs its logits.
        num_reusable = min(num_reusable, self.num_known - 1)
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, num_reusable)

    def _chosen_tokens(self) -> list[int]:
        """Return the tokens that the large model has chosen since the last call of `update`.

        Example: the tokens of `target` are [4, 5, 6, 7, 9]. `num_skipped` is 1, because an MTP
        layer leaves out the first token. The first two tokens after it are known. The result is
        [7, 9].
        """
        return self.target.token_ids[self.num_skipped + self.num_known :]
