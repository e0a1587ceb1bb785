# SPDX-License-Identifier: Apache-2.0
"""Passes the tensors of a GGUF file to transformers as the weights of a model.

The tensor names, and the changes that were made to the numbers, are those of llama.cpp's converter
(convert_hf_to_gguf.py and the folder conversion/). Weights of the types that `gguf_blocks` knows
keep their integers. The gguf library dequantises the other types.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from nereid_backend.checkpoints.gguf.gguf_blocks import BLOCK_TYPES
from nereid_backend.checkpoints.gguf.gguf_config import ARCHITECTURES
from nereid_backend.checkpoints.gguf.gguf_file import GgufFile, GgufTensor
from nereid_backend.checkpoints.integer_weight import PART_NUMBERS, IntegerWeight
from nereid_backend.errors import ModelError, UnsupportedModelError

_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_EXPERTS = re.compile(r"ffn_(gate|up|down)_exps")
_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_SANDWICH_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Tensors whose content is part of the config; see `gguf_config`.
_NOT_WEIGHTS = ("rope_freqs.weight",)
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class GgufWeight:
    """A weight in a GGUF file. It is read from disk only when transformers reads its elements.

    The elements are dequantised when they are read.

    Attributes:
        path: the file.
        tensor: the description of the tensor, including its position in the file.
        dtype: the data type of the result.
        num_heads: the number of heads, if the rows of each head must be reordered (see
            `_row_order`); None if the rows are in the right order.
        offset: the number that is subtracted from each weight.
        expert: the index of an expert in the first dimension of the tensor; None if the weight is
            the whole tensor.
    """

    path: Path
    tensor: GgufTensor
    dtype: torch.dtype
    num_heads: int | None = None
    offset: float = 0.0
    expert: int | None = None

    def __getitem__(self, index: object) -> Tensor:
        """Return the whole weight.

        `index` is ignored, because transformers always passes `...`, which selects the whole
        weight.
        """
        weight = self.decode()
        return weight.dequantise(self.dtype) if isinstance(weight, IntegerWeight) else weight

    def decode(self) -> Tensor | IntegerWeight:
        """Return the weight as floating point numbers, or as stored integers with scales."""
        blocks = self._read_blocks()
        # The shape of the tensor is [experts, rows, columns], [rows, columns], or [columns] for a
        # bias or a norm. A tensor of the shape [columns] is treated as one row.
        *_, num_rows, num_columns = (1, *self.tensor.shape)
        order = None if self.num_heads is None else _row_order(num_rows, self.num_heads)
        block_type = BLOCK_TYPES.get(self.tensor.kind.name)
        if block_type is not None:
            integers = block_type.decode(blocks, num_rows)
            return integers if order is None else integers.reordered(order)
        floats = self._decode_floats(blocks, num_rows, num_columns)
        if order is not None:
            floats = floats[order]
        return floats if self.expert is not None else floats.view(self.tensor.shape)

    @property
    def num_elements(self) -> int:
        """The number of elements of the weight."""
        shape = self.tensor.shape[1:] if self.expert is not None else self.tensor.shape
        return int(np.prod(shape))

    @property
    def has_integers(self) -> bool:
        """Whether `decode` returns an IntegerWeight."""
        return self.tensor.kind.name in BLOCK_TYPES

    @property
    def integer_bytes(self) -> int:
        """The size of the integers and their scales in memory, in bytes."""
        return int(self.num_elements * BLOCK_TYPES[self.tensor.kind.name].bytes_per_weight)

    def _decode_floats(self, blocks: Tensor, num_rows: int, num_columns: int) -> Tensor:
        """Return the dequantised numbers of blocks, [num_rows, num_columns] in `dtype`."""
        result = torch.empty(num_rows, num_columns, dtype=self.dtype)
        blocks_per_row = len(blocks) // num_rows
        rows_per_part = max(1, PART_NUMBERS // num_columns)
        parts = zip(
            torch.split(result, rows_per_part),
            torch.split(blocks, rows_per_part * blocks_per_row),
            strict=True,
        )
        for part, part_blocks in parts:
            numbers = _floats(part_blocks, self.tensor.kind)
            part.copy_(numbers.view(part.shape) - self.offset)
        return result

    def _read_blocks(self) -> Tensor:
        """Return the blocks of the weight, uint8 [blocks, bytes of a block]."""
        start, num_bytes = self.tensor.start, self.tensor.num_bytes
        if self.expert is not None:
            num_bytes //= self.tensor.shape[0]
            start += self.expert * num_bytes
        content = np.fromfile(self.path, dtype=np.uint8, count=num_bytes, offset=start)
        if len(content) < num_bytes:
            raise ModelError(
                f"the tensor {self.tensor.name} in {self.path} cannot be read, because the file "
                "has become shorter."
            )
        block_bytes = gguf.GGML_QUANT_SIZES[self.tensor.kind][1]
        return torch.from_numpy(content.reshape(-1, block_bytes))


def gguf_weights(
    file: GgufFile, num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> dict[str, GgufWeight]:
    """Return the weights of a GGUF file by their names in transformers.

    Args:
        file: the header of the file.
        num_heads: the number of attention heads.
        num_kv_heads: the number of key and value heads.
        dtype: the data type of dequantised weights.

    Raises:
        UnsupportedModelError: if a tensor of the file is not used.
    """
    weights: dict[str, GgufWeight] = {}
    architecture = ARCHITECTURES[file.architecture]
    # llama.cpp stores the rows of these two projections in another order than transformers; see
    # `_row_order`.
    reordered_heads = {}
    if architecture.has_rotated_pairs:
        reordered_heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
    for tensor in file.tensors.values():
        if tensor.name in _NOT_WEIGHTS:
            continue
        name = _model_name(tensor.name, file)
        if "*" in name:
            for expert in range(tensor.shape[0]):
                weight = GgufWeight(file.path, tensor, dtype, expert=expert)
                weights[name.replace("*", str(expert))] = weight
            continue
        # Architectures with sandwich norms store the weight of a norm plus 1.
        has_offset = architecture.has_sandwich_norms and name.endswith("norm.weight")
        layer_part = tensor.name.split(".")[-2]  # "attn_q" of "blk.3.attn_q.weight"
        weights[name] = GgufWeight(
            file.path,
            tensor,
            dtype,
            num_heads=reordered_heads.get(layer_part),
            offset=1.0 if has_offset else 0.0,
        )
    return weights


def _model_name(name: str, file: GgufFile) -> str:
    """Return the name of a tensor in transformers. It has "*" instead of the index of an expert.

    Example: "blk.3.attn_q.weight" gives "model.layers.3.self_attn.q_proj.weight".

    Raises:
        UnsupportedModelError: if the name is unknown.
    """
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    match = _LAYER.fullmatch(name)
    has_sandwich_norms = ARCHITECTURES[file.architecture].has_sandwich_norms
    names = _SANDWICH_LAYER_NAMES if has_sandwich_norms else _LAYER_NAMES
    if match is not None:
        layer, part, kind = match.groups()
        experts = _EXPERTS.fullmatch(part)
        if experts is not None:
            return f"model.layers.{layer}.mlp.experts.*.{experts[1]}_proj.{kind}"
        if part in names:
            return f"model.layers.{layer}.{names[part]}.{kind}"
    raise UnsupportedModelError(
        f"{file.path}: the tensor {name} of the GGUF architecture {file.architecture} is not "
        "supported. Use the model's safetensors files."
    )


def _row_order(num_rows: int, num_heads: int) -> Tensor:
    """Return the indices that reorder the rows of a file for transformers.

    For each row that transformers expects, the result contains the index of this row in the file.

    Rotary embeddings rotate pairs of numbers. In the file, the two rows of a pair are adjacent. In
    transformers, they are half a head apart. Example: for one head of 4 rows, the order is
    [0, 2, 1, 3].
    """
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


def _floats(blocks: Tensor, kind: gguf.GGMLQuantizationType) -> Tensor:
    """Return the float32 numbers of blocks."""
    if kind.name in _FLOATS:
        return blocks.flatten().view(_FLOATS[kind.name]).float()
    return torch.from_numpy(gguf.dequantize(blocks.numpy(), kind))
