# SPDX-License-Identifier: Apache-2.0
"""Chooses the fastest of the methods that compute correct vectors for a batch of texts.

The methods are tested with short texts of random tokens. First, each text is computed alone, with
the model's own attention. Then the texts are computed as one batch with each method in turn:
"packed", "padded" and "rows" (batches of texts with equal lengths). The first method whose vectors
agree with the vectors of the single texts is chosen. If there is no such method, the model is
refused. Every model is tested when it is loaded, because an inexact method would return wrong
vectors without an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from nereid_backend.attention.transformers_hook import AttentionHook
from nereid_backend.errors import ModelError, UnsupportedModelError
from nereid_backend.linear.merged_linear import merge_linears, separate_linears
from nereid_backend.linear.prepack import prepack_linears
from nereid_backend.pooling.forward.packed_texts import PackedAttention, TokenBatch
from nereid_backend.pooling.forward.pooling_forward import (
    PackedForward,
    PaddedForward,
    RowsForward,
)
from nereid_backend.pooling.forward.self_check_texts import (
    MODEL_ERRORS,
    TOLERANCE,
    random_batch,
    row_errors,
    self_check_lens,
)
from nereid_backend.pooling.loading.load_encoder import Encoder

# A sliding window is tested with a text that has `_BEYOND_WINDOW` more tokens than the window.
_BEYOND_WINDOW = 6
# The texts that test a sliding window have at most `_LONGEST_TEXT` tokens. If a window can only be
# tested with a longer text, the window is not tested.
_LONGEST_TEXT = 160
# To test whether a model is causal, the last token of a text is changed. In a causal model, the
# vectors of the earlier tokens stay the same. The model counts as causal if the relative error of
# these vectors (see `row_errors`) is less than `_CAUSAL_TOLERANCE`. This limit depends on the data
# type.
_CAUSAL_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 2e-3}

Forward = PackedForward | PaddedForward | RowsForward


@dataclass(frozen=True, slots=True)
class ChosenForward:
    """The chosen method of computing token vectors.

    Attributes:
        forward: the function that computes the token vectors of a batch.
        path: "packed", "padded" or "rows" (batches of texts with equal lengths).
        is_causal: whether a token attends only to itself and to earlier tokens.
        difference: the relative difference between token vectors computed in a batch and the same
            vectors computed with each text alone.
    """

    forward: Forward
    path: str
    is_causal: bool
    difference: float


@dataclass(frozen=True, slots=True)
class _ExpectedVectors:
    """Random texts for tests, and the token vectors that a correct method computes for the texts.

    Attributes:
        batch: the texts.
        vectors: the token vectors of the texts computed one by one, [num_tokens, hidden_size].
        is_causal: whether a token attends only to itself and to earlier tokens.
    """

    batch: TokenBatch
    vectors: Tensor
    is_causal: bool

    def of_first_text(self) -> "_ExpectedVectors":
        """Return a copy of this object with only the first text and the vectors of this text."""
        first_text = self.batch.split()[0]
        num_tokens = first_text.lens[0]
        return replace(self, batch=first_text, vectors=self.vectors[:num_tokens])


class _Comparison(NamedTuple):
    """The difference between the vectors that a method computes and the expected vectors.

    Attributes:
        difference: the relative difference; infinity if the method failed or if its vectors have a
            wrong shape.
        reason: a description, such as "the vectors differ by 0.5 (relative)".
    """

    difference: float
    reason: str


class _Candidate(NamedTuple):
    """An untested method of computing the token vectors of a batch.

    Attributes:
        method: "packed", "padded" or "rows".
        forward: the function that computes the token vectors of a batch.
        attention: the name of the attention implementation that `forward` needs in the model.
    """

    method: str
    forward: Forward
    attention: str


@torch.inference_mode()
def pack_layers_and_choose_forward(
    encoder: Encoder, hook: AttentionHook, name: str, max_len: int
) -> ChosenForward:
    """Pack the linear layers of a model, and choose the fastest exact method for token vectors.

    The methods are "packed" (all texts are joined into one row), "padded" (all texts are padded to
    the same length) and "rows" (only texts of equal lengths are computed together). A method is
    exact if its vectors equal the vectors of the same texts computed one by one, except for small
    rounding errors.

    Mutates: the model. The linear layers are packed and merged, and the attention implementation
    of the chosen method is set.

    Args:
        encoder: the loaded model.
        hook: Nereid's entry in transformers' attention interface.
        name: the name of the architecture, for error messages.
        max_len: the length limit of inputs in tokens.

    Raises:
        ModelError: the model's vectors are not finite numbers.
        UnsupportedModelError: no method is exact.
    """
    expected = _compute_expected_vectors(encoder, hook, name, max_len)
    # The expected vectors were computed with the original linear layers. The methods are tested
    # with packed and merged layers, so that the tests also detect errors in these layers.
    prepack_linears(encoder.model)
    _merge_layers(encoder, expected)
    return _first_exact_method(encoder, hook, name, expected)


def _first_exact_method(
    encoder: Encoder, hook: AttentionHook, name: str, expected: _ExpectedVectors
) -> ChosenForward:
    """Return the first method of `_candidates` that computes the expected vectors.

    `name` is the name of the architecture, for error messages. Mutates: the attention
    implementation of the model.

    Raises:
        UnsupportedModelError: no candidate computes the expected vectors.
    """
    # Maps each rejected method to the reason for the rejection.
    rejections: dict[str, str] = {}
    if not encoder.accepts_nereid_attention:
        # `_candidates` does not return the method "packed", so its rejection is added here.
        rejections["packed"] = "it does not use transformers' attention interface"
    for method, forward, attention in _candidates(encoder, hook, is_causal=expected.is_causal):
        if encoder.model.config._attn_implementation != attention:
            encoder.model.set_attn_implementation(attention)
        comparison = _compare_with_single_texts(forward, expected)
        if comparison.difference <= TOLERANCE[encoder.dtype]:
            return ChosenForward(forward, method, expected.is_causal, comparison.difference)
        rejections[method] = comparison.reason
    listed = "; ".join(f"{method}: {reason}" for method, reason in rejections.items())
    raise UnsupportedModelError(
        f"{name} is not supported, because its vectors for texts in a batch differ from its "
        f"vectors for the same texts computed one by one ({listed}). Use a model of another "
        "architecture."
    )


def _merge_layers(encoder: Encoder, expected: _ExpectedVectors) -> None:
    """Merge linear layers that have the same input. Undo the merging if the vectors change.

    One matrix product then computes all merged layers. Mutates: the model.
    """
    forward = PaddedForward(encoder)
    first_text = expected.of_first_text()

    def compute_first_text() -> _Comparison:
        return _compare_with_single_texts(forward, first_text)

    # `merge_linears` observes the inputs of all layers during one run, and ignores the result.
    merge_linears(encoder.model, run=compute_first_text)
    comparison = compute_first_text()
    if comparison.difference > TOLERANCE[encoder.dtype]:
        separate_linears(encoder.model)


def _compute_expected_vectors(
    encoder: Encoder, hook: AttentionHook, name: str, max_len: int
) -> _ExpectedVectors:
    """Return some test texts, and the vectors that result from computing each text alone.

    Args:
        encoder: the loaded model.
        hook: Nereid's entry in transformers' attention interface.
        name: the name of the architecture, for error messages.
        max_len: the length limit of inputs in tokens.

    Raises:
        ModelError: the vectors are not finite numbers.
        UnsupportedModelError: the model cannot compute one text alone.
    """
    short_lens = self_check_lens(max_len)
    short_texts = random_batch(encoder, short_lens)
    vectors = _vectors_of_single_texts(encoder, short_texts, name)
    is_causal = _is_causal(encoder, short_texts, vectors)
    # A sliding window affects only texts that are longer than the window.
    windows = _sliding_windows(encoder, hook, short_texts, is_causal=is_causal)
    long_lens = _lens_beyond_windows(windows, max(short_lens), max_len)
    if not long_lens:
        return _ExpectedVectors(short_texts, vectors, is_causal)
    all_texts = random_batch(encoder, (*short_lens, *long_lens))
    # This call computes all texts of a batch, so the vectors of the few short texts are computed a
    # second time.
    all_vectors = _vectors_of_single_texts(encoder, all_texts, name)
    return _ExpectedVectors(all_texts, all_vectors, is_causal)


def _candidates(encoder: Encoder, hook: AttentionHook, *, is_causal: bool) -> list[_Candidate]:
    """Return the methods to test for computing token vectors, the fastest method first.

    "packed" joins all texts into one row, "padded" pads all texts to the same length, and "rows"
    batches only texts of equal lengths.
    """
    candidates: list[_Candidate] = []
    # Packed texts need Nereid's attention, because the model's own attention would mix texts.
    if encoder.accepts_nereid_attention:
        # Packed texts need explicit position ids. The first position id is 0 in some models, and a
        # different number in others. Add one candidate for each first position id that this model
        # may use.
        for first_id in _possible_first_position_ids(encoder):
            forward = PackedForward(encoder, hook, first_id, is_causal)
            candidates.append(_Candidate("packed", forward, hook.name))
    candidates.append(_Candidate("padded", PaddedForward(encoder), encoder.own_attention))
    candidates.append(_Candidate("rows", RowsForward(encoder), encoder.own_attention))
    return candidates


def position_table(encoder: Encoder) -> torch.nn.Embedding | None:
    """Return the base model's table of position embeddings, or None if there is no such table.

    Position embeddings of an image encoder are ignored.
    """
    for name, module in encoder.base.named_modules():
        is_for_images = "vision" in name or "visual" in name
        is_for_positions = "position" in name.rsplit(".", 1)[-1] and not is_for_images
        if is_for_positions and isinstance(module, torch.nn.Embedding):
            return module
    return None


def _possible_first_position_ids(encoder: Encoder) -> list[int]:
    """Return the possible position ids of a text's first token, beginning with the most likely id.

    In some models, the first position follows the index of the padding embedding. Example: a table
    of position embeddings with padding_idx 1 returns [2, 0].
    """
    table = position_table(encoder)
    if table is None or table.padding_idx is None:
        return [0]
    return [table.padding_idx + 1, 0]


def _vectors_of_single_texts(encoder: Encoder, batch: TokenBatch, name: str) -> Tensor:
    """Compute the texts of a batch one by one, and return their token vectors.

    Shapes: returns float32 [num_tokens, hidden_size].
    """
    forward = PaddedForward(encoder)
    try:
        vectors = torch.cat([forward(text).float() for text in batch.split()])
    except MODEL_ERRORS as error:
        raise UnsupportedModelError(
            f"{name} is not supported: the forward pass of one text failed: "
            f"{type(error).__name__}: {error}. Use a model of another architecture."
        ) from error
    if not vectors.isfinite().all():
        raise ModelError(
            f"{name}: the vectors are not finite numbers. The weights are broken, or "
            f"{encoder.dtype} overflows. Set dtype=float32."
        )
    return vectors


def _is_causal(encoder: Encoder, batch: TokenBatch, expected: Tensor) -> bool:
    """Return whether each token attends only to itself and to earlier tokens.

    The last token of the last text is changed. If the vectors of the text's other tokens stay the
    same, no token attends to later tokens.

    Args:
        encoder: the model.
        batch: the texts.
        expected: the token vectors of the texts, [num_tokens, hidden_size].
    """
    text = batch.split()[-1]
    length = text.lens[0]
    if length < 2:
        return False  # A text of one token has no other tokens, so nothing can be measured.
    ids = text.token_ids.clone()
    ids[-1] = _other_token(batch, ids[-1])
    changed_text = TokenBatch(ids, text.type_ids, text.lens)
    # Compare the vectors of all tokens of the text except the last token.
    after_change = PaddedForward(encoder)(changed_text).float()[:-1]
    before_change = expected[-length:-1]
    # Use the median of the errors, because a mixture-of-experts model may choose other experts for
    # a few tokens when the batch changes.
    median_error = row_errors(after_change, before_change).median().item()
    return median_error < _CAUSAL_TOLERANCE[encoder.dtype]


def _other_token(batch: TokenBatch, token_id: Tensor) -> Tensor:
    """Return the first of the batch's token ids that is not equal to `token_id`.

    The batch must contain such a token id.
    """
    return batch.token_ids[batch.token_ids != token_id][0]


def _lens_beyond_windows(windows: set[int], longest_tested: int, max_len: int) -> list[int]:
    """Return the lengths of further test texts, which are longer than the model's sliding windows.

    A text has 6 tokens more than its window (`_BEYOND_WINDOW`). Example: the windows {8, 64} and
    longest_tested=20 return [70], because a text of 20 tokens also tests the window 8.

    Args:
        windows: the sizes of the sliding windows.
        longest_tested: the length of the longest test text so far.
        max_len: the length limit of inputs. Texts longer than `max_len` or `_LONGEST_TEXT` are left
            out.
    """
    longest_allowed = min(_LONGEST_TEXT, max_len)
    lens = sorted(window + _BEYOND_WINDOW for window in windows)
    return [length for length in lens if longest_tested < length <= longest_allowed]


def _sliding_windows(
    encoder: Encoder, hook: AttentionHook, batch: TokenBatch, *, is_causal: bool
) -> set[int]:
    """Return the sizes of the sliding windows of the model's attention layers.

    The model computes `batch` once as a packed batch, and each layer reports its window to Nereid's
    attention. The set is empty if the model has no windows, or cannot compute packed batches.
    """
    if not encoder.accepts_nereid_attention:
        return set()
    # Each attention layer passes the size of its sliding window to `attention`.
    attention = PackedAttention(batch.groups(), is_causal)
    # The vectors are not used, so the position ids may be wrong.
    any_first_id = _possible_first_position_ids(encoder)[0]
    forward = PackedForward(encoder, hook, any_first_id, is_causal)
    encoder.model.set_attn_implementation(hook.name)
    try:
        forward.run(batch, attention)
    except MODEL_ERRORS:
        return set()  # `_first_exact_method` tries a packed batch again, and reports the error.
    finally:
        encoder.model.set_attn_implementation(encoder.own_attention)
    return attention.windows


def _compare_with_single_texts(forward: Forward, expected: _ExpectedVectors) -> _Comparison:
    """Compute all texts as one batch, and compare the token vectors with the expected vectors."""
    try:
        batched = forward(expected.batch)
    except MODEL_ERRORS as error:
        return _Comparison(float("inf"), f"{type(error).__name__}: {error}")
    if batched.shape != expected.vectors.shape:
        return _Comparison(float("inf"), f"its vectors have the shape {tuple(batched.shape)}")
    errors = row_errors(batched, expected.vectors)  # the relative error of each token's vector
    if forward.encoder.dtype != torch.float32:
        # At low precision, rounding can make a mixture-of-experts model choose other experts for a
        # few tokens, even if the method is exact. An inexact method changes the vectors of most
        # tokens. The median error of each text distinguishes these two cases.
        errors_of_texts = torch.split(errors, list(expected.batch.lens))
        errors = torch.stack([text_errors.median() for text_errors in errors_of_texts])
    difference = errors.max().item()
    return _Comparison(difference, f"the vectors differ by {difference:.2g} (relative)")


@contextmanager
def own_attention(encoder: Encoder, chosen: ChosenForward) -> Iterator[None]:
    """Return a context manager in whose `with` block the model uses its own attention.

    If the chosen method is "packed", the model otherwise uses Nereid's attention, and uses it again
    after the block. The other methods always use the model's own attention.
    """
    forward = chosen.forward
    if not isinstance(forward, PackedForward):
        yield
        return
    encoder.model.set_attn_implementation(encoder.own_attention)
    try:
        yield
    finally:
        encoder.model.set_attn_implementation(forward.hook.name)
