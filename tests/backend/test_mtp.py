"""Tests that speculative decoding with MTP layers does not change the answers of the model."""

import json
from types import SimpleNamespace

import pytest
import torch
from backend.exactness import (
    PROMPTS,
    bytes_for,
    load_float32,
    open_engine,
    reference,
    run_staggered,
    run_together,
    share_of_accepted_tokens,
)
from backend.mtp_checkpoint import save_with_mtp
from nereid_backend import EngineConfig, SamplingParams, mtp_path
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.errors import ConfigError
from nereid_backend.paths.step_batch import tokens_of
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

pytestmark = pytest.mark.usefixtures("cheap_drafts")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_with_mtp(tmp_path_factory.mktemp("mtp"))


def open_mtp(folder, **settings):
    return open_engine(folder, speculative_method="mtp", **settings)


@pytest.mark.parametrize("block_size", [4, 16])
def test_greedy_tokens_are_those_of_the_model_alone(folder, block_size):
    engine = open_mtp(folder, block_size=block_size)
    assert run_together(engine) == reference(folder)
    assert 0.1 < share_of_accepted_tokens(engine) < 0.95
    assert engine.stats().num_drafts > 10
    engine.check()
    engine.close()


def record_proposals(engine, monkeypatch):
    """Return a list that gets a pair for each draft: the tokens of the sequence, and the draft."""
    drafter = engine._parts.scheduler.drafter
    propose = drafter.propose
    proposals = []

    def propose_and_record(sequence, limit):
        drafts = propose(sequence, limit)
        proposals.append((list(sequence.token_ids), drafts))
        return drafts

    monkeypatch.setattr(drafter, "propose", propose_and_record)
    return proposals


@torch.inference_mode()
def expected_draft(main_model, mtp_model, known):
    """Return the draft token that the MTP code of transformers generates after the known tokens."""
    ids = torch.tensor([known])
    hidden = main_model.model(ids[:, :-1]).last_hidden_state
    drafts, _, _ = mtp_model(
        input_ids=ids[:, 1:],
        last_hidden_states=hidden,
        attention_mask=None,
        position_ids=torch.arange(1, len(known))[None],
        mtp_cache=MtpCache(config=main_model.config.get_mtp_config()),
    )
    return drafts[0, 0].item()


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 9}])
def test_the_first_draft_token_is_that_of_transformers(folder, monkeypatch, settings):
    engine = open_mtp(folder, enable_prefix_caching=False, **settings)
    proposals = record_proposals(engine, monkeypatch)
    run_staggered(engine)
    engine.close()

    main_model = load_float32(folder)
    mtp_model = MtpModel.from_pretrained(main_model)
    drafted = [(known, drafts) for known, drafts in proposals if drafts]
    assert len(drafted) > 20
    for known, drafts in drafted:
        assert drafts[0] == expected_draft(main_model, mtp_model, known)


def test_requests_that_arrive_later_are_drafted_in_the_same_batch(folder):
    engine = open_mtp(folder, max_num_batched_tokens=9)
    assert run_staggered(engine) == reference(folder)
    assert engine.stats().num_accepted_tokens > 5
    engine.close()


def test_preempted_requests_are_drafted_again(folder):
    expected = reference(folder)
    measuring_engine = open_mtp(folder)
    kv_cache_memory = bytes_for(measuring_engine, num_tokens=100)
    measuring_engine.close()
    engine = open_mtp(folder, max_model_len=80, kv_cache_memory=kv_cache_memory)
    assert run_together(engine) == expected
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_accepted_tokens > 0
    engine.close()


def test_prompts_in_the_prefix_cache_are_drafted(folder):
    expected = reference(folder)
    engine = open_mtp(folder)
    first = run_together(engine)
    num_accepted = engine.stats().num_accepted_tokens
    assert first == run_together(engine) == expected
    stats = engine.stats()
    assert stats.num_prefix_cache_hits > 0
    assert stats.num_accepted_tokens > num_accepted > 0
    engine.close()


def test_sampled_tokens_are_those_of_the_model_alone(folder):
    params = SamplingParams(
        temperature=0.7, top_k=30, seed=3, max_tokens=40, ignore_eos=True, n=2, logprobs=1
    )

    def sampled_tokens(engine):
        outputs = engine.generate(PROMPTS, params)
        return [answer.token_ids for output in outputs for answer in output.outputs]

    plain_engine, drafting_engine = open_engine(folder), open_mtp(folder)

    assert sampled_tokens(drafting_engine) == sampled_tokens(plain_engine)
    assert drafting_engine.stats().num_accepted_tokens > 5
    plain_engine.close()
    drafting_engine.close()


class Decoder(torch.nn.Module):
    """A fake decoder that returns the id of each token as the token's hidden state."""

    def forward(self, ids):
        return SimpleNamespace(last_hidden_state=ids[None, :, None].float())


class DecoderPath:
    """A forward path that only runs a decoder."""

    def __init__(self, decoder):
        self.decoder = decoder

    def forward(self, plan, sampled=None):
        ids = [token for chunk in plan.chunks for token in tokens_of(chunk)]
        return self.decoder(torch.tensor(ids)).last_hidden_state[0]


def compute(hidden, *parts):
    """Run a step that computes each sequence from a given token to the last token.

    Args:
        hidden: the forward path that stores the hidden states.
        parts: pairs of a sequence and the index of the first token to compute.
    """
    chunks = []
    for sequence, start in parts:
        num_tokens = len(sequence.token_ids) - start
        chunks.append(Chunk(sequence, start, num_tokens, True, start == 0, 1))
    hidden.forward(StepPlan(chunks, sum(chunk.num_tokens for chunk in chunks)))


def taken(hidden, sequence, start, count):
    """Return the stored hidden states of `count` tokens from `start` on. A missing state is 0."""
    rows = torch.zeros(count, 1)
    hidden.take(sequence, start, into=rows)
    return rows.flatten().tolist()


@pytest.fixture
def hidden():
    decoder = Decoder()
    return mtp_path.HiddenStates(DecoderPath(decoder), decoder)


def make_sequence(token_ids):
    return Sequence("0", token_ids, SamplingParams(), max_total_tokens=50)


@pytest.mark.parametrize("max_appended", [1, 256])
def test_hidden_states_of_rejected_tokens_are_replaced(hidden, monkeypatch, max_appended):
    monkeypatch.setattr(mtp_path, "_MAX_APPENDED", max_appended)
    first, second = make_sequence([5, 6, 7]), make_sequence([8])
    compute(hidden, (first, 0), (second, 0))

    # The engine computes the draft tokens 1 and 2, and rejects 2. The sequence then continues with
    # the tokens 3 and 4. In this test, the hidden state of a token is the id of the token.
    first.token_ids += [1, 2]
    compute(hidden, (first, 3))
    first.token_ids[4:] = [3, 4]
    second.token_ids += [9]
    compute(hidden, (second, 1), (first, 4))

    assert taken(hidden, first, 0, count=6) == [5, 6, 7, 1, 3, 4]
    assert taken(hidden, second, 0, count=3) == [8, 9, 0]


def test_old_hidden_states_are_deleted_and_unknown_ones_stay_zero(hidden, monkeypatch):
    monkeypatch.setattr(mtp_path, "_MAX_STATES", 2)
    monkeypatch.setattr(mtp_path, "_MAX_APPENDED", 1)
    sequence = make_sequence([5, 6])
    compute(hidden, (sequence, 0))
    sequence.token_ids += [7, 8]
    compute(hidden, (sequence, 2))
    assert taken(hidden, sequence, 0, count=4) == [0, 0, 7, 8]
    assert taken(hidden, sequence, 2, count=2) == [0, 0]


def test_missing_hidden_states_do_not_change_answers(folder, monkeypatch):
    monkeypatch.setattr(mtp_path, "_MAX_STATES", 2)
    engine = open_mtp(folder, max_num_batched_tokens=9)
    assert run_together(engine) == reference(folder)
    assert engine.stats().num_accepted_tokens > 5
    engine.close()


def test_the_requests_continue_without_drafts_if_the_mtp_layer_fails(folder, monkeypatch):
    engine = open_mtp(folder)
    model = engine._parts.scheduler.drafter._path._model
    monkeypatch.setattr(model, "forward_layer", None)
    assert run_together(engine) == reference(folder)
    assert engine.stats().num_proposed_tokens == 0
    engine.close()


def test_a_model_without_mtp_layers_is_refused(checkpoint):
    with pytest.raises(ConfigError, match=r"value mtp .* LlamaForCausalLM has no num_mtp_layers"):
        open_mtp(checkpoint("llama"))


def test_missing_weights_of_mtp_layers_are_refused(tmp_path):
    save_with_mtp(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["mtp.fc.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"cannot load or run the MTP layers of .*eh_proj"):
        open_mtp(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 2}, "mtp requires tensor_parallel_size=1"),
        ({"draft_model": "/d"}, "the value mtp uses no draft model"),
    ],
)
def test_contradictory_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig("/m", speculative_method="mtp", **settings)
    assert EngineConfig("/m", speculative_method="mtp").max_draft_tokens == 4


def test_an_eagle_checkpoint_is_refused_as_a_draft_model(checkpoint, tmp_path):
    # These are the fields of a published EAGLE-3 checkpoint.
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": 160,
        "hidden_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"EAGLE checkpoint .+Eagle3., which trans"):
        open_engine(checkpoint("llama"), draft_model=str(tmp_path))
