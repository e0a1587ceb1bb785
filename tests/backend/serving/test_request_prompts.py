"""Images in a request to the tokenizer model, and content parts that no model accepts."""

import numpy as np
import pytest
from backend.serving.fake_server import Request
from nereid_backend import RequestError
from nereid_backend.serving.tokenizer.chat_messages import read_messages
from nereid_backend.serving.tokenizer.request_limits import RequestLimits
from nereid_backend.serving.tokenizer.request_prompts import RequestPrompts

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def body(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


def test_images_come_from_the_messages_or_from_the_tensor_but_not_from_both():
    prompts = RequestPrompts(prompts=None, images=object())
    with_tensor = Request(image=np.array([b"png"], dtype=np.object_))
    assert prompts.take_images(with_tensor, body({"type": "text", "text": "a"})) == [b"png"]
    assert prompts.take_images(Request(), body(IMAGE)) == [b"data:image/png;base64,AAAA"]
    with pytest.raises(RequestError, match=r"^image: the messages of the request have images, too"):
        prompts.take_images(with_tensor, body(IMAGE))


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ("abc", 'item 0 has the content part "abc", which is not an object'),
        (7, "item 0 has the content part 7, which is not an object"),
        ({"type": "song"}, 'item 0 has a content part of type "song", but this server supports'),
        (
            {"text": "a"},
            "item 0 has a content part without the field type, but this server supports",
        ),
    ],
)
def test_a_wrong_content_part_is_refused_with_an_example(part, problem):
    with pytest.raises(RequestError) as caught:
        read_messages(body(part), RequestLimits.derive(4096, 8))
    assert str(caught.value).startswith(f"messages: {problem}")
    assert '{"type": "text", "text": "..."}' in str(caught.value)
