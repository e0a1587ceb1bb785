# SPDX-License-Identifier: Apache-2.0
"""Uses a checkpoint's processor to prepare chat messages with images, videos or audio."""

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig
from transformers.video_utils import VideoMetadata

from nereid_backend.core.image_inputs import ImageInputs
from nereid_backend.errors import ModelError, RequestError, first_line
from nereid_backend.text.chat_template_files import complete_chat_template
from nereid_backend.tokenizer_file import apply_tokenizer_file
from nereid_backend.vision.audio_parts import FoundAudio, read_audio
from nereid_backend.vision.decode_image import ImageLimits
from nereid_backend.vision.image_digest import TOKEN_TYPES, arguments_digest
from nereid_backend.vision.load_processor import audio_processor, load_processor, refused_kinds
from nereid_backend.vision.messages import (
    KIND_OF,
    FoundImage,
    FoundVideo,
    Medium,
    decode_and_free_images,
    read_video,
    split_messages,
)
from nereid_backend.vision.refused_parts import refuse_kind

logger = logging.getLogger(__name__)

# Maps each type of media to an attribute of the processor. The attribute contains the placeholder
# text for this type of media.
_TOKENS = {FoundImage: "image_token", FoundVideo: "video_token", FoundAudio: "audio_token"}
# The outputs of a processor that belong to the text of a prompt. All other outputs belong to the
# images, videos or audio.
_TEXT_OUTPUTS = ("input_ids", "attention_mask")
# The name of one output of a processor. This output contains the type of each token (see
# `TOKEN_TYPES`).
_MM_TOKEN_TYPES = "mm_token_type_ids"
# The sampling rate that is used if the audio processor does not specify one.
_DEFAULT_RATE = 16_000


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt that the processor has rendered and tokenised. It can contain media.

    Attributes:
        token_ids: the tokens of the prompt. Each image, video or audio file is represented by
            placeholder tokens, one for each of its feature vectors.
        images: the prepared images, videos and audio files; None if the prompt contains no media.
        text: the rendered prompt, with one placeholder for each image, video or audio file.
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
            apply_tokenizer_file(self._tokenizer, folder)
            self._tokenizer.chat_template = complete_chat_template(
                self._tokenizer.chat_template, folder
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
        split, media = split_messages(messages, ImageLimits())
        if media:  # at least one image, video or audio file
            raise RequestError(
                f"messages: images, videos and audio are refused, because {self._reason}"
            )
        # Many chat templates of text models expect that each message has one text, not a list of
        # parts. Therefore join the texts of each message.
        text_messages = [_with_joined_texts(message) for message in split]
        try:
            text = self._tokenizer.apply_chat_template(
                text_messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            # A chat template can raise any exception. Convert the exception to a RequestError, so
            # that only the current request fails.
            raise RequestError(
                f"messages: the chat template cannot render the messages: {first_line(error)}"
            ) from error
        token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ImagePrompt(list(token_ids), None, str(text))


class ChatProcessor:
    """Converts chat messages to token ids, and converts their media to arguments of the model.

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
        # For each kind of media that the processor does not accept, `refused` contains the reason.
        # The kinds are "images", "videos" and "audio".
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
        split, media = split_messages(messages, self.limits)
        return self.prepare_with_media(split, media, template_arguments or {})

    @property
    def has_template(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return self.processor.chat_template is not None

    def prepare_with_media(
        self,
        messages: list[dict[str, Any]],
        media: Sequence[Medium],
        template_arguments: dict[str, Any],
    ) -> ImagePrompt:
        """Convert messages and their media to a prompt.

        The messages contain a placeholder for each image, video and audio file.

        Raises:
            RequestError: a message, an image, a video or an audio file is invalid.
        """
        if not self.has_template:
            # Without a chat template, the prompt consists of placeholders and texts, such as
            # "<image>Hi".
            return self._prepare_plain(messages, media)
        return self.prepare_rendered(self.render(messages, template_arguments), list(media))

    def _prepare_plain(
        self, messages: list[dict[str, Any]], media: Sequence[Medium]
    ) -> ImagePrompt:
        """Convert messages to a prompt for a checkpoint that has no chat template.

        The prompt consists of a placeholder for each image, video and audio file, and of the texts.
        Example: one image and the text "Hi" become "<image>Hi" if the processor's placeholder for
        images is "<image>". If the processor refuses this text or has no placeholders, only "Hi" is
        passed, because some processors insert the placeholders themselves.

        Raises:
            RequestError: the media are invalid, or the processor refuses the text. If both texts
                were refused, this is the error of the text with placeholders.
        """
        text = "\n".join(text for message in messages for text in _texts(message.get("content")))
        placeholders = self._placeholders(media)
        # `prepare_rendered` removes the files from a list of media, so pass a copy.
        if not placeholders:
            return self.prepare_rendered(text, list(media))
        try:
            return self.prepare_rendered(placeholders + text, list(media))
        except RequestError:
            with suppress(RequestError):
                return self.prepare_rendered(text, list(media))
            raise

    def _placeholders(self, media: Sequence[Medium]) -> str:
        """Return the processor's placeholders for `media`, such as "<image><image>" for two images.

        Return "" if the processor has no placeholder for one of the media.
        """
        values = [getattr(self.processor, _TOKENS[type(item)], None) for item in media]
        placeholders = [value for value in values if isinstance(value, str)]
        return "".join(placeholders) if len(placeholders) == len(media) else ""

    def prepare_rendered(
        self, text: str, media: list[Medium], *, add_special_tokens: bool | None = None
    ) -> ImagePrompt:
        """Convert the rendered text of a chat and the chat's media to a prompt.

        Args:
            text: the rendered text. It contains one placeholder for each medium, unless the
                processor inserts the placeholders.
            media: the images, videos and audio files.
            add_special_tokens: whether the tokenizer adds its special tokens. None means that they
                are added unless the text begins with the BOS token.

        Raises:
            RequestError: the media are invalid, or the processor refuses the text or the media.

        Mutates: `media`. When an image is decoded, its file is removed, so that the memory of the
            file is freed early.
        """
        kinds = _kinds(media)  # such as ("images", "audio")
        for kind in kinds:
            if kind in self.refused:
                raise refuse_kind(kind, self.refused[kind])
        outputs = self._process(text, media, add_special_tokens=add_special_tokens)
        token_ids = [int(token) for token in outputs["input_ids"][0]]
        if not kinds:
            return ImagePrompt(token_ids, None, text)
        arguments = self._model_arguments(outputs, token_ids)
        # An object of `ImageInputs` contains the arguments for all media, not only for images.
        media_inputs = ImageInputs(
            arguments,
            arguments_digest(arguments),
            self._first_media_token(token_ids, arguments),
            kinds,
        )
        return ImagePrompt(token_ids, media_inputs, text)

    def _model_arguments(self, outputs: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
        """Return the outputs of the processor that describe the media, such as the pixels.

        These outputs are arguments of the model. If the model also needs the type of each token
        (text or image), and the processor has not returned the types, compute the types.
        """
        arguments = {name: value for name, value in outputs.items() if name not in _TEXT_OUTPUTS}
        if self._needs_token_types and _MM_TOKEN_TYPES not in arguments:
            types = self.processor.create_mm_token_type_ids([token_ids])
            arguments[_MM_TOKEN_TYPES] = torch.tensor(types)
        return arguments

    def render(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        """Render messages with the chat template, and return the text.

        The text contains one placeholder for each image, video and audio file. `arguments` are
        variables of the template, such as {"enable_thinking": False}.

        Raises:
            RequestError: the chat template fails.
        """
        # Templates for images expect lists: the content "Hi" becomes [{"type": "text", ...}].
        messages = [{**message, "content": _parts(message.get("content"))} for message in messages]
        try:
            return str(
                self.processor.apply_chat_template(
                    messages, tokenize=False, **{"add_generation_prompt": True, **arguments}
                )
            )
        except Exception as error:
            # A chat template can raise any exception. Convert the exception to a RequestError, so
            # that only the current request fails.
            raise RequestError(
                f"messages: the chat template cannot render the messages: {first_line(error)}"
            ) from error

    def _process(
        self, text: str, media: list[Medium], *, add_special_tokens: bool | None
    ) -> dict[str, Any]:
        """Pass a text and its media to the processor. Return the processor's outputs.

        For the arguments, see `prepare_rendered`.

        Raises:
            RequestError: the media are invalid, or the processor refuses the text or the media.

        Mutates: `media`. Each image file is removed after decoding, so that its memory is freed.
        """
        arguments = {
            **self._image_arguments(media),
            **self._video_arguments(media),
            **self._audio_arguments(media),
        }
        if add_special_tokens is not None:
            arguments["add_special_tokens"] = add_special_tokens
        elif self._begins_with_bos(text):
            arguments["add_special_tokens"] = False  # Otherwise, a second BOS token is added.
        with _errors_of_processor(media):
            outputs = self.processor(text=text, return_tensors="pt", **arguments)
        # The processor itself needs `video_metadata`, so `_video_arguments` requests it. The model
        # has no such argument, so remove it.
        return {name: value for name, value in outputs.items() if name != "video_metadata"}

    def _begins_with_bos(self, text: str) -> bool:
        """Return whether a text begins with the BOS token of the processor's tokenizer."""
        tokenizer = getattr(self.processor, "tokenizer", None)
        bos = getattr(tokenizer, "bos_token", None)
        return bos is not None and text.startswith(bos)

    def _image_arguments(self, media: list[Medium]) -> dict[str, Any]:
        """Decode the images in `media`, and return them as arguments for the processor.

        A processor that accepts images also gets the argument `images`, with the value None, if
        there are no images. A processor that refuses images has no such argument.

        Raises:
            RequestError: a file is damaged or exceeds a limit.

        Mutates: `media`. Each image file is removed after decoding, so that its memory is freed.
        """
        if "images" in self.refused:
            return {}
        return {"images": decode_and_free_images(media, self.limits) or None}

    def _audio_arguments(self, media: list[Medium]) -> dict[str, Any]:
        """Decode the audio in `media`, and return it as arguments for the processor.

        Raises:
            RequestError: a file is damaged or exceeds a limit.
        """
        audio = [item for item in media if isinstance(item, FoundAudio)]
        if not audio:
            return {}
        rate = getattr(audio_processor(self.processor), "sampling_rate", _DEFAULT_RATE)
        return {"audio": read_audio(audio, rate, self.limits), "sampling_rate": rate}

    def _video_arguments(self, media: list[Medium]) -> dict[str, Any]:
        """Decode the videos in `media`, and return them as arguments for the processor.

        Raises:
            RequestError: a frame is invalid.
        """
        videos = [item for item in media if isinstance(item, FoundVideo)]
        if not videos:
            return {}
        frames_of_videos = [read_video(video, self.limits) for video in videos]
        metadata = [
            VideoMetadata(
                total_num_frames=len(frames),
                fps=item.video.fps,
                width=frames[0].width,
                height=frames[0].height,
                duration=len(frames) / item.video.fps,
                frames_indices=list(range(len(frames))),
            )
            for frames, item in zip(frames_of_videos, videos, strict=True)
        ]
        return {
            "videos": frames_of_videos,
            "video_metadata": metadata,
            # `return_metadata` adds the metadata to the outputs. Some processors compute the times
            # of the frames from the metadata.
            "return_metadata": True,
            # The client has already chosen the frames, so the processor must use all of them.
            "do_sample_frames": False,
        }

    def _first_media_token(self, token_ids: list[int], arguments: dict[str, Any]) -> int:
        """Return the index of the first placeholder token for media; 0 if no token is found."""
        for name in TOKEN_TYPES:
            types = arguments.get(name)
            if isinstance(types, Tensor) and types.any():
                return int(types[0].nonzero()[0])
        positions = [i for i, token in enumerate(token_ids) if token in self.placeholder_ids]
        return positions[0] if positions else 0


@contextmanager
def _errors_of_processor(media: Sequence[Medium]) -> Iterator[None]:
    """Return a context manager that converts exceptions of a processor to RequestErrors.

    In the `with` block, the processor prepares `media`. A processor can raise any exception. A
    RequestError lets only the current request fail.

    Raises:
        RequestError: the processor has refused the text or the media.
        MemoryError: there is too little memory. The caller reports this error.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        logger.debug("The image processor failed.", exc_info=True)
        contents = " and the ".join(_kinds(media)) or "text"
        raise RequestError(
            f"messages: the checkpoint's processor cannot prepare the {contents}: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error


def _kinds(media: Sequence[Medium]) -> tuple[str, ...]:
    """Return the kinds of media in `media`, each kind once."""
    return tuple(dict.fromkeys(KIND_OF[type(item)] for item in media))


def _placeholder_ids(processor: Any, config: PretrainedConfig) -> set[int]:  # noqa: ANN401
    """Return the token ids of the placeholders for images, videos and audio."""
    names = [f"{token}_{end}" for token in _TOKENS.values() for end in ("id", "index")]
    values = [getattr(source, name, None) for source in (processor, config) for name in names]
    return {value for value in values if isinstance(value, int)}


def _takes_token_types(config: PretrainedConfig) -> bool:
    """Return whether the forward method of the model accepts the argument mm_token_type_ids."""
    name = (getattr(config, "architectures", None) or [""])[0]
    forward = getattr(getattr(transformers, name, None), "forward", None)
    return forward is not None and _MM_TOKEN_TYPES in inspect.signature(forward).parameters


def _parts(content: Any) -> Any:  # noqa: ANN401 - the content of a message
    """Convert a text to a list of one content part. Return any other content unchanged.

    Chat templates for images expect lists.
    """
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _texts(content: Any) -> list[str]:  # noqa: ANN401 - the content of a message
    """Return the texts in the content of a message."""
    parts = _parts(content) or []
    return [str(part["text"]) for part in parts if part.get("type") == "text" and "text" in part]


def _with_joined_texts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is one text instead of a list of parts.

    Example: the content [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}] becomes
    "ab". A message whose content is not a list is returned unchanged.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(_texts(content))}
