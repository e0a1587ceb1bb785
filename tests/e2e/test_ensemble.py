"""Tests of the ensemble with Triton's own protocols: gRPC, `generate` and `generate_stream`."""

import asyncio
import json
import urllib.error
import urllib.request

import pytest
from e2e.triton_client import ask, chat, tensor

pytestmark = pytest.mark.triton

MAX_TOKENS = 12
GREEDY = json.dumps({"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True})


def run(served, inputs):
    return asyncio.run(ask(served.grpc_url, inputs))


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=120) as reply:
        return reply.read().decode()


def completion(stream, text="Once upon a time", **fields):
    fields = json.loads(GREEDY) | fields
    return [
        tensor("text_input", text),
        tensor("stream", stream, "BOOL"),
        tensor("sampling_parameters", json.dumps(fields)),
    ]


def test_streaming_and_not_give_the_same_text(served):
    streamed = run(served, completion(stream=True))
    without_prompt = tensor("exclude_input_in_output", True, "BOOL")
    whole = run(served, [*completion(stream=False), without_prompt])

    assert len(streamed.deltas) > 1
    assert len(whole.deltas) == 1
    assert whole.text == streamed.text != ""
    assert streamed.finish_reasons == whole.finish_reasons == ["length"]


def test_a_text_prompt_is_repeated_when_not_streaming_as_in_the_vllm_backend(served):
    whole = run(served, completion(stream=False))
    assert whole.text.startswith("Once upon a time")
    assert not whole.deltas[0]["content"].startswith("Once upon a time")


def test_deltas_join_to_the_text_and_usage_counts_up(served):
    reply = run(served, completion(stream=True))
    assert "".join(d.get("content", "") for d in reply.deltas) == reply.text
    counts = [d["usage"]["completion_tokens"] for d in reply.deltas]
    assert counts == sorted(counts)
    assert counts[-1] == MAX_TOKENS


def test_optional_outputs_come_only_when_asked_for(served):
    flags = [tensor(f"return_{n}", True, "BOOL") for n in ("finish_reason", "num_input_tokens")]
    reply = run(served, [*completion(stream=False), *flags])
    (result,) = reply.outputs
    assert result.as_numpy("finish_reason")[0] == b"length"
    assert result.as_numpy("num_input_tokens")[0] > 0
    assert result.as_numpy("num_output_tokens") is None


def test_token_ids_may_be_the_prompt(served):
    inputs = [
        tensor("input_ids", [5, 6, 7], "INT32"),
        tensor("stream", True, "BOOL"),
        tensor("sampling_parameters", GREEDY),
    ]
    reply = run(served, inputs)
    usage = reply.deltas[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, MAX_TOKENS)


def test_every_stream_of_many_is_the_one_it_would_be_alone(served):
    requests = [completion(stream=True, text=f"Number {n} of the list") for n in range(24)]

    async def send_all():
        return await asyncio.gather(*(ask(served.grpc_url, request) for request in requests))

    replies = asyncio.run(send_all())

    for request, reply in zip(requests[:6], replies[:6], strict=True):
        assert reply.text == run(served, request).text
    assert all(reply.finish_reasons == ["length"] for reply in replies)


def test_the_same_seed_gives_the_same_text(served):
    def text(seed):
        return run(served, completion(stream=True, temperature=1.5, seed=seed)).text

    assert text(3) == text(3)
    assert len({text(seed) for seed in range(4)}) > 1


def test_a_stop_string_ends_the_answer_and_is_not_shown(served):
    plain = run(served, completion(stream=True, max_tokens=40)).text
    stop = plain[len(plain) // 2 :][:3]
    reply = run(served, completion(stream=True, max_tokens=400, stop=[stop]))
    assert reply.text == plain[: plain.index(stop)]
    assert reply.finish_reasons == ["stop"]
    assert reply.deltas[-1]["stop_reason"] == stop


def test_generate_answers_with_one_json_object(served):
    body = {"text_input": "Hello", "sampling_parameters": GREEDY}
    reply = json.loads(post(f"{served.http_url}/v2/models/llm/generate", body))
    assert reply["text_output"].startswith("Hello")


def test_generate_takes_sampling_fields_as_request_parameters(served):
    body = {"text_input": "Hello", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    reply = json.loads(post(f"{served.http_url}/v2/models/llm/generate", body))
    assert json.loads(reply["delta"])["usage"]["completion_tokens"] == 3


def test_generate_stream_sends_events(served):
    body = {"text_input": "Hello", "stream": True, "sampling_parameters": GREEDY}
    text = post(f"{served.http_url}/v2/models/llm/generate_stream", body)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert len(events) > 1
    assert json.loads(events[-1]["delta"])["finish_reason"] == "length"


# Part of the error message -> the inputs of a wrong request.
WRONG = {
    "temperature: the value must be a finite number": chat("hi", temperature=float("nan")),
    "max_tokens: the value must be at least 1, but the request has 0": chat("hi", max_tokens=0),
    "max_tokens: the value must be at least 1, but the request has -5": chat("hi", max_tokens=-5),
    "messages: the list is empty": [tensor("chat_request", '{"messages": []}')],
    "chat_request: the text is not valid JSON": [tensor("chat_request", "{oops")],
    "a request must have exactly one of text_input, input_ids and chat_request": [
        tensor("stream", True, "BOOL")
    ],
    "text_input: the text is not valid UTF-8": [tensor("text_input", b"\xff\xfe")],
    "(max_model_len)": [tensor("input_ids", [5] * 100_000, "INT32")],
    "is outside the vocabulary": [tensor("input_ids", [2_000_000], "INT32")],
    'Did you mean "temperature"': [
        tensor("text_input", "x"),
        tensor("sampling_parameters", '{"temprature": 1}'),
    ],
    "image: the served model does not accept images": [
        tensor("text_input", "x"),
        tensor("image", "aGk="),
    ],
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_request_is_told_what_is_wrong(served, message):
    reply = run(served, WRONG[message])
    assert message in reply.error
    assert "[INVALID_ARGUMENT]" in reply.error
    assert not reply.deltas


def test_a_tensor_of_the_wrong_type_is_refused_and_the_server_goes_on(served):
    reply = run(served, [tensor("text_input", [7], "INT32")])
    assert "data-type is 'INT32'" in reply.error
    assert run(served, completion(stream=True)).finish_reasons == ["length"]


def test_an_error_over_http_names_the_field(served):
    body = {"text_input": "Hello", "temperature": -1}
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(f"{served.http_url}/v2/models/llm/generate", body)
    with caught.value as answer:
        assert (
            "temperature: the value must be at least 0, but the request has -1"
            in answer.read().decode()
        )
