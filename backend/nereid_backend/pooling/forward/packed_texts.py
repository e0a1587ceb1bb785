# SPDX-License-Identifier: Apache-2.0
"""Packs several texts into one batch without padding, and computes the attention of each text.

    tokens   a a a | b b b | c c c c c c        lens 3 3 6, groups (0, 2, 3) (6, 1, 6)

On a CPU, one call of Nereid's kernels computes the attention of all texts. With torch's functions,
one call computes the attention of a group: neighbouring texts of the same length. Here the texts a
and b form a group that begins at token 0 and has 2 texts of 3 tokens.
"""

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from nereid_backend.attention.cpu import cpu_texts
from nereid_backend.attention.cpu.cpu_library import NativePrefill
from nereid_backend.attention.cpu.cpu_texts import TextAttention
from nereid_backend.attention.transformers_hook import scale_of, sinks_of
from nereid_backend.pooling.forward.group_attention import GroupAttention


class TextGroup(NamedTuple):
    """Neighbouring texts of a batch that have the same length.

    Attributes:
        first_token: the index of the group's first token in the batch.
        num_texts: the number of texts.
        text_len: the number of tokens of each text.
    """

    first_token: int
    num_texts: int
    text_len: int


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The packed tokens of several texts.

    Attributes:
        token_ids: the concatenated tokens of all texts, int64 [num_tokens].
        type_ids: one number for each token, int64 [num_tokens]. The number is 0 in the first text
            of a pair, and 1 in the second text. None means the model's default.
        lens: the number of tokens of each text.
        attended_lens: one number n for each text. All tokens of the text attend only to its first n
            tokens. None means that the tokens attend to the whole text.
    """

    token_ids: Tensor
    type_ids: Tensor | None
    lens: tuple[int, ...]
    attended_lens: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        sequences: Sequence[Sequence[int]],
        type_ids: Sequence[Sequence[int] | None],
        device: torch.device,
    ) -> "TokenBatch":
        """Create a batch that concatenates the token ids of several texts.

        Example: the sequences [[5, 6], [7]] give a batch with the token_ids [5, 6, 7] and the lens
        (2, 1). If only some texts have type ids, the tokens of the other texts get the type id 0.

        Args:
            sequences: the token ids of each text.
            type_ids: the type ids of each text. In a pair of texts, the type id of a token is 0 in
                the first text, and 1 in the second text. None means that a text has no type ids.
            device: the device of the batch.
        """
        flat_ids = [token_id for ids in sequences for token_id in ids]
        token_ids = torch.tensor(flat_ids, dtype=torch.int64).to(device)
        lens = tuple(len(ids) for ids in sequences)
        if all(ids is None for ids in type_ids):
            return cls(token_ids, None, lens)
        flat_type_ids: list[int] = []
        for length, ids in zip(lens, type_ids, strict=True):
            flat_type_ids += [0] * length if ids is None else ids
        return cls(token_ids, torch.tensor(flat_type_ids, dtype=torch.int64).to(device), lens)

    @property
    def starts(self) -> list[int]:
        """The index of each text's first token, followed by the total number of tokens.

        Example: the lens (2, 1) give [0, 2, 3].
        """
        return [0, *itertools.accumulate(self.lens)]

    def groups(self) -> list[TextGroup]:
        """Group neighbouring texts that have the same length, and return the groups.

        Example: texts with 5, 5 and 13 tokens return [TextGroup(first_token=0, num_texts=2,
        text_len=5), TextGroup(first_token=10, num_texts=1, text_len=13)].
        """
        groups = []
        first_token = 0
        for text_len, equal_lens in itertools.groupby(self.lens):
            num_texts = len(list(equal_lens))
            groups.append(TextGroup(first_token, num_texts, text_len))
            first_token += num_texts * text_len
        return groups

    def split(self) -> list["TokenBatch"]:
        """Return a separate batch for each text."""
        types = self.type_ids
        return [
            TokenBatch(
                self.token_ids[start:end],
                None if types is None else types[start:end],
                (end - start,),
            )
            for start, end in itertools.pairwise(self.starts)
        ]

    def positions(self, offset: int) -> Tensor:
        """Return the position id of each token, int64 [num_tokens].

        The first token of each text has the position id `offset`. Example: the lens (2, 1) and the
        offset 5 return [5, 6, 5].

        In models such as RoBERTa, the offset is the id of the padding token plus 1. If a text
        contains the padding token, its position id is the id of the padding token, and the token is
        not counted. Example: the lens (3,), the offset 2 and the token ids [7, 1, 9] return
        [2, 1, 3].
        """
        padding_id = offset - 1  # -1 is no token id
        is_counted = (self.token_ids != padding_id).long()
        counts = is_counted.cumsum(0)
        starts = torch.tensor(self.starts[:-1], device=self.token_ids.device)
        lens = torch.tensor(self.lens, device=self.token_ids.device)
        counts_before_text = (counts - is_counted)[starts].repeat_interleave(lens)
        return (counts - counts_before_text) * is_counted + padding_id

    def mask(self) -> Tensor:
        """Return the mask of a padded batch, bool [num_texts, longest]. False means padding."""
        return self._mask_of(self.lens)

    def attention_mask(self) -> Tensor:
        """Return the mask of a padded batch, bool [num_texts, longest].

        True means that the tokens of the text attend to this token.
        """
        return self._mask_of(self.attended_lens or self.lens)

    def _mask_of(self, lens: tuple[int, ...]) -> Tensor:
        """Return a mask [num_texts, longest]. True marks the first `lens[i]` tokens of text i.

        `longest` is the number of tokens of the longest text.
        """
        ends = torch.tensor(lens, device=self.token_ids.device)
        return torch.arange(max(self.lens), device=ends.device) < ends[:, None]

    def pad(self, values: Tensor, filling: float = 0) -> Tensor:
        """Convert a tensor that has one row for each token into a padded batch.

        The shape of `values` is [num_tokens, ...]. The shape of the result is [num_texts, longest,
        ...].

        Example: the lens (2, 1) and the values [5, 6, 7] return [[5, 6], [7, 0]].
        """
        mask = self.mask()
        out = values.new_full((*mask.shape, *values.shape[1:]), filling)
        out[mask] = values
        return out


@dataclass(slots=True)
class PackedAttention:
    """Computes the attention of all layers in one forward pass with a packed batch.

    Attributes:
        groups: the groups of neighbouring texts with the same length (see TokenBatch.groups).
        is_causal: whether a token attends only to itself and to earlier tokens.
        windows: the sizes of the sliding windows that have been used so far.
    """

    groups: list[TextGroup]
    is_causal: bool
    windows: set[int] = field(default_factory=set)
    # The attention masks that were already built. All layers of the forward pass share them.
    _masks: dict[tuple[int, int, int, int | None], Tensor] = field(default_factory=dict)
    _native_texts: "ctypes.Array[NativePrefill] | None" = None

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: object
    ) -> Tensor:
        """Compute the attention of one layer. Tokens attend only to tokens of the same text.

        Shapes: query [1, num_heads, num_tokens, key_dim], key [1, num_kv_heads, num_tokens,
        key_dim], value [1, num_kv_heads, num_tokens, value_dim]; returns [1, num_tokens, num_heads,
        value_dim].
        """
        options = self._read_options(module, query, kwargs)
        if options.window is not None:
            # The self-check reads `windows` to choose texts that are longer than each window.
            self.windows.add(options.window)
        if _uses_kernels(query, options):
            packed = self._attend_with_kernels(query, key, value, options)
        else:
            packed = self._attend_by_groups(query, key, value, options)
        return packed.unsqueeze(0)

    def _attend_with_kernels(
        self, query: Tensor, key: Tensor, value: Tensor, options: TextAttention
    ) -> Tensor:
        """Compute the attention of one layer with Nereid's CPU kernels.

        Shapes: query [1, num_heads, num_tokens, key_dim], key [1, num_kv_heads, num_tokens,
        key_dim], value [1, num_kv_heads, num_tokens, value_dim]; returns [num_tokens, num_heads,
        value_dim].
        """
        if self._native_texts is None:
            lens = [group.text_len for group in self.groups for _ in range(group.num_texts)]
            self._native_texts = cpu_texts.native_texts(lens)
        return cpu_texts.attend_texts((query[0], key[0], value[0]), self._native_texts, options)

    def _attend_by_groups(
        self, query: Tensor, key: Tensor, value: Tensor, options: TextAttention
    ) -> Tensor:
        """Compute the attention of one layer with torch's functions.

        One call of torch's attention computes a group: neighbouring texts of the same length.

        Shapes: query [1, num_heads, num_tokens, key_dim], key [1, num_kv_heads, num_tokens,
        key_dim], value [1, num_kv_heads, num_tokens, value_dim]; returns [num_tokens, num_heads,
        value_dim].
        """
        attention = GroupAttention(options, masks=self._masks)  # all layers share the masks
        parts = []
        for group in self.groups:
            output = attention.attend(
                _texts_of_group(query, group),
                _texts_of_group(key, group),
                _texts_of_group(value, group),
            )
            # `output` has the shape [num_texts, num_heads, text_len, value_dim]. Each tensor in
            # `parts` has the shape [num_texts * text_len, num_heads, value_dim].
            parts.append(output.transpose(1, 2).flatten(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_options(
        self, module: torch.nn.Module, query: Tensor, kwargs: dict[str, object]
    ) -> TextAttention:
        """Return a layer's attention options, such as the size of its sliding window.

        Args:
            module: the attention layer of transformers.
            query: the queries, [1, num_heads, num_tokens, key_dim]. If the layer sets no scale for
                the scores, the scale is computed from `key_dim`.
            kwargs: the options that transformers passes to the attention of a layer.

        Raises:
            ValueError: the layer uses an option that is not supported.
        """
        if kwargs.get("position_bias") is not None:
            raise ValueError("its attention adds a position bias")
        # The layer has no sliding window if `window` is not a positive integer, and no softcap if
        # `softcap` is not a number.
        window = kwargs.get("sliding_window")
        softcap = kwargs.get("softcap")
        return TextAttention(
            scale=scale_of(module, query, kwargs),
            is_causal=self.is_causal,
            window=window if isinstance(window, int) and window > 0 else None,
            softcap=float(softcap) if isinstance(softcap, int | float) else None,
            sinks=sinks_of(kwargs),
        )


def _uses_kernels(query: Tensor, options: TextAttention) -> bool:
    """Return whether Nereid's CPU kernels compute the attention of a layer.

    In float32, torch's fused attention is as fast as the kernels, but it supports neither a softcap
    nor sinks.
    """
    is_fused = options.softcap is None and options.sinks is None
    if query.dtype is torch.float32 and is_fused:
        return False
    return cpu_texts.can_attend(query)


def _texts_of_group(tensor: Tensor, group: TextGroup) -> Tensor:
    """Return the queries, keys or values of a group, [num_texts, num_heads, text_len, dim].

    `tensor` contains the queries, keys or values of all texts, [1, num_heads, num_tokens, dim].
    """
    first_token, num_texts, text_len = group
    tokens = tensor[0, :, first_token : first_token + num_texts * text_len]
    return tokens.view(tokens.shape[0], num_texts, text_len, tokens.shape[2]).transpose(0, 1)
