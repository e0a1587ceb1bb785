import functools
from pathlib import Path

import pytest
from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.grammar import Guides

MODEL = str(Path(__file__).parents[3] / "demo" / "chat")
EOS = (2, 0)


@pytest.fixture(scope="session")
def guides():
    made = Guides(MODEL, vocab_size=2048, eos_token_ids=EOS)
    yield made
    made.close()


@pytest.fixture(scope="session")
def vocabulary(guides):
    return guides.warm_up().result(60).vocabulary


@pytest.fixture
def guide(guides):
    """A function that returns the guide of a grammar and a thinking spec."""

    def make(spec=None, thinking=None, stops=frozenset(EOS)):
        if spec is not None and not isinstance(spec, GrammarSpec):
            spec = GrammarSpec(*spec)
        params = SamplingParams(grammar=spec, thinking=thinking)
        return guides.prepare(params, stops).result(60)

    return make


@pytest.fixture
def problem(guides):
    """A function that compiles a grammar and returns the error."""

    def find(kind, source):
        params = SamplingParams(grammar=GrammarSpec(kind, source))
        return guides.prepare(params, frozenset(EOS)).exception(60)

    return find


@pytest.fixture(scope="session")
def allowed(vocabulary):
    """A function that returns the set of tokens that a guide allows next. None means all tokens."""
    import numpy as np
    from backend.grammar.random_schemas import bits

    @functools.wraps(bits)
    def find(guide):
        row = np.zeros(64, np.int32)
        return set(bits(row, vocabulary.size)) if guide.fill(row) else None

    return find
