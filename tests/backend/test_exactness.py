"""The engine's greedy tokens equal those of transformers, for some architectures of each path.

tests/backend/archs.py compares all architectures.
"""

import dataclasses
import functools

import pytest
from backend.exactness import PARAMS, PROMPTS, SITUATIONS, open_engine, reference

from backend import shrink

# The architectures by forward path. The first architecture of each path runs in every situation.
TYPES = {
    "packed": [
        "gpt_oss",  # windows, sinks, experts
        "llama",
        "gemma2",  # windows, softcap
        "llama4_text",  # chunked attention
        "deepseek_v3",  # keys and values of different sizes
        "gemma4_text",  # layers of different shapes
        "gpt2",  # learned positions
        "bart",  # positions from the length of the cache
    ],
    "rows": [
        "qwen3_next",
        "mamba",  # no attention, and prompts are computed whole
        "inkling_text",  # the model's own attention beside the states
        "qwen4_exp_text",  # states and a sparse indexer
        "zamba2",  # state and attention in one layer, one pass differs from single tokens
    ],
    "padded": [
        "bloom",  # positions from the mask
        "deepseek_v32",  # a sparse indexer
        "mvp",  # positions from the length of the cache
    ],
    "single": [
        "xlnet",  # relative positions
        "rwkv",  # a state with a name of its own
        "openai-gpt",  # no cache
        "reformer",  # buckets of hashes
    ],
}
MODELS = [(path, name) for path, names in TYPES.items() for name in names]
# Architectures that are not the first of their path run only in these situations, which include
# chunked prompts, batches of different lengths, preemption and the native kernels. The other
# combinations are marked `long`.
_USUAL_SITUATIONS = ("mixed", "preempted")


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """A function from an architecture to its tiny checkpoint and the answers of transformers.

    These answers take half of the time of a test. Each checkpoint has four tests or more.
    """

    @functools.cache
    def reference_of(name):
        folder = shrink.save(name, tmp_path_factory.mktemp(name))
        return folder, reference(folder)

    return reference_of


@pytest.fixture
def model(request, references):
    """The folder of a tiny checkpoint, its forward path, and the answers of transformers."""
    path, name = request.param
    folder, expected = references(name)
    return folder, path, expected


def cases(values, usual):
    """Return all pairs of model and value. Pairs that are not usual are marked `long`."""
    return [
        pytest.param(
            (path, name),
            value,
            id=f"{path}-{name}-{value}",
            marks=() if value in usual or name == TYPES[path][0] else pytest.mark.long,
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
    # With a small max_model_len, a model with a sparse indexer uses a better path, because the
    # indexer then selects all tokens.
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
    assert [[o.token_ids for o in each.outputs] for each in outputs] == [
        [answer] * 3 for answer in expected
    ]
    engine.close()
