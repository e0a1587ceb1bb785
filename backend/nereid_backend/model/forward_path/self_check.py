# SPDX-License-Identifier: Apache-2.0
"""Checks that the engine computes the same logits as the unmodified model.

The check lets the path compute a few short prompts in small chunks. A step contains chunks and
single tokens, and the blocks of a sequence are in random order. The unmodified model computes each
whole sequence in one pass with its own attention. The check compares the logits. A path with wrong
logits is never used.
"""

import random

import torch
from torch import Tensor

from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.model.forward_path.reference_logits import ReferenceLogits, ReferenceSequence
from nereid_backend.paths.model_call import UnfitError
from nereid_backend.paths.single_sequence import SinglePath
from nereid_backend.step_runner import ForwardPath

# The largest number of tokens in one step of the check. Two prompts have more tokens, so that the
# check also covers prompts that are divided into chunks.
_BUDGET = 8
# The largest accepted root mean square difference, relative to the standard deviation of the
# logits. The tests measured these differences: wrong masks or positions cause 0.1 to 1.4. Rounding
# causes 1e-6 in float32 and 0.01 to 0.04 in bfloat16. In a mixture of experts, rounding can change
# the choice of experts for many tokens, which causes 0.13 in bfloat16.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}
# The accepted difference is larger if the KV cache stores 8-bit numbers. In the tests, 8-bit
# integers caused differences of 0.01 to 0.08, and 8-bit floating point numbers caused differences
# of 0.07 to 0.2. If rounding changed the experts of many tokens, the difference was 0.3. Wrong
# masks and positions are still detected, because the same forward path must first pass the check
# without 8-bit numbers.
_ROUNDED_TOLERANCE = 0.5


@torch.inference_mode()
def check_generation(checkpoint: Checkpoint, reference: ReferenceLogits) -> None:
    """Compare the logits of one pass over a sequence with the logits of token-by-token generation.

    The sequence is the first test sequence of `reference`, and `reference` contains the logits of
    one pass. This function computes the logits of the generation with the unmodified model:
    `SinglePath` calls the model once for the prompt, and then once for each later token.

    Raises:
        UnfitError: if the logits differ. The logits of one pass are then not correct, because the
            model normally generates token by token.
    """
    path = SinglePath(checkpoint, uses_cache=True)
    sequence = reference.sequences[0]
    logits = path.forward(_whole_sequence_plan(sequence)).float()
    expected = reference.expected[: sequence.num_logits]
    row_differences = _row_differences(logits, expected, unit=reference.expected.std())
    # In a mixture of experts, rounding can change the experts of a few tokens. The logits of these
    # tokens then differ greatly, but the median of the differences stays small.
    difference = row_differences.median().item()
    # `not <=` also refuses NaN.
    if not difference <= _TOLERANCE[checkpoint.model.dtype]:
        raise UnfitError(
            "the logits of token-by-token generation differ from those of one forward pass by "
            f"{difference:.2g} standard deviations"
        )


def _row_differences(logits: Tensor, expected: Tensor, *, unit: Tensor) -> Tensor:
    """For each row, return the root mean square of `logits - expected`, divided by `unit`.

    `unit` is the standard deviation of all expected logits, a single number.
    """
    return (logits - expected).square().mean(-1).sqrt() / unit


def _whole_sequence_plan(test_sequence: ReferenceSequence) -> StepPlan:
    """Return a step plan with a single chunk that contains all tokens of a test sequence.

    The plan requests the logits of the last prompt token and of all later tokens.
    """
    tokens, prompt_len = test_sequence
    # A sequence ends as soon as it has `max_total_tokens` tokens, so allow one more token than the
    # test sequence contains.
    sequence = Sequence(
        "0", tokens[:prompt_len], SamplingParams(), max_total_tokens=len(tokens) + 1
    )
    sequence.token_ids += tokens[prompt_len:]
    sequence.row = 0  # The forward path stores the state of a sequence under the sequence's row.
    chunk = Chunk(
        sequence,
        start=0,
        num_tokens=len(tokens),
        samples=True,  # Every chunk that needs logits has this value.
        is_first=True,
        num_logits=test_sequence.num_logits,
    )
    return StepPlan([chunk], len(tokens))


def check_path(
    path: ForwardPath, reference: ReferenceLogits, dtype: torch.dtype, *, is_rounded: bool = False
) -> float:
    """Compare the engine's logits for test sequences with the logits of the unmodified model.

    Args:
        path: a path that has not computed any tokens yet.
        reference: the test sequences and the expected logits.
        dtype: the data type of the model.
        is_rounded: whether the setting kv_cache_dtype rounds keys and values to 8 bits.

    Returns:
        The largest root mean square difference of a row, relative to the standard deviation of the
        logits.

    Raises:
        UnfitError: if the difference is larger than rounding can explain.
    """
    check = PathCheck(path, reference, dtype, is_rounded=is_rounded)
    while not check.has_all_logits:
        check.run_pass()
    return check.compare()


class PathCheck:
    """Compares the engine's logits for test sequences with the logits of the unmodified model.

    The caller runs the forward passes one by one, so the engine can compute steps for requests
    between two passes. As in the engine, the prompts are computed first, and then one token of each
    sequence in each pass. However, the next token is not sampled, but is the next token of the test
    sequence.
    """

    def __init__(
        self,
        path: ForwardPath,
        reference: ReferenceLogits,
        dtype: torch.dtype,
        *,
        is_rounded: bool = False,
    ) -> None:
        """Prepare the check. `check_path` describes the arguments."""
        self._path = path
        self._reference = reference
        self._dtype = dtype
        self._is_rounded = is_rounded
        self._budget = _step_budget(reference)
        self._sequences = _prompt_sequences(reference)
        # The logits that were computed until now: for each sequence, one row for each token.
        self._logits: dict[Sequence, list[Tensor]] = {each: [] for each in self._sequences}
        self._test_sequences = dict(zip(self._sequences, reference.sequences, strict=True))

    @property
    def has_all_logits(self) -> bool:
        """Whether all tokens of the test sequences are computed."""
        return all(each.num_computed_tokens == len(each.token_ids) for each in self._sequences)

    @torch.inference_mode()
    def run_pass(self) -> None:
        """Run the next forward pass, and store its logits."""
        chunks = _next_chunks(self._sequences, self._budget)
        logits = self._path.forward(StepPlan(chunks, sum(chunk.num_tokens for chunk in chunks)))
        sampling_chunks = [chunk for chunk in chunks if chunk.samples]
        for chunk, chunk_logits in zip(sampling_chunks, logits, strict=True):
            self._logits[chunk.sequence].append(chunk_logits.float())
            _append_next_token(chunk, self._test_sequences[chunk.sequence].token_ids)
        for chunk in chunks:
            chunk.sequence.num_computed_tokens += chunk.num_tokens

    @torch.inference_mode()
    def compare(self) -> float:
        """Compare the logits of all passes with the logits of the unmodified model.

        Returns:
            The largest root mean square difference of a row, relative to the standard deviation of
            the logits. If the model or the KV cache does not contain float32 numbers, the median of
            the differences is computed for each sequence, and the result is the largest median.

        Raises:
            UnfitError: if the difference is larger than rounding can explain.
        """
        logits = torch.cat([torch.stack(rows) for rows in self._logits.values()])
        expected_shape = self._reference.expected.shape
        if logits.shape != expected_shape:
            raise UnfitError(
                f"its logits have the shape {tuple(logits.shape)}, but must have the shape "
                f"{tuple(expected_shape)}"
            )
        # Rounding can make a mixture-of-experts model choose different experts for a few tokens,
        # whose logits then differ greatly.
        ignores_outliers = self._dtype != torch.float32 or self._is_rounded
        difference = _largest_difference(logits, self._reference, ignores_outliers=ignores_outliers)
        # `not <=` also refuses NaN.
        if not difference <= self._tolerance:
            raise UnfitError(
                "its logits differ from the logits of the unmodified model; the largest difference "
                f"is {difference:.2g} times the standard deviation of the logits"
            )
        return difference

    @property
    def _tolerance(self) -> float:
        """The largest difference that rounding can explain; see `compare`."""
        tolerance = _TOLERANCE[self._dtype]
        return max(tolerance, _ROUNDED_TOLERANCE) if self._is_rounded else tolerance


def _largest_difference(
    logits: Tensor, reference: ReferenceLogits, *, ignores_outliers: bool
) -> float:
    """Return the largest difference between a row of `logits` and the expected row.

    If `ignores_outliers` is True, compute the median of each sequence's differences, and return the
    largest median. Because of rounding, a mixture-of-experts model can choose other experts for a
    few tokens. The logits of these tokens then differ greatly, but the median does not. A wrong
    forward path changes the logits of most tokens, so the median still detects a wrong path.
    """
    differences = _row_differences(logits, reference.expected, unit=reference.expected.std())
    if ignores_outliers:
        differences = differences.view(len(reference.sequences), -1).median(dim=1).values
    return differences.max().item()


def _step_budget(reference: ReferenceLogits) -> int:
    """Return the largest number of tokens that one forward pass of the check computes.

    A test prompt with images can be long, so such a prompt is divided into a few large chunks.
    """
    if not reference.images:
        return _BUDGET
    max_len = max(len(tokens) for tokens, _ in reference.sequences)
    return max(_BUDGET, max_len // 3)


def _append_next_token(chunk: Chunk, test_tokens: list[int]) -> None:
    """Append the next test token to `chunk.sequence`. Generation would append a sampled token.

    Do nothing after the last token of the test sequence.

    Mutates: `chunk.sequence`.
    """
    next_index = chunk.start + chunk.num_tokens
    if next_index < len(test_tokens):
        chunk.sequence.token_ids.append(test_tokens[next_index])


def _prompt_sequences(reference: ReferenceLogits) -> list[Sequence]:
    """Return a `Sequence` object for each test prompt, with blocks of the KV cache.

    No tokens are computed yet. The blocks of each sequence are in random order, so that the check
    detects a forward path that ignores the block tables.
    """
    sizes = reference.sizes
    blocks = list(range(sizes.num_blocks))
    random.Random(0).shuffle(blocks)
    blocks_per_sequence = sizes.num_blocks // len(reference.sequences)
    sequences = []
    for index, (tokens, prompt_len) in enumerate(reference.sequences):
        # A sequence ends as soon as it has `max_total_tokens` tokens. Allow one token more than the
        # test needs, so that the sequence does not end during the test.
        sequence = Sequence(
            str(index), tokens[:prompt_len], SamplingParams(), max_total_tokens=len(tokens) + 1
        )
        sequence.row = index  # the index of the sequence in the tables of the forward path
        if reference.images:
            sequence.images = reference.images[index]
        first_block = index * blocks_per_sequence
        sequence.block_table = blocks[first_block : first_block + blocks_per_sequence]
        sequences.append(sequence)
    return sequences


def _next_chunks(sequences: list[Sequence], budget: int) -> list[Chunk]:
    """Choose the tokens that the next forward pass computes: at most `budget` tokens in total.

    The budget is given first to sequences with computed tokens, and then to new sequences. Example:
    with a budget of 8 tokens and prompts of 21, 5 and 13 tokens, the first three steps compute 8, 8
    and 5 tokens of the first prompt. The third step also computes 3 tokens of the second prompt.
    """
    chunks = []
    remaining_budget = budget
    started = [sequence for sequence in sequences if sequence.num_computed_tokens > 0]
    new = [sequence for sequence in sequences if sequence.num_computed_tokens == 0]
    for sequence in started + new:
        start = sequence.num_computed_tokens
        num_tokens = min(len(sequence.token_ids) - start, remaining_budget)
        if num_tokens == 0:
            continue
        remaining_budget -= num_tokens
        has_last_token = start + num_tokens == len(sequence.token_ids)
        chunk = Chunk(
            sequence,
            start,
            num_tokens,
            samples=has_last_token,
            is_first=start == 0,
            num_logits=int(has_last_token),
        )
        chunks.append(chunk)
    # As in the engine's plans, chunks of one token (decodes) come before longer chunks.
    decodes = [chunk for chunk in chunks if chunk.num_tokens == 1]
    prefills = [chunk for chunk in chunks if chunk.num_tokens > 1]
    return decodes + prefills
