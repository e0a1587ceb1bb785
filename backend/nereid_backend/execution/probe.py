# SPDX-License-Identifier: Apache-2.0
"""What a model needs from attention, found out by running it, and whether it then runs exactly.

First a forward pass of one token records every attention call. Then a few short prompts go through
the real scheduler, batches and cache, in small chunks mixed with single tokens over scattered
blocks, and the logits are compared with those of the model alone, with its own attention and whole
prompts. A model that fails is refused by name: a wrong answer must not look like a right one.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from nereid_backend.attention.interface import AttentionHook
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec, Span
from nereid_backend.core.block_pool import BlockPool
from nereid_backend.core.params import SamplingParams
from nereid_backend.core.request import Request
from nereid_backend.core.scheduler import Scheduler
from nereid_backend.core.step import Sampled, StepResult
from nereid_backend.errors import UnsupportedModelError
from nereid_backend.execution.batch import BatchBuilder
from nereid_backend.execution.loader import Checkpoint
from nereid_backend.execution.packed import PackedPath

_PROMPT_LENS = (21, 5, 13)
_NUM_STEPS = 4
_BLOCK_SIZE = 4
_BUDGET = 8
# A prompt is made longer than a layer's window to see that the window works, up to this length:
# longer ones would cost seconds at every start.
_LONGEST_PROMPT = 160
# Root mean square of the difference over the logits' spread. Wrong masks or positions give 0.1 to
# 1.4; float32 gives 1e-6, bfloat16 0.01 to 0.04, and 0.13 where many tokens change experts (on the
# tests' architectures).
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What the comparison found: the relative difference, and over how many logits rows."""

    difference: float
    num_rows: int


class _Recorder:
    """Serves attention for a single token, whose output is its own value, and writes down calls."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.layers: list[LayerSpec] = []
        self.unsupported: str | None = None
        self._chunk = getattr(config, "attention_chunk_size", None)
        self._layer_types = list(getattr(config, "layer_types", None) or [])

    def __call__(
        self,
        module: torch.nn.Module,  # noqa: ARG002 - part of the protocol
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **kwargs: object,
    ) -> Tensor:
        number = len(self.layers)
        kind = self._layer_types[number] if number < len(self._layer_types) else ""
        window, softcap = kwargs.get("sliding_window"), kwargs.get("softcap")
        if kwargs.get("position_bias") is not None:
            self.unsupported = "its attention adds a position bias"
        if query.shape[0] != 1 or key.shape[2] != 1:
            self.unsupported = f"it calls attention with keys of shape {tuple(key.shape)}"
        spec = LayerSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            span=Span(
                window=window if isinstance(window, int) and window > 0 else None,
                chunk=self._chunk if kind == "chunked_attention" else None,
            ),
            softcap=float(softcap) if isinstance(softcap, int | float) else None,
            has_sinks=isinstance(kwargs.get("s_aux"), Tensor),
        )
        self.layers.append(spec)
        groups = spec.num_heads // spec.num_kv_heads
        return value.repeat_interleave(groups, dim=1).transpose(1, 2)


@torch.inference_mode()
def probe_layers(checkpoint: Checkpoint, hook: AttentionHook) -> list[LayerSpec]:
    """Run one token and return what each attention call needs, in order of the calls.

    Raises:
        UnsupportedModelError: the model does not come to our attention, or asks what it lacks.
    """
    model = checkpoint.model
    recorder = _Recorder(checkpoint.text_config)
    device = checkpoint.device
    token = torch.tensor([[_plain_token_ids(checkpoint)[0]]], device=device)
    try:
        with hook.serving(recorder):
            model(
                input_ids=token,
                position_ids=torch.zeros_like(token),
                use_cache=False,
                logits_to_keep=torch.zeros(1, dtype=torch.int64, device=device),
            )
    except Exception as error:
        raise _refusal(checkpoint, f"it does not run: {type(error).__name__}: {error}") from error
    if not recorder.layers:
        raise _refusal(checkpoint, "it does not use transformers' attention interface")
    if recorder.unsupported:
        raise _refusal(checkpoint, recorder.unsupported)
    return recorder.layers


@torch.inference_mode()
def check_packed(
    checkpoint: Checkpoint, hook: AttentionHook, layers: list[LayerSpec], max_len: int
) -> SelfCheck:
    """Compare packed steps with the model alone.

    Raises:
        UnsupportedModelError: they differ, or the packed step does not run.
    """
    sequences = _sequences(checkpoint, layers, max_len)
    try:
        packed = _packed_logits(checkpoint, hook, layers, sequences)
    except Exception as error:
        raise _refusal(
            checkpoint, f"a packed step does not run: {type(error).__name__}: {error}"
        ) from error
    alone = _logits_alone(checkpoint, hook, sequences)
    errors = (packed - alone).square().mean(-1).sqrt() / alone.std()
    if checkpoint.model.dtype != torch.float32:
        # Rounding makes an expert model choose other experts for a token now and then. Such a row
        # says nothing; what is wrong with the path shows in most rows of a sequence.
        errors = errors.view(len(sequences), -1).median(dim=1).values
    difference = errors.max().item()
    # Written so that NaN is refused, too.
    if not difference <= _TOLERANCE[checkpoint.model.dtype]:
        raise _refusal(
            checkpoint,
            f"a packed step differs from the model alone by {difference:.2g} of its logits' spread",
        )
    return SelfCheck(difference, packed.shape[0])


def _refusal(checkpoint: Checkpoint, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{checkpoint.architecture} is not supported: {reason}")


def _plain_token_ids(checkpoint: Checkpoint) -> list[int]:
    """Token ids that mean nothing special: images, padding, ends of text change what models do."""
    size = checkpoint.vocab_size
    special = set(checkpoint.eos_token_ids)
    for config in (checkpoint.model.config, checkpoint.text_config):
        for name, value in config.to_dict().items():
            if name.endswith(("token_id", "token_index")) and isinstance(value, int):
                special.add(value)
    middle = range(size // 8, max(size // 8 + 1, size // 2))
    return [token_id for token_id in middle if token_id not in special] or list(range(size))


def _sequences(
    checkpoint: Checkpoint, layers: list[LayerSpec], max_len: int
) -> list[tuple[list[int], int]]:
    """Pairs of a whole sequence and how many of its tokens are the prompt."""
    limits = {limit for layer in layers for limit in (layer.span.window, layer.span.chunk) if limit}
    visible = [limit + 6 for limit in limits if limit + 6 <= _LONGEST_PROMPT]
    lens = [max(_PROMPT_LENS[0], *visible, 0), *_PROMPT_LENS[1:]]
    choices = _plain_token_ids(checkpoint)
    rng = random.Random(0)
    sequences = []
    for length in lens:
        prompt_len = max(1, min(length, max_len - _NUM_STEPS))
        total = min(max_len, prompt_len + _NUM_STEPS)
        sequences.append(([rng.choice(choices) for _ in range(total)], prompt_len))
    return sequences


def _packed_logits(
    checkpoint: Checkpoint,
    hook: AttentionHook,
    layers: list[LayerSpec],
    sequences: list[tuple[list[int], int]],
) -> Tensor:
    """Logits at every token from the last of the prompt on, sequence by sequence."""
    model = checkpoint.model
    device = checkpoint.device
    longest = max(len(tokens) for tokens, _ in sequences)
    num_blocks = len(sequences) * -(-longest // _BLOCK_SIZE)
    cache = KVCache(
        layers, num_blocks=num_blocks, block_size=_BLOCK_SIZE, dtype=model.dtype, device=device
    )
    builder = BatchBuilder(
        max_num_seqs=len(sequences),
        max_model_len=longest,
        block_size=_BLOCK_SIZE,
        null_block=cache.null_block,
    )
    path = PackedPath(model, hook, layers, cache, builder)
    scheduler = Scheduler(
        _scattered_pool(num_blocks),
        block_size=_BLOCK_SIZE,
        max_num_seqs=len(sequences),
        max_num_batched_tokens=_BUDGET,
    )
    rows: dict[int, list[Tensor]] = {}
    for number, (tokens, prompt_len) in enumerate(sequences):
        request = Request(
            str(number),
            tokens[:prompt_len],
            SamplingParams(),
            max_total_tokens=len(tokens) + 1,
        )
        rows[number] = []
        scheduler.add(request)
    while scheduler.has_work():
        plan = scheduler.plan()
        logits = path.forward(plan)
        sampling = [chunk.request for chunk in plan.chunks if chunk.samples]
        sampled = []
        for request, row in zip(sampling, logits, strict=True):
            number = int(request.request_id)
            rows[number].append(row.float())
            # The next token is given, not sampled; after the last one the request ends by length.
            following = sequences[number][0][len(request.token_ids) :] or [0]
            sampled.append(Sampled(following[:1], [0.0]))
        scheduler.commit(plan, StepResult(sampled))
    return torch.cat([torch.stack(rows[number]) for number in range(len(sequences))])


def _scattered_pool(num_blocks: int) -> BlockPool:
    """A pool that hands out its blocks in no order."""
    pool = BlockPool(num_blocks)
    blocks = pool.allocate(num_blocks)
    random.Random(0).shuffle(blocks)
    pool.release(blocks)
    return pool


def _logits_alone(
    checkpoint: Checkpoint, hook: AttentionHook, sequences: list[tuple[list[int], int]]
) -> Tensor:
    """The same rows from the model's own attention, each sequence whole and by itself."""
    model, device = checkpoint.model, checkpoint.device
    model.set_attn_implementation("eager")
    try:
        parts = []
        for tokens, prompt_len in sequences:
            ids = torch.tensor([tokens], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0]
            parts.append(logits[prompt_len - 1 :].float())
    finally:
        model.set_attn_implementation(hook.name)
    return torch.cat(parts)
