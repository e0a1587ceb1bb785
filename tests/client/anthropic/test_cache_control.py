"""Tests of the field `cache_control` in requests of Anthropic's API."""

import pytest
from nereid_client.anthropic.cache_control import cache_retention
from nereid_client.anthropic.chat_translation import chat_request
from nereid_client.anthropic.messages_request import MessagesRequest
from nereid_client.errors import FieldError

FIVE = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
TEXT = {"type": "text", "text": "Hi"}


def body(**fields):
    return {"messages": [{"role": "user", "content": [TEXT]}], "max_tokens": 5, **fields}


def marked(block, control=FIVE):
    return [{"role": "user", "content": [{**block, "cache_control": control}]}]


@pytest.mark.parametrize(
    ("request_body", "expected"),
    [
        (body(), None),
        (body(cache_control=FIVE), "5m"),
        (body(cache_control=None), None),
        (body(system=[{**TEXT, "cache_control": HOUR}]), "1h"),
        (body(messages=marked(TEXT)), "5m"),
        (body(messages=marked(TEXT), system=[{**TEXT, "cache_control": HOUR}]), "1h"),
        (body(tools=[{"name": "a", "input_schema": {}, "cache_control": FIVE}]), "5m"),
        (
            body(
                messages=[
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "content": [{**TEXT, "cache_control": HOUR}]}
                        ],
                    }
                ]
            ),
            "1h",
        ),
        (body(system="text", messages=[{"role": "user", "content": "Hi"}]), None),
    ],
)
def test_the_longest_time_to_live_counts(request_body, expected):
    assert cache_retention(request_body) == expected


def test_a_wrong_time_names_its_place():
    with pytest.raises(FieldError) as raised:
        cache_retention(body(messages=marked(TEXT, {"type": "ephemeral", "ttl": "2h"})))
    assert "messages[0].content[0].cache_control" in str(raised.value)


def test_the_user_id_names_the_session():
    request_body = body(cache_control=HOUR, metadata={"user_id": "session-1"})
    chat = chat_request(MessagesRequest.model_validate(request_body), request_body)
    assert chat["prompt_cache_key"] == "session-1"
    assert chat["prompt_cache_retention"] == "1h"
    assert "cache_control" not in chat


def test_fields_of_the_request_take_precedence():
    request_body = body(cache_control=HOUR, prompt_cache_retention="24h", prompt_cache_key="k")
    chat = chat_request(MessagesRequest.model_validate(request_body), request_body)
    assert (chat["prompt_cache_key"], chat["prompt_cache_retention"]) == ("k", "24h")


@pytest.mark.anyio
@pytest.mark.parametrize("route", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("control", [True, 5, {"type": "x"}, {"type": "ephemeral", "ttl": 5}, {}])
async def test_a_wrong_cache_control_is_refused_by_name(connect, route, control):
    async with connect() as client:
        response = await client.post(route, json=body(cache_control=control))
    assert response.status_code == 400
    assert "cache_control" in response.json()["error"]["message"]
