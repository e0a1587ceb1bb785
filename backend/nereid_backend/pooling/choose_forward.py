# SPDX-License-Identifier: Apache-2.0
"""How a model can be run exactly, found out by running it.

A few short texts of random tokens go through the model one by one, with its own attention. A mixed
batch must then give the same vectors: packed if it does, else padded, else in rows of one length,
else the model is refused by name. A wrong answer must not look like a right one, and no list of
names says what a model does.
"""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nereid_backend.attention.interface import AttentionHook
from nereid_backend.errors import ModelError, UnsupportedModelError
from nereid_backend.linear.prepack import prepack_linears
from nereid_backend.pooling.load_encoder import Encoder
from nereid_backend.pooling.packed_texts import PackedAttention, TokenBatch
from nereid_backend.pooling.pooling_forward import Head, PackedForward, PaddedForward, RowsForward

_LENS = (5, 5, 13, 21)
# A text is made longer than a window to see that the window works, up to this length.
_LONGEST = 160
# Root mean square of the difference over the vectors' spread: below the first a change of a later
# token was not felt, above the second a batch gives something else than a text alone.
_CAUSAL = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 2e-3}
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


Forward = PackedForward | PaddedForward | RowsForward


@dataclass(frozen=True, slots=True)
class Way:
    """How token vectors are made.

    Attributes:
        forward: the function from a batch to token vectors.
        path: "packed", "padded" or "rows" (padded to no more than texts of one length).
        is_causal: whether a token sees only those before it.
        difference: of a mixed batch from each text alone, relative.
    """

    forward: Forward
    path: str
    is_causal: bool
    difference: float


@torch.inference_mode()
def choose_way(encoder: Encoder, hook: AttentionHook, name: str, max_len: int) -> Way:
    """Find the way to run a base model.

    Mutates: the model: its attention, and the layout of its linear layers.

    Args:
        encoder: the model, still as it was loaded.
        hook: our entry in transformers' attention interface.
        name: the architecture's, for messages.
        max_len: longest input in tokens.

    Raises:
        ModelError: the model's vectors are not finite numbers.
        UnsupportedModelError: a mixed batch differs from each text alone, packed and padded.
    """
    lens = tuple(min(n, max_len) for n in _LENS)
    batch = random_batch(encoder, lens)
    alone = _alone(encoder, batch, name)
    is_causal = _is_causal(encoder, batch, alone)
    difference, why = float("inf"), "it does not use transformers' attention interface"
    if encoder.takes_hook:
        wider = _wider(encoder, hook, batch, is_causal, max_len)
        if wider is not None:
            batch, alone = wider, _alone(encoder, wider, name)
    prepack_linears(encoder.model)
    if encoder.takes_hook:
        encoder.model.set_attn_implementation(hook.name)
        for offset in _offsets(encoder):
            packed = PackedForward(encoder, hook, offset, is_causal)
            difference, why = _compare(packed, batch, alone)
            if difference <= _TOLERANCE[encoder.dtype]:
                return Way(packed, "packed", is_causal, difference)
        encoder.model.set_attn_implementation(encoder.own_attention)
    whys = [f"packed: {why}"]
    for forward, path in ((PaddedForward(encoder), "padded"), (RowsForward(encoder), "rows")):
        difference, why = _compare(forward, batch, alone)
        if difference <= _TOLERANCE[encoder.dtype]:
            return Way(forward, path, is_causal, difference)
        whys.append(f"{path}: {why}")
    raise UnsupportedModelError(
        f"{name} is not supported: a batch differs from each text alone; {'; '.join(whys)}"
    )


@torch.inference_mode()
def choose_head(encoder: Encoder, way: Way, name: str, max_len: int) -> Head:
    """Find what a head that answers once a text must be given.

    Mutates: the model's attention, where nothing but the whole model gives the head's answer.

    Raises:
        UnsupportedModelError: it answers otherwise than the whole model, whatever it is given.
    """
    batch = random_batch(encoder, tuple(min(n, max_len) for n in _LENS))
    hidden = way.forward(batch)
    wanted = []
    for ids, types in _singles(batch):
        with _own_attention(encoder, way):
            extra = {} if types is None else {"token_type_ids": types}
            wanted.append(encoder.model(input_ids=ids, **extra).logits[0].float())
    whole = torch.stack(wanted)
    why = ""
    for rows in ("first", "last", "all", "whole"):
        if rows == "whole":
            # The whole model on padded rows, as transformers means it to be called.
            encoder.model.set_attn_implementation(encoder.own_attention)
        head = Head(encoder, rows)
        try:
            found = head.logits(hidden, batch).float()
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            continue
        if found.shape != whole.shape:
            why = f"it answers with {tuple(found.shape)} numbers"
            continue
        difference = relative_difference(found, whole)
        if difference <= _TOLERANCE[encoder.dtype]:
            return head
        why = f"its answers differ by {difference:.2g} of their spread"
    raise UnsupportedModelError(f"the head of {name} is not supported: {why}")


def random_batch(encoder: Encoder, lens: tuple[int, ...]) -> TokenBatch:
    """Texts of random tokens, none of them special."""
    special = set(encoder.tokenizer.all_special_ids)
    for config in (encoder.model.config, encoder.model.config.get_text_config()):
        for key, value in config.to_dict().items():
            if key.endswith("token_id") and isinstance(value, int):
                special.add(value)
    # Ids past the tokenizer's own are often never trained.
    size = min(encoder.vocab_size, max(8, len(encoder.tokenizer)))
    plain = [i for i in range(size // 8, size) if i not in special] or list(range(size))
    rng = random.Random(0)
    texts = [[rng.choice(plain) for _ in range(n)] for n in lens]
    types: list[list[int] | None] = [None] * len(lens)
    kinds = getattr(encoder.model.config, "type_vocab_size", None) or 0
    if kinds > 1 and "token_type_ids" in encoder.tokenizer.model_input_names:
        types = [[0] * (n // 2) + [1] * (n - n // 2) for n in lens]
    return TokenBatch.of(texts, types, encoder.device)


def relative_difference(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the worst row's difference over the spread of what is wanted."""
    return row_errors(found, wanted).max().item()


def row_errors(found: Tensor, wanted: Tensor) -> Tensor:
    """Root mean square of each row's difference over the spread of all that is wanted."""
    errors = (found.float() - wanted.float()).square().mean(-1).sqrt()
    return errors / wanted.float().square().mean().sqrt().clamp(min=1e-12)


def position_table(encoder: Encoder) -> torch.nn.Embedding | None:
    """The base's table of position embeddings, if it has one."""
    for name, module in encoder.base.named_modules():
        if isinstance(module, torch.nn.Embedding) and "position" in name.rsplit(".", 1)[-1]:
            return module
    return None


def _offsets(encoder: Encoder) -> list[int]:
    """Numbers that a text's first position may have, the likeliest first."""
    table = position_table(encoder)
    if table is None or table.padding_idx is None:
        return [0]
    return [table.padding_idx + 1, 0]


def _singles(batch: TokenBatch) -> list[tuple[Tensor, Tensor | None]]:
    """Each text as a batch of one: ids [1, n], type ids likewise or None."""
    starts = batch.starts
    return [
        (
            batch.token_ids[start:end][None],
            None if batch.type_ids is None else batch.type_ids[start:end][None],
        )
        for start, end in itertools.pairwise(starts)
    ]


def _alone(encoder: Encoder, batch: TokenBatch, name: str) -> Tensor:
    """Token vectors, each text by itself: [num_tokens, hidden_size] float32."""
    one = PaddedForward(encoder)
    try:
        parts = [
            one(TokenBatch(ids[0], None if types is None else types[0], (ids.shape[1],))).float()
            for ids, types in _singles(batch)
        ]
        found = torch.cat(parts)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{name} is not supported: it does not run on a text alone: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not found.isfinite().all():
        raise ModelError(
            f"{name}: its vectors are not finite numbers; the weights are broken, or "
            f"{encoder.dtype} overflows (set dtype=float32)"
        )
    return found


def _is_causal(encoder: Encoder, batch: TokenBatch, alone: Tensor) -> bool:
    """Whether a longest text's first tokens do not feel a change of its last one."""
    length = batch.lens[-1]
    ids = batch.token_ids[-length:].clone()
    ids[-1] = batch.token_ids[0]
    if ids[-1] == batch.token_ids[-1]:
        ids[-1] = batch.token_ids[1]
    types = None if batch.type_ids is None else batch.type_ids[-length:]
    changed = PaddedForward(encoder)(TokenBatch(ids, types, (length,))).float()
    if length < 2:
        return False
    # The middle row: a model of experts may choose others for a token when the batch changes.
    errors = row_errors(changed[:-1], alone[-length:-1])
    return errors.median().item() < _CAUSAL[encoder.dtype]


def _wider(
    encoder: Encoder, hook: AttentionHook, batch: TokenBatch, is_causal: bool, max_len: int
) -> TokenBatch | None:
    """The batch with texts beyond the windows that the model's attention has, None if it has none.

    Mutates: the model's attention, and back.
    """
    attention = PackedAttention(batch.groups(), is_causal)
    forward = PackedForward(encoder, hook, _offsets(encoder)[0], is_causal)
    encoder.model.set_attn_implementation(hook.name)
    try:
        forward.run(batch, attention)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
        return None
    finally:
        encoder.model.set_attn_implementation(encoder.own_attention)
    longer = {w + 6 for w in attention.windows if w + 6 > max(batch.lens)}
    reached = sorted(n for n in longer if n <= min(_LONGEST, max_len))
    return random_batch(encoder, (*batch.lens, *reached)) if reached else None


def _compare(forward: Forward, batch: TokenBatch, alone: Tensor) -> tuple[float, str]:
    """How far a batch is from each text alone, and that in words."""
    try:
        found = forward(batch)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        return float("inf"), f"{type(error).__name__}: {error}"
    if found.shape != alone.shape:
        return float("inf"), f"it gives vectors of shape {tuple(found.shape)}"
    errors = row_errors(found, alone)
    if forward.encoder.dtype != torch.float32:
        # Rounding makes a model of experts choose others for a token now and then. Such a row says
        # nothing; what is wrong with the way shows in most rows of a text.
        errors = torch.stack([one.median() for one in torch.split(errors, list(batch.lens))])
    difference = errors.max().item()
    return difference, f"it differs by {difference:.2g} of the vectors' spread"


@contextmanager
def _own_attention(encoder: Encoder, way: Way) -> Iterator[None]:
    """A model's own attention for a while, where it otherwise runs with ours."""
    if isinstance(way.forward, PackedForward):
        encoder.model.set_attn_implementation(encoder.own_attention)
    try:
        yield
    finally:
        if isinstance(way.forward, PackedForward):
            encoder.model.set_attn_implementation(way.forward.hook.name)
