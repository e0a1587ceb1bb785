"""Tests of the postprocessor with steps from executors, and with forged requests from clients."""

import json
import time
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import torch  # noqa: F401 - load_tokenizer keeps it out of processes that have not loaded it
from backend.serving.fake_server import DEMO, Request
from nereid_backend.serving import tensor_names
from nereid_backend.serving.feedback import FeedbackReader, Signal
from nereid_backend.serving.postprocessor.postprocessor_model import PostprocessorModel
from nereid_backend.serving.wire import Ending, Opening, SequenceDelta, StepState

CONTEXT = {"stream": True, "num_prompt_tokens": 1}
# The new tokens of a step, and those of the last step.
TOKENS = (SequenceDelta(0, (5, 6), cumulative_logprobs=(-1.0, -2.0)),)
LAST_TOKENS = (replace(TOKENS[0], ending=Ending("stop")),)


def make_postprocessor():
    parameters = {"model": {"string_value": str(DEMO / "chat")}}
    model = PostprocessorModel()
    model.initialize(
        {"model_config": json.dumps({"parameters": parameters}), "model_repository": "/llm"}
    )
    return model


@pytest.fixture(scope="module")
def postprocessor():
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


def send_step(model, executor, *, slot=0, serial, step, deltas=TOKENS, **fields):
    """Send one step of the stream `serial`, which `executor` has signed, and return the request."""
    state = StepState(slot, serial, step, deltas, **fields)
    return send(model, executor.sign(state.pack()))


def num_completion_tokens(request):
    """Return the number of generated tokens that the last response to a request contains."""
    return json.loads(request.replies[-1]["delta"][0])["usage"]["completion_tokens"]


def test_a_step_that_the_executor_has_not_signed_is_refused(postprocessor, executor):
    address = executor.address.encode()
    forged = StepState(slot=0, serial=99, step=7, deltas=TOKENS).pack()
    for message in (
        b"",
        b"\xff" * 300,
        forged,
        address + b"\n" + bytes(16) + forged,
        b"\n" + forged,
    ):
        assert send(postprocessor, message).error.startswith("[INVALID_ARGUMENT] state: ")
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
def test_a_damaged_context_ends_its_stream(postprocessor, executor, damaged):
    first = send_step(postprocessor, executor, serial=1, step=1, opening=damaged)
    assert first.error.startswith("[INVALID_ARGUMENT] envelope: ")
    assert executor.signal(0, 1) is Signal.CANCELLED

    later = send_step(postprocessor, executor, serial=1, step=2)
    assert (later.error, later.replies) == (None, [])
    assert executor.consumed(0, 1) == 2


def test_a_repeated_step_of_an_ended_stream_leaves_the_next_stream_alone(postprocessor, executor):
    end = {"deltas": LAST_TOKENS, "is_last": True}
    only_step = {"serial": 1, "step": 1, "opening": opening(), **end}
    assert send_step(postprocessor, executor, **only_step).replies

    send_step(postprocessor, executor, serial=2, step=1, opening=opening())
    repeated = send_step(postprocessor, executor, **only_step)
    assert (repeated.error, repeated.replies) == (None, [])
    last = send_step(postprocessor, executor, serial=2, step=2, **end)
    assert num_completion_tokens(last) == 4


def test_a_stream_that_began_before_a_restart_gets_an_error(executor):
    restarted = make_postprocessor()
    request = send_step(restarted, executor, slot=2, serial=8, step=5)
    assert "the postprocessor was restarted during this request" in request.error
    assert executor.signal(2, 8) is Signal.CANCELLED
    assert executor.consumed(2, 8) == 5


def test_streams_of_a_restarted_executor_begin_again(postprocessor, executor):
    first = send_step(postprocessor, executor, serial=50, step=1, opening=opening())
    assert first.error is None

    restarted = FeedbackReader(num_slots=4)
    first = send_step(postprocessor, restarted, serial=1, step=1, opening=opening())
    assert first.error is None
    assert restarted.consumed(0, 1) == 1
    restarted.close()


def test_streams_of_an_executor_continue_while_another_one_replaces_it(postprocessor, executor):
    replacement = FeedbackReader(num_slots=4)
    executors = (executor, replacement)
    steps = [
        {"step": 1, "opening": opening()},
        {"step": 2},
        {"step": 3, "deltas": LAST_TOKENS, "is_last": True},
    ]
    for step in steps:
        for sender in executors:
            request = send_step(postprocessor, sender, serial=1, **step)
            assert request.error is None
            assert num_completion_tokens(request) == 2 * step["step"]
    assert [sender.consumed(slot=0, serial=1) for sender in executors] == [3, 3]
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
        first = send_step(model, executor, slot=slot, serial=7, step=1, opening=context)
        assert first.replies
    num_checks = 0
    for step in (2, 3):
        time.sleep(0.15)
        message = executor.sign(StepState(slot=0, serial=7, step=step, deltas=TOKENS).pack())
        inputs = {tensor_names.STATE: np.frombuffer(message, dtype=np.uint8)}
        request = CountingRequest(**inputs)
        model.execute([request])
        num_checks += request.num_checks
    return num_checks


def test_each_of_many_streams_is_checked_for_cancellation_less_often(postprocessor):
    for num_streams, num_checks in [(1, 2), (2000, 0)]:
        executor = FeedbackReader(num_streams)
        assert num_cancel_checks(postprocessor, executor, num_streams) == num_checks
        executor.close()
