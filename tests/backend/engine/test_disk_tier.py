"""Tests that a new engine finds the prefixes that an earlier engine has written to disk."""

import dataclasses
import random
import subprocess
import sys
from pathlib import Path

import pytest
from backend.exactness import PARAMS, open_engine
from backend.tiny_models import VOCAB_SIZE
from nereid_backend.engine import disk_tier, open_disk_tier
from nereid_backend.errors import ConfigError

from backend import shrink

# One model for each forward path that uses blocks, a model with attention windows, and a model
# without attention.
_MODELS = ["llama", "qwen3_next", "mistral", "bloom", "mamba2"]
_USUAL = ("llama", "qwen3_next")
PROMPT = [random.Random(1).randrange(3, VOCAB_SIZE) for _ in range(70)]
NUM_FULL_BLOCK_TOKENS = 68  # 17 blocks of 4 tokens


def answer(engine, prompt=PROMPT, **params):
    """Return the answers to one prompt, and the number of its tokens that were cached."""
    (output,) = engine.generate([prompt], dataclasses.replace(PARAMS, **params))
    engine.check()
    return [sequence.token_ids for sequence in output.outputs], output.num_cached_tokens


def run_once(model, disk, prompt=PROMPT, **settings):
    """Answer one prompt with a new engine, and return the results of `answer`."""
    engine = open_engine(model, prefix_cache_disk=str(disk), **settings)
    answers_and_cached = answer(engine, prompt)
    engine.close()
    return answers_and_cached


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(n, marks=() if n in _USUAL else pytest.mark.long) for n in _MODELS],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_restarted_engine_continues_a_chat_from_the_disk(saved, tmp_path, model_type):
    model = saved(model_type)
    (first_answer,), num_cached = run_once(model, tmp_path)
    assert num_cached == 0

    next_prompt = [*PROMPT, *first_answer, 7, 8, 9]
    uncached = open_engine(model, enable_prefix_caching=False)
    expected, _ = answer(uncached, next_prompt)
    uncached.close()
    # The prompt and the first answer fill 21 blocks of 4 tokens.
    assert run_once(model, tmp_path, next_prompt) == (expected, 21 * 4)


def test_damaged_files_are_computed_again(saved, tmp_path):
    expected, _ = run_once(saved("llama"), tmp_path)
    files = sorted(tmp_path.glob("*.prefix"))
    assert len(files) == 21  # one file for each full block
    for path in files:
        path.write_bytes(path.read_bytes()[:-3])
    assert run_once(saved("llama"), tmp_path) == (expected, 0)
    # The engine wrote the recomputed tokens to the disk again.
    assert run_once(saved("llama"), tmp_path) == (expected, NUM_FULL_BLOCK_TOKENS)


def test_a_prefix_that_is_missing_in_the_middle_is_used_up_to_the_gap(saved, tmp_path):
    expected, _ = run_once(saved("llama"), tmp_path)
    engine = open_engine(saved("llama"), prefix_cache_disk=str(tmp_path))
    store = engine._parts.disk._store
    read_block, keys = store.read, []

    def read_all_but_the_sixth(key):
        keys.append(key)
        return None if len(keys) == 6 else read_block(key)

    store.read = read_all_but_the_sixth
    assert answer(engine) == (expected, 5 * engine.info.block_size)
    engine.close()


def test_a_slow_disk_does_not_stop_a_request(saved, tmp_path, monkeypatch):
    expected, _ = run_once(saved("llama"), tmp_path)
    monkeypatch.setattr(disk_tier, "_MAX_WAIT_S", 0.0)
    engine = open_engine(saved("llama"), prefix_cache_disk=str(tmp_path))
    # The future never gets a result, as if the disk never finished reading.
    engine._parts.disk._readers.submit = lambda *_: disk_tier.Future()
    assert answer(engine) == (expected, 0)
    engine.close()


def test_an_aborted_request_does_not_wait_for_the_disk(saved, tmp_path):
    run_once(saved("llama"), tmp_path)
    engine = open_engine(saved("llama"), prefix_cache_disk=str(tmp_path))
    engine.add_request("a", PROMPT, PARAMS)
    engine.abort("a")
    assert [update.finish_reason for update in engine.step()] == ["abort"]
    assert not engine.has_work()
    assert not engine._parts.disk._reads
    engine.close()


def test_evicted_blocks_are_found_on_disk(saved, tmp_path):
    engine = open_engine(saved("llama"), prefix_cache_disk=str(tmp_path), max_model_len=96)
    expected, _ = answer(engine)
    pool = engine._parts.pool
    pool.release(pool.allocate(pool.num_blocks))  # This evicts all blocks from the memory.
    assert pool.num_cached == 0
    assert answer(engine) == (expected, NUM_FULL_BLOCK_TOKENS)
    assert answer(engine, n=2) == (expected * 2, NUM_FULL_BLOCK_TOKENS)
    engine.close()


def test_models_with_different_weights_share_a_folder_but_no_files(saved, tmp_path):
    run_once(saved("llama"), tmp_path / "disk")
    other = shrink.save("llama", tmp_path / "model")
    assert run_once(other, tmp_path / "disk")[1] == 0
    assert run_once(saved("llama"), tmp_path / "disk", block_size=8)[1] == 0


def test_the_files_of_another_version_of_transformers_are_not_used(saved, tmp_path, monkeypatch):
    run_once(saved("llama"), tmp_path)
    monkeypatch.setattr(open_disk_tier, "version", lambda _: "4.0.0")
    assert run_once(saved("llama"), tmp_path)[1] == 0


def test_a_folder_that_cannot_be_used_is_refused(saved, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"^prefix_cache_disk: the folder .* cannot be used: "):
        open_engine(saved("llama"), prefix_cache_disk=str(file))


def test_the_disk_tells_that_a_setting_turned_the_prefix_cache_off(saved, tmp_path, caplog):
    caplog.set_level("INFO", logger="nereid_backend")
    engine = open_engine(
        saved("llama"), prefix_cache_disk=str(tmp_path), enable_prefix_caching=False
    )
    engine.close()
    reason = "because the setting enable_prefix_caching is false."
    assert f"The prefix cache on disk (prefix_cache_disk) is off, {reason}" in caplog.text


@pytest.mark.long
def test_the_answers_are_right_although_the_process_is_killed_repeatedly():
    program = Path(__file__).with_name("disk_soak.py")
    subprocess.run([sys.executable, program, "--seconds", "15"], check=True)
