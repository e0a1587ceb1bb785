"""Tests of the load test's HTTP client with faulty streams over a real connection."""

import json
import time

import pytest
from fakes.live_frontend import wait_for
from fakes.streams import chunk, event, play, stream

from loadtest.client.http_client import HttpEndpoint
from loadtest.load import numbered_answers
from loadtest.load.check_reply import ReplyChecker
from loadtest.load.load_requests import bad, chat, chat_at_once, embedding, generate_stream, rerank
from loadtest.load.prompts import Question

NUMBERS = numbered_answers.tokens(0)
QUESTION = Question(numbered_answers.prompt(0), NUMBERS)
TEN = NUMBERS[:10]
ASK = chat(QUESTION, 10, ignore_eos=True)


@pytest.fixture
def judged():
    """A function that sends `ask` to a server whose answer has these parts.

    The function returns the reply and the kinds of faults in the reply.
    """

    def send(parts, ask=ASK, status=200, ends=True, limit_s=60.0):
        with play(lambda body: (status, parts, ends)) as server:
            reply = HttpEndpoint(server.url, limit_s).send(ask)
        return reply, [fault.kind for fault in ReplyChecker().faults(ask, reply)]

    return send


def test_a_whole_stream_is_fine(judged):
    reply, faults = judged(stream(TEN, usage=10))
    assert faults == []
    assert reply.text == "".join(TEN)
    assert len(reply.times) == 10
    assert reply.started < reply.times[0] <= reply.times[-1] <= reply.ended


def test_pieces_may_be_split_anywhere_on_the_wire(judged):
    whole = b"".join(stream(TEN, usage=10))
    reply, faults = judged([whole[at : at + 7] for at in range(0, len(whole), 7)])
    assert faults == []
    assert reply.num_tokens == 10


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([*TEN[:4], *TEN[5:]], ["lost"]),
        ([*TEN[:4], TEN[3], *TEN[4:]], ["doubled"]),
        ([*TEN[:4], TEN[5], TEN[4], *TEN[6:]], ["reordered"]),
        (TEN[:7], ["truncated"]),
        ([*TEN[:4], NUMBERS[200], *TEN[4:]], ["foreign"]),
    ],
)
def test_the_fault_of_a_stream_with_a_wrong_token_is_named(judged, texts, expected):
    assert judged(stream(texts))[1] == expected


def test_a_stream_without_its_finish_reason_is_unended(judged):
    assert judged(stream(TEN, finish=None))[1] == ["unended"]


def test_a_chunk_of_another_answer_is_foreign(judged):
    said = [event(chunk(text) | {"id": "a"}) for text in TEN]
    said[4] = event(chunk(TEN[4]) | {"id": "b"})
    assert judged([*said, event(chunk(finish="length")), event("[DONE]")])[1] == ["foreign"]


def test_a_stream_without_done_is_broken(judged):
    assert judged(stream(TEN, done=False))[1] == ["broken"]


def test_a_connection_that_ends_within_a_stream_is_broken(judged):
    reply, faults = judged(stream(TEN)[:5], ends=False)
    assert faults == ["broken"]
    assert reply.text == "".join(TEN[:5])


def test_a_generate_stream_that_ends_without_its_last_chunk_is_broken(judged):
    ask = generate_stream(QUESTION, 2, ignore_eos=True)
    said = [
        event({"text_output": TEN[0], "delta": "{}"}),
        event({"text_output": TEN[1], "delta": json.dumps({"finish_reason": "length"})}),
    ]
    assert judged(said, ask)[1] == []
    assert judged(said, ask, ends=False)[1] == ["broken"]
    assert judged(said[:1], ask)[1] == ["unended", "truncated"]


def test_a_stream_that_sends_nothing_hangs(judged):
    assert judged([*stream(TEN)[:5], 30.0], limit_s=0.3)[1] == ["hung"]


def test_an_error_event_is_an_error(judged):
    said = [*stream(TEN)[:5], event({"error": {"message": "the engine failed"}}), event("[DONE]")]
    reply, faults = judged(said)
    assert faults == ["error"]
    assert "the engine failed" in reply.error


def test_a_refusal_is_distinguished_from_an_error(judged):
    assert judged([b'{"error": {"message": "busy"}}'], status=503)[1] == ["refused"]
    assert judged([b'{"error": {"message": "oops"}}'], status=500)[1] == ["error"]


def test_a_400_is_right_for_bad_input_only(judged):
    said = [b'{"error": {"message": "temperature: must be at least 0"}}']
    assert judged(said, bad(ASK, temperature=-1), status=400)[1] == []
    assert judged(said, status=400)[1] == ["error"]
    assert judged(said, bad(ASK, temperature=-1), status=500)[1] == ["error"]


def test_a_refused_connection_is_broken():
    reply = HttpEndpoint("http://127.0.0.1:9").send(ASK)
    assert [fault.kind for fault in ReplyChecker().faults(ASK, reply)] == ["broken"]


def test_a_client_that_disconnects_closes_its_connection_in_time():
    parts = [part for one in stream(NUMBERS[:200]) for part in (one, 0.1)]
    with play(lambda body: (200, parts)) as server:
        started = time.monotonic()
        ask = chat(QUESTION, 200, ignore_eos=True).cancelled(1.0)
        reply = HttpEndpoint(server.url).send(ask)
        assert time.monotonic() - started < 15  # The whole stream takes 20 s.
        assert reply.end == "cancelled"
        assert 0 < len(reply.pieces) < 200
        assert ReplyChecker().faults(ask, reply) == []
        wait_for(lambda: server.num_lost_clients)
        assert server.num_lost_clients == 1


def test_a_client_may_disconnect_before_the_first_token(judged):
    reply, faults = judged([30.0, *stream(TEN)], ASK.cancelled(0.1))
    assert (reply.end, reply.pieces, faults) == ("cancelled", [], [])


def test_a_slow_reader_gets_everything(judged):
    reply, faults = judged(stream(TEN, usage=10), ASK.read_slowly(0.02))
    assert faults == []
    assert reply.ended - reply.started > 0.02


def test_answers_in_one_piece_are_read(judged):
    message = {"message": {"content": "".join(TEN)}, "finish_reason": "length"}
    whole = json.dumps({"choices": [message], "usage": {"completion_tokens": 10}}).encode()
    assert judged([whole], chat_at_once(QUESTION, 10))[1] == []
    assert judged([whole], chat_at_once(QUESTION, 11))[1] == ["truncated", "miscounted"]


def test_reasoning_and_tool_calls_are_part_of_what_is_compared(judged):
    call = {"function": {"name": "get_weather", "arguments": '{"city"'}}
    more = {"function": {"arguments": ': "Paris"}'}}
    deltas = [{"reasoning": "hm "}, {"tool_calls": [call]}, {"tool_calls": [more]}]
    said = [event({"choices": [{"delta": delta}], "usage": None}) for delta in deltas]
    reply, faults = judged(
        [*said, event(chunk(finish="tool_calls")), event("[DONE]")], chat(Question("weather?"), 10)
    )
    assert reply.text == 'hm get_weather{"city": "Paris"}'
    assert faults == []


def test_vectors_and_scores_are_read(judged):
    vectors = {"data": [{"embedding": [1.0, 2.0]}, {"embedding": [3.0, 4.0]}]}
    reply, _ = judged([json.dumps(vectors).encode()], embedding("embed", ["a", "b"]))
    assert reply.numbers == [1.0, 2.0, 3.0, 4.0]
    ranked = [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}]
    reply, _ = judged([json.dumps({"results": ranked}).encode()], rerank("rerank", "q", ["a", "b"]))
    assert reply.numbers == [0.1, 0.9]
