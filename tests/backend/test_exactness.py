"""Tests that the engine and transformers generate equal greedy tokens.

These tests compare some architectures for each forward path. tests/backend/archs.py compares all
architectures.
"""

import dataclasses
import functools

import pytest
from backend.exactness import PARAMS, PROMPTS, SITUATIONS, open_engine, reference

from backend import shrink

# The architectures for each forward path. The comments name the special features of an
# architecture. The first architecture of each forward path runs in every situation.
TYPES = {
    "packed": [
        "gpt_oss",  # has attention windows, attention sinks and experts
        "llama",
        "gemma2",  # has attention windows and a soft cap of the logits
        "llama4_text",  # has chunked attention
        "deepseek_v3",  # has keys and values of different sizes
        "gemma4_text",  # has layers of different shapes
        "gpt2",  # has learned position embeddings
        "bart",  # computes positions from the length of the cache
    ],
    "rows": [
        "qwen3_next",
        "mamba",  # has no attention, and cannot divide a prompt into chunks
        "inkling_text",  # has recurrent states, and computes attention with its own code
        "qwen4_exp_text",  # has recurrent states and a sparse indexer
        # A layer has a recurrent state and attention. The state of several tokens at once differs
        # slightly from the state of single tokens.
        "zamba2",
    ],
    "padded": [
        "bloom",  # computes positions from the attention mask
        "deepseek_v32",  # has a sparse indexer
        "mvp",  # computes positions from the length of the cache
    ],
    "single": [
        "xlnet",  # has relative positions
        "rwkv",  # passes its state in an argument with an unusual name
        "openai-gpt",  # has no cache
        "reformer",  # computes attention in hash buckets
    ],
}
MODELS = [(path, name) for path, names in TYPES.items() for name in names]
# By default, the second and later architectures of each forward path run only in these situations,
# which cover chunked prompts, mixed batches, preemption and the CPU kernels. The other combinations
# are marked `long`.
_USUAL_SITUATIONS = ("mixed", "preempted")


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """A function that returns the tiny checkpoint of an architecture and the expected answers.

    The expected answers take half of the time of a test, so the function caches them.
    """

    @functools.cache
    def reference_of(name):
        folder = shrink.save(name, tmp_path_factory.mktemp(name))
        return folder, reference(folder)

    return reference_of


@pytest.fixture
def model(request, references):
    """The folder of a tiny checkpoint, its forward path, and the answers from transformers."""
    path, name = request.param
    folder, expected = references(name)
    return folder, path, expected


def cases(values, usual_values):
    """Return test parameters for all pairs of a model and one of `values`.

    A pair is marked `long`, unless its value is in `usual_values` or its model is the first one in
    the list of its forward path in `TYPES`.
    """

    def marks(path, name, value):
        is_usual = value in usual_values or name == TYPES[path][0]
        return () if is_usual else pytest.mark.long

    return [
        pytest.param(
            (path, name), value, id=f"{path}-{name}-{value}", marks=marks(path, name, value)
        )
        for path, name in MODELS
        for value in values
    ]


@pytest.mark.parametrize(
    ("model", "situation"), cases(SITUATIONS, _USUAL_SITUATIONS), indirect=["model"]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_greedy_tokens_equal_those_of_transformers(model, situation):
    folder, path, expected = model
    settings, run = SITUATIONS[situation]
    engine = open_engine(folder, **settings)
    # With a small `max_model_len`, a sparse indexer selects all tokens. The engine then chooses a
    # faster forward path.
    assert engine.info.path == path or "max_model_len" in settings
    assert run(engine) == expected
    engine.close()


@pytest.mark.parametrize("model", MODELS, indirect=True, ids="-".join)
def test_the_answers_vary_so_that_equality_proves_something(model):
    _, _, expected = model
    tokens = [token for answer in expected for token in answer]
    assert len(set(tokens)) > 8


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("model", "num_drafts"), cases([0, 4], [4]), indirect=["model"])
def test_sequences_of_one_request_have_equal_answers(model, num_drafts):
    folder, _, expected = model
    engine = open_engine(folder, num_speculative_tokens=num_drafts)
    params = dataclasses.replace(PARAMS, n=3)
    outputs = engine.generate(PROMPTS, params)
    answers = [[answer.token_ids for answer in output.outputs] for output in outputs]
    assert answers == [[expected_answer] * 3 for expected_answer in expected]
    engine.close()
