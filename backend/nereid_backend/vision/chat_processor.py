# SPDX-License-Identifier: Apache-2.0
"""Prepares chat messages with images, videos or audio with the checkpoint's own processor."""

import hashlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig
from transformers.video_utils import VideoMetadata

from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.errors import ModelError, RequestError, first_line
from nereid_backend.vision.audio_parts import FoundAudio, read_audio
from nereid_backend.vision.load_processor import audio_processor, load_processor, refused_kinds
from nereid_backend.vision.messages import (
    KIND_OF,
    Found,
    FoundImage,
    FoundVideo,
    read_images,
    read_video,
    split_messages,
)
from nereid_backend.vision.read_image import ImageLimits
from nereid_backend.vision.refused_parts import refuse_kind

logger = logging.getLogger(__name__)

# The attribute of a processor that contains the text of the placeholder.
_TOKENS = {FoundImage: "image_token", FoundVideo: "video_token", FoundAudio: "audio_token"}
_DIGEST_BYTES = 32
# The outputs of a processor that belong to the text of a prompt. All other outputs belong to the
# images, videos or audio.
_TEXT_OUTPUTS = ("input_ids", "attention_mask")
# The outputs of a processor that contain one value for each token. The value is 0 for a text token,
# and another number for an image token.
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
# The sampling rate if the audio processor does not name its sampling rate.
_DEFAULT_RATE = 16_000


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt that the processor has rendered and tokenised.

    Attributes:
        token_ids: the tokens of the prompt. Each image is represented by placeholder tokens, one
            for each of its feature vectors.
        images: the prepared images; None if the prompt contains no image.
        text: the rendered prompt, with one placeholder for each image.
    """

    token_ids: list[int]
    images: ImageInputs | None
    text: str


class TextProcessor:
    """Converts chat messages to token ids with the checkpoint's tokenizer. Images are refused."""

    def __init__(self, folder: Path, reason: str) -> None:
        """Load the tokenizer.

        Args:
            folder: the folder of the checkpoint.
            reason: the reason why images are refused. It follows the word "because" in an error
                message, and ends with a period.

        Raises:
            ModelError: the checkpoint has no tokenizer, or its tokenizer is broken.
        """
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (ValueError, OSError, KeyError, ImportError) as error:
            raise ModelError(
                f"the tokenizer in {folder} cannot be loaded: {first_line(error)}"
            ) from error
        self._reason = reason

    def prepare(self, messages: Sequence[Any]) -> ImagePrompt:
        """Convert chat messages to a prompt.

        Raises:
            RequestError: a message is invalid or contains an image.
        """
        messages, found = split_messages(messages, ImageLimits())
        if found:
            raise RequestError(
                f"messages: images, videos and audio are refused, because {self._reason}"
            )
        joined = [
            {**message, "content": "".join(_texts(message["content"]))}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                joined, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            # A chat template can raise any exception. This exception must end only the request with
            # these messages.
            raise RequestError(
                f"messages: the chat template cannot render the messages: {first_line(error)}"
            ) from error
        token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ImagePrompt(list(token_ids), None, str(text))


class ChatProcessor:
    """Converts chat messages to token ids, and their media to arguments of the model.

    Attributes:
        limits: the limits of the images of one request.
        processor: the checkpoint's processor, a processor of transformers.
        refused: maps each kind of media that the processor does not accept to the reason.
        placeholder_ids: the token ids of the placeholders for media.
    """

    def __init__(
        self, folder: Path, config: PretrainedConfig, limits: ImageLimits | None = None
    ) -> None:
        """Load the processor of a checkpoint.

        Raises:
            ModelError: the processor is missing or broken, or needs a package that is missing.
        """
        self.limits = limits or ImageLimits()
        self.processor: Any = load_processor(folder, config)
        self.refused = refused_kinds(self.processor)
        self.placeholder_ids = _placeholder_ids(self.processor, config)
        # Some models need the type of each token (text or image), but not every processor returns
        # these types.
        self._needs_token_types = _takes_token_types(config)

    def prepare(
        self, messages: Sequence[Any], template_arguments: dict[str, Any] | None = None
    ) -> ImagePrompt:
        """Convert chat messages to a prompt.

        Args:
            messages: messages in the format of OpenAI's chat completions. An image in a message is
                a data URL, bytes or an image of Pillow. The modules video_frames and audio_parts
                describe the formats of videos and audio.
            template_arguments: further variables of the chat template, such as `tools`.

        Raises:
            RequestError: a message or an image is invalid.
        """
        return self.prepare_split(*split_messages(messages, self.limits), template_arguments or {})

    @property
    def has_template(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return _chat_template(self.processor) is not None

    def prepare_split(
        self,
        messages: list[dict[str, Any]],
        found: Sequence[Found],
        template_arguments: dict[str, Any],
    ) -> ImagePrompt:
        """Convert messages and their media to a prompt.

        The messages contain a placeholder for each image, video and audio file. The docstring of
        `prepare` lists the errors.
        """
        if not self.has_template:
            return self._prepare_plain(messages, found)
        return self.prepare_text(self.render(messages, template_arguments), found)

    def _prepare_plain(self, messages: list[dict[str, Any]], found: Sequence[Found]) -> ImagePrompt:
        """Convert messages to a prompt if the checkpoint has no chat template.

        The prompt consists of a placeholder for each image, video and audio file, and of the texts.
        Some processors insert the placeholders themselves, and refuse a text that contains
        placeholders.
        """
        texts = [text for message in messages for text in _texts(message.get("content"))]
        text = "\n".join(texts)
        names = [_TOKENS[type(item)] for item in found]
        values = [getattr(self.processor, name, None) for name in names]
        placeholders = [value for value in values if isinstance(value, str)]
        if len(placeholders) < len(found):
            return self.prepare_text(text, found)
        try:
            return self.prepare_text("".join([*placeholders, text]), found)
        except RequestError as error:
            try:
                return self.prepare_text(text, found)
            except RequestError:
                raise error from None

    def prepare_text(self, text: str, found: Sequence[Found]) -> ImagePrompt:
        """Convert a rendered text and its media to a prompt.

        The text contains one placeholder for each image, video and audio file, unless the processor
        inserts the placeholders.

        Raises:
            RequestError: the media are invalid, or the processor refuses the text or the media.
        """
        kinds = _kinds(found)
        for kind in kinds:
            if kind in self.refused:
                raise refuse_kind(kind, self.refused[kind])
        outputs = self._process(text, found)
        token_ids = [int(token) for token in outputs["input_ids"][0]]
        if self._needs_token_types and TOKEN_TYPES[0] not in outputs:
            types = self.processor.create_mm_token_type_ids([token_ids])
            outputs[TOKEN_TYPES[0]] = torch.tensor(types)
        if not found:
            return ImagePrompt(token_ids, None, text)
        arguments = {name: value for name, value in outputs.items() if name not in _TEXT_OUTPUTS}
        first_token = self._first_image_token(token_ids, arguments)
        digest = arguments_digest(arguments)
        return ImagePrompt(token_ids, ImageInputs(arguments, digest, first_token, kinds), text)

    def render(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        """Render messages with the chat template, and return the text.

        The text contains one placeholder for each image, video and audio file.

        Raises:
            RequestError: the chat template fails.
        """
        messages = [{**message, "content": _parts(message.get("content"))} for message in messages]
        try:
            return str(
                self.processor.apply_chat_template(
                    messages, tokenize=False, **{"add_generation_prompt": True, **arguments}
                )
            )
        except Exception as error:
            # A chat template can raise any exception. This exception must end only the request with
            # these messages.
            raise RequestError(
                f"messages: the chat template cannot render the messages: {first_line(error)}"
            ) from error

    def _process(self, text: str, found: Sequence[Found]) -> dict[str, Any]:
        """Call the processor for a text and its media. Return the outputs."""
        tokenizer = getattr(self.processor, "tokenizer", None)
        bos = getattr(tokenizer, "bos_token", None)
        arguments: dict[str, Any] = {"return_tensors": "pt"}
        if bos is not None and text.startswith(bos):
            # The rendered text already begins with the BOS token.
            arguments["add_special_tokens"] = False
        if "images" not in self.refused:
            arguments["images"] = read_images(found, self.limits) or None
        if videos := [item for item in found if isinstance(item, FoundVideo)]:
            arguments |= self._video_arguments(videos)
        if audio := [item for item in found if isinstance(item, FoundAudio)]:
            rate = getattr(audio_processor(self.processor), "sampling_rate", _DEFAULT_RATE)
            arguments["audio"] = read_audio(audio, rate, self.limits)
            arguments["sampling_rate"] = rate
        try:
            outputs = self.processor(text=text, **arguments)
        except Exception as error:
            # A processor can raise any exception. Convert the exception to a RequestError, so that
            # only the current request fails.
            logger.debug("The image processor failed.", exc_info=True)
            raise RequestError(
                f"messages: the checkpoint's processor cannot prepare the "
                f"{' and the '.join(_kinds(found)) or 'text'}: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
        return {name: value for name, value in outputs.items() if name != "video_metadata"}

    def _video_arguments(self, videos: list[FoundVideo]) -> dict[str, Any]:
        """Decode videos, and return the arguments of the processor that contain the videos.

        Raises:
            RequestError: a frame is invalid.
        """
        frames = [read_video(found, self.limits) for found in videos]
        metadata = [
            VideoMetadata(
                total_num_frames=len(images),
                fps=found.video.fps,
                width=images[0].width,
                height=images[0].height,
                duration=len(images) / found.video.fps,
                frames_indices=list(range(len(images))),
            )
            for images, found in zip(frames, videos, strict=True)
        ]
        return {
            "videos": frames,
            "video_metadata": metadata,
            # `return_metadata` adds the metadata to the outputs. Some processors compute the times
            # of the frames from the metadata.
            "return_metadata": True,
            # The client has already chosen the frames, so the processor must use all of them.
            "do_sample_frames": False,
        }

    def _first_image_token(self, token_ids: list[int], arguments: dict[str, Any]) -> int:
        """Return the index of the first image token, or 0 if no image token is found."""
        for name in TOKEN_TYPES:
            types = arguments.get(name)
            if isinstance(types, Tensor) and types.any():
                return int(types[0].nonzero()[0])
        positions = [i for i, token in enumerate(token_ids) if token in self.placeholder_ids]
        return positions[0] if positions else 0


def _kinds(found: Sequence[Found]) -> tuple[str, ...]:
    """Return the kinds of media in `found`, each kind once."""
    return tuple(dict.fromkeys(KIND_OF[type(item)] for item in found))


def _placeholder_ids(processor: Any, config: PretrainedConfig) -> set[int]:  # noqa: ANN401
    """Return the token ids of the placeholders for images, videos and audio."""
    names = [f"{token}_{end}" for token in _TOKENS.values() for end in ("id", "index")]
    values = [getattr(source, name, None) for source in (processor, config) for name in names]
    return {value for value in values if isinstance(value, int)}


def _takes_token_types(config: PretrainedConfig) -> bool:
    """Return whether the forward method of the model accepts the argument mm_token_type_ids."""
    name = (getattr(config, "architectures", None) or [""])[0]
    forward = getattr(getattr(transformers, name, None), "forward", None)
    return forward is not None and TOKEN_TYPES[0] in inspect.signature(forward).parameters


def _chat_template(processor: Any) -> str | None:  # noqa: ANN401 - a processor of transformers
    """Return the chat template of a processor, or else the chat template of its tokenizer."""
    template = getattr(processor, "chat_template", None)
    if template is None:
        template = getattr(getattr(processor, "tokenizer", None), "chat_template", None)
    return template


def _parts(content: Any) -> Any:  # noqa: ANN401 - the content of a message
    """Convert a text to a list of one content part. Return any other content unchanged.

    Chat templates for images expect lists.
    """
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _texts(content: Any) -> list[str]:  # noqa: ANN401 - the content of a message
    """Return the texts in the content of a message."""
    parts = _parts(content) or []
    return [str(part["text"]) for part in parts if part.get("type") == "text" and "text" in part]


def arguments_digest(arguments: Mapping[str, Any]) -> bytes:
    """Return one hash of the names and the values of all image arguments of a prompt."""
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in sorted(arguments):
        state.update(name.encode())
        _update(state, arguments[name])
    return state.digest()


def _update(state: Any, value: Any) -> None:  # noqa: ANN401 - a hash, and a tensor or a list
    """Add a value to a hash. If the value is a tensor, also add its shape and its data type."""
    if isinstance(value, list | tuple):
        state.update(f"[{len(value)}".encode())
        for item in value:
            _update(state, item)
    elif isinstance(value, Tensor):
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        state.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        state.update(f"{value.dtype}{value.shape}".encode())
        state.update(np.ascontiguousarray(value).tobytes())
    else:
        state.update(repr(value).encode())
