"""Tests of the runner with real grammars, the demo model's vocabulary and random logits."""

import json
import random
import re
from pathlib import Path

import jsonschema
import pytest
from backend.test_step_runner import chunk_of, output_of, run
from fakes.hashed_path import HashedPath
from nereid_backend import SamplingParams
from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.core.sequence import Sequence
from nereid_backend.grammar import Guides, token_guide
from nereid_backend.step_runner import Runner
from tokenizers import Tokenizer

MODEL = Path(__file__).parents[3] / "demo" / "chat"
VOCAB = json.loads((MODEL / "config.json").read_text())["vocab_size"]
EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "level": {"enum": ["low", "middle", "high"]},
        "counts": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "level", "counts"],
    "additionalProperties": False,
}
REGEX = "The whole answer is (yes|no), and nothing else was asked\\."
TEXTS = [{"type": "const_string", "value": text} for text in ("yes", "no")]
TAG = {
    "type": "sequence",
    "elements": [
        {"type": "const_string", "value": "The whole answer is "},
        {"type": "or", "elements": TEXTS},
        {"type": "const_string", "value": ", and nothing else was asked."},
    ],
}


@pytest.fixture(scope="module")
def guides():
    made = Guides(str(MODEL), vocab_size=VOCAB, eos_token_ids=[EOS])
    yield made
    made.close()


@pytest.fixture(scope="module")
def decode():
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    return lambda token_ids: tokenizer.decode(token_ids)


def make_sequence(guides, spec, seed=0, row=0, **params):
    sampling = SamplingParams(grammar=spec, **params)
    sequence = Sequence(
        "r", [5, 6], sampling, max_total_tokens=999, eos_token_ids=(EOS,), seed=seed
    )
    sequence.row = row
    sequence.guide = guides.prepare(sampling, sequence.stop_token_ids).result(30)
    return sequence


def answer(runner, sequences, rng=None, expected=None, limit=400):
    """Run steps until all sequences have ended.

    If `expected` contains the tokens of each sequence, some of them are used as draft tokens. Some
    drafts end with a wrong token.
    """
    for _ in range(limit):
        active = [sequence for sequence in sequences if sequence.token_ids[-1] != EOS]
        if not active:
            return
        chunks = []
        for sequence in active:
            drafts = []
            if expected:
                next_tokens = expected[sequences.index(sequence)][len(output_of(sequence)) :]
                drafts = list(next_tokens[: rng.randrange(4)])
                if drafts and rng.random() < 0.4:
                    drafts[-1] = rng.randrange(VOCAB)
            chunks.append(chunk_of(sequence, drafts=drafts))
        for sampled in run(runner, *chunks).sampled:
            assert sampled.error is None, sampled.error
    raise AssertionError("an answer does not end")


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.9, "logprobs": 1}])
def test_answers_match_their_schema_and_draft_tokens_change_nothing(guides, decode, params):
    spec = GrammarSpec("json_schema", json.dumps(SCHEMA))

    def batch():
        return [make_sequence(guides, spec, seed=i, row=i, **params) for i in range(10)]

    sequences = batch()
    answer(Runner(HashedPath(VOCAB)), sequences)
    for sequence in sequences:
        *answer_tokens, _ = output_of(sequence)
        jsonschema.validate(json.loads(decode(answer_tokens)), SCHEMA)

    expected = [output_of(sequence) for sequence in sequences]
    with_drafts = batch()
    answer(Runner(HashedPath(VOCAB)), with_drafts, random.Random(1), expected)
    assert [output_of(sequence) for sequence in with_drafts] == expected


def test_draft_tokens_do_not_replace_forced_tokens(guides):
    spec = GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": TAG}))

    def answer_of(drafts=(), **params):
        sequence = make_sequence(guides, spec, temperature=0.0, **params)
        runner = Runner(HashedPath(VOCAB))
        run(runner, chunk_of(sequence, drafts=drafts))
        answer(runner, [sequence])
        return output_of(sequence)

    # With log-probabilities, the runner samples every token and forces none. The text is the same,
    # but it consists of other tokens.
    sampled, forced = answer_of(logprobs=0), answer_of()
    assert sampled != forced
    assert answer_of(drafts=sampled[:6]) == forced


def test_forced_tokens_need_few_steps(guides, decode):
    sequence = make_sequence(guides, GrammarSpec("regex", REGEX), temperature=0.0)
    path = HashedPath(VOCAB)
    runner, steps = Runner(path), 0
    while sequence.token_ids[-1] != EOS:
        run(runner, chunk_of(sequence))
        steps += 1
    assert re.fullmatch(REGEX, decode(output_of(sequence)[:-1]))
    assert steps < len(output_of(sequence)) / 2


@pytest.mark.parametrize(
    "rules",
    [
        'root ::= start many "!"\nmany ::= many many many | [a-z] | ""\nstart ::= ',
        'start: before many "!"\nmany: many "+" many | many many | /[a-z]/\nbefore: ',
    ],
)
@pytest.mark.parametrize("drafts", [(), (300, 301)])
def test_a_grammar_whose_tokens_become_slow_ends_its_request(guides, monkeypatch, rules, drafts):
    monkeypatch.setattr(token_guide, "_SLOW_TOKEN_S", 0.001)
    monkeypatch.setattr(token_guide, "_MAX_SLOW_S", 0.05)
    # The trial tests only the first tokens, and the ambiguous rule begins later.
    spec = GrammarSpec("ebnf", rules + '"q" ' * 40)
    sequence = make_sequence(guides, spec, temperature=0.0)
    runner = Runner(HashedPath(VOCAB))
    for _ in range(400):
        (sampled,) = run(runner, chunk_of(sequence, drafts=drafts)).sampled
        if sampled.error is not None:
            break
    assert sampled.is_refused
    assert sampled.error.startswith("grammar: checking the tokens of the answer takes too long")
    assert sequence.token_ids[-1] != EOS
