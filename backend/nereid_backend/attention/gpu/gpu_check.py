# SPDX-License-Identifier: Apache-2.0
"""Whether the GPU kernels compute what their twin computes, on the very device and at load.

The engine's own check runs the model over short sequences. This one runs one layer over sequences
that reach what those leave out: parts of a long sequence and their reduction, tiles of keys that
all rows see, windows that have moved on. It compiles those kernels on the way.
"""

import functools
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from nereid_backend.attention import reference
from nereid_backend.attention.attention_batch import AttentionBatch, Decodes, Prefill
from nereid_backend.attention.float8_cache import Float8KVCache
from nereid_backend.attention.gpu import gpu_attention
from nereid_backend.attention.kv_cache import KVCache
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.attention.scaled_cache import ScaledKVCache

# Tokens of each decode, the new one included, and (cached, new) ones of each prefill.
_DECODES = (400, 1, 17)
_PREFILLS = ((0, 40), (140, 20))
# Root mean square of the difference over that of the answer, at the worst token. The twin computes
# in float32; what a window off by one gives is above 0.1.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.03, torch.float16: 0.01}
_SCALE = 0.3


class KernelError(Exception):
    """The kernels compute something else; the message says what."""


@functools.cache
def why_not(
    kind: type[gpu_attention.GpuKVCache],
    spec: LayerSpec,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Why the kernels must not serve layers like this; None: they may."""
    try:
        check(kind, spec, block_size, dtype, device)
    except Exception as error:  # noqa: BLE001 - compilers and drivers fail in any way
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        return text if isinstance(error, KernelError) else f"{type(error).__name__}: {text}"
    return None


@torch.inference_mode()
def check(
    kind: type[gpu_attention.GpuKVCache],
    spec: LayerSpec,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Run one layer of one step through the kernels and through their twin.

    Args:
        kind: of the cache.
        spec: the layer.
        block_size: tokens in one block.
        dtype: of the model.
        device: where.

    Returns:
        The worst token's difference: root mean square, over that of its answer.

    Raises:
        KernelError: what was written or computed is not the twin's.
    """
    batch, num_blocks = _batch(block_size, device)
    cache = kind([spec], num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    # By rows of the cache, in whatever order: all of them but the null block are filled.
    count = num_blocks * block_size
    filled = [randn(count, spec.num_kv_heads, dim) for dim in (spec.key_dim, spec.value_dim)]
    rows = torch.arange(count * spec.num_kv_heads, device=device)
    cache.store(0, filled[0], filled[1], rows)
    num_tokens = batch.slots.numel()
    query, key, value = (
        randn(num_tokens, heads, dim).transpose(0, 1)
        for heads, dim in (
            (spec.num_heads, spec.key_dim),
            (spec.num_kv_heads, spec.key_dim),
            (spec.num_kv_heads, spec.value_dim),
        )
    )
    sinks = randn(spec.num_heads) if spec.has_sinks else None
    found = gpu_attention.attend(
        (query, key, value), (0, spec), cache, batch, scale=_SCALE, sinks=sinks
    )
    twin = _plain(cache, spec, block_size)
    stored = _stored(twin, batch, (key, value), block_size)
    _check_written(cache, stored, (key, value))
    inputs = (query.float(), *stored)
    expected = reference.attend(inputs, (0, spec), twin, batch, scale=_SCALE, sinks=sinks)
    errors = (found.float() - expected).square().mean((1, 2)).sqrt()
    difference = (errors / expected.square().mean((1, 2)).sqrt()).max().item()
    # Written so that NaN is refused, too.
    if not difference <= _TOLERANCE[dtype]:
        raise KernelError(f"attention differs from its twin by {difference:.2g} of it")
    return difference


def _batch(block_size: int, device: torch.device) -> tuple[AttentionBatch, int]:
    """The step, its sequences over scattered blocks; and how many blocks there are."""
    lens = [*_DECODES, *(cached + new for cached, new in _PREFILLS)]
    counts = [-(-length // block_size) for length in lens]
    numbers = list(range(sum(counts)))
    random.Random(0).shuffle(numbers)
    tables = [[numbers.pop() for _ in range(count)] for count in counts]
    width, null = max(counts[: len(_DECODES)]), sum(counts)

    def tensor(values: Sequence[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    places = [(table, length - 1, length) for table, length in zip(tables, _DECODES, strict=False)]
    prefills, start = [], len(_DECODES)
    for table, (cached, new) in zip(tables[len(_DECODES) :], _PREFILLS, strict=True):
        prefills.append(Prefill(start, start + new, cached, tensor([table])))
        places.append((table, cached, cached + new))
        start += new
    slots = [
        table[position // block_size] * block_size + position % block_size
        for table, begin, end in places
        for position in range(begin, end)
    ]
    blocks = [table + [null] * (width - len(table)) for table in tables[: len(_DECODES)]]
    decodes = Decodes(None, tensor(blocks), tensor(_DECODES), block_size)
    return AttentionBatch(tensor(slots), len(_DECODES), [decodes], prefills, block_size), null


def _plain(cache: KVCache, spec: LayerSpec, block_size: int) -> KVCache:
    """A float32 cache of what this one holds."""
    twin = KVCache(
        [spec],
        num_blocks=cache.null_block,
        block_size=block_size,
        dtype=torch.float32,
        device=cache.device,
    )
    for target, source in ((twin.keys[0], cache.keys[0]), (twin.values[0], cache.values[0])):
        if not isinstance(cache, ScaledKVCache):
            target.copy_(source)
            continue
        scales = cache.key_scales[0] if source is cache.keys[0] else cache.value_scales[0]
        target.copy_(cache.restored(source, scales))
    return twin


def _stored(
    twin: KVCache, batch: AttentionBatch, given: tuple[Tensor, Tensor], block_size: int
) -> tuple[Tensor, Tensor]:
    """The step's own keys and values as the cache has them, shaped as given, float32."""
    blocks, places = batch.slots // block_size, batch.slots % block_size
    found = []
    for tensor, like in zip((twin.keys[0], twin.values[0]), given, strict=True):
        found.append(tensor[blocks, :, places].transpose(0, 1).reshape(like.shape))
    return found[0], found[1]


def _check_written(
    cache: KVCache, stored: tuple[Tensor, Tensor], given: tuple[Tensor, Tensor]
) -> None:
    for found, expected in zip(stored, (tensor.float() for tensor in given), strict=True):
        largest = expected.abs().amax(-1, keepdim=True)
        allowed = torch.zeros_like(expected)
        if isinstance(cache, Float8KVCache):
            allowed = expected.abs() * (1.01 / 16) + largest * 2.0**-17
        elif isinstance(cache, ScaledKVCache):
            # Half a step, and some for numbers halfway between two.
            allowed = (largest * (0.51 / 127)).expand_as(expected)
        if not bool(((found - expected).abs() <= allowed).all()):
            raise KernelError("the cache write differs from what was to be written")
