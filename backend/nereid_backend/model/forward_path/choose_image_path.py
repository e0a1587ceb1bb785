# SPDX-License-Identifier: Apache-2.0
"""Chooses how a model processes prompts with images, videos or audio.

The following candidates are tried in this order. The first candidate with correct logits is used.
Logits are correct if transformers' generate computes the same logits for test images. If the model
accepts no images, the test uses videos or audio.

    packed      the model's code encodes the images, and the forward path `packed` computes the
                decoder, together with the tokens of other sequences
    single      the model's own code computes one sequence at a time, with its own cache
    generated   transformers' generate computes every token; very slow

The choice never depends on the model's name. If no candidate can be used, requests with images are
refused with the reasons. The chosen candidate is also tested with videos and with audio. If its
logits for one of these kinds are not correct, requests with this kind are refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PretrainedConfig

from nereid_backend.core.image_inputs import KINDS, ImageInputs
from nereid_backend.errors import NereidError
from nereid_backend.load_checkpoint import Checkpoint, Progress
from nereid_backend.model.forward_path.media_references import describe, generate_references
from nereid_backend.model.forward_path.path_spec import PathSpec
from nereid_backend.model.forward_path.reference_logits import ReferenceLogits
from nereid_backend.model.forward_path.self_check import check_path
from nereid_backend.paths.model_call import UnfitError
from nereid_backend.paths.packed import PackedPath
from nereid_backend.paths.single_sequence import SinglePath
from nereid_backend.step_runner import ForwardPath
from nereid_backend.vision.chat_processor import ChatProcessor
from nereid_backend.vision.check_prompt import PromptCheck
from nereid_backend.vision.forward.feature_cache import FeatureCache
from nereid_backend.vision.forward.own_attention import OwnAttention
from nereid_backend.vision.forward.packed_images import PackedImages
from nereid_backend.vision.forward.single_images import GeneratedPath, SplitPath
from nereid_backend.vision.load_processor import has_processor

# The memory limit for all stored image features together, in bytes.
_FEATURE_BYTES = 256 * 2**20


_AddImages = Callable[[ForwardPath], ForwardPath]
"""Adds the support for images to the forward path for texts, and returns the new path."""


class _Candidate(NamedTuple):
    """One of the ways in which a model can process prompts with images.

    Attributes:
        name: "packed", "single" or "generated".
        add_images: adds the support for images to the forward path for texts, and returns the new
            path.
    """

    name: str
    add_images: _AddImages


@dataclass(frozen=True, slots=True)
class ImageSupport:
    """Describes how a model processes prompts with images, videos or audio.

    Attributes:
        name: "packed", "single" or "generated"; empty if all kinds of media are refused.
        reason: a sentence that says why all kinds of media are refused; empty if a kind is
            accepted.
        refused: maps each refused kind of media to a clause with the reason.
        config: the config of the model.
        add_images: adds the support for images to the forward path for texts, and returns the new
            path.
        needs_images: whether the model processes only prompts with images.
        difference: the largest difference between the logits of the path and the logits of
            transformers' generate, relative to the standard deviation of the logits.
        features: the cache of image features; None if all kinds of media are refused.
        check: raises a RequestError if the model cannot process a prompt with images.
    """

    name: str
    reason: str
    config: PretrainedConfig
    add_images: _AddImages
    needs_images: bool = False
    difference: float = 0.0
    features: FeatureCache | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[list[int], ImageInputs], None] = lambda token_ids, images: None  # noqa: ARG005

    @property
    def shares_blocks(self) -> bool:
        """Whether the keys and values of a sequence with images are stored in blocks."""
        return self.name == "packed"

    @property
    def kind(self) -> str:
        """The accepted kinds of media, as a text such as "images or audio"."""
        return " or ".join(kind for kind in KINDS if kind not in self.refused)


def choose_image_path(
    checkpoint: Checkpoint, folder: Path, spec: PathSpec, block_size: int, progress: Progress
) -> ImageSupport:
    """Choose how a model processes prompts with images.

    Args:
        checkpoint: a loaded model.
        folder: the folder of the checkpoint, with the processor.
        spec: the forward path for texts.
        block_size: the number of tokens in one block.
        progress: called with one line about the choice.

    Returns:
        The first candidate ("packed", "single" or "generated") whose logits are correct. If there
        is none, images are refused.
    """
    config = checkpoint.model.config
    if reason := _reason_against_images(config, folder):
        return refuse_images(config, reason)
    attention = OwnAttention(checkpoint.model)
    try:
        processor = ChatProcessor(folder, config)
    except NereidError as error:
        progress(f"images: refused, because {describe(error)}")
        return refuse_images(config, f"{describe(error)}.")
    with attention.activated():
        references, unanswered = generate_references(checkpoint, processor, block_size)
    features = FeatureCache(_FEATURE_BYTES)
    features.install(checkpoint.model)
    candidates = _candidates(checkpoint, spec, features, attention)

    def check_and_measure(add_images: _AddImages, reference: ReferenceLogits) -> float:
        """Return the difference between a candidate's logits and the expected logits.

        Raise an exception if the difference is too large.
        """
        return check_path(
            add_images(spec.build(reference.sizes)), reference, checkpoint.model.dtype
        )

    chosen, incorrect = _choose_candidate(candidates, references, check_and_measure)
    refused = {**processor.refused, **unanswered, **incorrect}
    _report(chosen, refused, progress)
    if chosen is None:
        first_kind = next(kind for kind in KINDS if kind not in processor.refused)
        return refuse_images(config, f"{refused[first_kind]}.")
    # The number of encoded images is reported as a metric, which must not include the test images.
    features.num_encoded = 0
    support = ImageSupport(
        name=chosen.name,
        reason="",
        config=config,
        add_images=chosen.add_images,
        difference=chosen.difference,
        features=features,
        refused=refused,
    )
    # On the path "generated", only the model's method `generate` prepares the images. `PromptCheck`
    # does not call `generate`, so prompts are not checked on this path.
    if chosen.name != "generated":
        support = replace(support, check=PromptCheck(checkpoint.model, features, attention).check)
    return support


def _reason_against_images(config: PretrainedConfig, folder: Path) -> str | None:
    """Return a sentence that says why a checkpoint does not support images, or None.

    `folder` is the folder of the checkpoint.
    """
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not config.sub_configs:
        return "the served model reads only text."
    if not has_processor(folder):
        return "the checkpoint has no processor for images (processor_config.json)."
    return None


@dataclass(frozen=True, slots=True)
class _Choice:
    """The chosen candidate.

    Attributes:
        name: the name of the candidate.
        add_images: adds the support for images to the forward path for texts, and returns the new
            path.
        difference: the largest difference from the logits of transformers' generate.
        problems: one text for each candidate that was tried before without success, such as
            "packed: RuntimeError: shapes differ".
    """

    name: str
    add_images: _AddImages
    difference: float
    problems: list[str]


def _choose_candidate(
    candidates: list[_Candidate],
    references: dict[str, ReferenceLogits],
    check_and_measure: Callable[[_AddImages, ReferenceLogits], float],
) -> tuple[_Choice | None, dict[str, str]]:
    """Choose a candidate, and refuse each kind of media for which the logits are wrong.

    A candidate is a way to run a model. The kinds of media (images, videos and audio) are tried in
    the order of `references`. The first candidate that computes correct logits for a kind is
    chosen. The engine runs a model in only one way. Therefore, the later kinds must use the same
    candidate, and are refused if their logits are wrong.

    Args:
        candidates: the candidates in order of preference.
        references: for each kind of media, the test prompts and the expected logits.
        check_and_measure: returns the difference between a candidate's logits and the expected
            logits, or raises an exception if the difference is too large.

    Returns:
        The chosen candidate, with the largest difference of all accepted kinds; None if all kinds
        are refused. The second item maps each refused kind to the reason.
    """
    choice: _Choice | None = None
    refused: dict[str, str] = {}
    for kind, reference in references.items():
        try:
            if choice is None:
                choice = _first_correct(candidates, kind, reference, check_and_measure)
            else:
                difference = check_and_measure(choice.add_images, reference)
                choice = replace(choice, difference=max(choice.difference, difference))
        except Exception as error:  # noqa: BLE001 - a model's code can raise any exception
            refused[kind] = describe(error)
    return choice, refused


def _first_correct(
    candidates: list[_Candidate],
    kind: str,
    reference: ReferenceLogits,
    check_and_measure: Callable[[_AddImages, ReferenceLogits], float],
) -> _Choice:
    """Return the first candidate (a way to process images) that computes correct logits.

    Args:
        candidates: the candidates in order of preference.
        kind: the kind of media in the test prompts, for the error message.
        reference: the test prompts and the expected logits.
        check_and_measure: returns the difference between a candidate's logits and the expected
            logits, or raises an exception if the difference is too large.

    Raises:
        UnfitError: if no candidate has correct logits. The message contains the problem of each
            candidate, such as "packed: RuntimeError: shapes differ; single: ...".
    """
    problems: list[str] = []
    for name, add_images in candidates:
        try:
            difference = check_and_measure(add_images, reference)
        except Exception as error:  # noqa: BLE001 - a model's code can raise any exception
            problems.append(f"{name}: {describe(error)}")
        else:
            return _Choice(name, add_images, difference, problems)
    raise UnfitError(
        f"each method of computing {kind} gives other logits than generate of transformers: "
        f"{'; '.join(problems)}"
    )


def _report(choice: _Choice | None, refused: Mapping[str, str], progress: Progress) -> None:
    """Report whether the model accepts images, videos and audio, and how it computes them."""
    for kind in KINDS:
        if choice is None or kind in refused:
            progress(f"{kind}: refused, because {refused[kind]}")
        else:
            detail = f" ({'; '.join(choice.problems)})" if choice.problems else ""
            progress(f"{kind}: {choice.name}{detail}")


def refuse_images(config: PretrainedConfig, reason: str) -> ImageSupport:
    """Return an ImageSupport object for a model that refuses images.

    The forward path for texts is not changed.

    Args:
        config: the config of the model.
        reason: a sentence that says why images are refused.
    """
    return ImageSupport(name="", reason=reason, config=config, add_images=lambda path: path)


def _candidates(
    checkpoint: Checkpoint, spec: PathSpec, features: FeatureCache, attention: OwnAttention
) -> list[_Candidate]:
    """Return the ways to process prompts with images, in order of preference.

    Each candidate contains a function that adds the support for images to the forward path for
    texts. The function returns the changed path, or a `SplitPath`, which combines two forward
    paths: one for sequences without images, and one for sequences with images.

    Args:
        checkpoint: the model.
        spec: the forward path for texts.
        features: the cache of image features.
        attention: the attention of the model's own code, which computes the images.
    """

    def add_packed(path: ForwardPath) -> ForwardPath:
        """Enable images in the forward path `path`, and return `path`.

        A single forward pass then computes all sequences of a step, with or without images. This
        candidate is therefore the fastest. Raise an UnfitError if `path` is not a PackedPath.
        """
        if not isinstance(path, PackedPath):
            raise UnfitError(f"the forward path of texts is {spec.name}")
        path.images = PackedImages(checkpoint.model, features, attention)
        return path

    def add_single(path: ForwardPath) -> ForwardPath:
        """Return a SplitPath that computes sequences with images one at a time.

        For a sequence with images, the SplitPath uses the model's own attention and cache.
        """
        single_path = SinglePath(checkpoint, uses_cache=True)
        return SplitPath(path, single_path, features, attention)

    def add_generated(path: ForwardPath) -> ForwardPath:
        """Return a SplitPath that calls transformers' `generate` for sequences with images.

        This candidate is very slow, because `generate` is called again for each new token.
        """
        return SplitPath(path, GeneratedPath(checkpoint), features, attention)

    return [
        _Candidate("packed", add_packed),
        _Candidate("single", add_single),
        _Candidate("generated", add_generated),
    ]
