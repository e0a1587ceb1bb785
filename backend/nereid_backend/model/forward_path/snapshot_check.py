# SPDX-License-Identifier: Apache-2.0
"""Checks whether a sequence gets the same logits if it continues from a copy of its state."""

import logging
import math

import torch
from torch import Tensor

from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, SnapshotPlan, StepPlan
from nereid_backend.errors import first_line
from nereid_backend.model.forward_path.reference_logits import ReferenceLogits
from nereid_backend.paths.recurrent import RowsPath

log = logging.getLogger(__name__)

# The engine logs this text if the logits change when a sequence continues from a copy of its
# recurrent state.
NO_SNAPSHOTS = "no prefix cache, because a copy of its recurrent state gives other logits"
# The smallest number of tokens in one half of a test sequence. Shorter halves cannot be checked.
_MIN_HALF_LEN = 2
# The largest accepted difference of the logits in float32. In the tests, rounding caused
# differences of at most 8e-6. In some models, one pass over several tokens computes a different
# recurrent state than one pass for each token. The logits then differ by 1e-3, so copies of the
# state cannot be used.
_ROUNDING = 1e-4


@torch.inference_mode()
def has_exact_snapshots(
    path: RowsPath, reference: ReferenceLogits, difference: float, dtype: torch.dtype
) -> bool:
    """Return whether a sequence gets the same logits if it continues from a snapshot of its state.

    A snapshot is a copy of the recurrent state. Two conditions must be met:

    1. Token-by-token generation and one pass over a sequence give equal logits. Otherwise, a
       snapshot after an answer would differ from the state that the next turn of the chat computes
       from the same tokens. Only float32 is checked: in other data types, rounding alone causes
       such differences.
    2. A test sequence that continues from a snapshot has unchanged logits; see
       `_continues_exactly`. If the model's code fails, the reason is logged, and the result is
       False.

    Args:
        path: the forward path. The states of its first two rows are overwritten.
        reference: the test sequences.
        difference: the relative difference between the logits of `path` and the logits of one pass.
        dtype: the data type of the model.
    """
    if dtype == torch.float32 and difference > _ROUNDING:
        return False
    token_ids, _ = reference.sequences[0]
    half_len = len(token_ids) // 2
    if half_len < _MIN_HALF_LEN:
        return False  # The sequence is too short for the check.
    try:
        return _continues_exactly(path, reference, half_len)
    except Exception as error:  # noqa: BLE001 - a model's code can raise any exception
        log.info("Copies of recurrent states are not used: %s", first_line(error))
        return False


def _continues_exactly(path: RowsPath, reference: ReferenceLogits, half_len: int) -> bool:
    """Return whether a copy of a sequence's state gives the same logits as the state itself.

    The state after the first `half_len` tokens is copied to a snapshot. The rest of the sequence
    is computed three times: from the state itself, from the snapshot in another row of the batch,
    and from the snapshot in the row from which the snapshot was copied. All bits of the logits must
    be equal.
    """
    # The check uses one snapshot, with the id 0, and its steps contain one sequence, at index 0.
    sequence_and_snapshot = (0, 0)
    save = SnapshotPlan(loads=[], saves=[sequence_and_snapshot], deleted=[])
    load = SnapshotPlan(loads=[sequence_and_snapshot], saves=[], deleted=[])
    original = _make_sequence(reference, row=0)
    first_half = Chunk(
        original, start=0, num_tokens=half_len, samples=False, is_first=True, num_logits=0
    )
    _run_chunk(path, first_half, save)
    expected = _continue_from(path, original, half_len, restored=None)
    in_other_row = _continue_from(path, _make_sequence(reference, row=1), half_len, restored=load)
    in_same_row = _continue_from(path, _make_sequence(reference, row=0), half_len, restored=load)
    return torch.equal(in_other_row, expected) and torch.equal(in_same_row, expected)


def _make_sequence(reference: ReferenceLogits, row: int) -> Sequence:
    """Return a sequence in the batch row `row`, with the tokens of the first test sequence.

    All sequences that this function returns have the same blocks.
    """
    token_ids = reference.sequences[0][0]
    # A sequence ends as soon as it has `max_total_tokens` tokens, so allow one more token than the
    # test sequence contains.
    sequence = Sequence("0", token_ids, SamplingParams(), max_total_tokens=len(token_ids) + 1)
    sequence.row = row
    sequence.block_table = list(range(math.ceil(len(token_ids) / reference.block_size)))
    return sequence


def _continue_from(
    path: RowsPath, sequence: Sequence, start: int, *, restored: SnapshotPlan | None
) -> Tensor:
    """Compute the rest of a sequence in two passes, and return the logits of both passes.

    The rest begins with the token whose index is `start`. The first pass computes all tokens of the
    rest except the last token. The second pass computes the last token. The check therefore covers
    passes with several tokens and passes with one token.

    `restored` loads the state before the token `start` from a snapshot. If `path` itself has
    computed the tokens before `start`, `restored` is None.

    Returns:
        The logits of the two passes, [2, vocab_size].
    """
    last = len(sequence.token_ids) - 1
    first_chunk = Chunk(
        sequence,
        start,
        num_tokens=last - start,
        samples=True,
        # The forward path must treat a sequence as new if its state comes from a snapshot.
        is_first=restored is not None,
        num_logits=1,
    )
    last_chunk = Chunk(sequence, last, num_tokens=1, samples=True, is_first=False, num_logits=1)
    first_logits = _run_chunk(path, first_chunk, restored)
    last_logits = _run_chunk(path, last_chunk, None)
    return torch.cat([first_logits, last_logits])


def _run_chunk(path: RowsPath, chunk: Chunk, snapshots: SnapshotPlan | None) -> Tensor:
    """Run a forward pass that computes only the tokens of `chunk`, and return the logits."""
    return path.forward(StepPlan([chunk], chunk.num_tokens, snapshots=snapshots))
