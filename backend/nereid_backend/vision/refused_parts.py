# SPDX-License-Identifier: Apache-2.0
"""The types of content parts that are refused, and the alternatives for clients."""

from collections.abc import Mapping
from typing import Any

_AUDIO = "audio is not supported. Send a transcript as a text part."
_FILE = "files are not supported. Send the text of the file as a text part."
_EMBEDS = "embeddings of images and videos are not supported. Send the images themselves."
# Maps each refused type of content part to the reason for the refusal. The names of the types come
# from the APIs of OpenAI, vLLM and SGLang, and from the chat templates of transformers.
_REASONS = {
    **dict.fromkeys(("audio", "audio_url", "input_audio", "audio_embeds"), _AUDIO),
    **dict.fromkeys(("file", "input_file", "file_url", "document"), _FILE),
    **dict.fromkeys(("image_embeds", "video_embeds"), _EMBEDS),
}


def refused_part(part: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the type of a refused content part and the reason for the refusal, or else None.

    In vLLM's API, a content part can have no type. The name of its field then determines the type.
    Example: the part {"audio_url": {"url": "data:..."}} returns ("audio_url", "audio is not
    supported. ...").
    """
    kind = part.get("type")
    if kind is None:
        kind = next((name for name in _REASONS if name in part), None)
    reason = _REASONS.get(kind) if isinstance(kind, str) else None
    return None if reason is None else (str(kind), reason)
