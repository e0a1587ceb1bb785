import contextlib
import dataclasses
import time
from concurrent.futures import Future

import pytest
import torch
from backend.exactness import bytes_for, make_prompts, open_engine
from nereid_backend import CapacityError, ConfigError, RequestError, SamplingParams
from nereid_backend.core.grammar import GrammarSpec

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
# The last token of the tiny Llama 3.2 Vision. This model has embeddings, but no logits, for the
# image token and 7 other tokens.
TOKEN_WITHOUT_LOGIT = 327


@pytest.fixture(scope="module")
def engine(checkpoint):
    engine = open_engine(checkpoint("llama"), max_model_len=64, max_num_waiting=3)
    yield engine
    assert not engine.has_work()
    engine.check()
    assert engine.stats().kv_cache_blocks_used == 0
    engine.close()


def drain(engine):
    """Run the engine until it is idle, and return the updates of each request by request id."""
    updates_by_id = {}
    while engine.has_work():
        for update in engine.step():
            updates_by_id.setdefault(update.request_id, []).append(update)
        engine.check()
    return updates_by_id


def finish_reasons(updates):
    return [u.finish_reason for u in updates if u.finish_reason is not None]


def tokens_of(updates, index=0):
    """Return the tokens in the updates of the sequence `index` of a request."""
    return [token for u in updates if u.index == index for token in u.new_token_ids]


def set_nan_embedding(engine, token_id):
    """Set the embedding of a token to NaN, so that requests with this token have NaN logits."""
    model = engine._parts.runner._path._model
    with torch.no_grad():
        model.get_input_embeddings().weight[token_id] = float("nan")


def test_info_describes_the_loaded_model(engine):
    info = engine.info
    assert info.architecture == "LlamaForCausalLM"
    assert (info.dtype, info.device, info.path) == ("float32", "cpu", "packed")
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (64, 320, (2,))
    assert info.num_blocks * info.block_size >= info.max_model_len


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: the prompt is empty"),
        ([5] * 90, r"prompt has 90 tokens; the limit is 64 \(max_model_len\)"),
        ([5] * 64, "leaves no token for the answer"),
        ([5, 320], r"token id 320 is outside the vocabulary \(0 to 319\)"),
        ([-1], "token id -1 is outside"),
        ([5, 1.5], "prompt: the value must be a list of token ids"),
        (["5"], "prompt: the value must be a list of token ids"),
        (None, "prompt: the value must be a list of token ids"),
    ],
)
def test_a_bad_prompt_is_refused_with_the_value_and_the_limit(engine, prompt, message):
    with pytest.raises(RequestError, match=message):
        engine.add_request("bad", prompt, GREEDY)
    assert not engine.has_work()


def test_the_id_of_a_request_cannot_be_used_again_before_the_request_has_ended(engine):
    engine.add_request("a", [5, 6], GREEDY)
    with pytest.raises(RequestError, match="the id 'a' belongs to a request that has not ended"):
        engine.add_request("a", [5, 6], GREEDY)
    drain(engine)
    engine.add_request("a", [5, 6], GREEDY)
    drain(engine)


def test_an_id_cannot_be_used_again_before_its_abort_was_reported(engine):
    engine.add_request("a", [5, 6], GREEDY)
    engine.abort("a")
    with pytest.raises(RequestError, match="the id 'a' belongs to a request that has not ended"):
        engine.add_request("a", [5, 6], GREEDY)
    assert finish_reasons(drain(engine)["a"]) == ["abort"]


def test_a_full_queue_refuses_with_the_limit(engine):
    for number in range(3):
        engine.add_request(str(number), [5], GREEDY)
    message = r"3 requests are waiting, and the limit is 3 \(max_num_waiting\)"
    with pytest.raises(CapacityError, match=message):
        engine.add_request("late", [5], GREEDY)
    assert sorted(drain(engine)) == ["0", "1", "2"]


def test_an_answer_ends_at_max_model_len_with_length(engine):
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    (output,) = engine.generate([[5] * 60], params)
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].finish_reason == "length"


def test_updates_contain_each_token_once_and_one_finish_reason(engine):
    prompts = make_prompts((4, 9, 20))
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, GREEDY)
    updates_by_id = drain(engine)
    for number, output in enumerate(engine.generate(prompts, GREEDY)):
        updates = updates_by_id[str(number)]
        assert tokens_of(updates) == output.outputs[0].token_ids
        assert finish_reasons(updates) == ["length"]
        assert updates[-1].finish_reason == "length"


def test_a_stop_token_of_the_request_is_included_and_named(engine):
    (unstopped,) = outputs_alone(engine, [5, 9], GREEDY)
    stop_token = unstopped[2]
    params = SamplingParams(temperature=0.0, max_tokens=6, stop_token_ids=[stop_token])
    (output,) = engine.generate([[5, 9]], params)
    answer = output.outputs[0]
    assert answer.token_ids == unstopped[: answer.token_ids.index(stop_token) + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop_token)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_aborted_request_ends_once_and_frees_its_blocks(engine, steps):
    engine.add_request("a", [5] * 20, GREEDY)
    updates = [u for _ in range(steps) for u in engine.step()]
    engine.abort("a")
    engine.abort("a")  # The second call has no effect.
    assert engine.stats().kv_cache_blocks_used == 0
    updates += drain(engine)["a"]
    assert finish_reasons(updates) == ["abort"]
    engine.abort("a")
    assert not engine.has_work()


def test_the_cumulative_logprob_is_that_of_the_model(engine, checkpoint):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    prompt = [5, 9, 77]
    (output,) = engine.generate([prompt], GREEDY)
    answer = output.outputs[0]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + answer.token_ids])).logits[0]
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    expected = logprobs.gather(1, torch.tensor(answer.token_ids)[:, None]).sum().item()
    assert answer.cumulative_logprob == pytest.approx(expected, abs=1e-3)


def test_a_seed_gives_the_same_tokens_alone_with_other_requests_and_after_preemption(checkpoint):
    folder = checkpoint("qwen3")
    large = open_engine(folder, max_model_len=64)
    params = [
        SamplingParams(temperature=1.3, top_p=0.9, seed=seed, max_tokens=20, ignore_eos=True)
        for seed in range(6)
    ]
    prompts = make_prompts()
    small = open_engine(
        folder,
        max_model_len=64,
        max_num_batched_tokens=9,
        kv_cache_memory=bytes_for(large, num_tokens=72),
    )

    alone = [
        outputs_alone(large, prompt, param)[0]
        for prompt, param in zip(prompts, params, strict=True)
    ]
    together = [output.outputs[0].token_ids for output in large.generate(prompts, params)]
    preempted = [output.outputs[0].token_ids for output in small.generate(prompts, params)]

    assert small.stats().num_preemptions > 0
    assert together == alone
    assert preempted == alone
    large.close()
    small.close()


def test_requests_without_a_seed_differ_but_repeat_with_the_engines_seed(checkpoint):
    params = SamplingParams(temperature=2.0, max_tokens=10, ignore_eos=True)

    def answers_with(seed):
        engine = open_engine(checkpoint("llama"), seed=seed)
        answers = [output.outputs[0].token_ids for output in engine.generate([[5], [5]], params)]
        engine.close()
        return answers

    first, second = answers_with(seed=0)
    assert first != second
    assert answers_with(seed=0) == [first, second]
    assert answers_with(seed=1) != [first, second]


def test_generate_leaves_no_request_behind_if_a_prompt_is_invalid(engine):
    with pytest.raises(RequestError, match="prompt: the prompt is empty"):
        engine.generate([[5], [6], []], GREEDY)
    assert not engine.has_work()


def test_generate_takes_more_prompts_than_may_wait(engine):
    outputs = engine.generate([[token] for token in range(3, 20)], GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [[t] for t in range(3, 20)]
    assert all(len(output.outputs[0].token_ids) == 6 for output in outputs)


def test_logits_that_are_not_finite_end_only_the_request_that_has_them(checkpoint):
    engine = open_engine(checkpoint("llama"), max_model_len=64)
    (expected,) = outputs_alone(engine, [5, 9, 11], GREEDY)
    set_nan_embedding(engine, token_id=300)
    engine.add_request("with NaN", [300, 5, 9], GREEDY)
    engine.add_request("beside", [5, 9, 11], GREEDY)
    updates = drain(engine)
    assert finish_reasons(updates["with NaN"]) == ["error"]
    assert "NaN or infinity" in updates["with NaN"][-1].error
    assert tokens_of(updates["beside"]) == expected

    # The next requests use the blocks that contained NaN.
    outputs = engine.generate([[5, 9, 11]] * 4, GREEDY)
    assert all(output.outputs[0].token_ids == expected for output in outputs)
    engine.close()


def test_a_failed_request_does_not_change_requests_with_the_same_prefix(checkpoint):
    engine = open_engine(checkpoint("llama"), max_model_len=64)
    prompt = make_prompts((14,))[0]
    num_shared_tokens, nan_token = 12, 300  # 12 tokens are full blocks
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, n=2)
    expected = outputs_alone(engine, prompt, params)
    set_nan_embedding(engine, nan_token)

    engine.add_request("beside", prompt, params)
    first_updates = [update for _ in range(3) for update in engine.step()]
    engine.add_request("with NaN", [*prompt[:num_shared_tokens], nan_token], params)
    updates = drain(engine)

    assert finish_reasons(updates["with NaN"]) == ["error", "error"]
    assert updates["with NaN"][0].num_cached_tokens == num_shared_tokens
    # The running request shares blocks with the failed request, so it was preempted.
    assert engine.stats().num_preemptions > 0

    updates_beside = first_updates + updates["beside"]
    assert [tokens_of(updates_beside, index) for index in (0, 1)] == expected
    assert outputs_alone(engine, prompt, params) == expected
    engine.close()


def test_a_request_whose_parameters_forbid_every_token_is_refused_without_effect_on_others(
    checkpoint,
):
    engine = open_engine(checkpoint("llama"), max_model_len=64)
    prompt = make_prompts((14,))[0]
    engine.add_request("beside", prompt, GREEDY)
    engine.step()
    # Only token 7 is allowed, but not twice in a row. After the first 7, no token is allowed.
    params = SamplingParams(allowed_token_ids=[7], bad_words_token_ids=[[7, 7]])
    engine.add_request("contradiction", prompt, params)
    updates = drain(engine)
    first, second = updates["contradiction"]
    assert (first.new_token_ids, first.num_cached_tokens) == ([7], 12)
    assert (second.finish_reason, second.is_refused) == ("error", True)
    assert "forbidden by allowed_token_ids and bad_words_token_ids" in second.error
    assert finish_reasons(updates["beside"]) == ["length"]
    assert engine.stats().num_preemptions == 0
    assert engine.generate([prompt], GREEDY)[0].num_cached_tokens == 12
    engine.close()


def test_an_answer_that_gets_no_further_token_does_not_end_the_other_answers(engine):
    params = SamplingParams(allowed_token_ids=[7], bad_words_token_ids=[[7, 7]])
    bad, good = (o.outputs[0] for o in engine.generate([[5], [6]], [params, GREEDY]))
    assert (bad.token_ids, bad.finish_reason) == ([7], "error")
    assert (len(good.token_ids), good.finish_reason) == (6, "length")


def test_a_step_that_raises_ends_its_requests_with_an_error_and_the_engine_goes_on(checkpoint):
    engine = open_engine(checkpoint("llama"), max_model_len=64)
    expected = outputs_alone(engine, [5, 9, 11], GREEDY)
    engine.add_request("a", [5, 9, 11], GREEDY)
    engine.step()
    engine.add_request("b", [8], GREEDY)

    def fail(module, args):
        raise RuntimeError("out of something")

    hook = engine._parts.runner._path._model.register_forward_pre_hook(fail)
    updates = engine.step()
    hook.remove()

    assert [(u.request_id, u.finish_reason) for u in updates] == [("a", "error"), ("b", "error")]
    assert "RuntimeError: out of something" in updates[0].error
    engine.check()
    assert not engine.has_work()
    assert engine.stats().kv_cache_blocks_used == 0
    assert outputs_alone(engine, [5, 9, 11], GREEDY) == expected
    engine.close()


def test_two_engines_in_one_process_do_not_disturb_each_other(checkpoint):
    engines = [open_engine(checkpoint(name)) for name in ("llama", "qwen3")]
    expected = [outputs_alone(engine, [5, 9], GREEDY)[0] for engine in engines]
    for engine in engines:
        engine.add_request("x", [5, 9], GREEDY)
    answers = [[], []]
    while any(engine.has_work() for engine in engines):
        for answer, engine in zip(answers, engines, strict=True):
            for update in engine.step():
                answer += update.new_token_ids
    assert answers == expected
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"max_model_len": 9000},
            r"max_model_len: the value must be at most 256 \(max_position_embeddings",
        ),
        ({"kv_cache_memory": 1000}, "kv_cache_memory: 1000 bytes is enough for 0 tokens"),
        (
            {"kv_cache_memory": "100KiB", "max_model_len": 256},
            "Raise kv_cache_memory or lower max_model_len",
        ),
        ({"kv_cache_memory": "900TiB"}, "kv_cache_memory: the value is .*, but only .* are free"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_remedy(checkpoint, settings, message):
    with pytest.raises(ConfigError, match=message):
        open_engine(checkpoint("llama"), **settings)


def test_without_max_model_len_a_small_memory_shortens_requests(checkpoint):
    lines = []
    from nereid_backend import Engine, EngineConfig

    engine = Engine(
        EngineConfig(str(checkpoint("llama")), kv_cache_memory="60KiB", num_threads=1),
        progress=lines.append,
    )
    assert 16 <= engine.info.max_model_len < 256
    assert any(f"A request can have {engine.info.max_model_len} tokens" in line for line in lines)
    engine.close()


def outputs_alone(engine, prompt, params):
    """Return the tokens of each answer to one prompt."""
    return [answer.token_ids for answer in engine.generate([prompt], params)[0].outputs]


def test_the_first_of_n_answers_equals_a_single_answer_and_the_others_differ(engine):
    prompt = make_prompts((21,))[0]
    params = {"temperature": 2.0, "seed": 5, "max_tokens": 8, "ignore_eos": True}
    (alone,) = outputs_alone(engine, prompt, SamplingParams(**params))
    several = outputs_alone(engine, prompt, SamplingParams(**params, n=4))
    assert several[0] == alone
    assert len({tuple(tokens) for tokens in several}) == 4


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_n_greedy_answers_equal_a_single_answer_for_every_length_of_the_prompt(engine, length):
    prompt = make_prompts((length,))[0]
    expected = outputs_alone(engine, prompt, GREEDY)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, n=3)
    assert outputs_alone(engine, prompt, params) == expected * 3
    engine.check()


def test_a_cached_prompt_is_not_computed_again_and_gets_the_same_answer(checkpoint):
    engine = open_engine(checkpoint("llama"), max_model_len=64)
    prompt = make_prompts((30,))[0]
    first, second = (engine.generate([prompt], GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 28)
    assert second.outputs[0].token_ids == first.outputs[0].token_ids

    # Blocks have 4 tokens, and only full blocks are cached.
    longer = prompt + first.outputs[0].token_ids[:5] + [7]
    assert engine.generate([longer], GREEDY)[0].num_cached_tokens == 32
    stats = engine.stats()
    assert (stats.num_prefix_cache_queries, stats.num_prefix_cache_hits) == (30 + 30 + 36, 28 + 32)
    assert engine.stats().kv_cache_blocks_used == 0
    engine.close()


def test_requests_with_different_salts_share_no_cached_blocks(checkpoint):
    engine = open_engine(checkpoint("llama"), max_model_len=64)
    prompt = make_prompts((30,))[0]
    params = [SamplingParams(max_tokens=2, cache_salt=salt) for salt in ("a", "b", "a")]
    outputs = [engine.generate([prompt], each_params)[0] for each_params in params]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 28]
    engine.close()


def test_the_prefix_cache_can_be_switched_off(checkpoint):
    engine = open_engine(checkpoint("llama"), max_model_len=64, enable_prefix_caching=False)
    prompt = make_prompts((30,))[0]
    outputs = [engine.generate([prompt], GREEDY)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert engine.stats().num_prefix_cache_queries == 0
    engine.close()


def test_one_sequence_of_several_can_be_aborted(engine):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, n=3)
    engine.add_request("a", [5] * 9, params)
    updates = engine.step() + engine.step()
    engine.abort("a", 1)
    updates += drain(engine)["a"]
    assert sorted((u.index, u.finish_reason) for u in updates if u.finish_reason) == [
        (0, "length"),
        (1, "abort"),
        (2, "length"),
    ]


def test_prompt_logprobs_equal_those_of_transformers_with_and_without_chunks(checkpoint):
    from transformers import AutoModelForCausalLM

    folder = checkpoint("llama")
    prompt = make_prompts((21,))[0]
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([prompt])).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1)
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1, n=2)
    for chunk_size in (64, 8):
        engine = open_engine(folder, max_model_len=64, max_num_batched_tokens=chunk_size)
        for _ in range(2):  # The second time, the prompt is in the prefix cache.
            (output,) = engine.generate([prompt], params)
            first, *others = output.prompt_logprobs
            assert first is None
            assert [logprobs.token_ids[0] for logprobs in others] == prompt[1:]
            reported = torch.tensor([logprobs.logprobs[0] for logprobs in others])
            torch.testing.assert_close(reported, expected, atol=1e-4, rtol=0)
        engine.close()


def test_a_request_whose_grammar_cannot_be_compiled_is_refused_once_for_each_sequence(checkpoint):
    # The tiny checkpoint has no tokenizer, so the engine cannot compile a grammar.
    engine = open_engine(checkpoint("llama"), max_model_len=64)
    params = SamplingParams(grammar=GrammarSpec("regex", "a+"), n=2)
    engine.add_request("a", [5, 9], params)
    assert engine.stats().num_requests_waiting == 2
    engine.add_request("beside", [5, 9], GREEDY)
    updates = drain(engine)
    assert [(u.index, u.finish_reason, u.is_refused) for u in updates["a"]] == [
        (0, "error", True),
        (1, "error", True),
    ]
    assert finish_reasons(updates["beside"]) == ["length"]
    with pytest.raises(RequestError, match="tokenizer cannot be loaded"):
        engine.generate([[5, 9]], params)
    assert not engine.has_work()
    engine.close()


@pytest.mark.usefixtures("cheap_drafts")
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_draft_tokens_do_not_change_an_answer(checkpoint, temperature):
    settings = {"max_model_len": 120, "kv_cache_memory": "4MiB"}
    plain_engine = open_engine(checkpoint("llama"), num_speculative_tokens=0, **settings)
    draft_engine = open_engine(checkpoint("llama"), num_speculative_tokens=4, **settings)
    # The bias makes the answers repeat themselves, as the answers of a trained model do.
    params = SamplingParams(
        temperature=temperature,
        seed=3,
        max_tokens=80,
        ignore_eos=True,
        n=2,
        logit_bias={7: 6.0, 8: 6.0},
        logprobs=1,
    )
    prompts = make_prompts((6, 20))
    expected, answers = (
        [answer for output in engine.generate(prompts, params) for answer in output.outputs]
        for engine in (plain_engine, draft_engine)
    )
    for plain, drafted in zip(expected, answers, strict=True):
        assert drafted.token_ids == plain.token_ids
        assert drafted.cumulative_logprob == pytest.approx(plain.cumulative_logprob, abs=1e-3)
        assert len(drafted.logprobs) == len(drafted.token_ids)
    assert draft_engine.stats().num_accepted_tokens > 20
    draft_engine.check()
    plain_engine.close()
    draft_engine.close()


@pytest.mark.parametrize(
    ("settings", "has_drafts"),
    [
        ({}, True),
        ({"num_speculative_tokens": 0}, False),
        ({"async_scheduling": True}, False),
        ({"async_scheduling": True, "speculative_method": "ngram"}, True),
    ],
)
def test_prompt_lookup_is_on_by_default_without_async_scheduling(checkpoint, settings, has_drafts):
    engine = open_engine(checkpoint("llama"), **settings)
    assert (engine._parts.scheduler.drafter is not None) == has_drafts
    engine.close()


class PendingGuides:
    """A fake compiler of grammars. Its futures never get a guide as their result."""

    def __init__(self):
        self.futures = []

    def prepare(self, params, stop_token_ids):
        self.futures.append(Future())
        return self.futures[-1]

    def close(self):
        pass


def test_a_request_is_not_added_if_too_many_grammars_wait(checkpoint):
    engine = open_engine(checkpoint("llama"), max_model_len=64)
    engine._parts.preparation._guides = guides = PendingGuides()
    params = SamplingParams(grammar=GrammarSpec("regex", "a+"))
    refusal = Future()
    refusal.set_exception(CapacityError("grammar: 256 grammars are being compiled."))
    guides.prepare = lambda *_: refusal
    with pytest.raises(CapacityError, match="256 grammars"):
        engine.add_request("a", [5, 9], params)
    assert not engine.has_work()
    engine.add_request("a", [5, 9], GREEDY)
    assert finish_reasons(drain(engine)["a"]) == ["length"]
    engine.close()


def test_steps_wait_briefly_while_a_guide_is_created_and_the_request_can_be_aborted(checkpoint):
    engine = open_engine(checkpoint("llama"), max_model_len=64)
    engine._parts.preparation._guides = guides = PendingGuides()
    params = SamplingParams(grammar=GrammarSpec("regex", "a+"))
    engine.add_request("a", [5, 9], params)
    started_s, started_cpu_s = time.monotonic(), time.thread_time()
    for _ in range(5):
        assert engine.step() == []
    # Each step waits about 20 ms without using the CPU.
    assert time.monotonic() - started_s > 0.08
    assert time.thread_time() - started_cpu_s < 0.05

    engine.abort("a")
    assert [u.finish_reason for u in engine.step()] == ["abort"]
    assert not engine.has_work()
    assert guides.futures[0].cancelled()
    engine.close()


@pytest.mark.parametrize(
    "values",
    [
        {"logit_bias": {100_000: 1.0}},
        {"allowed_token_ids": [100_000]},
        {"bad_words_token_ids": [[100_000]]},
    ],
)
def test_token_ids_beyond_the_vocabulary_are_refused_when_a_request_comes(engine, values):
    with pytest.raises(RequestError, match="100000"):
        engine.add_request("a", [5], SamplingParams(**values))
    assert not engine.has_work()


@pytest.mark.parametrize(
    "values",
    [
        {"logit_bias": {TOKEN_WITHOUT_LOGIT: 1.0}},
        {"bad_words_token_ids": [[TOKEN_WITHOUT_LOGIT]]},
        {"repetition_penalty": 1.2},
    ],
)
def test_a_token_for_which_the_model_has_no_logit_does_not_fail_a_step(saved, values):
    with contextlib.closing(open_engine(saved("mllama"), max_model_len=64)) as engine:
        assert engine.info.vocab_size == TOKEN_WITHOUT_LOGIT + 1
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, **values)

        output, other_output = engine.generate([[5, TOKEN_WITHOUT_LOGIT], [9]], [params, GREEDY])

        answer = output.outputs[0]
        assert (answer.error, len(answer.token_ids)) == (None, 6)
        assert output.prompt_logprobs is None
        assert [other_output.outputs[0].token_ids] == outputs_alone(engine, [9], GREEDY)


def test_the_probability_of_a_prompt_token_without_logit_is_zero(saved):
    with contextlib.closing(open_engine(saved("mllama"), max_model_len=64)) as engine:
        prompt = [5, TOKEN_WITHOUT_LOGIT]
        params = dataclasses.replace(GREEDY, prompt_logprobs=1)

        output, other_output = engine.generate([prompt, [9]], [params, GREEDY])

        assert output.prompt_logprobs[1].logprobs[0] == float("-inf")
        assert [output.outputs[0].token_ids] == outputs_alone(engine, prompt, GREEDY)
        assert [other_output.outputs[0].token_ids] == outputs_alone(engine, [9], GREEDY)
