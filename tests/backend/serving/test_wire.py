from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nereid_backend import RequestUpdate, SamplingParams
from nereid_backend.core.grammar import GrammarSpec, ThinkingSpec
from nereid_backend.core.outputs import TokenLogprobs
from nereid_backend.errors import RequestError
from nereid_backend.serving.wire import (
    Ending,
    Opening,
    RequestEnvelope,
    SequenceDelta,
    StepState,
    StreamContext,
    pack_params,
    pack_update,
    unpack_params,
    unpack_update,
)


def test_a_context_is_unchanged_after_packing_and_unpacking():
    context = StreamContext(
        stream=True,
        num_prompt_tokens=3,
        seed_token_ids=(1, 2),
        prepend="é",
        stop=("a", "b"),
        returns=("finish_reason",),
        tools=({"type": "function", "function": {"name": "f"}},),
        prompt="<think>",
    )
    assert StreamContext.unpack(context.pack()) == context


def test_a_schema_with_integers_of_more_than_64_bits_keeps_their_type():
    parameters = {"enum": [2**64, -(10**400), 1]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    context = StreamContext(stream=True, num_prompt_tokens=3, tools=(tool,))
    (unpacked,) = StreamContext.unpack(context.pack()).tools
    assert unpacked["function"]["parameters"]["enum"] == (2**64 - 1, -(2**63), 1)


def test_an_envelope_is_unchanged_after_packing_and_unpacking():
    envelope = RequestEnvelope(b"\x00params", 2, b"\x00context", timeout_s=1.5)
    packed = envelope.pack()
    assert packed.dtype == np.uint8
    assert RequestEnvelope.unpack(packed) == envelope


def test_sampling_parameters_are_unchanged_after_packing_and_unpacking():
    params = SamplingParams(
        n=2,
        seed=2**63,
        stop_token_ids=(4, 5),
        logit_bias=((7, 1.5),),
        bad_words_token_ids=((1, 2), (3,)),
        grammar=GrammarSpec("regex", "a+", "</think>"),
        thinking=ThinkingSpec("<think>", "</think>", (9, 10), is_open=True, budget=5),
    )
    assert unpack_params(pack_params(params)) == params
    assert unpack_params(pack_params(SamplingParams())) == SamplingParams()


LOGPROBS = st.floats(max_value=0, allow_nan=False)
TOKEN_LOGPROBS = st.tuples(  # the fields of TokenLogprobs: token_ids, logprobs and rank
    st.lists(st.integers(0, 99), min_size=1).map(tuple),
    st.lists(LOGPROBS, min_size=1).map(tuple),
    st.integers(1, 9),
)
DELTAS = st.builds(
    SequenceDelta,
    index=st.integers(0, 63),
    token_ids=st.lists(st.integers(0, 2**31 - 1)).map(tuple),
    cumulative_logprobs=st.lists(LOGPROBS).map(tuple),
    logprobs=st.none() | st.lists(TOKEN_LOGPROBS).map(tuple),
    prompt_logprobs=st.none() | st.lists(st.none() | TOKEN_LOGPROBS).map(tuple),
    num_cached_tokens=st.integers(0, 4096),
    ending=st.none() | st.builds(Ending, st.text(), st.none() | st.integers(0, 2**31)),
)
OPENINGS = st.builds(Opening, st.binary(), st.lists(st.integers(0, 4095), min_size=1).map(tuple))


@given(
    st.builds(
        StepState,
        slot=st.integers(0, 4095),
        serial=st.integers(1, 2**32 - 1),
        step=st.integers(1, 2**31),
        deltas=st.lists(DELTAS, max_size=4).map(tuple),
        is_last=st.booleans(),
        opening=st.none() | OPENINGS,
    )
)
def test_a_step_is_unchanged_after_packing_and_unpacking(state):
    assert StepState.unpack(state.pack()) == state


def test_an_update_is_unchanged_after_packing_and_unpacking():
    logprobs = TokenLogprobs([5, 6], [-1.0, -2.0], rank=1)
    prompt_logprobs = TokenLogprobs([5], [-1.0], rank=1)
    update = RequestUpdate(
        request_id="1",
        new_token_ids=[5],
        finish_reason="stop",
        stop_reason=2,
        cumulative_logprob=-1.5,
        index=3,
        logprobs=[logprobs],
        prompt_logprobs=[None, prompt_logprobs],
        num_cached_tokens=16,
    )
    message = msgpack.unpackb(msgpack.packb(pack_update(update)))
    # msgpack has no type for named tuples, so the log-probabilities arrive as lists.
    assert unpack_update(message) == replace(
        update, logprobs=[list(logprobs)], prompt_logprobs=[None, list(prompt_logprobs)]
    )


GOOD = msgpack.packb([b"params", 1, b"context"])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1\xc1",  # The byte 0xc1 has no meaning in msgpack.
        GOOD[:-1],
        GOOD + b"\0",
        b"\xdd\x3b\x9a\xca\x00",  # an array of 10**9 items that do not follow
        b"\x91" * 100_000 + b"\xc0",  # 100,000 nested arrays
        msgpack.packb(7),
        msgpack.packb([b"params"]),
        msgpack.packb([b"params", 1, b"", *[0] * 40]),
        *(msgpack.packb([b"params", n, b""]) for n in (-1, 0, 65, 10**9, "many", None)),
        msgpack.packb([b"params", 1, b"", 5]),
        msgpack.packb([b"params", 1, b"", "", "soon"]),
    ],
)
def test_a_damaged_envelope_is_refused(data):
    with pytest.raises(RequestError, match="envelope: the message is damaged"):
        RequestEnvelope.unpack(np.frombuffer(data, dtype=np.uint8))


@pytest.mark.parametrize(
    "values",
    [
        7,
        {},
        {"stream": True},
        {"stream": True, "num_prompt_tokens": -1},
        {"stream": True, "num_prompt_tokens": 1, "n": 10**9},
        {"stream": True, "num_prompt_tokens": 1, "prompt_token_ids": (-5,)},
        {"stream": True, "num_prompt_tokens": 1, "returns": ("delta",)},
        {"stream": True, "num_prompt_tokens": 1, "tools": ({"function": 3},)},
        {"stream": True, "num_prompt_tokens": 1, "stop": 9},
    ],
)
def test_a_damaged_context_is_refused(values):
    with pytest.raises(RequestError, match="envelope: the context is damaged"):
        StreamContext.unpack(msgpack.packb(values))


@pytest.mark.parametrize(
    "values",
    [7, {"evil": 1}, {"temperature": "hot"}, {"grammar": 3}, {"n": -1}, {"stop_token_ids": (-1,)}],
)
def test_damaged_sampling_parameters_are_refused(values):
    with pytest.raises(RequestError):
        unpack_params(msgpack.packb(values))
