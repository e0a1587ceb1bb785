"""Tests of the load test's gRPC client with faulty streams over a real connection."""

import json
import threading
import time
from concurrent import futures

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from loadtest.client.grpc_client import GrpcEndpoint
from loadtest.load import numbered_answers
from loadtest.load.check_reply import ReplyChecker
from loadtest.load.load_requests import bad, grpc_chat, grpc_text
from loadtest.load.prompts import Question

NUMBERS = numbered_answers.tokens(0)
QUESTION = Question(numbered_answers.prompt(0), NUMBERS)
TEN = NUMBERS[:10]
ASK = grpc_chat(QUESTION, 10, ignore_eos=True)


def response(delta=None, *, is_final=False):
    """Return one response of the ensemble. Without `delta`, the response has no tensors."""
    made = service_pb2.ModelStreamInferResponse()
    made.infer_response.parameters["triton_final_response"].bool_param = is_final
    if delta is not None:
        raw = json.dumps(delta).encode()
        output = made.infer_response.outputs.add(name="delta", datatype="BYTES", shape=[1])
        assert output.name == "delta"
        made.infer_response.raw_output_contents.append(len(raw).to_bytes(4, "little") + raw)
    return made


def failed(message):
    return service_pb2.ModelStreamInferResponse(error_message=message)


def answer(texts, *, finish="length", is_final=True):
    said = [response({"content": text}) for text in texts]
    said += [response({"finish_reason": finish, "usage": {"completion_tokens": 10}})]
    return said + ([response(is_final=True)] if is_final else [])


class _Service(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self):
        self.said = []
        self.requests = []
        self.is_over = threading.Event()

    def ModelStreamInfer(self, requests, context):
        # Each call has its own event, because the callback of an earlier call may run late.
        is_over = self.is_over = threading.Event()
        context.add_callback(is_over.set)
        for request in requests:
            self.requests.append(request)
            for one in self.said:
                if isinstance(one, float):
                    is_over.wait(one)
                elif isinstance(one, grpc.StatusCode):
                    context.abort(one, "gone")
                else:
                    yield one


@pytest.fixture(scope="module")
def service():
    server = grpc.server(futures.ThreadPoolExecutor(4))
    made = _Service()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(made, server)
    made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield made
    server.stop(None).wait()


@pytest.fixture
def judged(service):
    """A function that sends `ask` to a server with the answer `said`.

    The function returns the reply and the kinds of faults in the reply.
    """

    def send(said, ask=ASK, limit_s=60.0):
        service.said = said
        service.requests.clear()
        endpoint = GrpcEndpoint(service.address, limit_s)
        reply = endpoint.send(ask)
        endpoint.close()
        return reply, [fault.kind for fault in ReplyChecker().faults(ask, reply)]

    return send


def test_a_whole_stream_is_fine(judged, service):
    reply, faults = judged(answer(TEN))
    assert faults == []
    assert (reply.text, reply.num_tokens) == ("".join(TEN), 10)
    [request] = service.requests
    assert request.model_name == "llm"
    assert [tensor.name for tensor in request.inputs] == ["stream", "chat_request"]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([*TEN[:4], *TEN[5:]], ["lost"]),
        ([*TEN[:4], TEN[3], *TEN[4:]], ["doubled"]),
        ([*TEN[:4], TEN[5], TEN[4], *TEN[6:]], ["reordered"]),
        (TEN[:7], ["truncated"]),
    ],
)
def test_the_fault_of_a_stream_with_a_wrong_token_is_named(judged, texts, expected):
    assert judged(answer(texts))[1] == expected


def test_a_stream_without_its_final_response_hangs(judged):
    assert judged([*answer(TEN, is_final=False), 60.0], limit_s=0.5)[1] == ["hung"]


def test_a_stream_without_its_finish_reason_is_unended(judged):
    assert judged([*answer(TEN)[:-2], response(is_final=True)])[1] == ["unended"]


def test_a_call_that_the_server_ends_is_broken(judged):
    assert judged([*answer(TEN)[:5], grpc.StatusCode.UNAVAILABLE])[1] == ["broken"]


def test_errors_are_distinguished_by_their_code(judged):
    wrong = bad(grpc_text(QUESTION, 10), sampling_parameters="{")
    invalid = "in ensemble 'llm', [INVALID_ARGUMENT] sampling_parameters: is not JSON"
    assert judged([failed(invalid)], wrong)[1] == []
    assert judged([failed(invalid)])[1] == ["error"]
    assert judged([failed("[UNAVAILABLE] too many wait")])[1] == ["refused"]
    assert judged([failed("[INTERNAL] oops")], wrong)[1] == ["error"]


def test_a_client_that_disconnects_cancels_its_call(judged, service):
    started = time.monotonic()
    reply, faults = judged([*answer(TEN)[:5], 60.0], ASK.cancelled(1.0))
    assert time.monotonic() - started < 30
    assert (reply.end, faults) == ("cancelled", [])
    assert service.is_over.wait(60)


def test_a_connection_is_used_again_after_every_kind_of_stream(service):
    endpoint = GrpcEndpoint(service.address)
    for said, ask, expected in (
        (answer(TEN), ASK, "whole"),
        ([response({"content": TEN[0]}), 60.0], ASK.cancelled(0.2), "cancelled"),
        ([failed("[INVALID_ARGUMENT] no")], ASK, "whole"),
        (answer(TEN), ASK, "whole"),
    ):
        service.said = said
        assert endpoint.send(ask).end == expected
    endpoint.close()
