import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from nereid_backend import SamplingParams
from nereid_backend.serving.wire import Ending, Opening, RequestEnvelope, StepState, StreamContext


def test_a_context_comes_out_as_it_went_in():
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


def test_an_envelope_comes_out_as_it_went_in():
    params = SamplingParams(temperature=0.5, seed=2**63, stop_token_ids=[4, 5], max_tokens=9)
    envelope = RequestEnvelope(params, b"\x00context")
    packed = envelope.pack()
    assert packed.dtype == np.uint8
    assert RequestEnvelope.unpack(packed) == envelope


@given(
    slot=st.integers(0, 4095),
    serial=st.integers(1, 2**32 - 1),
    opening=st.none() | st.builds(Opening, st.binary(), st.text()),
    ending=st.none() | st.builds(Ending, st.text(), st.none() | st.integers(0, 2**31)),
)
def test_a_step_comes_out_as_it_went_in(slot, serial, opening, ending):
    state = StepState(slot, serial, 5, -1.5, opening, ending)
    assert StepState.unpack(state.pack()) == state
