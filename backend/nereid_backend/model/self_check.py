# SPDX-License-Identifier: Apache-2.0
"""Whether a path computes what the model computes alone.

A few short prompts go through the path, in small chunks mixed with single
tokens over scattered blocks, and the logits are compared with those of the model alone, with its
own attention and whole prompts. A wrong answer must not look like a right one.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nereid_backend.attention.layers import LayerSpec
from nereid_backend.checkpoint import Checkpoint
from nereid_backend.core.request import Request
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.model.probe_layers import plain_token_ids
from nereid_backend.paths.model_call import ModelCall, Sizes, UnfitError
from nereid_backend.paths.single_sequence import SinglePath
from nereid_backend.runner import ForwardPath

_PROMPT_LENS = (21, 5, 13)
_NUM_STEPS = 4
_BUDGET = 8
# A prompt is made longer than a layer's window to see that the window works, up to this length:
# longer ones would cost seconds at every start.
_LONGEST_PROMPT = 160
# Root mean square of the difference over the logits' spread. Wrong masks or positions give 0.1 to
# 1.4; float32 gives 1e-6, bfloat16 0.01 to 0.04, and 0.13 where many tokens change experts (on the
# tests' architectures).
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}
# Keys and values of 8 bits give 0.01 to 0.08 as integers, 0.07 to 0.2 as floating point, and 0.3
# where tokens change experts. The path itself is compared without the rounding before.
_ROUNDED_TOLERANCE = 0.5


@dataclass(frozen=True, slots=True)
class Trial:
    """Sequences and what the model alone answers to them.

    Attributes:
        sequences: pairs of a whole sequence and how many of its tokens are the prompt.
        expected: [num_rows, vocab_size] float32, logits at every token from the last of the prompt
            on, sequence by sequence.
        block_size: of the blocks to try it with; attention's kernels take only some sizes.
    """

    sequences: list[tuple[list[int], int]]
    expected: Tensor
    block_size: int

    @property
    def sizes(self) -> Sizes:
        """What a path needs to hold for it."""
        longest = max(len(tokens) for tokens, _ in self.sequences)
        num_blocks = len(self.sequences) * -(-longest // self.block_size)
        return Sizes(num_blocks, self.block_size, len(self.sequences), longest)


@torch.inference_mode()
def make_trial(
    checkpoint: Checkpoint, layers: Sequence[LayerSpec], max_len: int, block_size: int
) -> Trial:
    """Random sequences, and the logits of the model alone: each sequence whole and by itself.

    The model must have its own attention set.
    """
    sequences = _sequences(checkpoint, layers, max_len)
    call = ModelCall(checkpoint.model)
    parts = []
    for tokens, prompt_len in sequences:
        ids = torch.tensor([tokens], device=checkpoint.device)
        positions = torch.arange(len(tokens), device=checkpoint.device)[None]
        count = len(tokens) - prompt_len + 1
        parts.append(call(ids, num_logits=count, position_ids=positions)[0].float())
    return Trial(sequences, torch.cat(parts), block_size)


@torch.inference_mode()
def make_generated_trial(checkpoint: Checkpoint, max_len: int, block_size: int) -> Trial:
    """Random prompts, and what transformers' generate makes of each by itself.

    For models that compute something else, or nothing, in one pass over a whole sequence. Some of
    those fail on prompts beyond a window or chunk; they fail loudly there, so short ones must do.
    """
    try:
        return _generated(checkpoint, _sequences(checkpoint, (), max_len), block_size)
    except Exception:  # noqa: BLE001 - models fail in any way
        short = min(max_len, _PROMPT_LENS[0] + _NUM_STEPS)
        return _generated(checkpoint, _sequences(checkpoint, (), short), block_size)


def _generated(
    checkpoint: Checkpoint, prompts: list[tuple[list[int], int]], block_size: int
) -> Trial:
    model: Any = checkpoint.model
    sequences, parts = [], []
    for tokens, prompt_len in prompts:
        ids = torch.tensor([tokens[:prompt_len]], device=checkpoint.device)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=_NUM_STEPS + 1,
            min_new_tokens=_NUM_STEPS + 1,
            do_sample=False,
            num_beams=1,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        sequences.append((output.sequences[0, :-1].tolist(), prompt_len))
        parts.append(torch.cat(output.logits).float())
    return Trial(sequences, torch.cat(parts), block_size)


@torch.inference_mode()
def check_generation(checkpoint: Checkpoint, trial: Trial) -> None:
    """See that transformers' own generation computes the trial's first sequence in the same way.

    Raises:
        UnfitError: it does not, so that the trial says nothing about what users of the model see.
    """
    path = SinglePath(checkpoint, keeps=True)
    tokens, prompt_len = trial.sequences[0]
    count = len(tokens) - prompt_len + 1
    request = Request("0", tokens, SamplingParams(), max_total_tokens=len(tokens) + 1)
    request.row, request.num_prompt_tokens = 0, prompt_len
    plan = StepPlan([Chunk(request, 0, len(tokens), True, True, count)], len(tokens))
    found, expected = path.forward(plan).float(), trial.expected[:count]
    error = ((found - expected).square().mean(-1).sqrt() / trial.expected.std()).median()
    if not error.item() <= _TOLERANCE[checkpoint.model.dtype]:
        raise UnfitError(
            "its generation, token by token, differs from one pass over the whole sequence by "
            f"{error.item():.2g} of its logits' spread"
        )


@torch.inference_mode()
def check_path(
    path: ForwardPath, trial: Trial, dtype: torch.dtype, *, is_rounded: bool = False
) -> float:
    """Compare a path's logits with those of the model alone.

    Args:
        path: empty so far.
        trial: what goes through it.
        dtype: the model's.
        is_rounded: whether it keeps less of keys and values than the model does, as was asked for.

    Returns:
        The difference: root mean square over the logits' spread, of the worst row.

    Raises:
        UnfitError: it is beyond what rounding explains.
    """
    found = _run(path, trial)
    if found.shape != trial.expected.shape:
        raise UnfitError(f"logits of shape {tuple(found.shape)}, not {tuple(trial.expected.shape)}")
    errors = (found - trial.expected).square().mean(-1).sqrt() / trial.expected.std()
    if dtype != torch.float32 or is_rounded:
        # Rounding makes an expert model choose other experts for a token now and then. Such a row
        # says nothing; what is wrong with the path shows in most rows of a sequence.
        errors = errors.view(len(trial.sequences), -1).median(dim=1).values
    difference = errors.max().item()
    # Written so that NaN is refused, too.
    tolerance = max(_TOLERANCE[dtype], _ROUNDED_TOLERANCE if is_rounded else 0.0)
    if not difference <= tolerance:
        raise UnfitError(f"differs from the model alone by {difference:.2g} of its logits' spread")
    return difference


def _sequences(
    checkpoint: Checkpoint, layers: Sequence[LayerSpec], max_len: int
) -> list[tuple[list[int], int]]:
    limits = {limit for layer in layers for limit in (layer.span.window, layer.span.chunk) if limit}
    limits |= _limits_in_config(checkpoint)
    visible = [limit + 6 for limit in limits if limit + 6 <= _LONGEST_PROMPT]
    lens = [max(_PROMPT_LENS[0], *visible, 0), *_PROMPT_LENS[1:]]
    choices = plain_token_ids(checkpoint)
    rng = random.Random(0)
    sequences = []
    for length in lens:
        prompt_len = max(1, min(length, max_len - _NUM_STEPS))
        total = min(max_len, prompt_len + _NUM_STEPS)
        sequences.append(([rng.choice(choices) for _ in range(total)], prompt_len))
    return sequences


def _limits_in_config(checkpoint: Checkpoint) -> set[int]:
    """Lengths that the config speaks of as windows or chunks: where something may change."""
    return {
        value
        for name, value in checkpoint.text_config.to_dict().items()
        if re.search("window|chunk|local|block_size|topk", name)
        and isinstance(value, int)
        and value > 1
    }


def _run(path: ForwardPath, trial: Trial) -> Tensor:
    """The path's logits at the trial's rows."""
    requests = _requests(trial)
    computed = [0] * len(requests)
    rows: list[list[Tensor]] = [[] for _ in requests]
    while plan := _plan(requests, computed):
        logits = path.forward(StepPlan(plan, sum(chunk.num_tokens for chunk in plan)))
        wanted = [chunk for chunk in plan if chunk.num_logits]
        for chunk, row in zip(wanted, logits, strict=True):
            number = requests.index(chunk.request)
            rows[number].append(row.float())
            # The next token is given, not sampled.
            tokens = trial.sequences[number][0]
            chunk.request.token_ids += tokens[chunk.start + chunk.num_tokens :][:1]
        for chunk in plan:
            computed[requests.index(chunk.request)] += chunk.num_tokens
    return torch.cat([torch.stack(found) for found in rows])


def _requests(trial: Trial) -> list[Request]:
    """The trial's prompts with rows and scattered blocks."""
    sizes = trial.sizes
    blocks = list(range(sizes.num_blocks))
    random.Random(0).shuffle(blocks)
    each = -(-sizes.max_model_len // sizes.block_size)
    requests = []
    for number, (tokens, prompt_len) in enumerate(trial.sequences):
        request = Request(
            str(number), tokens[:prompt_len], SamplingParams(), max_total_tokens=len(tokens) + 1
        )
        request.row = number
        request.block_table = blocks[number * each : (number + 1) * each]
        requests.append(request)
    return requests


def _plan(requests: list[Request], computed: list[int]) -> list[Chunk]:
    """The next step's chunks under a small budget: first who runs already, single tokens first."""
    chunks, budget = [], _BUDGET
    order = sorted(range(len(requests)), key=lambda number: computed[number] == 0)
    for number in order:
        known, start = len(requests[number].token_ids), computed[number]
        num_tokens = min(known - start, budget)
        if num_tokens > 0:
            samples = start + num_tokens == known
            chunks.append(
                Chunk(requests[number], start, num_tokens, samples, start == 0, int(samples))
            )
            budget -= num_tokens
    return sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)
