"""Tests that files and embeddings in chats are refused with an error that names them."""

import pytest
from nereid_backend.errors import RequestError
from nereid_backend.serving.tokenizer.chat.chat_messages import read_messages
from nereid_backend.serving.tokenizer.request_limits import RequestLimits
from nereid_backend.vision.decode_image import ImageLimits
from nereid_backend.vision.messages import split_messages
from nereid_client.anthropic.content_blocks import _REFUSED_BLOCKS
from nereid_client.responses.input_items import _REMEDIES

PARTS = [
    ({"type": "file", "file": {"file_id": "file-1"}}, "files"),
    ({"type": "image_embeds", "image_embeds": "AAAA"}, "embeddings of images"),
    ({"type": "video_embeds", "video_embeds": "AAAA"}, "embeddings of images, videos"),
    ({"type": "audio_embeds", "audio_embeds": "AAAA"}, "embeddings of images, videos and audio"),
]


@pytest.mark.parametrize(("part", "word"), PARTS)
def test_each_shape_is_refused_by_name(part, word):
    content = [{"type": "text", "text": "What happens here?"}, part]
    messages = [{"role": "user", "content": content}]
    for read in (
        lambda: read_messages({"messages": messages}, RequestLimits.derive(4096, 8)),
        lambda: split_messages(messages, ImageLimits()),
    ):
        with pytest.raises(RequestError, match=f"{word}.* supported. Send "):
            read()


def test_the_other_apis_name_videos_and_audio():
    assert {"video", "audio"} <= _REFUSED_BLOCKS.keys()
    assert {"input_video", "input_audio", "input_file"} <= _REMEDIES.keys()
