# SPDX-License-Identifier: Apache-2.0
"""Computes attention with torch's variable-length function, which can read KV cache blocks.

Since torch 2.13, the function accepts a block table. The supported block sizes depend on the
version of flash attention in torch. Therefore, the function is tested when a model is loaded. The
speed has not been measured on a GPU.
"""

import inspect
import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from nereid_backend.attention.attention_batch import Prefill
from nereid_backend.attention.gpu.backends.attention_backend import (
    LayerInputs,
    Situation,
    first_refusal,
)
from nereid_backend.attention.layers import LayerSpec
from nereid_backend.device_transfer import upload

_DTYPES = (torch.bfloat16, torch.float16)


class _Sequences(NamedTuple):
    """The lengths and block tables of n sequences, whose attention is computed in one call.

    Attributes:
        blocks: [n, width] int32, the block tables.
        lens: [n] int32, the lengths of the sequences, including the new tokens.
        query_starts: [n + 1] int32. The first n numbers are the indices of each sequence's first
            query. The last number is the total number of queries. A query is a new token.
        max_new: the largest number of new tokens in a sequence.
        max_keys: an upper bound on the number of keys of a sequence.
    """

    blocks: Tensor
    lens: Tensor
    query_starts: Tensor
    max_new: int
    max_keys: int


class TorchVarlen:
    """The variable-length attention of torch; see `AttentionBackend`."""

    name = "torch's variable-length attention"
    situations = frozenset(Situation)

    def refusal(self, spec: LayerSpec, block_size: int, dtype: torch.dtype) -> str | None:  # noqa: ARG002
        """Return the reason why torch cannot compute a layer; None if torch can compute it.

        See `AttentionBackend.refusal` for the arguments.
        """
        if "block_table" not in inspect.signature(varlen_attn).parameters:
            return f"torch {torch.__version__} has no block table in varlen_attn"
        if dtype not in _DTYPES:
            return f"it does not support {dtype}"
        if spec.key_dim != spec.value_dim:
            return "the keys and the values have different sizes"
        return first_refusal(spec, supports_window=True, supports_softcap=False)

    def attend(self, situation: Situation, inputs: LayerInputs, out: Tensor) -> None:
        """Compute all decodes or all prefills of a step; see `AttentionBackend.attend`."""
        if situation is Situation.DECODE:
            self._attend_decodes(inputs, out)
        else:
            self._attend_prefills(inputs, out)

    def _attend_decodes(self, inputs: LayerInputs, out: Tensor) -> None:
        """Compute the attention of the decodes, with one call for each group of decodes.

        A decode is a sequence with one new token. A group contains decodes of similar length.
        torch's function requires int32 numbers. Mutates: out.
        """
        for group in inputs.batch.decodes:
            count, width = group.blocks.shape
            # Each decode has one query, so decode i starts at query i. The last number is the end
            # of the last decode. Example: three decodes give [0, 1, 2, 3].
            query_starts = torch.arange(count + 1, dtype=torch.int32, device=group.lens.device)
            sequences = _Sequences(
                blocks=group.blocks.to(torch.int32),
                lens=group.lens.to(torch.int32),
                query_starts=query_starts,
                max_new=1,
                max_keys=width * group.block_size,
            )
            # If `group.tokens` is None, the group contains all decodes, and the tokens of the
            # decodes are the first tokens of the step.
            tokens = slice(count) if group.tokens is None else group.tokens
            out[tokens] = self._varlen_attention(inputs, inputs.query[:, tokens], sequences)

    def _attend_prefills(self, inputs: LayerInputs, out: Tensor) -> None:
        """Compute the attention of all prefills with one call.

        Mutates: out, and `inputs.rows.shared`.
        """
        prefills = inputs.batch.prefills
        tokens = slice(prefills[0].start, prefills[-1].end)
        query = inputs.query[:, tokens]
        out[tokens] = self._varlen_attention(inputs, query, _shared_prefill_sequences(inputs))

    def _varlen_attention(
        self, inputs: LayerInputs, query: Tensor, sequences: _Sequences
    ) -> Tensor:
        """Compute the attention of some sequences with one call of torch's `varlen_attn`.

        Args:
            inputs: the arguments of the layer. The cache of the layer contains the keys and values.
            query: [num_heads, num_tokens, key_dim], the queries of these sequences.
            sequences: the metadata of these sequences.

        Returns:
            [num_tokens, num_heads, value_dim].
        """
        call = inputs.call
        window = call.spec.window.size
        # torch's window is a pair: the number of earlier tokens and the number of later tokens to
        # which a token attends. -1 means no limit.
        window_size = (-1 if window is None else window - 1, 0)
        result = varlen_attn(
            query=query.transpose(0, 1),
            key=call.keys.transpose(1, 2),
            value=call.values.transpose(1, 2),
            cu_seq_q=sequences.query_starts,
            cu_seq_k=None,  # The keys are in blocks, so their lengths are passed as seqused_k.
            max_q=sequences.max_new,
            max_k=sequences.max_keys,
            scale=call.scale,
            window_size=window_size,
            enable_gqa=call.group_size > 1,
            seqused_k=sequences.lens,
            block_table=sequences.blocks,
        )
        assert isinstance(result, Tensor), "varlen_attn must return one tensor"
        return result


def _shared_prefill_sequences(inputs: LayerInputs) -> _Sequences:
    """Return the metadata of a step's prefills. It is built once for all layers of the step.

    Mutates: `inputs.rows.shared`, in which the first layer stores the metadata.
    """
    shared = inputs.rows.shared
    sequences: _Sequences | None = shared.get("varlen")
    if sequences is None:
        sequences = _prefill_sequences(inputs.batch.prefills, inputs.query.device)
        shared["varlen"] = sequences
    return sequences


def _prefill_sequences(prefills: list[Prefill], device: torch.device) -> _Sequences:
    """Return the metadata of a step's prefills in the form that torch's `varlen_attn` needs.

    A prefill is a sequence with several new tokens.
    """
    width = max(prefill.blocks.shape[1] for prefill in prefills)
    # Each block table [1, n] is padded to [1, width].
    tables = [
        functional.pad(prefill.blocks, (0, width - prefill.blocks.shape[1])) for prefill in prefills
    ]
    nums_new = [prefill.end - prefill.start for prefill in prefills]
    lens = [prefill.seq_len for prefill in prefills]
    # The index of each prefill's first new token. The last element is the number of all new tokens.
    query_starts = list(itertools.accumulate(nums_new, initial=0))
    # Join the two lists, because one copy to the device takes less time than two copies.
    uploaded = upload(np.array([*lens, *query_starts]), device).to(torch.int32)
    return _Sequences(
        blocks=torch.cat(tables).to(torch.int32),
        lens=uploaded[: len(lens)],
        query_starts=uploaded[len(lens) :],
        max_new=max(nums_new),
        max_keys=max(lens),
    )
