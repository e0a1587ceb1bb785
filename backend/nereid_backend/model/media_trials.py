# SPDX-License-Identifier: Apache-2.0
"""Test prompts with images, videos or audio, and the logits of transformers' generate for them."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nereid_backend.errors import NereidError, first_line
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.model.self_check import GENERATE_ARGUMENTS, NUM_STEPS, Trial
from nereid_backend.paths.model_call import UnfitError
from nereid_backend.vision.chat_processor import ChatProcessor, ImagePrompt
from nereid_backend.vision.image_tensors import place_images

if TYPE_CHECKING:
    from PIL.Image import Image

# The sizes of the test images in pixels, width and height.
_SIZES = ((40, 30), (30, 50))
# The number of frames of each test video.
_NUM_FRAMES = (4, 2)
# The durations of the test audio in seconds, and the sampling rate.
_DURATIONS_S = (0.6, 0.9)
_RATE = 16_000


def make_trials(
    checkpoint: Checkpoint, processor: ChatProcessor, block_size: int, refused: dict[str, str]
) -> dict[str, Trial]:
    """Return a trial for each kind of media that transformers can compute.

    Mutates: `refused`. The reason is added for each kind that transformers cannot compute.
    """
    trials = {}
    for kind, make_prompts in _PROMPTS.items():
        if kind not in refused:
            try:
                trial = _make_trial(checkpoint, processor, make_prompts, block_size)
                if kind == "audio":
                    _check_dependence(trial)
                trials[kind] = trial
            except Exception as error:  # noqa: BLE001 - a model's code can raise any exception
                refused[kind] = f"transformers cannot answer test {kind}: {describe(error)}"
    return trials


@torch.inference_mode()
def _make_trial(
    checkpoint: Checkpoint,
    processor: ChatProcessor,
    make_prompts: Callable[[ChatProcessor], list[Callable[[], ImagePrompt]]],
    block_size: int,
) -> Trial:
    """Return test prompts, and the logits of transformers' generate for these prompts.

    The last prompt equals the first prompt, so that stored features are tested, too.

    Args:
        checkpoint: the model.
        processor: prepares the prompts.
        make_prompts: returns functions that return the prompts. If transformers cannot answer a
            prompt after the first prompt, the prompt is left out. Some models accept only one
            image.
        block_size: the number of tokens in one block.
    """
    prompts: list[ImagePrompt] = []
    answers: list[tuple[list[int], torch.Tensor]] = []
    for make_prompt in make_prompts(processor):
        try:
            prompt = _placed(make_prompt(), checkpoint)
            answers.append(_generate(checkpoint, prompt, processor.placeholder_ids))
            prompts.append(prompt)
        except Exception:
            # A model's code can raise any exception.
            if not prompts:
                raise
    prompts.append(prompts[0])
    answers.append(answers[0])
    sequences = [
        (prompt.token_ids + tokens, len(prompt.token_ids))
        for prompt, (tokens, _) in zip(prompts, answers, strict=True)
    ]
    expected = torch.cat([logits for _, logits in answers])
    images = tuple(prompt.images for prompt in prompts)
    return Trial(sequences, expected, block_size, images)


def _image_prompts(processor: ChatProcessor) -> list[Callable[[], ImagePrompt]]:
    """Return two functions: one returns a prompt with one image, the other one with two images."""
    rng = random.Random(0)
    parts = [{"type": "image", "image": _random_image(rng, size)} for size in _SIZES]
    return [partial(_test_prompt, processor, parts[:number]) for number in (1, 2)]


def _video_prompts(processor: ChatProcessor) -> list[Callable[[], ImagePrompt]]:
    """Return two functions: one returns a prompt with one video, the other one with two videos."""
    rng = random.Random(0)
    parts = [
        {"type": "video", "video": [_random_image(rng, size) for _ in range(number)]}
        for size, number in zip(_SIZES, _NUM_FRAMES, strict=True)
    ]
    return [partial(_test_prompt, processor, parts[:number]) for number in (1, 2)]


def _check_dependence(trial: Trial) -> None:
    """Raise an UnfitError if the logits do not depend on the audio.

    Some models ignore audio if their checkpoint has no audio encoder.
    """
    num_rows = NUM_STEPS + 1
    # The last prompt equals the first prompt. The prompt before the last prompt has other audio.
    if torch.equal(trial.expected[0], trial.expected[-2 * num_rows]):
        raise UnfitError("the logits do not depend on the audio")


def _audio_prompts(processor: ChatProcessor) -> list[Callable[[], ImagePrompt]]:
    """Return functions that return a prompt with one audio, with two, and with another one."""
    rng = np.random.default_rng(0)
    parts = [
        {
            "type": "audio",
            "audio": rng.uniform(-1, 1, int(seconds * _RATE)).astype(np.float32),
            "sampling_rate": _RATE,
        }
        for seconds in (*_DURATIONS_S, _DURATIONS_S[0])
    ]
    chosen = (parts[:1], parts[:2], parts[2:])
    return [partial(_test_prompt, processor, each) for each in chosen]


_PROMPTS = {"images": _image_prompts, "videos": _video_prompts, "audio": _audio_prompts}


def _random_image(rng: random.Random, size: tuple[int, int]) -> "Image":
    """Return an image with random pixels. `size` is the width and the height."""
    import PIL.Image

    return PIL.Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1]))


def _test_prompt(processor: ChatProcessor, parts: list[dict[str, Any]]) -> ImagePrompt:
    """Return a prompt that consists of content parts and a short text."""
    text = {"type": "text", "text": "What is shown here?"}
    return processor.prepare([{"role": "user", "content": [*parts, text]}])


def _placed(prompt: ImagePrompt, checkpoint: Checkpoint) -> ImagePrompt:
    """Copy the images of a prompt to the device of the model, and return the new prompt."""
    assert prompt.images is not None
    images = place_images(prompt.images, checkpoint.device, checkpoint.model.dtype)
    return replace(prompt, images=images)


def _generate(
    checkpoint: Checkpoint, prompt: ImagePrompt, placeholder_ids: set[int]
) -> tuple[list[int], torch.Tensor]:
    """Generate tokens with transformers' generate, and return the tokens and their logits.

    The last token is not returned, because a forward path computes all these logits from the
    earlier tokens. The tokens contain no placeholder, because the code of some models would replace
    the embedding of a generated placeholder by an image. The logits are those before this choice.

    Raises:
        UnfitError: if the model generated fewer tokens than requested.
    """
    model: Any = checkpoint.model
    assert prompt.images is not None
    ids = torch.tensor([prompt.token_ids], device=checkpoint.device)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **GENERATE_ARGUMENTS,
        suppress_tokens=sorted(placeholder_ids) or None,
        **prompt.images.arguments,
    )
    logits = torch.cat(output.logits).float()
    if len(logits) != NUM_STEPS + 1:
        raise UnfitError(f"generate returned {len(logits)} tokens instead of {NUM_STEPS + 1}")
    return output.sequences[0, -len(logits) : -1].tolist(), logits


def describe(error: Exception) -> str:
    """Return the message of an error without a final period, for use within a sentence.

    Example: RuntimeError("shapes differ") gives "RuntimeError: shapes differ".
    """
    if isinstance(error, UnfitError | NereidError):
        return str(error).rstrip(".")
    return f"{type(error).__name__}: {first_line(error)}"
