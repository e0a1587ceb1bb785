"""Functions that answer the same prompts with an engine, in several situations, or transformers."""

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from backend.tiny_models import VOCAB_SIZE
from nereid_backend import Engine, EngineConfig, SamplingParams
from nereid_backend.core.blocks.window import max_sequence_blocks
from transformers import AutoConfig, PreTrainedModel

Answers = list[list[int]]

MAX_TOKENS = 16
PARAMS = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
BLOCK_SIZE = 4
# In the situations that divide prompts into chunks, a step has at most this number of tokens.
_STEP_TOKENS = 9
# In the situation "preempted", a sequence has at most this number of tokens.
_PREEMPTED_LEN = 64


def make_prompts(lengths=(1, 5, 11, 19, 28, 40)) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


PROMPTS = make_prompts()


def reference(folder: Path) -> Answers:
    """Return the greedy tokens that transformers generates for each prompt alone.

    Several tests use the same checkpoint. The tokens are therefore cached until a file in the
    folder of the checkpoint changes.
    """
    times = tuple((file.name, file.stat().st_mtime_ns) for file in sorted(folder.iterdir()))
    return [list(answer) for answer in _reference(folder, times)]


@functools.cache
def _reference(folder: Path, times: tuple[tuple[str, int], ...]) -> Answers:
    return greedy_tokens(load_float32(folder))


def load_float32(folder: Path) -> PreTrainedModel:
    """Load a checkpoint with transformers in float32."""
    config = AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(
        folder, dtype=torch.float32
    )


def greedy_tokens(
    model: PreTrainedModel,
    prompts: Sequence[list[int]] = PROMPTS,
    max_tokens: int = MAX_TOKENS,
) -> Answers:
    """Return the greedy tokens that a model of transformers generates for each prompt alone."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        token_ids = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            forced_bos_token_id=None,
            forced_eos_token_id=None,
        )
        answers.append(token_ids[0, len(prompt) :].tolist())
    return answers


def equal_tokens(expected: Answers, answers: Answers) -> tuple[int, int]:
    """Return the number of positions with equal tokens, and the number of all positions."""
    are_equal = [
        expected_token == token
        for expected_answer, answer in zip(expected, answers, strict=True)
        for expected_token, token in zip(expected_answer, answer, strict=True)
    ]
    return sum(are_equal), len(are_equal)


def share_of_accepted_tokens(engine: Engine) -> float:
    """Return the share of the draft tokens that the model accepted."""
    stats = engine.stats()
    return stats.num_accepted_tokens / stats.num_proposed_tokens


def run_together(engine: Engine) -> Answers:
    """Answer all prompts at the same time."""
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS)]


def open_engine(folder: Path, **settings) -> Engine:
    """Open an engine for a tiny checkpoint. `settings` override the settings of this function."""
    settings = {
        "max_num_seqs": 8,
        "block_size": BLOCK_SIZE,
        "dtype": "float32",
        "num_threads": 1,
        "kv_cache_memory": "4MiB",
        **settings,
    }
    return Engine(EngineConfig(str(folder), **settings))


def bytes_for(engine: Engine, num_tokens: int) -> int:
    """Return the size in bytes of a KV cache for `num_tokens` tokens."""
    info = engine.info
    # The cache also contains the null block, which `num_blocks` does not include.
    bytes_per_block = info.kv_cache_bytes // (info.num_blocks + 1)
    return bytes_per_block * (num_tokens // info.block_size + 1)


def run_staggered(
    engine: Engine,
    params: Sequence[SamplingParams] = (PARAMS,) * len(PROMPTS),
    *,
    check_blocks: bool = True,
) -> Answers:
    """Answer three prompts, and add the other prompts one by one while the engine runs.

    Args:
        engine: an engine without requests.
        params: the sampling parameters of each prompt.
        check_blocks: whether to check after each step that all used blocks belong to requests.
    """
    answers: dict[str, list[int]] = {}
    waiting_prompts = list(enumerate(PROMPTS))
    for _ in range(3):
        index, prompt = waiting_prompts.pop()
        engine.add_request(str(index), prompt, params[index])
    while engine.has_work() or waiting_prompts:
        for update in engine.step():
            answers.setdefault(update.request_id, []).extend(update.new_token_ids)
        if check_blocks:
            engine.check()
        if waiting_prompts:
            index, prompt = waiting_prompts.pop()
            engine.add_request(str(index), prompt, params[index])
    if check_blocks:
        assert engine.stats().kv_cache_blocks_used == 0
    return [answers[str(index)] for index in range(len(PROMPTS))]


def run_alone(engine: Engine) -> Answers:
    return [engine.generate([prompt], PARAMS)[0].outputs[0].token_ids for prompt in PROMPTS]


def run_preempted(engine: Engine) -> Answers:
    """Answer the prompts with so few free blocks that the engine has to preempt sequences."""
    pool = engine._parts.pool
    # The longest sequence must fit into the free blocks, or the engine would wait for blocks
    # forever. If a model has groups of layers with different attention windows, a sequence has
    # blocks in each group.
    windows, block_size = engine._parts.scheduler.windows, engine.info.block_size
    num_blocks_of_longest = max_sequence_blocks(windows, _PREEMPTED_LEN, _STEP_TOKENS, block_size)
    withheld_blocks = pool.allocate(pool.num_free - num_blocks_of_longest - 2)
    num_earlier_preemptions = engine.stats().num_preemptions

    try:
        answers = run_staggered(engine, check_blocks=False)
    finally:
        pool.release(withheld_blocks)

    assert engine.stats().num_preemptions > num_earlier_preemptions, "nothing was preempted"
    return answers


def run_cached(engine: Engine) -> Answers:
    """Answer each prompt after the prefix cache has stored the prompt and a similar prompt."""
    rng = random.Random(3)
    for prompt in PROMPTS:
        engine.generate([[*prompt[: len(prompt) // 2], rng.randrange(3, 300)], prompt], PARAMS)
    return run_alone(engine)


# The settings of the engine and the function for each situation. The CPU kernels require blocks of
# 16 tokens. With smaller blocks, attention runs in plain torch.
SITUATIONS: dict[str, tuple[dict, Callable[[Engine], Answers]]] = {
    "alone": ({"block_size": 16}, run_alone),
    "mixed": ({"block_size": 16}, run_staggered),
    "chunked": ({"max_num_batched_tokens": _STEP_TOKENS}, run_staggered),
    "preempted": (
        {"max_num_batched_tokens": _STEP_TOKENS, "max_model_len": _PREEMPTED_LEN},
        run_preempted,
    ),
    "prefix-cached": ({"enable_prefix_caching": True}, run_cached),
}
