# SPDX-License-Identifier: Apache-2.0
"""Refuses certain types of content parts, and suggests an alternative to the client."""

from collections.abc import Mapping
from typing import Any

from nereid_backend.errors import RequestError

_FILE = "files are not supported. Send the text of the file as a text part."
_EMBEDS = "embeddings of images, videos and audio are not supported. Send the files themselves."
# Maps each refused type of content part to the reason for the refusal. The names of the types come
# from the APIs of OpenAI, vLLM and SGLang, and from the chat templates of transformers.
_REASONS = {
    **dict.fromkeys(("file", "input_file", "file_url", "document"), _FILE),
    **dict.fromkeys(("image_embeds", "video_embeds", "audio_embeds"), _EMBEDS),
}
# Maps each kind of media to a suggestion. Clients get the suggestion if the model does not accept
# this kind of media.
_REMEDIES = {
    "images": "Send text only.",
    "videos": "Send some frames of the video as image parts.",
    "audio": "Send a transcript as a text part.",
}


def refused_part(part: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the type of a refused content part and the reason for the refusal, or else None.

    In vLLM's API, a content part can have no type. The name of its field then determines the type.
    Example: the part {"file": {"file_id": "file-1"}} returns ("file", "files are not supported.
    ...").
    """
    kind = part.get("type")
    if kind is None:
        kind = next((name for name in _REASONS if name in part), None)
    reason = _REASONS.get(kind) if isinstance(kind, str) else None
    return None if reason is None else (str(kind), reason)


def refuse_kind(kind: str, reason: str) -> RequestError:
    """Return the error for a chat with images, videos or audio that the model does not accept.

    Args:
        kind: a member of `KINDS`.
        reason: the end of the sentence "videos are refused, because ...", without a period.
    """
    verb = "is" if kind == "audio" else "are"
    return RequestError(
        f"messages: {kind} {verb} refused, because {reason.rstrip('.')}. {_REMEDIES[kind]}"
    )
