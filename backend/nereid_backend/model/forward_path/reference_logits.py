# SPDX-License-Identifier: Apache-2.0
"""Test sequences, and the logits that the unmodified model computes for them."""

import logging
import math
import random
import re
from collections import abc
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nereid_backend.attention.layers import LayerSpec
from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.errors import first_line
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.model.forward_path.probe_layers import plain_token_ids
from nereid_backend.paths.model_call import ModelCall, Sizes

log = logging.getLogger(__name__)

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
"""The arguments of transformers' `generate` that compute the expected logits."""
# One prompt is longer than the model's sliding window in order to test the window. The prompt has
# at most `_LONGEST_PROMPT` tokens, because longer prompts would take seconds at every start.
_LONGEST_PROMPT = 160
# A prompt that tests a sliding window has `_BEYOND_LIMIT` tokens more than the window.
_BEYOND_LIMIT = 6


class ReferenceSequence(NamedTuple):
    """A test sequence.

    Attributes:
        token_ids: the tokens of the prompt and the tokens after the prompt.
        prompt_len: the number of prompt tokens.
    """

    token_ids: list[int]
    prompt_len: int

    @property
    def num_logits(self) -> int:
        """The number of tokens whose logits are compared: the last prompt token and all later ones.

        Sampling needs the logits of these tokens.
        """
        return len(self.token_ids) - self.prompt_len + 1


@dataclass(frozen=True, slots=True)
class ReferenceLogits:
    """Test sequences, and the logits of the unmodified model for these sequences.

    Attributes:
        sequences: the test sequences.
        expected: the logits at every token from the last prompt token on, one sequence after
            another, float32 [num_rows, vocab_size].
        block_size: the block size for the check. Attention kernels support only some sizes.
        images: the images of each sequence; empty if no sequence has images.
    """

    sequences: list[ReferenceSequence]
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
def compute_reference(
    checkpoint: Checkpoint, layers: abc.Sequence[LayerSpec], max_len: int, block_size: int
) -> ReferenceLogits:
    """Return random test sequences, and the logits that the unmodified model computes for them.

    A correct forward path must compute the same logits. The model computes each whole sequence in a
    separate pass, and must use its own attention.

    Args:
        checkpoint: the model.
        layers: the attention layers. One sequence is longer than the windows of these layers.
        max_len: the largest length of a sequence.
        block_size: the block size for the check.
    """
    sequences = _random_sequences(checkpoint, layers, max_len)
    call = ModelCall(checkpoint.model)
    expected = []
    for sequence in sequences:
        ids = torch.tensor([sequence.token_ids], device=checkpoint.device)
        positions = torch.arange(len(sequence.token_ids), device=checkpoint.device)[None]
        logits = call(ids, num_logits=sequence.num_logits, position_ids=positions)
        expected.append(logits[0].float())
    return ReferenceLogits(sequences, torch.cat(expected), block_size)


@torch.inference_mode()
def generate_reference(checkpoint: Checkpoint, max_len: int, block_size: int) -> ReferenceLogits:
    """Return test sequences whose tokens and logits come from transformers' `generate`.

    This function is for models that cannot compute a whole sequence in one pass, or that compute
    other logits in one pass than in token-by-token generation. The prompts are random.

    If `generate` fails for a prompt that is longer than a window of the model, the result contains
    only short prompts. Requests with long prompts then fail with the same error, because the
    forward path runs the same code of the model as `generate`.
    """
    try:
        prompts = _random_sequences(checkpoint, (), max_len)
        return _generate_sequences(checkpoint, prompts, block_size)
    except Exception as error:  # noqa: BLE001 - a model can raise any exception
        log.info("transformers' generate fails for a long test prompt: %s", first_line(error))
    short_len = min(max_len, _PROMPT_LENS[0] + NUM_STEPS)
    short_prompts = _random_sequences(checkpoint, (), short_len)
    return _generate_sequences(checkpoint, short_prompts, block_size)


def _generate_sequences(
    checkpoint: Checkpoint, prompts: list[ReferenceSequence], block_size: int
) -> ReferenceLogits:
    """Let transformers' `generate` continue the prompts, and return the tokens and their logits.

    Each item of `prompts` is a test sequence: the tokens, and the number of prompt tokens. The
    tokens after the prompt are replaced by the generated tokens.

    Example: `generate` returns the tokens a, b and c, and three rows of logits. The rows are the
    logits at the last prompt token, at a, and at b. The sequence is the prompt with a and b.
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
            **GENERATE_ARGUMENTS,  # greedy search, NUM_STEPS + 1 tokens, with their logits
        )
        logits = torch.cat(output.logits).float()  # one row for each generated token
        # The output of an encoder-decoder model does not contain the prompt, so the generated
        # tokens are counted from the end. The last generated token is left out, because `generate`
        # has not computed the logits that follow it.
        generated = output.sequences[0, -len(logits) : -1].tolist()
        sequences.append(ReferenceSequence(prompt + generated, prompt_len))
        expected.append(logits)
    return ReferenceLogits(sequences, torch.cat(expected), block_size)


def _random_sequences(
    checkpoint: Checkpoint, layers: abc.Sequence[LayerSpec], max_len: int
) -> list[ReferenceSequence]:
    """Return sequences of random tokens that are not special tokens.

    The first prompt is longer than the attention windows of the layers, unless a window is too long
    to test. Example: for a window of 64 tokens, the prompts have 70, 5 and 13 tokens. Each sequence
    has 4 tokens after the prompt, so the sequences have 74, 9 and 17 tokens.
    """
    prompt_lens = [_len_beyond_windows(checkpoint, layers), *_PROMPT_LENS[1:]]
    token_ids = plain_token_ids(checkpoint)
    rng = random.Random(0)
    sequences = []
    for prompt_len in prompt_lens:
        # If the model supports only short sequences, shorten the prompt, so that the tokens after
        # the prompt fit, too.
        shortened_len = max(1, min(prompt_len, max_len - NUM_STEPS))
        num_tokens = min(max_len, shortened_len + NUM_STEPS)
        tokens = [rng.choice(token_ids) for _ in range(num_tokens)]
        sequences.append(ReferenceSequence(tokens, shortened_len))
    return sequences


def _len_beyond_windows(checkpoint: Checkpoint, layers: abc.Sequence[LayerSpec]) -> int:
    """Return a prompt length that exceeds the attention windows of the model.

    A window is ignored if a longer prompt would have more than `_LONGEST_PROMPT` tokens. The length
    is at least the first length of `_PROMPT_LENS`.
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
