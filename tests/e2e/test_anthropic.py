"""Tests of Anthropic's Messages API on a real server, with Anthropic's client library."""

import anthropic
import pytest

pytestmark = pytest.mark.triton

WEATHER = {
    "name": "get_weather",
    "description": "Return the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
BILLING_LINE = "x-anthropic-billing-header: cc_version=2.1; cch={};"


@pytest.fixture(scope="module")
def client(served):
    url = served.openai_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def fields(client):
    model = next(iter(client.models.list()))  # the chat model is the first one
    messages = [{"role": "user", "content": "Hello!"}]
    return {"model": model.id, "messages": messages, "max_tokens": 20, "extra_body": {"seed": 1}}


def test_a_message_streams_what_it_answers_at_once(client, fields):
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()

    assert streamed.to_dict()["content"] == whole.to_dict()["content"]
    assert streamed.usage.output_tokens == whole.usage.output_tokens > 0

    prompt = {name: fields[name] for name in ("model", "messages")}
    num_prompt_tokens = client.messages.count_tokens(**prompt).input_tokens
    assert num_prompt_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_a_strict_tool_is_called_with_arguments_that_match_its_schema(client, fields):
    message = client.messages.create(
        **fields | {"max_tokens": 60}, tools=[WEATHER], tool_choice={"type": "any"}
    )
    call = message.content[-1]
    assert (message.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
    assert list(call.input) == ["city"]


def test_a_changed_billing_line_does_not_prevent_a_hit_in_the_prefix_cache(client, fields):
    def usage_with_billing_number(number):
        texts = (BILLING_LINE.format(number), long_rules)
        system = [{"type": "text", "text": text} for text in texts]
        return client.messages.create(**fields | {"max_tokens": 1}, system=system).usage

    long_rules = " ".join(f"Rule {number}: be brief." for number in range(20))
    first = usage_with_billing_number(0)
    second = usage_with_billing_number(1)

    assert second.cache_read_input_tokens > 50
    assert first.input_tokens > second.input_tokens
