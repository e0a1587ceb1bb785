# SPDX-License-Identifier: Apache-2.0
"""Creates prompts with images, videos or audio for tests, and computes their reference logits."""

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nereid_backend.errors import NereidError, first_line
from nereid_backend.load_checkpoint import Checkpoint
from nereid_backend.model.forward_path.reference_logits import (
    GENERATE_ARGUMENTS,
    NUM_STEPS,
    ReferenceLogits,
    ReferenceSequence,
)
from nereid_backend.paths.model_call import UnfitError
from nereid_backend.vision.chat_processor import ChatProcessor, ImagePrompt
from nereid_backend.vision.forward.image_tensors import place_images

if TYPE_CHECKING:
    from PIL.Image import Image

# The width and the height of each test image in pixels.
_SIZES = ((40, 30), (30, 50))
# The number of frames of each test video.
_NUM_FRAMES = (4, 2)
# The durations of the test audio in seconds, and the sampling rate in Hz.
_DURATIONS_S = (0.6, 0.9)
_RATE = 16_000

_MediaPart = dict[str, Any]
"""A content part of a chat message with one medium, such as {"type": "image", "image": image}."""


class _Answer(NamedTuple):
    """The answer of transformers' `generate` to a test prompt.

    Attributes:
        prompt: the prompt, whose images, videos or audio are on the device of the model.
        token_ids: the generated tokens without the last one.
        logits: the logits before each generated token, float32 [len(token_ids) + 1, vocab_size].
    """

    prompt: ImagePrompt
    token_ids: list[int]
    logits: torch.Tensor


def generate_references(
    checkpoint: Checkpoint, processor: ChatProcessor, block_size: int
) -> tuple[dict[str, ReferenceLogits], dict[str, str]]:
    """Return test prompts and their logits for each kind of media that transformers can process.

    The logits are those of transformers' `generate`. The engine must compute the same logits.

    Args:
        checkpoint: the model.
        processor: prepares the prompts. The kinds of media that it refuses are left out.
        block_size: the number of tokens in a block of the KV cache.

    Returns:
        Two dictionaries whose keys are kinds of media ("images", "videos" or "audio"). The first
        contains the test prompts and logits of each kind. The second contains each kind whose test
        prompts transformers cannot answer, and the reason.
    """
    references: dict[str, ReferenceLogits] = {}
    failures: dict[str, str] = {}
    for kind in _TEST_MEDIA:
        if kind in processor.refused:
            continue
        try:
            references[kind] = _generate_reference(checkpoint, processor, block_size, kind)
        except Exception as error:  # noqa: BLE001 - a model's code can raise any exception
            failures[kind] = f"transformers cannot answer test {kind}: {describe(error)}"
    return references, failures


def _generate_reference(
    checkpoint: Checkpoint, processor: ChatProcessor, block_size: int, kind: str
) -> ReferenceLogits:
    """Return test prompts with one kind of media, and the logits of transformers' `generate`.

    Raises:
        Exception: of any class, if transformers cannot answer the prompts, or ignores audio.
    """
    answers = _generate_answers(checkpoint, processor, _TEST_MEDIA[kind]())
    reference = _combine_answers(answers, block_size)
    if kind == "audio":
        _check_uses_audio(reference)
    return reference


@torch.inference_mode()
def _generate_answers(
    checkpoint: Checkpoint, processor: ChatProcessor, contents: Iterable[list[_MediaPart]]
) -> list[_Answer]:
    """Return the answers of transformers' `generate` to some test prompts.

    The later prompts contain several images. If transformers cannot answer a later prompt, it is
    left out, because some models accept only one image.

    Args:
        checkpoint: the model.
        processor: prepares the prompts.
        contents: the media of each prompt.

    Raises:
        Exception: of any class, if transformers cannot answer the first prompt.
    """
    answers: list[_Answer] = []
    for media in contents:
        try:
            prompt = _placed(_test_prompt(processor, media), checkpoint)
            answers.append(_generate_answer(checkpoint, prompt, processor.placeholder_ids))
        except Exception:
            # A model's code can raise any exception.
            if not answers:
                raise
    return answers


def _combine_answers(answers: list[_Answer], block_size: int) -> ReferenceLogits:
    """Combine several answers of the unmodified model in one ReferenceLogits.

    The last test sequence repeats the first answer. When a forward path computes the last sequence,
    its images have already been encoded. The test sequences therefore also test the cache of image
    features.
    """
    repeated = [*answers, answers[0]]
    return ReferenceLogits(
        sequences=[
            ReferenceSequence(
                answer.prompt.token_ids + answer.token_ids, len(answer.prompt.token_ids)
            )
            for answer in repeated
        ],
        expected=torch.cat([answer.logits for answer in repeated]),
        block_size=block_size,
        images=tuple(answer.prompt.images for answer in repeated),
    )


def _image_contents() -> list[list[_MediaPart]]:
    """Return the images of two test prompts. The first prompt has one image, the second has two."""
    rng = random.Random(0)
    first, second = ({"type": "image", "image": _random_image(rng, size)} for size in _SIZES)
    return [[first], [first, second]]


def _video_contents() -> list[list[_MediaPart]]:
    """Return the videos of two test prompts. The first prompt has one video, the second has two.

    A video is a list of images. The two videos have different sizes and different numbers of
    frames. Each video is a content part of a chat message.
    """
    rng = random.Random(0)
    first, second = (
        {"type": "video", "video": [_random_image(rng, size) for _ in range(num_frames)]}
        for size, num_frames in zip(_SIZES, _NUM_FRAMES, strict=True)
    )
    return [[first], [first, second]]


def _audio_contents() -> list[list[_MediaPart]]:
    """Return the audio of three test prompts. Only the second prompt has two recordings.

    The audio of the last prompt has the duration of the audio of the first prompt.
    `_check_uses_audio` compares the answers to these two prompts.
    """
    rng = np.random.default_rng(0)
    first_duration_s, second_duration_s = _DURATIONS_S
    first = _random_audio(rng, first_duration_s)
    second = _random_audio(rng, second_duration_s)
    different = _random_audio(rng, first_duration_s)
    return [[first], [first, second], [different]]


# For each kind of media, a function that returns the media of each test prompt.
_TEST_MEDIA = {"images": _image_contents, "videos": _video_contents, "audio": _audio_contents}


def _check_uses_audio(reference: ReferenceLogits) -> None:
    """Raise an UnfitError if the logits do not depend on the audio.

    Some models ignore audio if their checkpoint has no audio encoder.
    """
    num_rows = NUM_STEPS + 1
    # Each prompt has `num_rows` rows of logits. The second-to-last prompt differs from the first
    # prompt only in the audio.
    if torch.equal(reference.expected[0], reference.expected[-2 * num_rows]):
        raise UnfitError("the logits do not depend on the audio")


def _random_image(rng: random.Random, size: tuple[int, int]) -> "Image":
    """Return an image with random pixels. `size` is the width and the height."""
    import PIL.Image

    return PIL.Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1]))


def _random_audio(rng: np.random.Generator, duration_s: float) -> _MediaPart:
    """Return a content part with random noise. `duration_s` is the duration in seconds."""
    samples = rng.uniform(-1, 1, int(duration_s * _RATE)).astype(np.float32)
    return {"type": "audio", "audio": samples, "sampling_rate": _RATE}


def _test_prompt(processor: ChatProcessor, media: list[_MediaPart]) -> ImagePrompt:
    """Return a prompt that consists of images, videos or audio, and a short text."""
    text = {"type": "text", "text": "What is shown here?"}
    return processor.prepare([{"role": "user", "content": [*media, text]}])


def _placed(prompt: ImagePrompt, checkpoint: Checkpoint) -> ImagePrompt:
    """Copy the images of a prompt to the device of the model, and return the new prompt."""
    assert prompt.images is not None
    images = place_images(prompt.images, checkpoint.device, checkpoint.model.dtype)
    return replace(prompt, images=images)


def _generate_answer(
    checkpoint: Checkpoint, prompt: ImagePrompt, placeholder_ids: set[int]
) -> _Answer:
    """Generate tokens with transformers' `generate`, and return the tokens and their logits.

    The last token is not returned, because no logits follow it. No placeholder of an image is
    generated. The logits are returned as they were before the placeholders were excluded.

    Raises:
        UnfitError: if the model generated fewer tokens than requested.
    """
    model: Any = checkpoint.model
    assert prompt.images is not None
    ids = torch.tensor([prompt.token_ids], device=checkpoint.device)
    num_generated = GENERATE_ARGUMENTS["max_new_tokens"]
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **GENERATE_ARGUMENTS,
        # The code of some models would replace the embedding of a generated placeholder by an
        # image.
        suppress_tokens=sorted(placeholder_ids) or None,
        **prompt.images.arguments,
    )
    logits = torch.cat(output.logits).float()  # one row for each generated token
    if len(logits) != num_generated:
        raise UnfitError(f"generate returned {len(logits)} tokens instead of {num_generated}")
    # The output of an encoder-decoder model does not contain the prompt, so the generated tokens
    # are counted from the end.
    generated_ids = output.sequences[0, -num_generated:].tolist()
    return _Answer(prompt, generated_ids[:-1], logits)


def describe(error: Exception) -> str:
    """Return the message of an error without a final period, for use within a sentence.

    Example: RuntimeError("shapes differ") gives "RuntimeError: shapes differ".
    """
    if isinstance(error, UnfitError | NereidError):
        return str(error).rstrip(".")
    return f"{type(error).__name__}: {first_line(error)}"
