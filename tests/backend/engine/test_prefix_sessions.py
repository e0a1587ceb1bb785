"""Tests that cached prefixes of sessions stay in the cache longer than other cached prefixes."""

import pytest
from backend.exactness import make_prompts, open_engine
from nereid_backend import RequestError, SamplingParams

PROMPTS = make_prompts((48, *[60] * 8))
CHAT, OTHERS = PROMPTS[0], PROMPTS[1:]


def cached_tokens(engine, prompt, **fields):
    """Answer a prompt, and return how many of its tokens were in the cache."""
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, **fields)
    output = engine.generate([prompt], params)[0]
    engine.check()
    return output.num_cached_tokens


def use_whole_cache(engine):
    """Compute more prompts than the cache can store."""
    for prompt in OTHERS:
        cached_tokens(engine, prompt)


@pytest.fixture
def engine(checkpoint):
    """An engine whose cache has 64 blocks of 4 tokens. The prompts `OTHERS` need more blocks."""
    folder = checkpoint("llama")
    engine = open_engine(folder, max_model_len=64)
    num_bytes = engine.info.kv_cache_bytes // engine.info.num_blocks * 64
    engine.close()
    engine = open_engine(folder, max_model_len=64, kv_cache_memory=num_bytes)
    yield engine
    assert engine.stats().kv_cache_blocks_used == 0
    engine.close()


@pytest.mark.parametrize(
    ("fields", "is_kept"),
    [({}, False), ({"prompt_cache_key": "a"}, True), ({"prompt_cache_ttl": 60.0}, True)],
)
def test_a_session_keeps_its_prefix_while_other_requests_use_the_whole_cache(
    engine, fields, is_kept
):
    assert cached_tokens(engine, CHAT, **fields) == 0
    use_whole_cache(engine)
    assert (cached_tokens(engine, CHAT, **fields) > 0) == is_kept


def test_statistics_list_the_sessions(engine):
    cached_tokens(engine, CHAT, prompt_cache_key="a", client_id="me")
    cached_tokens(engine, OTHERS[0], prompt_cache_key="b", client_id="you")
    statistics = engine.sessions.call("statistics", {})
    assert (statistics["num_blocks"], statistics["num_used_blocks"]) == (engine.info.num_blocks, 0)
    assert statistics["num_retained_blocks"] == statistics["num_cached_blocks"] > 0
    # The session that expires last comes first. Without prompt_cache_ttl, a session expires after
    # 300 s.
    assert [session["prompt_cache_key"] for session in statistics["sessions"]] == ["b", "a"]
    assert 299 < statistics["sessions"][0]["expires_in_s"] <= 300

    mine = engine.sessions.call("statistics", {"client_id": "me"})["sessions"]
    assert [session["prompt_cache_key"] for session in mine] == ["a"]


def test_a_dropped_session_is_computed_again(engine):
    cached_tokens(engine, CHAT, prompt_cache_key="a")
    cached_tokens(engine, OTHERS[0], prompt_cache_key="b")
    dropped = engine.sessions.call("drop", {"prompt_cache_key": "a"})
    assert dropped["num_dropped_tokens"] >= len(CHAT) - 4  # The last block may be incomplete.
    assert cached_tokens(engine, CHAT) == 0
    assert cached_tokens(engine, OTHERS[0]) > 0
    engine.sessions.call("drop", {})
    assert engine.sessions.statistics()["num_cached_blocks"] == 0


def test_a_session_of_another_client_is_neither_extended_nor_dropped(engine):
    cached_tokens(engine, CHAT, prompt_cache_key="a", client_id="me")
    values = {"prompt_cache_key": "a", "client_id": "you", "seconds": 3600.0}
    assert engine.sessions.call("extend", values) == {"num_sessions": 0}
    assert engine.sessions.call("drop", values) == {"num_dropped_tokens": 0}
    assert engine.sessions.call("extend", values | {"client_id": "me"}) == {"num_sessions": 1}
    assert engine.sessions.statistics()["sessions"][0]["expires_in_s"] > 3599


def test_an_unknown_operation_is_refused(engine):
    with pytest.raises(
        RequestError, match="cache: the value must be 'statistics', 'drop' or 'extend'"
    ):
        engine.sessions.call("burn", {})
