# SPDX-License-Identifier: Apache-2.0
"""The interface of classes that propose draft tokens for speculative decoding."""

from collections import abc
from typing import Protocol

from nereid_backend.core.draft_tokens.draft_lengths import DraftLengths
from nereid_backend.core.sequence import Sequence


class Drafter(Protocol):
    """The interface of a class that proposes draft tokens for running sequences.

    Attributes:
        lengths: chooses the lengths of drafts, and measures acceptance rates and costs.
    """

    lengths: DraftLengths

    def prepare(self, sequences: abc.Sequence[Sequence]) -> None:
        """Prepare the drafts of the next step. `sequences` contains all running sequences."""

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """Predict the next tokens of a sequence. Return at most `limit` draft tokens.

        The method is called at most once for each sequence and step, after `prepare`.
        """

    def forget(self, sequence: Sequence) -> None:
        """Delete the data that is stored for an ended sequence."""
