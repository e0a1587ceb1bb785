"""Tests of the postprocessor with steps from executors, and with forged requests from clients."""

import json
import time

import msgpack
import numpy as np
import pytest
import torch  # noqa: F401 - load_tokenizer keeps it out of processes that have not loaded it
from backend.serving.fake_server import DEMO, Request
from nereid_backend.serving import tensor_names
from nereid_backend.serving.feedback import FeedbackReader, Signal
from nereid_backend.serving.postprocessor.postprocessor_model import PostprocessorModel
from nereid_backend.serving.wire import Ending, Opening, SequenceDelta, StepState, StreamContext

CONTEXT = {"stream": True, "num_prompt_tokens": 1}
TOKENS = (SequenceDelta(0, (5, 6), (-1.0, -2.0)),)


def make_postprocessor():
    parameters = {"model": {"string_value": str(DEMO / "chat")}}
    model = PostprocessorModel()
    model.initialize(
        {"model_config": json.dumps({"parameters": parameters}), "model_repository": "/llm"}
    )
    return model


@pytest.fixture(scope="module")
def shared_postprocessor():
    return make_postprocessor()


@pytest.fixture
def executor():
    reader = FeedbackReader(4)
    yield reader
    reader.close()


def opening(values=CONTEXT, slots=(0,)):
    return Opening(msgpack.packb(values), slots)


def send(model, message):
    request = Request(**{tensor_names.STATE: np.frombuffer(message, dtype=np.uint8)})
    model.execute([request])
    return request.wait(1)


def send_step(model, executor, state):
    return send(model, executor.sign(state.pack()))


def test_a_step_that_the_executor_has_not_signed_is_refused(shared_postprocessor, executor):
    address = executor.address.encode()
    forged = StepState(0, 99, 7, TOKENS).pack()
    for message in (
        b"",
        b"\xff" * 300,
        forged,
        address + b"\n" + bytes(16) + forged,
        b"\n" + forged,
    ):
        assert send(shared_postprocessor, message).error.startswith("[INVALID_ARGUMENT] state: ")
    assert executor.consumed(0, 99) == 0


@pytest.mark.parametrize(
    "damaged",
    [
        opening({}),
        opening(7),
        opening(CONTEXT | {"n": 2}),
        opening(CONTEXT | {"strict_schema": "{"}),
        opening(CONTEXT | {"returns": ("delta",)}),
        Opening(b"\xc1", (0,)),
        Opening(b"", (0,)),
    ],
)
def test_a_damaged_context_ends_its_stream(shared_postprocessor, executor, damaged):
    first = send_step(shared_postprocessor, executor, StepState(0, 1, 1, TOKENS, opening=damaged))
    assert first.error.startswith("[INVALID_ARGUMENT] envelope: ")
    assert executor.signal(0, 1) is Signal.CANCELLED
    later = send_step(shared_postprocessor, executor, StepState(0, 1, 2, TOKENS))
    assert (later.error, later.replies) == (None, [])
    assert executor.consumed(0, 1) == 2


def test_a_repeated_step_of_an_ended_stream_leaves_the_next_stream_alone(
    shared_postprocessor, executor
):
    last = (SequenceDelta(0, (5, 6), (-1.0, -2.0), ending=Ending("stop")),)
    old = StepState(0, 1, 1, last, is_last=True, opening=opening())
    assert send_step(shared_postprocessor, executor, old).replies
    send_step(shared_postprocessor, executor, StepState(0, 2, 1, TOKENS, opening=opening()))
    repeated = send_step(shared_postprocessor, executor, old)
    assert (repeated.error, repeated.replies) == (None, [])
    end = send_step(shared_postprocessor, executor, StepState(0, 2, 2, last, is_last=True))
    assert json.loads(end.replies[-1]["delta"][0])["usage"]["completion_tokens"] == 4


def test_a_stream_that_began_before_a_restart_gets_an_error(executor):
    restarted = make_postprocessor()
    step = send_step(restarted, executor, StepState(2, 8, 5, TOKENS))
    assert "the postprocessor was restarted during this request" in step.error
    assert executor.signal(2, 8) is Signal.CANCELLED
    assert executor.consumed(2, 8) == 5


def test_streams_of_a_restarted_executor_begin_again(shared_postprocessor, executor):
    first = StepState(0, 50, 1, TOKENS, opening=opening())
    assert send_step(shared_postprocessor, executor, first).error is None
    restarted = FeedbackReader(4)
    again = StepState(0, 1, 1, TOKENS, opening=Opening(StreamContext(**CONTEXT).pack(), (0,)))
    assert send_step(shared_postprocessor, restarted, again).error is None
    assert restarted.consumed(0, 1) == 1
    restarted.close()


def test_streams_of_an_executor_continue_while_another_one_replaces_it(
    shared_postprocessor, executor
):
    replacement = FeedbackReader(4)
    executors = (executor, replacement)
    for one in executors:
        first = StepState(0, 1, 1, TOKENS, opening=opening())
        assert send_step(shared_postprocessor, one, first).error is None
    for one in executors:
        assert send_step(shared_postprocessor, one, StepState(0, 1, 2, TOKENS)).error is None
    last = (SequenceDelta(0, (5, 6), (-1.0, -2.0), ending=Ending("stop")),)
    for one in executors:
        end = send_step(shared_postprocessor, one, StepState(0, 1, 3, last, is_last=True))
        assert json.loads(end.replies[-1]["delta"][0])["usage"]["completion_tokens"] == 6
        assert one.consumed(0, 1) == 3
    replacement.close()


class CountingRequest(Request):
    """A request that counts how often the model checks whether the client cancelled it."""

    num_checks = 0

    def is_cancelled(self):
        self.num_checks += 1
        return False


def num_cancel_checks(model, executor, num_streams):
    """Return how often the model checks one stream for cancellation in two steps.

    The model has `num_streams` streams. The second step follows 0.15 s after the first.
    """
    for slot in reversed(range(num_streams)):
        context = opening(slots=(slot,))
        assert send_step(model, executor, StepState(slot, 7, 1, TOKENS, opening=context)).replies
    requests = []
    for step in (2, 3):
        time.sleep(0.15)
        message = executor.sign(StepState(0, 7, step, TOKENS).pack())
        requests.append(
            CountingRequest(**{tensor_names.STATE: np.frombuffer(message, dtype=np.uint8)})
        )
        model.execute(requests[-1:])
    return sum(request.num_checks for request in requests)


def test_each_of_many_streams_is_checked_for_cancellation_less_often(shared_postprocessor):
    for num_streams, num_checks in [(1, 2), (2000, 0)]:
        executor = FeedbackReader(num_streams)
        assert num_cancel_checks(shared_postprocessor, executor, num_streams) == num_checks
        executor.close()
