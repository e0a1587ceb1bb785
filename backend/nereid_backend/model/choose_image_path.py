# SPDX-License-Identifier: Apache-2.0
"""Chooses how a model computes prompts with images.

The following candidates are tried in this order. The first candidate with correct logits is used.
Logits are correct if transformers' generate computes the same logits for test images.

    packed      the model's code encodes the images, and the forward path `packed` computes the
                decoder, together with the tokens of other sequences
    single      the model's own code computes one sequence at a time, with its own cache
    generated   transformers' generate computes every token; very slow

The choice never depends on the model's name. If no candidate can be used, requests with images are
refused with the reasons. The chosen candidate is also tested with videos. If its logits for videos
are not correct, requests with videos are refused.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PretrainedConfig

from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.errors import NereidError, first_line
from nereid_backend.load_checkpoint import Checkpoint, Progress
from nereid_backend.model.path_variants import PathSpec
from nereid_backend.model.self_check import Trial, check_path
from nereid_backend.paths.model_call import UnfitError
from nereid_backend.paths.packed import PackedPath
from nereid_backend.paths.single_sequence import SinglePath
from nereid_backend.runner import ForwardPath
from nereid_backend.vision.chat_processor import ChatProcessor, ImagePrompt
from nereid_backend.vision.check_prompt import PromptCheck
from nereid_backend.vision.feature_cache import FeatureCache
from nereid_backend.vision.image_tensors import place_images
from nereid_backend.vision.load_processor import has_processor, refused_videos
from nereid_backend.vision.own_attention import OwnAttention
from nereid_backend.vision.packed_images import PackedImages
from nereid_backend.vision.single_images import GeneratedPath, SplitPath

if TYPE_CHECKING:
    from PIL.Image import Image

# The number of tokens that are generated after each test prompt.
_NUM_STEPS = 4
# The sizes of the test images in pixels, width and height.
_SIZES = ((40, 30), (30, 50))
# The number of frames of each test video.
_NUM_FRAMES = (4, 2)
# The largest size of the stored image features in bytes.
_FEATURE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class ImageSupport:
    """Describes how a model computes prompts with images.

    Attributes:
        name: "packed", "single" or "generated"; empty if images are refused.
        reason: a sentence that says why images are refused; empty if images are accepted.
        video_reason: a sentence that says why videos are refused; empty if videos are accepted.
        config: the config of the model.
        add: adds the support for images to the forward path for texts, and returns the new path.
        needs_images: whether the model computes only prompts with images.
        difference: the largest difference between the logits of the path and the logits of
            transformers' generate, relative to the standard deviation of the logits.
        features: the cache of image features; None if images are refused.
        check: raises a RequestError if the model cannot process a prompt with images.
    """

    name: str
    reason: str
    config: PretrainedConfig
    add: Callable[[ForwardPath], ForwardPath]
    video_reason: str = ""
    needs_images: bool = False
    difference: float = 0.0
    features: FeatureCache | None = None
    check: Callable[[list[int], ImageInputs], None] = lambda token_ids, images: None  # noqa: ARG005

    @property
    def shares_blocks(self) -> bool:
        """Whether the keys and values of a sequence with images are stored in blocks."""
        return self.name == "packed"


def choose_image_path(
    checkpoint: Checkpoint, folder: Path, spec: PathSpec, block_size: int, progress: Progress
) -> ImageSupport:
    """Choose how a model computes prompts with images.

    Args:
        checkpoint: a loaded model.
        folder: the folder of the checkpoint, with the processor.
        spec: the forward path for texts.
        block_size: the number of tokens in one block.
        progress: called with one line about the choice.

    Returns:
        The first candidate whose logits are correct; see the module's docstring. If there is none,
        images are refused.
    """
    config = checkpoint.model.config
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return refuse_images(config, "the served model reads only text.")
    if not has_processor(folder):
        return refuse_images(
            config, "the checkpoint has no processor for images (processor_config.json)."
        )
    attention = OwnAttention(checkpoint.model)
    try:
        processor = ChatProcessor(folder, config)
        with attention.used():
            trial = _make_trial(checkpoint, _image_prompts(processor), block_size)
    except Exception as error:  # noqa: BLE001 - a model's code can raise any exception
        reason = f"transformers cannot answer a test image: {_describe(error)}"
        progress(f"images: refused, because {reason}")
        return refuse_images(config, f"{reason}.")
    features = FeatureCache(checkpoint.model, _FEATURE_BYTES)
    # One text for each candidate that cannot be used: the candidate's name and its problem.
    problems: list[str] = []
    for name, add in _candidates(checkpoint, spec, features, attention):
        try:
            difference = check_path(add(spec.build(trial.sizes)), trial, checkpoint.model.dtype)
        except Exception as error:  # noqa: BLE001 - a model's code can raise any exception
            problems.append(f"{name}: {_describe(error)}")
            continue
        detail = f" ({'; '.join(problems)})" if problems else ""
        progress(f"images: {name}{detail}")
        video_reason = refused_videos(processor.processor)
        if not video_reason:
            try:
                with attention.used():
                    videos = _make_trial(checkpoint, _video_prompts(processor), block_size)
                check_path(add(spec.build(videos.sizes)), videos, checkpoint.model.dtype)
            except Exception as error:  # noqa: BLE001 - a model's code can raise any exception
                video_reason = _describe(error)
        progress(f"videos: refused, because {video_reason}" if video_reason else f"videos: {name}")
        # The number of encoded images is reported as a metric, which must not include the test
        # images.
        features.num_encoded = 0
        support = ImageSupport(
            name,
            "",
            config,
            add,
            video_reason=video_reason and f"{video_reason}.",
            difference=difference,
            features=features,
        )
        if name == "generated" or config.is_encoder_decoder:
            # transformers' generate and encoder-decoder models prepare the images in another way
            # than a decoder. This other way is not checked.
            return support
        return replace(support, check=PromptCheck(checkpoint.model, features, attention))
    reason = (
        "no way to compute images gives the same logits as transformers' generate: "
        f"{'; '.join(problems)}"
    )
    progress(f"images: refused, because {reason}")
    return refuse_images(config, f"{reason}.")


def refuse_images(config: PretrainedConfig, reason: str) -> ImageSupport:
    """Return the ImageSupport of a model that refuses images.

    The forward path for texts is not changed.

    Args:
        config: the config of the model.
        reason: a sentence that says why images are refused.
    """
    return ImageSupport(name="", reason=reason, config=config, add=lambda path: path)


def _candidates(
    checkpoint: Checkpoint, spec: PathSpec, features: FeatureCache, attention: OwnAttention
) -> Iterator[tuple[str, Callable[[ForwardPath], ForwardPath]]]:
    """Yield each candidate as a pair (name, function).

    The function takes the forward path for texts, and returns a forward path that also computes
    images.
    """

    def packed(path: ForwardPath) -> ForwardPath:
        if not isinstance(path, PackedPath):
            raise UnfitError(f"the forward path of texts is {spec.name}")
        path.images = PackedImages(checkpoint.model, features, attention)
        return path

    yield "packed", packed
    yield (
        "single",
        lambda path: SplitPath(path, SinglePath(checkpoint, uses_cache=True), features, attention),
    )
    yield (
        "generated",
        lambda path: SplitPath(path, GeneratedPath(checkpoint), features, attention),
    )


@torch.inference_mode()
def _make_trial(
    checkpoint: Checkpoint, make_prompts: list[Callable[[], ImagePrompt]], block_size: int
) -> Trial:
    """Return test prompts, and the logits of transformers' generate for these prompts.

    The last prompt equals the first prompt, so that stored features are tested, too.

    Args:
        checkpoint: the model.
        make_prompts: functions that return the prompts. If transformers cannot answer a prompt
            after the first prompt, the prompt is left out. Some models accept only one image.
        block_size: the number of tokens in one block.
    """
    prompts: list[ImagePrompt] = []
    answers: list[tuple[list[int], torch.Tensor]] = []
    for make_prompt in make_prompts:
        try:
            prompt = _placed(make_prompt(), checkpoint)
            answers.append(_generate(checkpoint, prompt))
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


def _generate(checkpoint: Checkpoint, prompt: ImagePrompt) -> tuple[list[int], torch.Tensor]:
    """Generate tokens with transformers' generate, and return the tokens and their logits.

    The last token is not returned, because a forward path computes all these logits from the
    earlier tokens.

    Raises:
        UnfitError: if the model generated fewer tokens than requested.
    """
    model: Any = checkpoint.model
    assert prompt.images is not None
    ids = torch.tensor([prompt.token_ids], device=checkpoint.device)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=_NUM_STEPS + 1,
        min_new_tokens=_NUM_STEPS + 1,
        do_sample=False,
        num_beams=1,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **prompt.images.arguments,
    )
    logits = torch.cat(output.logits).float()
    if len(logits) != _NUM_STEPS + 1:
        raise UnfitError(f"generate returned {len(logits)} tokens instead of {_NUM_STEPS + 1}")
    return output.sequences[0, -len(logits) : -1].tolist(), logits


def _describe(error: Exception) -> str:
    """Return the message of an error without a final period, for use within a sentence.

    Example: RuntimeError("shapes differ") gives "RuntimeError: shapes differ".
    """
    if isinstance(error, UnfitError | NereidError):
        return str(error).rstrip(".")
    return f"{type(error).__name__}: {first_line(error)}"
