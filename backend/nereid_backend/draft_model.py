# SPDX-License-Identifier: Apache-2.0
"""Generates draft tokens with a small model, for speculative decoding.

Before each step of the large model, the draft model runs a few passes. Each pass generates one
draft token for each sequence. Example for one sequence (the draft model has already computed the
tokens a and b of this sequence):

    known tokens of the sequence         a b c d
    pass 1 of the draft model            computes c d, and samples x
    pass 2 of the draft model            computes x, and samples y
    the step of the large model          computes d x y, and samples x z
                                         (the draft token x is accepted, and y is rejected)
    pass 1 before the next step          computes z

The draft model uses the sampling parameters and the random numbers of the request. The draft model
therefore often selects the same token as the large model. The answer never depends on the draft
tokens, because the large model verifies each draft token (sampling/draft_verification.py).

An MTP layer of the large model can replace the draft model (mtp_path.py). The MTP layer computes
the known tokens from the second token on. It also computes accepted draft tokens again, because it
then gets the hidden states of the large model for these tokens.

The draft model has its own KV cache, with its own block tables and prefix cache. If this cache has
too few free blocks for a sequence, the sequence gets no draft tokens.
"""

import logging
import time
from collections import abc
from dataclasses import dataclass

import torch

from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.core.blocks.block_pool import BlockPool
from nereid_backend.core.blocks.block_tables import BlockTables
from nereid_backend.core.blocks.prefix_cache import PrefixCache
from nereid_backend.core.draft_tokens.draft_lengths import DraftLengths
from nereid_backend.core.request import Request
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.errors import ModelError
from nereid_backend.mtp_path import MtpPath
from nereid_backend.sampling.draft_verification import Position
from nereid_backend.sampling.sampler import NOT_FINITE, Sampler
from nereid_backend.sequence_draft import SequenceDraft
from nereid_backend.step_runner import ForwardPath

logger = logging.getLogger(__name__)

# The known tokens of a sequence are the prompt and the tokens generated so far. A sequence gets
# draft tokens only if the large model has at most _MAX_REMAINING known tokens left to compute.
# During a long prompt or after a preemption, more known tokens are left, and draft tokens would
# then cost more time than they save.
_MAX_REMAINING = 16
# The known tokens of a sequence are the tokens of the prompt and the answer. The time for the draft
# tokens is measured only if the draft model must still compute at most `_MAX_TIMED_TOKENS` known
# tokens of each sequence. Computing more known tokens would take most of the measured time.
_MAX_TIMED_TOKENS = 4


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """The size of the draft model's KV cache, and the limits of its forward passes.

    Attributes:
        num_blocks: the number of blocks of the KV cache.
        block_size: the number of tokens in one block.
        max_num_seqs: the largest number of sequences that run at the same time.
        max_model_len: the largest number of tokens in a sequence of the draft model.
        max_num_batched_tokens: the largest number of tokens in one pass.
        max_draft_tokens: the largest number of draft tokens for one sequence in one step.
        enable_prefix_caching: whether sequences with the same prefix share blocks.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    max_draft_tokens: int
    enable_prefix_caching: bool


class DraftModel:
    """Generates draft tokens with a small model; see the interface `Drafter`.

    Attributes:
        lengths: chooses the lengths of drafts, and measures the acceptance and the cost of drafts.
    """

    def __init__(
        self, path: ForwardPath | MtpPath, sizes: DraftSizes, hook: AttentionHook | None = None
    ) -> None:
        """Create a draft model without sequences.

        Args:
            path: the forward path of a small model, or of an MTP layer (a multi-token prediction
                layer of the large model).
            sizes: the sizes of the cache of `path`.
            hook: the attention function that transformers calls for the small model; None for an
                MTP layer, which uses the attention function of the large model.
        """
        self.lengths = DraftLengths(sizes.max_draft_tokens)
        self._path = path
        # The path of an MTP layer, which also needs the hidden states of the large model. None if
        # the draft model is a separate small model.
        self._mtp = path if isinstance(path, MtpPath) else None
        self._hook = hook
        self._sizes = sizes
        self._sampler = Sampler()
        pool = BlockPool(sizes.num_blocks)
        cache = PrefixCache(pool, sizes.block_size) if sizes.enable_prefix_caching else None
        self._tables = BlockTables(pool, sizes.block_size, cache)
        # The free rows of the draft model's batch. Each sequence with draft tokens uses one row.
        self._free_rows = list(range(sizes.max_num_seqs))
        # Maps sequences of the large model to their drafts. Each draft uses one row of the batch.
        self._drafts: dict[Sequence, SequenceDraft] = {}
        # The draft tokens of each sequence for the next forward pass of the large model.
        self._proposals: dict[Sequence, list[int]] = {}
        self._is_broken = False

    def prepare(self, sequences: abc.Sequence[Sequence]) -> None:
        """Generate draft tokens for the next forward pass of the large model; see `propose`.

        If a forward pass of the draft model fails, the draft model is never used again, and all
        requests continue without draft tokens.

        Some of the sequences of the next step may get no draft tokens.

        Mutates: the KV cache of the draft model, and the proposals that `propose` returns.
        """
        self._proposals = {}
        if self._is_broken:
            return
        self.lengths.begin_step(len(sequences))
        preempted = [sequence for sequence in self._drafts if sequence.row is None]
        for sequence in preempted:
            self._release(sequence)
        prepared = [self._prepare_draft(sequence) for sequence in sequences]
        drafts = [draft for draft in prepared if draft is not None]
        if not drafts:
            return
        try:
            self._proposals = self._generate(drafts, len(sequences))
        except Exception:
            logger.exception("The draft model failed. The engine continues without draft tokens.")
            self._disable()

    def _disable(self) -> None:
        """Never use the draft model again."""
        self._is_broken = True
        if self._mtp is not None:
            # Stop storing the large model's hidden states, which only the MTP layer needs.
            self._mtp.hidden.close()

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """Return the draft tokens of a sequence; see `Drafter.propose`."""
        return self._proposals.get(sequence, [])[: max(0, limit)]

    def forget(self, sequence: Sequence) -> None:
        """Release what an ended sequence uses: a row of the batch, and blocks of the KV cache."""
        self.lengths.forget(sequence)
        if self._mtp is not None:
            self._mtp.hidden.forget(sequence)
        if sequence in self._drafts:
            self._release(sequence)

    def close(self) -> None:
        """Remove the draft model's attention function from transformers."""
        if self._hook is not None:
            self._hook.remove()

    def _prepare_draft(self, target: Sequence) -> SequenceDraft | None:
        """Prepare a sequence for new draft tokens: update its draft, and allocate KV cache blocks.

        `target` is the sequence of the large model. The draft of `target` contains a sequence of
        the draft model with the same known tokens. Return None if `target` gets no draft tokens in
        this step: while its prompt is computed, if its prompt has images, if it is close to its
        length limit, or if too few blocks are free.
        """
        length = self._draft_length(target)
        if length == 0:
            return None
        draft = self._drafts.get(target) or self._start_draft(target)
        if draft is None:
            return None
        # This call replaces the draft tokens of the previous step by the tokens that the large
        # model has chosen. An MTP layer must compute accepted draft tokens again, because the large
        # model's hidden states of these tokens exist only after the verification.
        draft.update(recomputes_accepted=self._mtp is not None)
        # The sequence of the draft model now contains only known tokens, so it may enter the prefix
        # cache. Draft tokens must not enter the prefix cache, because the large model may reject
        # them.
        if self._tables.cache is not None:
            self._tables.cache.add(draft.sequence)
        draft.length = length
        # The sequence keeps the blocks of rejected draft tokens.
        has_blocks = self._tables.try_extend(draft.sequence, draft.num_known + length)
        if not has_blocks:
            self._release(target)
            return None
        return draft

    def _draft_length(self, target: Sequence) -> int:
        """Return how many draft tokens a sequence may get now.

        A sequence gets draft tokens only after its first output token, and only if it has no
        images.
        """
        num_known = len(target.token_ids)  # the tokens of the prompt and of the answer so far
        has_output = target.num_output_tokens > 0
        # After a preemption, many known tokens must be computed again. Draft tokens would then cost
        # more time than they save.
        is_decoding = num_known - target.num_computed_tokens <= _MAX_REMAINING
        is_text_only = target.images is None  # The draft model gets only token ids.
        if not (has_output and is_decoding and is_text_only):
            return 0
        profitable_length = self.lengths.take_length(target)
        # The large model itself adds one token after the accepted draft tokens.
        fits_in_answer = target.max_total_tokens - num_known - 1
        fits_in_draft_model = self._sizes.max_model_len - num_known
        return max(0, min(profitable_length, fits_in_answer, fits_in_draft_model))

    def _start_draft(self, target: Sequence) -> SequenceDraft | None:
        """Add a sequence of the large model to the draft model, and return its `SequenceDraft`.

        The `SequenceDraft` is the state of the sequence in the draft model. If there are not enough
        free blocks, change nothing and return None.
        """
        # An MTP layer combines each token with the hidden state of the previous token. The first
        # token of the sequence is therefore left out.
        num_skipped = 0 if self._mtp is None else 1
        copy = self._admit_copy(target, num_skipped)
        if copy is None:
            return None
        if self._mtp is not None:
            # Let the MTP layer use the hidden states of `target`.
            self._mtp.follow(copy, target)
        draft = SequenceDraft(target, copy, num_skipped, len(copy.token_ids))
        self._drafts[target] = draft
        return draft

    def _admit_copy(self, target: Sequence, num_skipped: int) -> Sequence | None:
        """Return a copy of a sequence, with blocks and a batch row in the draft model.

        The copy lacks the first `num_skipped` tokens. If there are not enough free blocks, change
        nothing and return None.
        """
        copy = Sequence(
            target.request_id,
            target.token_ids[num_skipped:],
            target.params,
            max_total_tokens=target.max_total_tokens,
        )
        if not self._tables.try_admit(copy, Request([copy])):
            return None
        # A row is free, because there are `max_num_seqs` rows, and `copy` is the copy of one of at
        # most `max_num_seqs` running sequences. Each running sequence needs at most one row.
        copy.row = self._free_rows.pop()
        return copy

    def _release(self, target: Sequence) -> None:
        """Release the batch row and the KV cache blocks of a sequence in the draft model."""
        draft_sequence = self._drafts.pop(target).sequence
        assert draft_sequence.row is not None
        if self._mtp is not None:
            self._mtp.release(draft_sequence)
        self._free_rows.append(draft_sequence.row)
        self._tables.release(draft_sequence)

    @torch.inference_mode()
    def _generate(
        self, drafts: list[SequenceDraft], num_sequences: int
    ) -> dict[Sequence, list[int]]:
        """Generate the draft tokens of all sequences.

        The keys of the result are the sequences of the target model.

        Each forward pass of the draft model adds one token to each draft, until all drafts are
        complete. The time of the passes is measured, because later steps choose the number of draft
        tokens by their cost.

        Args:
            drafts: the drafts of the sequences. They contain no draft tokens yet.
            num_sequences: the number of sequences in the step.
        """
        start = time.perf_counter()
        # Do not use the measured time if the draft model must first compute a long prompt, because
        # the time would not show the cost of a draft token.
        is_timed = all(draft.num_missing <= _MAX_TIMED_TOKENS for draft in drafts)
        incomplete = drafts
        while incomplete:
            incomplete = self._run_pass(incomplete)
        proposals = {draft.target: draft.draft_tokens for draft in drafts}
        num_tokens = sum(len(tokens) for tokens in proposals.values())
        if is_timed and num_tokens:
            seconds = time.perf_counter() - start
            self.lengths.costs.add_drafting(num_sequences, num_tokens, seconds)
        return proposals

    def _run_pass(self, drafts: list[SequenceDraft]) -> list[SequenceDraft]:
        """Run one forward pass of the draft model, and sample a draft token for each sequence.

        If the uncomputed tokens of the drafts exceed the token budget of a pass, some drafts are
        computed only partly or not at all. Such a draft gets no further token before the next step
        of the large model. It is continued before the step after that.

        Args:
            drafts: the states of the sequences in the draft model. Mutated.

        Returns:
            The drafts that got a token and need more tokens, and therefore another pass.
        """
        planned = self._plan_pass(drafts)
        chunks = [chunk for _, chunk in planned]
        plan = StepPlan(chunks, sum(chunk.num_tokens for chunk in chunks))
        logits = self._path.forward(plan)
        for draft, chunk in planned:
            draft.is_new = False  # The next chunk is not the first chunk of this sequence.
            draft.sequence.num_computed_tokens += chunk.num_tokens
        sampling = [draft for draft, chunk in planned if chunk.samples]
        if not sampling:
            return []
        return self._append_sampled_tokens(logits, sampling)

    def _plan_pass(self, drafts: list[SequenceDraft]) -> list[tuple[SequenceDraft, Chunk]]:
        """Choose the tokens that the next forward pass of the draft model computes for each draft.

        A pass computes at most `max_num_batched_tokens` tokens. Drafts with few uncomputed tokens
        come first, so that many drafts get their next token.

        Returns:
            The drafts that the pass computes, each with its chunk: the tokens to compute.
        """
        budget = self._sizes.max_num_batched_tokens
        planned: list[tuple[SequenceDraft, Chunk]] = []
        for draft in sorted(drafts, key=lambda draft: draft.num_missing):
            if budget == 0:
                break
            chunk = _next_chunk(draft, budget)
            budget -= chunk.num_tokens
            planned.append((draft, chunk))
        # The attention code requires sequences with one new token to come before sequences with
        # several new tokens. The token budget may have shortened the last chunk (the new tokens of
        # a sequence) to one token. Therefore, the chunks are sorted again.
        planned.sort(key=lambda pair: pair[1].num_tokens)
        return planned

    def _append_sampled_tokens(
        self, logits: torch.Tensor, drafts: list[SequenceDraft]
    ) -> list[SequenceDraft]:
        """Append a sampled token to each draft. Return the drafts that need more tokens.

        A draft needs no more tokens if it ends with a stop token or has its planned length. If the
        sampler reports an error for a draft, the draft gets no token and is not returned.

        Args:
            logits: [num_drafts, vocab_size].
            drafts: the drafts, in the order of the logits. Mutated.

        Raises:
            ModelError: if the logits contain NaN or infinity.
        """
        positions = [Position(draft.target, draft.draft_tokens) for draft in drafts]
        sampled = self._sampler.sample(logits, positions)
        has_invalid_logits = NOT_FINITE in sampled.errors.values()
        if has_invalid_logits:
            raise ModelError(NOT_FINITE)
        incomplete = []
        for index, draft in enumerate(drafts):
            if index in sampled.errors:
                continue
            token_id = sampled.token_ids[index]
            draft.sequence.token_ids.append(token_id)
            ends_answer = token_id in draft.target.stop_token_ids
            has_planned_length = draft.is_full  # `is_full` counts the token that was appended.
            if not ends_answer and not has_planned_length:
                incomplete.append(draft)
        return incomplete


def _next_chunk(draft: SequenceDraft, budget: int) -> Chunk:
    """Return a chunk with the next tokens of a draft, at most `budget` tokens."""
    num_missing = draft.num_missing  # at least 1, because the last token is not computed
    num_tokens = min(num_missing, budget)
    has_last_token = num_tokens == num_missing
    return Chunk(
        sequence=draft.sequence,
        start=draft.sequence.num_computed_tokens,
        num_tokens=num_tokens,
        samples=has_last_token,
        is_first=draft.is_new,
        num_logits=int(has_last_token),
    )
