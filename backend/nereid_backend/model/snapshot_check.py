# SPDX-License-Identifier: Apache-2.0
"""Checks whether a sequence gets the same logits if it continues from a copy of its state."""

import math

import torch
from torch import Tensor

from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, SnapshotPlan, StepPlan
from nereid_backend.model.trials import Trial
from nereid_backend.paths.recurrent import RowsPath

# The engine logs this text if a sequence that continues from a copy of its recurrent state gets
# other logits.
NO_SNAPSHOTS = "no prefix cache, because a copy of its recurrent state gives other logits"
# A snapshot is a copy of the recurrent state of a sequence. The check uses only one snapshot, whose
# id is `_SNAPSHOT`, and computes only one sequence at a time, whose index is 0. Each pair below
# consists of the index of the sequence and the id of the snapshot.
_SNAPSHOT = 0
_SAVE = SnapshotPlan(loads=[], saves=[(0, _SNAPSHOT)], deleted=[])
_RESTORE = SnapshotPlan(loads=[(0, _SNAPSHOT)], saves=[], deleted=[])
# The smallest number of tokens in one half of a test sequence. Shorter halves cannot be checked.
_MIN_HALF_LEN = 2
# The largest accepted difference of the logits in float32. In the tests, rounding caused
# differences of at most 8e-6. In some models, one pass over several tokens computes a different
# recurrent state than one pass for each token. The logits then differ by 1e-3, so copies of the
# state cannot be used.
_ROUNDING = 1e-4


@torch.inference_mode()
def has_exact_snapshots(
    path: RowsPath, trial: Trial, difference: float, dtype: torch.dtype
) -> bool:
    """Return whether a sequence gets the same logits if it continues from a snapshot of its state.

    A snapshot is a copy of the recurrent state. The check computes the first half of a test
    sequence and saves a snapshot. It then computes the rest of the sequence three times: once from
    the state itself, and twice from the snapshot. All bits of the three results must be equal.

    In addition, token-by-token generation and one pass over a sequence must give equal logits.
    Otherwise, a snapshot after an answer would differ from the state that the next turn of the chat
    computes from the same tokens.

    Args:
        path: the forward path. The states of its first two rows are overwritten.
        trial: the test sequences.
        difference: the relative difference between the logits of `path` and the logits of one pass.
        dtype: the data type of the model.
    """
    # In float32, a difference above `_ROUNDING` means that token-by-token generation computes other
    # logits than one pass over all tokens. In other data types, rounding alone causes such
    # differences.
    if dtype == torch.float32 and difference > _ROUNDING:
        return False
    token_ids, _ = trial.sequences[0]
    half_len = len(token_ids) // 2
    if half_len < _MIN_HALF_LEN:
        return False  # The sequence is too short for the check.
    try:
        return _continues_exactly(path, trial, half_len)
    except Exception:  # noqa: BLE001 - a model's code can raise any exception
        return False


def _continues_exactly(path: RowsPath, trial: Trial, half_len: int) -> bool:
    """Return whether a sequence that continues from a copy of its state has unchanged logits.

    The copy (the snapshot) is the state of the original sequence after `half_len` tokens. It is
    restored in another row of the batch first, and then in the row from which it was saved.
    """
    original = _make_sequence(trial, row=0)
    first_half = Chunk(
        original, start=0, num_tokens=half_len, samples=False, is_first=True, num_logits=0
    )
    _run_chunk(path, first_half, _SAVE)
    expected = _continue_from(path, original, half_len, None)
    in_other_row = _continue_from(path, _make_sequence(trial, row=1), half_len, _RESTORE)
    in_same_row = _continue_from(path, _make_sequence(trial, row=0), half_len, _RESTORE)
    return torch.equal(in_other_row, expected) and torch.equal(in_same_row, expected)


def _make_sequence(trial: Trial, row: int) -> Sequence:
    """Return a sequence in the batch row `row`, with the tokens of the first test sequence.

    All sequences that this function returns have the same blocks.
    """
    token_ids = trial.sequences[0][0]
    # A sequence ends as soon as it has `max_total_tokens` tokens, so allow one more token than the
    # test sequence contains.
    sequence = Sequence("0", token_ids, SamplingParams(), max_total_tokens=len(token_ids) + 1)
    sequence.row = row
    sequence.block_table = list(range(math.ceil(len(token_ids) / trial.block_size)))
    return sequence


def _continue_from(
    path: RowsPath, sequence: Sequence, start: int, restoring: SnapshotPlan | None
) -> Tensor:
    """Compute the tokens from index `start` on in two passes, and return the logits.

    The first pass computes all tokens except the last token, and the second pass computes the last
    token. The check therefore covers passes with several tokens and passes with one token.

    Args:
        path: the forward path.
        sequence: the sequence. If `restoring` is None, `path` has computed its tokens before
            `start`.
        start: the index of the first token to compute.
        restoring: loads the state after the tokens before `start` from a snapshot; None if the
            sequence already has this state.

    Returns:
        The logits of the two passes, [2, vocab_size].
    """
    last = len(sequence.token_ids) - 1
    # If the state is restored from a snapshot, the forward path must treat the sequence as new.
    # Therefore, `middle_chunk` is marked as the first chunk of the sequence.
    is_new_sequence = restoring is not None
    middle_chunk = Chunk(
        sequence,
        start,
        num_tokens=last - start,
        samples=True,
        is_first=is_new_sequence,
        num_logits=1,
    )
    last_chunk = Chunk(sequence, last, num_tokens=1, samples=True, is_first=False, num_logits=1)
    middle_logits = _run_chunk(path, middle_chunk, restoring)
    last_logits = _run_chunk(path, last_chunk, None)
    return torch.cat([middle_logits, last_logits])


def _run_chunk(path: RowsPath, chunk: Chunk, snapshots: SnapshotPlan | None) -> Tensor:
    """Run a forward pass that computes only the tokens of `chunk`, and return the logits."""
    return path.forward(StepPlan([chunk], chunk.num_tokens, snapshots=snapshots))
