"""Tests of prompts with images in the tokenizer model, and of wrong content parts."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from backend.serving.fake_server import Request
from nereid_backend import RequestError
from nereid_backend.serving.tokenizer.chat.chat_messages import IMAGE_PLACEHOLDER, read_messages
from nereid_backend.serving.tokenizer.request_limits import RequestLimits
from nereid_backend.serving.tokenizer.request_prompts import RequestPrompts
from nereid_backend.serving.tokenizer.tokenizer_model import _is_long

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
LIMITS = RequestLimits.derive(4096, 8)


def body(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


def nested(depth):
    """Return a JSON schema with `depth` nested levels."""
    value = {}
    for _ in range(depth):
        value = {"not": value}
    return value


def test_images_come_from_the_messages_or_from_the_tensor_but_not_from_both():
    prompts = RequestPrompts(prompts=None, images=object())
    with_tensor = Request(image=np.array([b"png"], dtype=np.object_))
    assert prompts.take_images(with_tensor, body({"type": "text", "text": "a"})) == [b"png"]
    assert prompts.take_images(Request(), body(IMAGE)) == [b"data:image/png;base64,AAAA"]
    with pytest.raises(RequestError, match=r"^image: the messages of the request have images, too"):
        prompts.take_images(with_tensor, body(IMAGE))


class FakeImagePrompts:
    """A fake that always prepares a prompt of five tokens, or six tokens with special tokens."""

    def prepare(self, text, images, *, add_special_tokens=None):
        token_ids = [1, 2, 3, 4, 5]
        return [0, *token_ids] if add_special_tokens else token_ids, b"packed"


@pytest.fixture
def image_prompts():
    return RequestPrompts(SimpleNamespace(limits=LIMITS), FakeImagePrompts())


TEXT = np.array([b"<image>Hi"], dtype=np.object_)


@pytest.mark.parametrize(
    "fields", [{}, {"truncate_prompt_tokens": 5}, {"truncate_prompt_tokens": -1, "max_tokens": 9}]
)
def test_a_prompt_with_images_that_needs_no_truncation_is_accepted(image_prompts, fields):
    prompt = image_prompts.with_images(Request(text_input=TEXT), None, fields, [b"png"])
    assert prompt.token_ids == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("value", "num_tokens"), [(None, 5), (False, 5), (True, 6), ("true", 6)])
def test_special_tokens_are_added_to_a_prompt_with_images_on_request(
    image_prompts, value, num_tokens
):
    fields = {"add_special_tokens": value}
    prompt = image_prompts.with_images(Request(text_input=TEXT), None, fields, [b"png"])
    assert len(prompt.token_ids) == num_tokens


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"add_special_tokens": 1}, "add_special_tokens: the value must be true or false"),
        (
            {"truncate_prompt_tokens": 4},
            "truncate_prompt_tokens: the prompt has 5 tokens, but only 4 may be kept",
        ),
        # With max_model_len = 4096, this max_tokens leaves 4 tokens for the prompt of 5 tokens.
        ({"truncate_prompt_tokens": -1, "max_tokens": 4092}, "truncate_prompt_tokens: the prompt"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens: the value must be -1 or at least"),
        ({"json_schema": nested(300)}, "json_schema: the field has more than 256 nested levels"),
    ],
)
def test_a_field_that_a_prompt_with_images_cannot_follow_is_refused(image_prompts, fields, problem):
    with pytest.raises(RequestError, match=problem):
        image_prompts.with_images(Request(text_input=TEXT), None, fields, [b"png"])


def test_token_ids_beside_images_are_refused(image_prompts):
    request = Request(text_input=TEXT, input_ids=np.array([7], dtype=np.int32))
    with pytest.raises(RequestError, match=r"image: a request with images must .* no input_ids"):
        image_prompts.with_images(request, None, {}, [b"png"])


@pytest.mark.parametrize(
    ("part", "problem"),
    [
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
        read_messages(body(part), LIMITS)
    assert str(caught.value).startswith(f"messages: {problem}")
    assert '{"type": "text", "text": "..."}' in str(caught.value)


def test_a_text_part_without_a_string_names_its_field():
    with pytest.raises(RequestError, match=r"whose field text must be a string, but .* has 5"):
        read_messages(body({"type": "text", "text": 5}), LIMITS)


def test_a_content_part_can_be_a_string():
    (message,) = read_messages(body("abc", {"type": "text", "text": "d"}, "e"), LIMITS)
    assert message["content"] == "abcde"
    (message,) = read_messages(body(IMAGE_PLACEHOLDER, "abc"), LIMITS)
    assert message["content"] == [IMAGE_PLACEHOLDER, {"type": "text", "text": "abc"}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Par', {"unparsed_arguments": '{"city": "Par'}),
        ('["Paris"]', {"unparsed_arguments": '["Paris"]'}),
        (r'{"city": "\ud83d"}', {"unparsed_arguments": r'{"city": "\ud83d"}'}),
        ('{"text": "a\nb"}', {"text": "a\nb"}),
        ("null", {}),
        (" ", {}),
    ],
)
def test_a_call_whose_arguments_the_model_wrote_wrongly_does_not_end_the_conversation(
    arguments, expected
):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    (message,) = read_messages({"messages": messages}, LIMITS)
    assert message["tool_calls"][0]["function"]["arguments"] == expected


def test_results_of_tools_are_rendered_in_the_order_of_their_calls():
    def results_of(result_ids, call_ids=("a", "b", "c")):
        calls = [{"id": call_id, "function": {"name": "f"}} for call_id in call_ids]
        results = [
            {"role": "tool", "tool_call_id": result_id, "content": f"{number} of {result_id}"}
            for number, result_id in enumerate(result_ids)
        ]
        messages = [{"role": "assistant", "tool_calls": calls}, *results]
        return [message["content"] for message in read_messages({"messages": messages}, LIMITS)[1:]]

    assert results_of("cab") == ["1 of a", "2 of b", "0 of c"]
    assert results_of("ca") == ["1 of a", "0 of c"]
    # The calls of these results are not known for certain.
    assert results_of("bb") == ["0 of b", "1 of b"]
    assert results_of("xa") == ["0 of x", "1 of a"]
    assert results_of("ba", call_ids="aab") == ["0 of b", "1 of a"]


def test_calls_without_an_id_or_a_type_get_what_chat_templates_read():
    calls = [{"function": {"name": "f"}}, {"function": {"name": "g"}, "id": None, "type": None}]
    results = [{"role": "tool", "content": text} for text in ("1", "2", "3")]
    messages = [{"role": "assistant", "tool_calls": calls}, *results]
    assistant, *read = read_messages({"messages": messages}, LIMITS)
    assert [(call["id"], call["type"]) for call in assistant["tool_calls"]] == [
        ("call_0_0", "function"),
        ("call_0_1", "function"),
    ]
    assert [result.get("tool_call_id") for result in read] == ["call_0_0", "call_0_1", None]
    assert [result["name"] for result in read[:2]] == ["f", "g"]


def test_encrypted_thinking_is_left_out():
    parts = [{"type": "redacted_thinking", "data": "Ej"}, {"type": "text", "text": "Hi"}]
    (message,) = read_messages({"messages": [{"role": "assistant", "content": parts}]}, LIMITS)
    assert message == {"role": "assistant", "content": "Hi"}


def test_an_empty_list_of_tool_calls_is_left_out():
    message = {"role": "assistant", "content": "Hi", "tool_calls": []}
    assert read_messages({"messages": [message]}, LIMITS) == [
        {"role": "assistant", "content": "Hi"}
    ]


def test_a_refusal_beside_the_content_is_the_text_of_the_message():
    message = {"role": "assistant", "content": None, "refusal": "I can't help."}
    (read,) = read_messages({"messages": [message]}, LIMITS)
    assert read["content"] == "I can't help."


def chat_request(text):
    return Request(chat_request=np.array([text.encode()], dtype=np.object_))


@pytest.mark.parametrize(
    "part",
    [
        IMAGE,
        {"type": "image", "image": "http://example.org/a.png"},
        {"type": "input_image", "image_url": "aGk="},
        {"video": ["aGk="]},
        {"type": "input_audio", "input_audio": {"data": "aGk="}},
    ],
)
def test_a_chat_with_media_does_not_delay_the_chats_of_other_clients(part):
    text = json.dumps(body(part))
    # JSON allows an escape sequence for any letter, so the names of parts may be spelled with it.
    escaped = text.replace("image", "\\u0069mage").replace("dio", "\\u0064io")
    for spelling in (text, escaped.replace("ideo", "i\\u0064eo")):
        assert json.loads(spelling) == body(part)
        # Long requests are prepared in other threads than short requests.
        assert _is_long(chat_request(spelling), reads_media=True)


def test_a_completion_with_a_large_grammar_does_not_delay_other_requests():
    parameters = json.dumps({"regex": "(a|b)" * 10_000})
    fields = {"text_input": "Hello", "sampling_parameters": parameters}
    tensors = {name: np.array([text.encode()], dtype=np.object_) for name, text in fields.items()}
    assert _is_long(Request(**tensors), reads_media=False)


def test_a_chat_that_mentions_images_is_short_if_the_model_reads_none():
    text = json.dumps(body({"type": "text", "text": 'The "image" of a café'}))
    assert not _is_long(chat_request(text), reads_media=False)
    assert not _is_long(chat_request(text.replace("image", "picture")), reads_media=True)
