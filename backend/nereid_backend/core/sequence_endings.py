# SPDX-License-Identifier: Apache-2.0
"""Removes ended sequences from the scheduler, and creates their last updates."""

from nereid_backend.core.active_requests import ActiveRequests
from nereid_backend.core.async_plans import PendingPlans
from nereid_backend.core.draft_tokens.drafter import Drafter
from nereid_backend.core.outputs import FinishReason, RequestUpdate
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step_planner import StepPlanner
from nereid_backend.core.updates import report_tokens


class SequenceEndings:
    """Ends sequences, and releases their rows and blocks as soon as no running step uses them."""

    def __init__(
        self,
        requests: ActiveRequests,
        pending_plans: PendingPlans,
        planner: StepPlanner,
        drafter: Drafter | None,
    ) -> None:
        """Store the objects from which an ended sequence must be removed.

        Args:
            requests: the requests that have not ended.
            pending_plans: the plans whose steps are not committed.
            planner: releases the row and the blocks of a sequence.
            drafter: proposes draft tokens; None if speculative decoding is off.
        """
        self._requests = requests
        self._pending_plans = pending_plans
        self._planner = planner
        self._drafter = drafter

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        update: RequestUpdate | None = None,
        stop_reason: int | None = None,
        error: str | None = None,
        is_refused: bool = False,
    ) -> RequestUpdate:
        """End a sequence, and return the update that reports the end to the client.

        The sequence is removed from its request and from the waiting queue. Its row and its blocks
        are released as soon as no running step uses them.

        Args:
            sequence: the sequence.
            reason: the reason why the sequence has ended.
            update: the update with the last tokens of the sequence; None if the sequence has no new
                tokens. Mutated: the reason and the error are added.
            stop_reason: the stop token that ended the sequence, if there is one.
            error: a sentence that describes the error, if there was one.
            is_refused: whether the request is invalid, so that the client caused the error.
        """
        self._remove(sequence)
        if update is None:
            update = report_tokens(sequence, new_token_ids=[], top=None)
        update.finish_reason = reason
        update.stop_reason = stop_reason
        update.error = error
        update.is_refused = is_refused
        return update

    def _remove(self, sequence: Sequence) -> None:
        """Remove an ended sequence, and release its row and its blocks.

        If an uncommitted plan contains the sequence, the sequence keeps its row and its blocks
        until the plan is committed.
        """
        if self._drafter is not None:
            self._drafter.forget(sequence)
        self._requests.remove(sequence)
        if sequence.row is None:
            return  # A waiting sequence has no row and no blocks.
        if sequence in self._pending_plans:
            # A running step may still write to the row and the blocks of this sequence.
            self._pending_plans.keep_until_commit(sequence)
        else:
            self._planner.release(sequence)

    def release_unused(self) -> None:
        """Release the row and the blocks of each ended sequence that no unfinished step uses.

        The other ended sequences keep their rows and blocks, because a running step still uses
        them.
        """
        if self._pending_plans.ended_sequences:
            for sequence in self._pending_plans.take_releasable():
                self._planner.release(sequence)
