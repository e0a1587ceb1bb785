# SPDX-License-Identifier: Apache-2.0
"""Loads the processor of a checkpoint. If the package for videos is missing, videos are refused."""

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    PretrainedConfig,
    ProcessorMixin,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from nereid_backend.core.image_inputs import KINDS
from nereid_backend.errors import ModelError, first_line
from nereid_backend.text.chat_template_files import complete_chat_template
from nereid_backend.tokenizer_file import apply_tokenizer_file, settings_for_tekken
from nereid_backend.vision.torchvision_operators import declare_operators

_FILES = ("processor_config.json", "preprocessor_config.json")
# Maps the name of a processor's component to the transformers class that loads the component.
_AUTO_CLASSES = {
    "tokenizer": AutoTokenizer,
    "feature_extractor": AutoFeatureExtractor,
    "audio_processor": AutoFeatureExtractor,
}
_COMPONENTS = ("image_processor", "video_processor", *_AUTO_CLASSES)


def has_processor(folder: Path) -> bool:
    """Return whether a checkpoint has a processor for images or audio."""
    return any((folder / name).is_file() for name in _FILES)


def has_chat_template(folder: Path) -> bool:
    """Return whether a checkpoint has a chat template.

    The template is in a separate file, or in the config of the tokenizer or of the processor.
    """
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    paths = (folder / name for name in ("tokenizer_config.json", *_FILES))
    return any(path.is_file() and '"chat_template":' in path.read_text("utf-8") for path in paths)


def load_processor(folder: Path, config: PretrainedConfig) -> Any:  # noqa: ANN401 - transformers'
    """Return the processor of a checkpoint. It prepares texts, images, videos and audio.

    A processor without a chat template gets the chat template of its tokenizer.

    Many processors contain a component for videos, and this component needs torchvision. If
    torchvision is missing, the processor is loaded without this component, and accepts no videos.

    Raises:
        ModelError: the processor is missing or broken, or needs a package that is not installed.
    """
    declare_operators()  # Without this call, importing torchvision can fail. Processors import it.
    try:
        processor = _load(folder, config)
    except Exception as error:
        # A processor can raise any exception for a broken file.
        raise ModelError(
            f"the processor in {folder} cannot be loaded: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error
    if getattr(processor, "tokenizer", None) is not None:
        _correct_tokenizer(processor.tokenizer, folder)
    refused = refused_kinds(processor)
    if len(refused) == len(KINDS):
        raise ModelError(
            f"the processor in {folder} accepts no media: {'; '.join(refused.values())}"
        )
    if getattr(processor, "chat_template", None) is None:
        # If the chat template is in tokenizer_config.json, transformers stores the template in the
        # tokenizer, but not in the processor.
        tokenizer = getattr(processor, "tokenizer", None)
        processor.chat_template = getattr(tokenizer, "chat_template", None)
    processor.chat_template = complete_chat_template(processor.chat_template, folder)
    return processor


def _correct_tokenizer(tokenizer: Any, folder: Path) -> None:  # noqa: ANN401 - transformers'
    """Change a processor's tokenizer, so that media do not change the tokens of the text."""
    apply_tokenizer_file(tokenizer, folder)
    settings = settings_for_tekken(folder)
    if settings:
        corrected = _from_pretrained(AutoTokenizer, folder, **settings)
        tokenizer.backend_tokenizer.pre_tokenizer = corrected.backend_tokenizer.pre_tokenizer


def _load(folder: Path, config: PretrainedConfig) -> Any:  # noqa: ANN401 - transformers'
    """Return the processor of a checkpoint.

    If loading the processor fails, load it again without the component for videos. The result then
    accepts no videos. If this attempt fails, too, the exception of the processor's code is raised.
    This exception can be of any class.
    """
    try:
        processor = _from_pretrained(AutoProcessor, folder)
        # If the checkpoint's files do not name the class of the processor, AutoProcessor returns
        # only one component, such as the tokenizer.
        if isinstance(processor, ProcessorMixin):
            return processor
    except (ImportError, OSError, ValueError):
        # `_load_without_video` can load only processors that have a component for images.
        reads_images = "image_processor" in _processor_class(folder, config).get_attributes()
        if not reads_images:
            raise
    # This function can find the class of the processor by the type of the model.
    return _load_without_video(folder, config)


def _from_pretrained(auto_class: Any, folder: Path, **arguments: object) -> Any:  # noqa: ANN401
    """Call `from_pretrained` of a class. Neither download files nor run the checkpoint's code."""
    return auto_class.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, **arguments
    )


def refused_kinds(processor: Any) -> dict[str, str]:  # noqa: ANN401 - a processor of transformers
    """For each kind of media that a processor does not accept, return the reason.

    The keys are members of `KINDS`.
    """
    refused = {}
    if getattr(processor, "image_processor", None) is None:
        refused["images"] = "the checkpoint's processor has no image processor"
    video_processor = getattr(processor, "video_processor", None)
    if video_processor is None:
        refused["videos"] = "the checkpoint's processor has no video processor"
    elif isinstance(video_processor, _NoVideo):  # It replaces the video processor.
        refused["videos"] = (
            "the video processor needs the package torchvision, which is not installed"
        )
    if audio_processor(processor) is None:
        refused["audio"] = "the checkpoint's processor has no audio processor"
    elif "audio" not in inspect.signature(processor.__call__).parameters:
        refused["audio"] = "the checkpoint's processor has no argument for audio"
    return refused


def audio_processor(processor: Any) -> Any:  # noqa: ANN401 - processors of transformers
    """Return the component of a processor that prepares audio, or None."""
    component = getattr(processor, "audio_processor", None)
    return component or getattr(processor, "feature_extractor", None)


class _NoVideo:
    """Replaces a video processor that cannot be loaded, because a package is missing."""

    def __init__(self, image_processor: Any) -> None:  # noqa: ANN401 - transformers'
        # Processors read numbers such as `merge_size` from their video processor. The image
        # processor has the same numbers.
        self.__dict__.update(vars(image_processor))


class _AcceptsNoVideo:
    """A base class for processors that contain a `_NoVideo`."""

    # transformers logs the `repr` of a new processor. The original `repr` converts the processor to
    # JSON, which fails for a `_NoVideo`.
    __repr__ = object.__repr__

    def check_argument_for_proper_class(self, argument_name: str, argument: object) -> None:
        """Raise a TypeError if a component, except the video processor, has a wrong type."""
        if argument_name != "video_processor":
            super().check_argument_for_proper_class(argument_name, argument)  # type: ignore[misc]


def _processor_class(folder: Path, config: PretrainedConfig) -> Any:  # noqa: ANN401
    """Return the class of a checkpoint's processor.

    If processor_config.json does not name the class, the model type determines the class.
    """
    try:
        settings = json.loads((folder / _FILES[0]).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = {}
    named = getattr(transformers, str(settings.get("processor_class")), None)
    is_processor = isinstance(named, type) and issubclass(named, ProcessorMixin)
    return named if is_processor else PROCESSOR_MAPPING[type(config)]


def _load_without_video(folder: Path, config: PretrainedConfig) -> Any:  # noqa: ANN401 - a processor of transformers
    """Return a processor that accepts texts, images and perhaps audio, but no videos.

    The components of the processor are loaded one by one. A `_NoVideo` replaces the component for
    videos, because this component needs torchvision.

    Raises:
        ImportError: the image processor needs a package that is not installed.
    """
    processor_class = _processor_class(folder, config)
    components = _load_components(folder, processor_class.get_attributes())
    # The processor's config contains settings and components. Pass on only the settings, because
    # the components are a separate argument.
    processor_config, _ = processor_class.get_processor_dict(folder, local_files_only=True)
    settings = {name: value for name, value in processor_config.items() if name not in _COMPONENTS}
    # The constructor of `processor_class` would refuse an object of `_NoVideo`.
    subclass = _class_accepting_no_video(processor_class)
    return subclass.from_args_and_dict(components, settings)


def _load_components(folder: Path, names: Sequence[str]) -> list[Any]:
    """Load the components of a processor, and return them in the order of `names`.

    A `_NoVideo` takes the place of the component "video_processor".
    """
    # The backend "pil" needs only Pillow, not torchvision.
    image_processor = _from_pretrained(AutoImageProcessor, folder, backend="pil")
    components: list[Any] = []
    for name in names:
        match name:
            case "image_processor":
                components.append(image_processor)
            case "video_processor":
                components.append(_NoVideo(image_processor))
            case _:
                components.append(_from_pretrained(_AUTO_CLASSES[name], folder))
    return components


def _class_accepting_no_video(processor_class: type[ProcessorMixin]) -> Any:  # noqa: ANN401 - a class
    """Return a subclass of `processor_class`. The subclass accepts a `_NoVideo` in its constructor.

    A `_NoVideo` is an object in place of a video processor that cannot be loaded. The methods of
    `_AcceptsNoVideo` override the methods of `processor_class` with the same names.
    """
    return type(processor_class.__name__, (_AcceptsNoVideo, processor_class), {})
