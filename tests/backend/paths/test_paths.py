"""Tests of the forward paths other than the packed path: their states, logits and self-checks."""

import logging
import re
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from backend.exactness import PARAMS, PROMPTS, open_engine, reference
from nereid_backend import EngineConfig, UnsupportedModelError
from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.core.sequence import Sequence
from nereid_backend.core.step import Chunk, StepPlan
from nereid_backend.load_checkpoint import load_checkpoint
from nereid_backend.model.forward_path.choose_path import choose_path
from nereid_backend.paths import gathered_cache, recurrent_cache, row_keys
from nereid_backend.paths.model_call import Sizes

from backend import shrink

SIZES = Sizes(num_blocks=64, block_size=16, max_num_seqs=8, max_model_len=128)


def spec_of(folder, lines=None, **settings):
    """Return the `PathSpec` of the forward path that the engine chooses for a checkpoint.

    If `lines` is a list, append the progress messages to it.
    """
    hook = AttentionHook()
    checkpoint = load_checkpoint(
        str(folder),
        dtype="float32",
        device=torch.device("cpu"),
        attention=hook.name,
        progress=lambda line: None,
    )
    config = EngineConfig(str(folder), **settings)
    lines = [] if lines is None else lines
    return choose_path(checkpoint, hook, config, lines.append).spec


def request_of(row, token_ids, num_prompt_tokens=None):
    """Return a sequence in the row `row`. By default, all of its tokens belong to the prompt."""
    sequence = Sequence(str(row), list(token_ids), SamplingParams(), max_total_tokens=128)
    sequence.row = row
    sequence.num_prompt_tokens = num_prompt_tokens or len(sequence.token_ids)
    sequence.block_table = list(range(row * 8, row * 8 + 8))
    return sequence


@torch.inference_mode()
def forward(path, *chunks):
    """Return the logits of a step that consists of `chunks`."""
    return path.forward(StepPlan(list(chunks), sum(chunk.num_tokens for chunk in chunks)))


def prompt_chunk(sequence):
    """Return a chunk that contains all tokens of a sequence."""
    num_tokens = len(sequence.token_ids)
    return Chunk(sequence, 0, num_tokens, samples=True, is_first=True, num_logits=1)


def next_chunk(sequence, token_id):
    """Append a token to a sequence, and return a chunk with this token."""
    sequence.token_ids.append(token_id)
    position = len(sequence.token_ids) - 1
    return Chunk(sequence, position, 1, samples=True, is_first=False, num_logits=1)


@pytest.mark.parametrize("model_type", ["qwen3_next", "minimax"])
def test_the_states_of_ended_sequences_are_deleted(model_type, saved):
    # The scheduler gives the memory of ended sequences to other sequences and to snapshots.
    engine = open_engine(saved(model_type))
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, replace(PARAMS, max_tokens=number + 1))
    while engine.has_work():
        engine.step()

    engine.generate([PROMPTS[0]], PARAMS)

    # Only the state of the last sequence remains. The two models have forward paths that store
    # states in different attributes.
    states = engine._parts.runner._path._states
    assert len(states._num_tokens if model_type == "qwen3_next" else states) == 1
    engine.close()


@pytest.mark.parametrize("model_type", ["minimax", "mamba", "jamba"])
def test_tokens_that_a_grammar_forces_continue_the_stored_state(model_type, saved, monkeypatch):
    spec = spec_of(saved(model_type))
    path, fresh_path = spec.build(SIZES), spec.build(SIZES)
    sequence = request_of(0, PROMPTS[3])
    forward(path, prompt_chunk(sequence))
    num_prompt_tokens = len(sequence.token_ids)
    sequence.token_ids += [7, 8, 9]
    whole_sequence = request_of(1, sequence.token_ids, num_prompt_tokens)
    expected = forward(fresh_path, prompt_chunk(whole_sequence))
    run_model = Mock(side_effect=path._run_model)
    monkeypatch.setattr(path, "_run_model", run_model)

    forced_tokens = Chunk(
        sequence, num_prompt_tokens, 3, samples=True, is_first=False, num_logits=1
    )
    logits = forward(path, forced_tokens)

    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    # These models can continue a state only with one token at a time, so the three tokens need
    # three calls.
    assert run_model.call_count == 3


@pytest.mark.parametrize("model_type", ["qwen3_next", "mamba", "inkling_text"])
def test_a_state_is_computed_again_after_tokens_were_removed(saved, model_type):
    spec = spec_of(saved(model_type))
    path, fresh_path = spec.build(SIZES), spec.build(SIZES)
    sequence = request_of(0, PROMPTS[2])
    forward(path, prompt_chunk(sequence))
    forward(path, next_chunk(sequence, 7))
    forward(path, next_chunk(sequence, 8))

    del sequence.token_ids[-2:]
    logits = forward(path, next_chunk(sequence, 9))

    expected = forward(fresh_path, prompt_chunk(request_of(0, [*PROMPTS[2], 9])))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["qwen3_next", "inkling_text", "rwkv"])
def test_a_failed_request_does_not_change_the_states_of_others(saved, model_type):
    spec = spec_of(saved(model_type))
    path, fresh_path = spec.build(SIZES), spec.build(SIZES)
    failed, other = request_of(0, PROMPTS[1]), request_of(1, PROMPTS[2])
    for sequence in (failed, other):
        forward(path, prompt_chunk(sequence))
    forward(path, next_chunk(failed, 5), next_chunk(other, 6))

    path.clear(failed)
    logits = forward(path, next_chunk(other, 7))

    same_tokens = request_of(1, [*PROMPTS[2], 6], len(PROMPTS[2]))
    forward(fresh_path, prompt_chunk(same_tokens))
    expected = forward(fresh_path, next_chunk(same_tokens, 7))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["qwen3_next", "bloom", "bart", "rwkv"])
def test_logits_are_computed_for_the_requested_number_of_tokens(saved, model_type):
    path = spec_of(saved(model_type)).build(SIZES)
    chunk = prompt_chunk(request_of(0, PROMPTS[2]))
    logits_of_four = forward(path, chunk._replace(num_logits=4))
    logits_of_one = forward(path, chunk)
    no_logits = forward(path, chunk._replace(num_logits=0, samples=False, num_tokens=5))
    assert len(logits_of_four) == 4
    assert len(no_logits) == 0
    torch.testing.assert_close(logits_of_four[-1:], logits_of_one, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "pattern"),
    [
        ("llama", r"^path: packed\.$"),
        ("qwen3_next", r"^path: rows \(packed: its logits differ from .+\)\.$"),
        (
            "inkling_text",
            r"^path: rows; keys and values are copied from blocks \(packed: its attention adds",
        ),
        ("bloom", r"^path: padded \(packed: it does not use transformers' attention interface"),
        ("rwkv", r"^path: single; with the model's own cache \(packed: .+\)\. This is slow\.$"),
    ],
)
def test_the_path_is_logged_with_the_reasons_against_faster_paths(saved, model_type, pattern):
    lines = []
    spec_of(saved(model_type), lines)
    (line,) = lines
    assert re.search(pattern, line)


def assert_check_fails(folder, path_name):
    """Check that the self-check rejects the forward path `path_name`, so "single" is chosen."""
    lines = []
    assert spec_of(folder, lines).name == "single"
    assert f"{path_name}: its logits differ from the logits of the unmodified model" in lines[0]


def attend_to_padding(monkeypatch):
    """Replace the attention masks of gathered steps by masks that do not hide the padding."""
    from_chunks = gathered_cache.GatheredStep.from_chunks

    def from_chunks_with_wrong_mask(chunks, cache):
        step = from_chunks(chunks, cache)
        step.mask.fill_(1)
        return step

    monkeypatch.setattr(gathered_cache.GatheredStep, "from_chunks", from_chunks_with_wrong_mask)


def test_the_self_check_detects_attention_to_padding(saved, monkeypatch):
    attend_to_padding(monkeypatch)
    assert_check_fails(saved("bloom"), "padded")


def test_the_self_check_detects_states_of_other_rows(saved, monkeypatch):
    cut_row = recurrent_cache._cut_row

    def cut_first_row(value, row, count):
        return cut_row(value, 0, count)

    monkeypatch.setattr(recurrent_cache, "_cut_row", cut_first_row)
    assert_check_fails(saved("qwen3_next"), "rows")


def test_the_self_check_detects_a_state_of_an_earlier_request(saved, monkeypatch):
    make_cache = row_keys.make_cache

    def make_cache_with_states(config):
        cache = make_cache(config)
        for layer in cache.layers:
            layer.lazy_initialization(torch.ones(1, 96, 4), torch.ones(1, 96, 16))
            layer.conv_states[0].fill_(1)
            layer.recurrent_states[0].fill_(1)
            layer.has_previous_state[0] = True
        return cache

    monkeypatch.setattr(row_keys, "make_cache", make_cache_with_states)
    assert_check_fails(saved("mamba"), "rows")


def test_the_self_check_detects_attention_to_padding_in_models_with_states(saved, monkeypatch):
    attend_to_padding(monkeypatch)
    assert_check_fails(saved("inkling_text"), "rows")


@pytest.mark.parametrize(("max_model_len", "path"), [(64, "packed"), (65, "padded")])
def test_sparse_attention_runs_packed_if_the_indexer_keeps_all_tokens(saved, max_model_len, path):
    spec = spec_of(saved("deepseek_v32"), max_model_len=max_model_len)
    assert spec.name == path


def test_weights_that_give_nan_are_refused_with_the_reason_of_every_path(tmp_path):
    model = shrink.tiny_model("llama")
    model.model.layers[0].mlp.up_proj.weight.data.fill_(3e38)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as caught:
        open_engine(tmp_path)
    for path_name in ("packed: ", "rows: ", "padded: ", "single: "):
        assert path_name in str(caught.value)


def test_states_are_part_of_the_memory_plan(saved):
    engine = open_engine(saved("qwen3_next"), max_num_seqs=64)
    small_engine = open_engine(saved("qwen3_next"), max_num_seqs=64, kv_cache_memory=200 * 1024)
    assert small_engine.info.max_num_seqs < engine.info.max_num_seqs == 64
    outputs = small_engine.generate(PROMPTS, PARAMS)
    expected = reference(saved("qwen3_next"))
    assert [output.outputs[0].token_ids for output in outputs] == expected
    engine.close()
    small_engine.close()


def test_the_memory_plan_is_printed_at_start(saved, caplog):
    caplog.set_level(logging.INFO, logger="nereid_backend")
    open_engine(saved("llama")).close()
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("memory: ")]
    for part in ("weights ", "a step of ", "KV cache ", "A request can have "):
        assert part in line
