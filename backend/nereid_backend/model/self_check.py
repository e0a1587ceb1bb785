# SPDX-License-Identifier: Apache-2.0
"""Checks that a forward path computes the same logits as the unmodified model.

The check lets the path compute a few short prompts in small chunks. A step contains chunks and
single tokens, and the blocks of a sequence are in random order. The unmodified model computes each
whole sequence in one pass with its own attention. The check compares the logits. A path with wrong
logits is never used.
"""

import math
import random
import re
from collections import abc
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nereid_backend.attention.layers import LayerSpec
from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.model.probe_layers import plain_token_ids
from nereid_backend.paths.model_call import ModelCall, Sizes, UnfitError
from nereid_backend.paths.single_sequence import SinglePath
from nereid_backend.runner import ForwardPath

# The number of tokens of each test prompt, and the number of tokens after each prompt.
_PROMPT_LENS = (21, 5, 13)
NUM_STEPS = 4
GENERATE_ARGUMENTS: dict[str, Any] = {
    "max_new_tokens": NUM_STEPS + 1,
    "min_new_tokens": NUM_STEPS + 1,
    "do_sample": False,
    "num_beams": 1,
    "output_logits": True,
    "return_dict_in_generate": True,
    "pad_token_id": 0,
}
"""The arguments of transformers' `generate` that compute the expected logits of a trial."""
# The largest number of tokens in one step of the check. Two prompts have more tokens, so that the
# check also computes prompts in several chunks.
_BUDGET = 8
# One prompt is longer than the model's sliding window in order to test the window. The prompt has
# at most `_LONGEST_PROMPT` tokens, because longer prompts would take seconds at every start.
_LONGEST_PROMPT = 160
# A prompt that tests a sliding window has `_BEYOND_LIMIT` tokens more than the window.
_BEYOND_LIMIT = 6
# The largest accepted root mean square difference, relative to the standard deviation of the
# logits. The tests measured these differences: wrong masks or positions cause 0.1 to 1.4. Rounding
# causes 1e-6 in float32 and 0.01 to 0.04 in bfloat16. In a mixture of experts, rounding can
# assign other experts to many tokens; the difference in bfloat16 is then 0.13.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}
# The accepted difference is larger if the KV cache stores 8-bit numbers. In the tests, 8-bit
# integers caused differences of 0.01 to 0.08, and 8-bit floating point numbers caused differences
# of 0.07 to 0.2. If rounding changed the experts of many tokens, the difference was 0.3. Wrong
# masks and positions are still detected, because the same forward path must first pass the check
# without 8-bit numbers.
_ROUNDED_TOLERANCE = 0.5


@dataclass(frozen=True, slots=True)
class Trial:
    """Test sequences, and the logits of the unmodified model for these sequences.

    Attributes:
        sequences: one pair for each sequence: (the ids of all tokens, the number of prompt tokens).
        expected: the logits at every token from the last prompt token on, one sequence after
            another, float32 [num_rows, vocab_size].
        block_size: the block size for the check. Attention kernels support only some sizes.
        images: the images of each sequence; empty if no sequence has images.
    """

    sequences: list[tuple[list[int], int]]
    expected: Tensor
    block_size: int
    images: tuple[ImageInputs | None, ...] = ()

    @property
    def sizes(self) -> Sizes:
        """The sizes of the caches and block tables that the test sequences need."""
        max_len = max(len(tokens) for tokens, _ in self.sequences)
        num_blocks = len(self.sequences) * math.ceil(max_len / self.block_size)
        return Sizes(num_blocks, self.block_size, len(self.sequences), max_len)


@torch.inference_mode()
def make_trial(
    checkpoint: Checkpoint, layers: abc.Sequence[LayerSpec], max_len: int, block_size: int
) -> Trial:
    """Return random sequences, and the logits of the model for these sequences.

    The model computes each whole sequence in a separate pass, and must use its own attention. The
    logits are those that a correct forward path must compute.

    Args:
        checkpoint: the model.
        layers: the attention layers. One sequence is longer than the windows of these layers.
        max_len: the largest length of a sequence.
        block_size: the block size for the check.
    """
    sequences = _random_sequences(checkpoint, layers, max_len)
    call = ModelCall(checkpoint.model)
    expected = []
    for tokens, prompt_len in sequences:
        ids = torch.tensor([tokens], device=checkpoint.device)
        positions = torch.arange(len(tokens), device=checkpoint.device)[None]
        # Sampling needs the logits at the last prompt token and at every later token.
        num_logits = len(tokens) - prompt_len + 1
        logits = call(ids, num_logits=num_logits, position_ids=positions)
        expected.append(logits[0].float())
    return Trial(sequences, torch.cat(expected), block_size)


@torch.inference_mode()
def make_generated_trial(checkpoint: Checkpoint, max_len: int, block_size: int) -> Trial:
    """Return test sequences whose tokens and logits come from transformers' generate.

    The prompts are random.

    Some models cannot compute a whole sequence in one pass, and some models compute other logits in
    one pass than in token-by-token generation. This trial is for such models.

    If generate raises an error, perhaps because a prompt is longer than a window, the trial
    contains only short prompts. Longer prompts then need no test, because they fail with an error
    and never give wrong logits.
    """
    try:
        prompts = _random_sequences(checkpoint, (), max_len)
        return _generate_sequences(checkpoint, prompts, block_size)
    except Exception:  # noqa: BLE001 - a model can raise any exception
        short_len = min(max_len, _PROMPT_LENS[0] + NUM_STEPS)
        short_prompts = _random_sequences(checkpoint, (), short_len)
        return _generate_sequences(checkpoint, short_prompts, block_size)


def _generate_sequences(
    checkpoint: Checkpoint, prompts: list[tuple[list[int], int]], block_size: int
) -> Trial:
    """Let transformers' generate continue the prompts, and return the tokens and their logits.

    `prompts` has the same form as `Trial.sequences`. The tokens after each prompt are ignored.
    """
    model: Any = checkpoint.model
    sequences = []
    expected = []
    for tokens, prompt_len in prompts:
        prompt = tokens[:prompt_len]
        ids = torch.tensor([prompt], device=checkpoint.device)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **GENERATE_ARGUMENTS,
        )
        # The output of an encoder-decoder model does not contain the prompt, so the generated
        # tokens are counted from the end. The last generated token has no logits after it.
        generated = output.sequences[0, -len(output.logits) : -1].tolist()
        sequences.append((prompt + generated, prompt_len))
        expected.append(torch.cat(output.logits).float())
    return Trial(sequences, torch.cat(expected), block_size)


@torch.inference_mode()
def check_generation(checkpoint: Checkpoint, trial: Trial) -> None:
    """Compare the logits of one pass over a sequence with the logits of token-by-token generation.

    The sequence is the first test sequence of `trial`. `trial` contains the logits of one pass.

    Raises:
        UnfitError: if the logits differ. The logits of one pass are then not correct, because the
            model normally generates token by token.
    """
    path = SinglePath(checkpoint, uses_cache=True)
    tokens, prompt_len = trial.sequences[0]
    num_logits = len(tokens) - prompt_len + 1
    logits = path.forward(_whole_plan(tokens, prompt_len, num_logits)).float()
    row_differences = _row_differences(logits, trial.expected[:num_logits], trial)
    difference = row_differences.median().item()
    # `not <=` also refuses NaN.
    if not difference <= _TOLERANCE[checkpoint.model.dtype]:
        raise UnfitError(
            "the logits of token-by-token generation differ from those of one forward pass by "
            f"{difference:.2g} standard deviations"
        )


def _row_differences(logits: Tensor, expected: Tensor, trial: Trial) -> Tensor:
    """Return the root mean square difference of each row of logits.

    The differences are relative to the standard deviation of the expected logits of `trial`.
    """
    return (logits - expected).square().mean(-1).sqrt() / trial.expected.std()


def _whole_plan(tokens: list[int], prompt_len: int, num_logits: int) -> StepPlan:
    """Return a plan for one step that computes all tokens of a sequence.

    The first `prompt_len` tokens are the prompt. The step returns the logits of the last
    `num_logits` tokens.
    """
    sequence = Sequence("0", tokens, SamplingParams(), max_total_tokens=len(tokens) + 1)
    sequence.row = 0
    sequence.num_prompt_tokens = prompt_len
    chunk = Chunk(
        sequence,
        start=0,
        num_tokens=len(tokens),
        samples=True,
        is_first=True,
        num_logits=num_logits,
    )
    return StepPlan([chunk], len(tokens))


def check_path(
    path: ForwardPath, trial: Trial, dtype: torch.dtype, *, is_rounded: bool = False
) -> float:
    """Compare the logits of a forward path with the logits of the unmodified model.

    Args:
        path: a path that has not computed any tokens yet.
        trial: the test sequences and the expected logits.
        dtype: the data type of the model.
        is_rounded: whether the setting kv_cache_dtype rounds keys and values to 8 bits.

    Returns:
        The largest root mean square difference of a row, relative to the standard deviation of the
        logits.

    Raises:
        UnfitError: if the difference is larger than rounding can explain.
    """
    steps = check_in_steps(path, trial, dtype, is_rounded=is_rounded)
    while True:
        try:
            next(steps)
        except StopIteration as end:  # This exception contains the result of the generator.
            difference: float = end.value
            return difference


@torch.inference_mode()
def check_in_steps(
    path: ForwardPath, trial: Trial, dtype: torch.dtype, *, is_rounded: bool = False
) -> Generator[None, None, float]:
    """Do the same check as `check_path`, but yield after each step of the forward path.

    Between two steps of the check, the engine can compute a step with requests. The generator
    returns the same result and raises the same errors as `check_path`.
    """
    logits = yield from _run_in_steps(path, trial)
    if logits.shape != trial.expected.shape:
        raise UnfitError(
            f"its logits have the shape {tuple(logits.shape)}, but must have the shape "
            f"{tuple(trial.expected.shape)}"
        )
    differences = _row_differences(logits, trial.expected, trial)
    if dtype != torch.float32 or is_rounded:
        # Because of rounding, a mixture-of-experts model can choose other experts for a few tokens.
        # The logits of these tokens then differ greatly. The median of each sequence ignores such
        # tokens. A wrong forward path changes the logits of most tokens, so the median still
        # detects a wrong path.
        differences = differences.view(len(trial.sequences), -1).median(dim=1).values
    largest_difference = differences.max().item()
    tolerance = max(_TOLERANCE[dtype], _ROUNDED_TOLERANCE if is_rounded else 0.0)
    # `not <=` also refuses NaN.
    if not largest_difference <= tolerance:
        raise UnfitError(
            "its logits differ from the logits of the unmodified model; the largest difference is "
            f"{largest_difference:.2g} times the standard deviation of the logits"
        )
    return largest_difference


def _random_sequences(
    checkpoint: Checkpoint, layers: abc.Sequence[LayerSpec], max_len: int
) -> list[tuple[list[int], int]]:
    """Return random sequences, each as a pair (token ids, number of prompt tokens).

    The first prompt is longer than the windows of the layers. Windows with more than about
    `_LONGEST_PROMPT` tokens are too long to test. Example: for a window of 64 tokens, the prompts
    have 70, 5 and 13 tokens, and the sequences have 74, 9 and 17 tokens.
    """
    first_len = _len_beyond_windows(checkpoint, layers)
    other_lens = _PROMPT_LENS[1:]
    token_ids = plain_token_ids(checkpoint)
    rng = random.Random(0)
    sequences = []
    for wanted_len in (first_len, *other_lens):
        # Leave space for the tokens after the prompt if the model supports only short sequences.
        prompt_len = max(1, min(wanted_len, max_len - NUM_STEPS))
        num_tokens = min(max_len, prompt_len + NUM_STEPS)
        tokens = [rng.choice(token_ids) for _ in range(num_tokens)]
        sequences.append((tokens, prompt_len))
    return sequences


def _len_beyond_windows(checkpoint: Checkpoint, layers: abc.Sequence[LayerSpec]) -> int:
    """Return a prompt length that exceeds every window that is short enough to be tested.

    The length is at least the first length of `_PROMPT_LENS`.
    """
    window_sizes = _limits_in_config(checkpoint)
    for layer in layers:
        sizes_of_layer = (layer.window.size, layer.window.chunk)  # each can be None
        window_sizes |= {size for size in sizes_of_layer if size}
    lens = [size + _BEYOND_LIMIT for size in window_sizes]
    testable_lens = [length for length in lens if length <= _LONGEST_PROMPT]
    return max([_PROMPT_LENS[0], *testable_lens])


def _limits_in_config(checkpoint: Checkpoint) -> set[int]:
    """Return the config values whose names indicate the size of a window, chunk or block.

    Example: a config with sliding_window 64 and hidden_size 512 gives {64}.
    """
    return {
        value
        for name, value in checkpoint.text_config.to_dict().items()
        if re.search("window|chunk|local|block_size|topk", name)
        and isinstance(value, int)
        and value > 1
    }


def _run_in_steps(path: ForwardPath, trial: Trial) -> Generator[None, None, Tensor]:
    """Compute the test sequences with a forward path, and yield after each step.

    Returns:
        The logits in the order of `Trial.expected`, float32 [num_rows, vocab_size].
    """
    sequences = _prompt_sequences(trial)
    rows_by_sequence: dict[Sequence, list[Tensor]] = {sequence: [] for sequence in sequences}
    test_tokens = {
        sequence: tokens for sequence, (tokens, _) in zip(sequences, trial.sequences, strict=True)
    }
    budget = _step_budget(trial)
    while chunks := _next_chunks(sequences, budget):
        logits = path.forward(StepPlan(chunks, sum(chunk.num_tokens for chunk in chunks)))
        sampling_chunks = [chunk for chunk in chunks if chunk.samples]
        for chunk, chunk_logits in zip(sampling_chunks, logits, strict=True):
            rows_by_sequence[chunk.sequence].append(chunk_logits.float())
            _append_next_token(chunk, test_tokens[chunk.sequence])
        for chunk in chunks:
            chunk.sequence.num_computed_tokens += chunk.num_tokens
        yield
    return torch.cat([torch.stack(rows) for rows in rows_by_sequence.values()])


def _step_budget(trial: Trial) -> int:
    """Return the largest number of tokens in one step of the check.

    A test prompt with images can be long, so such a prompt is divided into a few large chunks.
    """
    if not trial.images:
        return _BUDGET
    max_len = max(len(tokens) for tokens, _ in trial.sequences)
    return max(_BUDGET, max_len // 3)


def _append_next_token(chunk: Chunk, test_tokens: list[int]) -> None:
    """Append the next token of `test_tokens` to `chunk.sequence`, in place of a sampled token.

    Do nothing after the last token of the test sequence.

    Mutates: `chunk.sequence`.
    """
    next_index = chunk.start + chunk.num_tokens
    if next_index < len(test_tokens):
        chunk.sequence.token_ids.append(test_tokens[next_index])


def _prompt_sequences(trial: Trial) -> list[Sequence]:
    """Return the prompts of `trial` as sequences. Each sequence has blocks in random order."""
    sizes = trial.sizes
    blocks = list(range(sizes.num_blocks))
    random.Random(0).shuffle(blocks)
    blocks_per_sequence = sizes.num_blocks // len(trial.sequences)
    sequences = []
    for index, (tokens, prompt_len) in enumerate(trial.sequences):
        sequence = Sequence(
            str(index), tokens[:prompt_len], SamplingParams(), max_total_tokens=len(tokens) + 1
        )
        sequence.row = index
        if trial.images:
            sequence.images = trial.images[index]
        first_block = index * blocks_per_sequence
        sequence.block_table = blocks[first_block : first_block + blocks_per_sequence]
        sequences.append(sequence)
    return sequences


def _next_chunks(sequences: list[Sequence], budget: int) -> list[Chunk]:
    """Return the chunks of the next step. The chunks together have at most `budget` tokens.

    The budget is given first to sequences with computed tokens, and then to new sequences. In the
    result, single tokens come before longer chunks, as in the engine's plans. Example: with a
    budget of 8 tokens and prompts of 21, 5 and 13 tokens, the first three steps compute 8, 8 and 5
    tokens of the first prompt. The third step also computes 3 tokens of the second prompt.
    """
    chunks = []
    remaining_budget = budget
    for sequence in sorted(sequences, key=lambda sequence: sequence.num_computed_tokens == 0):
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
    return sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)
