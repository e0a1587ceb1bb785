"""Tests of models whose layers have different windows.

The layers form groups by their windows, and each group frees its own blocks.
"""

import dataclasses
import random

import pytest
import torch
from backend.exactness import greedy_tokens, open_engine
from backend.tiny_models import VOCAB_SIZE, WINDOW, Family
from nereid_backend import Engine, EngineConfig, SamplingParams
from nereid_backend.attention.int8_cache import Int8KVCache
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec, LayerWindow, single_group
from nereid_backend.core.blocks.window import AttentionWindow, max_sequence_blocks
from nereid_backend.core.sequence import Sequence
from nereid_backend.errors import ConfigError
from nereid_backend.model.forward_path.length_limits import LengthLimit
from nereid_backend.model.forward_path.path_spec import PathSpec
from nereid_backend.model.memory.layer_groups import choose_layer_groups, divide_layers
from nereid_backend.model.memory.memory_plan import BlockShape, plan_memory
from transformers import AutoConfig, AutoModelForCausalLM

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
FAMILIES = {
    # Two groups contain fewer layers than the largest group.
    "gemma3": Family(
        "gemma3",
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_hidden_layers": 7,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
        },
    ),
    "gpt_oss": Family(
        "gpt_oss",
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "llama4": Family(
        "llama4",
        "llama4_text",
        {
            "head_dim": 16,
            "attention_chunk_size": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": [CHUNKED, CHUNKED, CHUNKED, FULL],
            "no_rope_layers": [1, 1, 1, 0],
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
        },
    ),
    "cohere2": Family(
        "cohere2",
        "cohere2",
        {
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        },
    ),
}
MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


def make_prompts() -> list[list[int]]:
    """Return prompts that share some tokens and that are mostly longer than the window."""
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(count)] for count in (100, 7, 61, 140)]
    return [*prompts, [*prompts[3][:90], *prompts[2][:20]]]


PROMPTS = make_prompts()


# The layers of the families in `make test` have sliding windows (gemma3) and chunks (llama4).
# `make test-long` tests the other families, too.
FAMILY_PARAMS = [
    "gemma3",
    "llama4",
    pytest.param("gpt_oss", marks=pytest.mark.long),
    pytest.param("cohere2", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=FAMILY_PARAMS)
def model(request, tmp_path_factory):
    """The folder of a tiny checkpoint, and the greedy tokens of transformers for each prompt."""
    folder = FAMILIES[request.param].save(tmp_path_factory.mktemp(request.param))
    model = AutoModelForCausalLM.from_pretrained(folder)
    return folder, greedy_tokens(model, PROMPTS, MAX_TOKENS)


def run(engine, params=GREEDY):
    """Answer all prompts at the same time, and verify the blocks after each step.

    Returns:
        For each prompt, the tokens of each of its answers.
    """
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, params)
    answers = {}
    while engine.has_work():
        for update in engine.step():
            key = (int(update.request_id), update.index)
            answers.setdefault(key, []).extend(update.new_token_ids)
        engine.check()
    assert engine.stats().kv_cache_blocks_used == 0
    return [[answers[number, index] for index in range(params.n)] for number in range(len(PROMPTS))]


def open_with_groups(folder, **settings):
    """Open an engine whose layers form several groups."""
    engine = open_engine(folder, **{"max_num_batched_tokens": 16, **settings})
    assert engine.info.path == "packed"
    assert len(engine._parts.scheduler.windows) > 1
    return engine


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 9},
        {"block_size": 16},
        {"num_speculative_tokens": 3},
        {"block_size": 16, "async_scheduling": True},
        {"enable_prefix_caching": False},
    ],
    ids=["chunks of 9", "native kernels", "drafts", "async", "no prefix cache"],
)
def test_groups_do_not_change_greedy_tokens(model, settings):
    folder, expected = model
    engine = open_with_groups(folder, **settings)
    answers = run(engine)
    assert answers == [[tokens] for tokens in expected]
    engine.close()


def test_sequences_of_one_request_share_the_blocks_of_all_groups(model):
    folder, expected = model
    engine = open_with_groups(folder)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, n=3)
    assert run(engine, params) == [[tokens] * 3 for tokens in expected]
    engine.close()


def test_preempted_sequences_give_the_same_tokens(model):
    folder, expected = model
    engine = open_with_groups(folder, max_model_len=180)
    pool, windows = engine._parts.pool, engine._parts.scheduler.windows
    # The free blocks are just enough for the longest sequence. Several short prompts fit at the
    # same time, but not together with their answers, so the engine must preempt requests.
    num_free = max_sequence_blocks(windows, num_tokens=180, max_step_tokens=16, block_size=4)
    withheld_blocks = pool.allocate(pool.num_free - num_free)
    prompt_numbers = [1, 1, 1, 1, 1, 1, *range(len(PROMPTS))]
    for request_number, prompt_number in enumerate(prompt_numbers):
        engine.add_request(str(request_number), PROMPTS[prompt_number], GREEDY)

    answers = {}
    while engine.has_work():
        for update in engine.step():
            answers.setdefault(int(update.request_id), []).extend(update.new_token_ids)

    assert engine.stats().num_preemptions > 0
    assert [answers[i] for i in range(len(answers))] == [expected[i] for i in prompt_numbers]
    pool.release(withheld_blocks)
    engine.check()
    engine.close()


def test_a_cached_prefix_is_found_although_blocks_before_the_window_were_evicted(model):
    folder, expected = model
    engine = open_with_groups(folder, block_size=4)
    run(engine)
    prompt = PROMPTS[3]
    evict_blocks_before_window(engine._parts.scheduler, prompt)

    (output,) = engine.generate([prompt], GREEDY)

    assert output.outputs[0].token_ids == expected[3]
    # The engine always computes the last token of a prompt. All full blocks of the tokens before
    # it are cached.
    assert output.num_cached_tokens == (len(prompt) - 1) // 4 * 4
    engine.check()
    engine.close()


def evict_blocks_before_window(scheduler, prompt):
    """Remove cached blocks of a prompt: in groups with a window, the blocks before the window."""
    hashes = scheduler.cache.prefix_hashes(Sequence("", prompt, GREEDY, max_total_tokens=200))
    num_needed = -(-WINDOW // 4) + 1
    for window, cached_blocks in zip(scheduler.windows, scheduler.cache._blocks, strict=True):
        if window is not None:
            for block_hash in hashes[:-num_needed]:
                scheduler.cache.forget(cached_blocks[block_hash])


@pytest.mark.long
def test_a_compiled_forward_pass_reads_the_block_table_of_each_group(model):
    folder, expected = model
    lines = []
    config = EngineConfig(
        str(folder),
        dtype="float32",
        num_threads=1,
        kv_cache_memory="4MiB",
        compile_forward=True,
        block_size=16,
        max_num_batched_tokens=16,
        max_num_seqs=8,
    )
    engine = Engine(config, lines.append)
    # torch cannot trace the mixture of experts of Llama 4 for a variable number of tokens. For this
    # model, the engine runs the forward pass uncompiled.
    is_traceable = AutoConfig.from_pretrained(folder).model_type != "llama4_text"
    assert ("the forward pass is compiled" in lines) is is_traceable
    assert len(engine._parts.scheduler.windows) > 1
    assert run(engine) == [[tokens] for tokens in expected]
    engine.close()


def layers(kinds: str, **sizes) -> list[LayerSpec]:
    """Return a layer for each letter of `kinds`: full attention (F), window (W) or chunk (C)."""
    windows = {"F": LayerWindow(), "W": LayerWindow(size=64), "C": LayerWindow(chunk=32)}
    shape = {"num_heads": 8, "num_kv_heads": 4, "key_dim": 16, "value_dim": 16, **sizes}
    return [LayerSpec(**shape, window=windows[kind]) for kind in kinds]


W, C = AttentionWindow(((64, None),)), AttentionWindow(((None, 32),))


def test_layers_are_divided_by_window_into_groups_of_equal_size():
    groups = divide_layers(layers("WWWWWF" * 2), 10000, max_step_tokens=64, block_size=16)
    assert groups.windows == (None, W, W, W, W, W)
    # The place of a layer is a pair: the index of its group, and the index of the layer in the
    # group.
    first_six_layers = ((1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (0, 0))
    last_six_layers = ((3, 1), (4, 0), (4, 1), (5, 0), (5, 1), (0, 1))
    assert groups.places == (*first_six_layers, *last_six_layers)

    # The groups of C and W contain one layer less than the group of F. Three such groups need less
    # than 5 % more memory than four groups of one layer.
    groups = divide_layers(layers("FCFW"), 10000, max_step_tokens=64, block_size=16)
    assert groups.windows == (None, C, W)


def test_layers_form_one_group_if_groups_save_no_memory():
    def divide(specs, max_model_len):
        return divide_layers(specs, max_model_len, max_step_tokens=64, block_size=16)

    mixed = layers("WF")
    assert divide(mixed, max_model_len=100) == single_group(mixed)
    assert len(divide(mixed, max_model_len=1000).windows) == 2
    # With one layer in each group, there would be 51 groups.
    assert len(divide(layers("W" * 50 + "F"), max_model_len=100_000).windows) <= 16


def test_every_combination_without_groups_has_a_reason():
    spec = PathSpec("packed", build=None, layers=layers("WF"))

    def reason(device="cpu", max_model_len=10_000, settings=None, **changes):
        """Return the reason why the layers form one group, or "" if they form several groups.

        `changes` replace attributes of the forward path.
        """
        config = EngineConfig("model", **(settings or {}))
        changed = dataclasses.replace(spec, **changes)
        groups, reason = choose_layer_groups(
            config, changed, torch.device(device), max_model_len, 64
        )
        assert (len(groups.windows) == 1) == (reason != "")
        return reason

    assert reason() == ""
    assert "same tokens" in reason(layers=layers("FF"))
    assert "padded" in reason(name="padded")
    assert "one pass" in reason(whole_prefill=True)
    assert "outside of blocks" in reason(bytes_per_token=8)
    assert "GPUs" in reason(device="cuda")
    assert "on disk" in reason(settings={"prefix_cache_disk": "/folder"})
    assert "draft model" in reason(settings={"draft_model": "/folder"})
    assert "tensor parallelism" in reason(settings={"tensor_parallel_size": 2})
    assert "save little memory" in reason(max_model_len=100)
    layers_of_two_shapes = [*layers("F"), *layers("W", key_dim=32)]
    assert "different sizes" in reason(layers=layers_of_two_shapes)


def test_the_memory_plan_counts_the_blocks_of_all_groups():
    # A block needs 16 * 64 bytes, which is 1 KiB.
    block = BlockShape(bytes_per_token=64, block_size=16, windows=(None, W), max_step_tokens=16)
    # 63 blocks for the group with full attention, and 6 blocks for the window and the step of the
    # other group.
    assert block.num_sequence_blocks(1000) == 69

    def plan(num_kib, **settings):
        config = EngineConfig("model", max_num_seqs=4, **settings)
        limit = LengthLimit(2000, "")
        return plan_memory(config, block, 0, limit, num_bytes=num_kib * 1024)

    assert plan(70, max_model_len=1000).num_blocks == 69
    assert plan(70, max_model_len=1000).max_model_len == 1000
    with pytest.raises(ConfigError, match=r"enough for 992 tokens.*needs 70.0 KiB"):
        plan(69, max_model_len=1000)
    # Without the setting `max_model_len`, the memory limits the length, and if there is enough
    # memory, the model does.
    assert plan(69).max_model_len == 992
    assert plan(1000).max_model_len == 2000


@pytest.mark.parametrize(
    ("cache_class", "tensors_per_place"), [(KVCache, 2), (Int8KVCache, 4)], ids=["plain", "int8"]
)
def test_layers_with_the_same_place_share_the_tensors_of_a_cache(cache_class, tensors_per_place):
    specs = layers("WWWF")
    groups = divide_layers(specs, 10_000, max_step_tokens=64, block_size=16)
    cache = cache_class(
        specs,
        num_blocks=6,
        block_size=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
        groups=groups,
    )
    assert groups.num_places == 1
    assert cache.group_of == [1, 2, 3, 0]
    # The layers share one tensor of keys and one tensor of values. An 8-bit cache also has the
    # scales of the keys and of the values.
    assert len(cache.tensors()) == tensors_per_place

    for tensor in cache.tensors():
        tensor[2] = 3
    content = cache.read_block(2)
    cache.write_blocks([5], [content])
    cache.copy_blocks([(5, 1)])
    assert cache.read_block(1) == content != cache.read_block(4)
    cache.clear([1])
    assert cache.read_block(1) == cache.read_block(4)


def test_a_small_pool_runs_more_requests_with_groups(tmp_path):
    folder = FAMILIES["cohere2"].save(tmp_path)
    settings = {"kv_cache_memory": "256KiB", "max_model_len": 200}
    # The engine divides the layers into groups only if a step has few tokens, because a group with
    # a window must store the window and the tokens of a step.
    engine_with_groups = open_with_groups(folder, max_num_batched_tokens=16, **settings)
    engine_with_one_group = open_engine(folder, **settings)
    assert engine_with_one_group._parts.scheduler.windows == (None,)
    assert engine_with_groups.info.kv_cache_bytes <= 2**18

    def max_running_requests(engine):
        rng = random.Random(1)
        for number in range(8):
            prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(150)]
            engine.add_request(str(number), prompt, GREEDY)
        max_running = 0
        while engine.has_work():
            engine.step()
            max_running = max(max_running, engine.stats().num_requests_running)
        return max_running

    num_with_one_group = max_running_requests(engine_with_one_group)
    assert max_running_requests(engine_with_groups) >= 2 * num_with_one_group
    engine_with_groups.close()
    engine_with_one_group.close()
