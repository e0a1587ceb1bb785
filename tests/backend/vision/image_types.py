"""Creates tiny random checkpoints with processors, for the types that read images or audio.

The module `shrink` creates the small config of a type. The tokenizer has one token for each
character, and one for each special token in the source code of the processor's class.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from backend.vision.image_type_hints import HINTS
from nereid_backend.vision.load_processor import _NoVideo
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES
from transformers.utils import is_torchvision_available

from backend import shrink, shrink_hints

LENGTH = 4096
# The name of the model class for each type of model.
_CLASSES = {
    **MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
_CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
_PATTERN = re.compile(r"""["'](<[^"'<>\s]{1,40}>|\[[A-Z_]{2,20}\])["']""")
# The name and the text of a special token in the constructor of a processor. Example:
# self.image_token = "<image>"
_LITERAL = re.compile(r"""self\.(\w+_token)\s*=\s*["']([^"'\s]+)["']""")
_ATTRIBUTE = re.compile(r"tokenizer\.((?:\w+_)?token)(?:_id)?\b")
_FULL_PARTS = ("image_processor", "tokenizer")


# The methods of choosing the size of images. "small": the config and the processor use images of a
# few patches. "defaults": the config and the processor keep their defaults. "config": the processor
# uses the default of the config. "processor": the config uses the default of the processor.
SIZES = ("small", "defaults", "config", "processor")


def save(model_type: str, folder: Path, sizes: str = "defaults") -> Path:
    """Write a tiny random checkpoint of a type with its processor, and return the folder.

    The argument `sizes` is one of `SIZES`.
    """
    hints = {"_sizes": sizes, **HINTS.get(model_type, {})}
    values, config_class = small_values(model_type, hints)
    processor = make_processor(model_type, hints, values)
    _set_tokens(values, processor)
    _set_ids(values, processor, hints)
    config = config_class(**values)
    torch.manual_seed(0)
    model = _model_class(model_type)(config)
    _randomise(model, hints)
    model.generation_config.eos_token_id = None
    # The engine does not force a token at the end of an answer, so transformers must not do so.
    model.generation_config.forced_eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _model_class(model_type: str) -> Any:
    return getattr(transformers, _CLASSES[model_type])


def audio_types() -> list[str]:
    """Return the types of models whose processor has an audio processor."""
    return [
        model_type
        for model_type in _CLASSES
        if {"feature_extractor", "audio_processor"} & _processor_parts(model_type)
    ]


def _processor_parts(model_type: str) -> set[str]:
    """Return the names of a processor's parts, such as "tokenizer" and "image_processor".

    Return an empty set if the processor cannot be imported.
    """
    default = PROCESSOR_MAPPING_NAMES.get(model_type)
    name = HINTS.get(model_type, {}).get("_processor") or default or ""
    try:
        return set(getattr(transformers, name).get_attributes())
    except (AttributeError, ImportError):
        return set()


def _randomise(model: PreTrainedModel, hints: dict[str, Any]) -> None:
    """Set the weights of a model to random values with which the tokens depend on the context."""
    embeddings = hints.get("_embeddings", ("embed", "wte"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in embeddings):
                parameter.normal_(0.0, 0.02)
            elif parameter.dim() > 1:
                parameter.normal_(0.0, hints.get("_scale", 0.2))
            elif "gate" in name and parameter.numel() == 1:
                # The default of a gate is 0. The answers would then not depend on the images.
                parameter.fill_(0.5)


def small_values(model_type: str, hints: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the values of the small config of a type, and the class of the config."""
    config_class = type(AutoConfig.for_model(model_type))
    default_config = config_class(**hints.get("_birth", {}))
    hints = _with_text_hints(model_type, default_config, hints)
    shrink_hints_of_type = {
        name: value for name, value in hints.items() if not name.startswith("_p")
    }
    values = shrink._shrunk(default_config, shrink_hints_of_type)
    _lengthen(values)
    _set_sections(values, model_type, hints)
    vision = _vision_values(values)
    vision.update(hints.get("_vision", {}))
    _set_image_size(values, vision, model_type, hints)
    values.update(hints.get("_values", {}))
    for name, changes in hints.get("_parts", {}).items():
        values[name].update(changes)
    return values, config_class


def _set_image_size(
    values: dict[str, Any], vision: dict[str, Any], model_type: str, hints: dict[str, Any]
) -> None:
    """Set the size of images in a config to the size that the hint "_sizes" requires.

    The hint is one of `SIZES`. `vision` is the part of the config that describes the image encoder.
    """
    if hints["_sizes"] == "processor":
        default_sizes = dict(_image_class(model_type, hints)().size or {})
        side = next(iter(default_sizes.values()), None)
        if "image_size" in vision and side:
            vision["image_size"] = side
    if hints["_sizes"] == "small":
        patches_per_side = hints.get("_side", 4)
        if isinstance(vision.get("image_size"), int) and isinstance(vision.get("patch_size"), int):
            vision["image_size"] = patches_per_side * vision["patch_size"]
        if "image_seq_length" in values:
            values["image_seq_length"] = patches_per_side**2


def _with_text_hints(model_type: str, default_config: Any, hints: dict[str, Any]) -> dict[str, Any]:
    """Return the hints of a type, merged with the hints in `shrink_hints`.

    The hints in `shrink_hints` for the type and for its decoder are used.
    """
    merged = {**shrink_hints.HINTS.get(model_type, {}), **hints}
    text_config = getattr(default_config, "text_config", None)
    text_hints = shrink_hints.HINTS.get(getattr(text_config, "model_type", ""))
    if text_hints and "text_config" not in merged:
        merged["text_config"] = text_hints
    return merged


def _set_sections(values: dict[str, Any], model_type: str, hints: dict[str, Any]) -> None:
    """Set the sections of three-dimensional positions. Their sum is half of the head size."""
    source = inspect.getsource(inspect.getmodule(_model_class(model_type)))
    text = values.get("text_config", values)
    for rope in (text.get("rope_parameters"), values.get("rope_parameters")):
        has_sections = "mrope_section" in source or model_type.startswith("glm")
        if isinstance(rope, dict) and "rope_type" in rope and has_sections:
            rope["mrope_section"] = hints.get("_sections", [2, 3, 3])


def _vision_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config that describes the image encoder."""
    for name in ("vision_config", "visual_config", "vq_config"):
        if isinstance(values.get(name), dict):
            return values[name]
    return values


def _lengthen(values: dict[str, Any]) -> None:
    """Set the maximum lengths in a small config to `LENGTH`, because images need many tokens."""
    for name, value in values.items():
        if isinstance(value, dict):
            _lengthen(value)
        elif name == "max_position_embeddings" and value == shrink.LENGTH:
            values[name] = LENGTH


def _set_tokens(values: dict[str, Any], processor: Any) -> None:
    """Set the ids of special tokens in a config to their ids in the tokenizer."""
    tokenizer = getattr(processor, "tokenizer", processor)
    vocabulary = tokenizer.get_vocab()
    for name, value in values.items():
        if isinstance(value, dict):
            _set_tokens(value, processor)
        if name in ("bos_token_id", "eos_token_id", "pad_token_id") or not isinstance(name, str):
            continue
        # Example: the attribute "image_token_index" contains the id of "image_token".
        match = re.fullmatch(r"(\w+_token)_(?:id|index)", name)
        if match and isinstance(value, int | None):
            text = _special_token(processor, tokenizer, match[1])
            if isinstance(text, str) and text in vocabulary:
                values[name] = vocabulary[text]
            elif isinstance(value, int) and value >= shrink.VOCAB_SIZE:
                values[name] = vocabulary.get(f"<{match[1]}>", shrink.VOCAB_SIZE - 1)


def _special_token(processor: Any, tokenizer: Any, attribute: str) -> Any:
    """Return the special token in an attribute of the processor or of the tokenizer.

    Example: the attribute "image_token" contains "<image>".
    """
    token = getattr(processor, attribute, None)
    if attribute == "image_token" and isinstance(token, str):
        ids = [token_id for token_id in processor.image_token_ids if isinstance(token_id, int)]
        return tokenizer.convert_ids_to_tokens(ids[0]) if ids else token
    return token or getattr(tokenizer, attribute, None)


def _set_ids(values: dict[str, Any], processor: Any, hints: dict[str, Any]) -> None:
    """Set the fields of a config that the hint "_ids" names.

    The hint maps the name of a field to one special token or to a list of special tokens.
    """
    vocabulary = processor.tokenizer.get_vocab()
    if "vocabulary_map" in values:
        values["vocabulary_map"] = vocabulary
    for name, texts in hints.get("_ids", {}).items():
        if isinstance(texts, str):
            values[name] = vocabulary[texts]
        else:
            values[name] = [vocabulary[text] for text in texts]


def make_processor(model_type: str, hints: dict[str, Any], values: dict[str, Any]) -> Any:
    """Return the processor of a type."""
    name = hints.get("_processor") or PROCESSOR_MAPPING_NAMES[model_type]
    processor_class = getattr(transformers, name)
    parts = _make_parts(processor_class, model_type, hints, values)
    changes = {
        "check_argument_for_proper_class": lambda *a: None,
        "__repr__": object.__repr__,
        # The `save_pretrained` of some processors also saves the video processor, which is missing.
        "save_pretrained": ProcessorMixin.save_pretrained,
    }
    lenient_class = type(name, (processor_class,), changes)
    arguments = _processor_arguments(processor_class, _vision_values(values), hints)
    processor = lenient_class(**parts, **arguments)
    # A missing part must not be saved, so it is removed from the processor.
    saved_parts = [name for name, part in parts.items() if not isinstance(part, _NoVideo)]
    for part_name in set(parts) - set(saved_parts):
        delattr(processor, part_name)
    lenient_class.get_attributes = classmethod(lambda cls: saved_parts)
    return processor


def _make_parts(
    processor_class: Any, model_type: str, hints: dict[str, Any], values: dict[str, Any]
) -> dict[str, Any]:
    """Return the parts of a processor by their names.

    If there is no video processor for the type, the part is a `_NoVideo`.
    """
    names = processor_class.get_attributes()
    vision = _vision_values(values)
    tokenizer = make_tokenizer(processor_class, hints)
    reads_images = "image_processor" in names
    image_processor = _image_processor(model_type, hints, vision) if reads_images else None
    parts: dict[str, Any] = {}
    for name in names:
        if "tokenizer" in name:
            parts[name] = tokenizer
        elif name == "image_processor":
            parts[name] = image_processor
        elif name in ("feature_extractor", "audio_processor"):
            parts[name] = _audio_processor(model_type, hints, values)
        else:
            video_processor = _video_processor(model_type, hints, vision)
            parts[name] = video_processor or _NoVideo(image_processor)
    return parts


def _processor_arguments(
    processor_class: Any, vision: dict[str, Any], hints: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a processor that are computed from the config and the hints.

    An argument is left out if the processor class defines a default other than None, 0 or 256,
    because such a default fits the type. The hint "_arguments" overrides all defaults.
    """
    parameters = inspect.signature(processor_class.__init__).parameters
    patch_size, side = vision.get("patch_size"), vision.get("image_size")
    arguments = {
        "patch_size": patch_size,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    if hints["_sizes"] == "small" and isinstance(side, int) and isinstance(patch_size, int):
        num_patches = (side // patch_size) ** 2
        arguments |= {"num_image_tokens": num_patches, "image_seq_length": num_patches}
    hinted_arguments = hints.get("_arguments", {})
    arguments |= hinted_arguments
    arguments["chat_template"] = hints.get("_template")
    return {
        name: value
        for name, value in arguments.items()
        if name in parameters
        and value is not None
        and (name in hinted_arguments or parameters[name].default in (None, 0, 256))
    }


def _image_processor(model_type: str, hints: dict[str, Any], vision: dict[str, Any]) -> Any:
    image_class = _image_class(model_type, hints)
    fits_config = hints["_sizes"] in ("config", "small")
    sizes = _image_sizes(image_class(), vision) if fits_config else {}
    return image_class(**(sizes | hints.get("_image", {})))


def _audio_processor(model_type: str, hints: dict[str, Any], values: dict[str, Any]) -> Any:
    default = FEATURE_EXTRACTOR_MAPPING_NAMES.get(model_type, "WhisperFeatureExtractor")
    name = hints.get("_audio_class", default)
    audio_class = getattr(transformers, name)
    audio_config = values.get("audio_config")
    num_bins = audio_config.get("num_mel_bins") if isinstance(audio_config, dict) else None
    takes_size = "feature_size" in inspect.signature(audio_class.__init__).parameters
    sizes = {"feature_size": num_bins} if num_bins and takes_size else {}
    return audio_class(**(sizes | hints.get("_audio", {})))


def _video_processor(model_type: str, hints: dict[str, Any], vision: dict[str, Any]) -> Any:
    """Return the video processor of a type.

    The result is None if the type has no video processor or if torchvision is not installed.
    """
    names = VIDEO_PROCESSOR_MAPPING_NAMES.get(model_type.removesuffix("_thinker"))
    if not is_torchvision_available() or names is None:
        return None
    video_class = getattr(transformers, names["torchvision"])
    fits_config = hints["_sizes"] in ("config", "small")
    sizes = _image_sizes(video_class(), vision) if fits_config else {}
    return video_class(**(sizes | hints.get("_image", {}) | hints.get("_video", {})))


def _image_class(model_type: str, hints: dict[str, Any]) -> Any:
    names = hints.get("_image_processor") or IMAGE_PROCESSOR_MAPPING_NAMES[model_type]
    if isinstance(names, dict):
        names = names.get("pil") or names["torchvision"]
    return getattr(transformers, names)


def _image_sizes(default: Any, vision: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that make an image processor resize images for the image encoder.

    `default` is an image processor with the default arguments.
    """
    side = vision.get("image_size")
    arguments = {}
    for name in ("size", "crop_size"):
        size = getattr(default, name, None)
        if size and isinstance(side, int):
            keys = set(dict(size))
            if keys in ({"height", "width"}, {"shortest_edge"}, {"longest_edge"}):
                arguments[name] = dict.fromkeys(dict(size), side)
    for name in ("patch_size", "temporal_patch_size"):
        if isinstance(getattr(default, name, None), int) and isinstance(vision.get(name), int):
            arguments[name] = vision[name]
    return arguments


def make_tokenizer(processor_class: Any, hints: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the special tokens in the source code of a processor's class."""
    source = inspect.getsource(inspect.getmodule(processor_class))
    attributes = _token_attributes(source, hints)
    constants = [
        value
        for name, value in vars(processor_class).items()
        if name.endswith("_TOKEN") and isinstance(value, str)
    ]
    special_tokens = dict.fromkeys(
        [
            *("<pad>", "<s>", "</s>", "<unk>"),
            *constants,
            *attributes.values(),
            *_PATTERN.findall(source),
            *hints.get("_special", []),
        ]
    )
    vocabulary = {text: number for number, text in enumerate([*special_tokens, *_CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special_tokens))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=attributes,
        model_max_length=LENGTH,
    )


def _token_attributes(source: str, hints: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that `source`, the code of a processor, reads from its tokenizer.

    Example: the source code `tokenizer.image_token_id` gives {"image_token": "<image_token>"}.
    """
    hinted_tokens = hints.get("_tokens", {})
    literals = {**dict(_LITERAL.findall(source)), **hinted_tokens}
    attributes = {}
    for attribute in sorted({*_ATTRIBUTE.findall(source), *hinted_tokens}):
        has_own_name = attribute.split("_")[0] in ("bos", "eos", "pad", "unk", "add")
        is_left_out = attribute in ("token", *hints.get("_without", []))
        if not has_own_name and not is_left_out:
            attributes[attribute] = literals.get(attribute, f"<{attribute}>")
    return attributes
