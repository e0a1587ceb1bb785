# SPDX-License-Identifier: Apache-2.0
"""Passes the tensors of a GGUF file to transformers as the weights of a model.

llama.cpp's converter (convert_hf_to_gguf.py and the folder conversion/) changes the names and the
numbers of weights. This module reverses these changes. If `gguf_blocks` supports the type of a
weight, the integers of the weight are kept. Otherwise, the gguf library dequantises the weight.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from nereid_backend.checkpoints.gguf.gguf_architectures import ARCHITECTURES
from nereid_backend.checkpoints.gguf.gguf_blocks import BLOCK_TYPES
from nereid_backend.checkpoints.gguf.gguf_file import GgufFile, GgufTensor
from nereid_backend.checkpoints.integer_weight import PART_NUMBERS, IntegerWeight
from nereid_backend.errors import ModelError, UnsupportedModelError

_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_EXPERTS = re.compile(r"ffn_(gate|up|down)_exps")
# One tensor may contain the weights of several experts. The pattern for the names of these weights
# contains "*" at the place of the expert's index.
_ANY_EXPERT = "*"
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
# Tensors that are not weights. `gguf_config` reads these tensors.
_CONFIG_TENSORS = ("rope_freqs.weight",)
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class GgufWeight:
    """A weight in a GGUF file. It is read from disk when transformers needs its elements.

    Attributes:
        path: the path of the file.
        tensor: the description of the tensor that contains the weight.
        dtype: the data type of the dequantised weight.
        num_reordered_heads: the number of heads if the rows of each head must be reordered (see
            `_row_order`); None if the rows are in the right order.
        offset: a number that must be subtracted from each element.
        expert: the index of the expert in the first dimension of the tensor; None if the weight is
            the whole tensor.
    """

    path: Path
    tensor: GgufTensor
    dtype: torch.dtype
    num_reordered_heads: int | None = None
    offset: float = 0.0
    expert: int | None = None

    def __getitem__(self, index: object) -> Tensor:
        """Return the dequantised weight.

        transformers always passes `...` as `index`, which selects the whole weight.
        """
        weight = self.decode()
        return weight.dequantise(self.dtype) if isinstance(weight, IntegerWeight) else weight

    def decode(self) -> Tensor | IntegerWeight:
        """Read the weight from the file, and convert the weight to the form that transformers uses.

        In some weights, llama.cpp stores the rows of each attention head in another order than
        transformers. The rows of such a weight are reordered.

        If the file contains integers with scales, the result is an IntegerWeight. Otherwise, the
        result is a tensor.
        """
        # A bias or the weight of a norm has the shape [columns] and is treated as one row.
        num_rows = self.shape[-2] if len(self.shape) > 1 else 1
        blocks = self._read_blocks()
        # Reorder the rows of a weight matrix or the numbers of a bias. In both cases, the first
        # dimension is reordered.
        num_heads = self.num_reordered_heads
        row_order = None if num_heads is None else _row_order(self.shape[0], num_heads)
        if self.has_integers:
            integers = BLOCK_TYPES[self.tensor.kind.name].decode(blocks, num_rows)
            return integers if row_order is None else integers.reordered(row_order)
        numbers = self._decode_floats(blocks, num_rows, self.shape[-1]).view(self.shape)
        return numbers if row_order is None else numbers[row_order]

    @property
    def origin(self) -> str:
        """The name of the tensor and its file, for error messages."""
        return f"{self.tensor.name} in {self.path}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight: [rows, columns] or [columns]."""
        # If the tensor contains the weights of several experts, its shape is [experts, rows,
        # columns].
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    @property
    def num_elements(self) -> int:
        """The number of elements of the weight."""
        return int(np.prod(self.shape))

    @property
    def has_integers(self) -> bool:
        """Whether `decode` returns an IntegerWeight."""
        return self.tensor.kind.name in BLOCK_TYPES

    @property
    def integer_bytes(self) -> int:
        """The number of bytes that the integers and their scales need in memory."""
        return int(self.num_elements * BLOCK_TYPES[self.tensor.kind.name].bytes_per_weight)

    def _decode_floats(self, blocks: Tensor, num_rows: int, num_columns: int) -> Tensor:
        """Dequantise the blocks of the weight, and subtract `offset` from each number.

        `blocks` is uint8 [blocks, bytes of a block]. The result has the data type `self.dtype` and
        the shape [num_rows, num_columns].
        """
        result = torch.empty(num_rows, num_columns, dtype=self.dtype)
        blocks_per_row = len(blocks) // num_rows
        # The rows are converted in parts, so that only the float32 numbers of one part are in
        # memory. The parts are views of `result` and `blocks`.
        rows_per_part = max(1, PART_NUMBERS // num_columns)
        result_parts = torch.split(result, rows_per_part)
        block_parts = torch.split(blocks, rows_per_part * blocks_per_row)
        for result_part, block_part in zip(result_parts, block_parts, strict=True):
            numbers = _floats(block_part, self.tensor.kind)
            result_part.copy_(numbers.view(result_part.shape) - self.offset)
        return result

    def _read_blocks(self) -> Tensor:
        """Read the blocks of the weight from the file. A block contains some quantised numbers.

        If `self.expert` is not None, only the blocks of this expert are read. The result is uint8
        [blocks, bytes of a block].
        """
        start, num_bytes = self.tensor.start, self.tensor.num_bytes
        if self.expert is not None:
            # The tensor contains the weights of all experts, one after the other.
            num_experts = self.tensor.shape[0]
            num_bytes //= num_experts
            start += self.expert * num_bytes
        content = np.fromfile(self.path, dtype=np.uint8, count=num_bytes, offset=start)
        if len(content) < num_bytes:
            raise ModelError(
                f"the tensor {self.origin} cannot be read, because the file has become shorter."
            )
        _block_size, block_bytes = gguf.GGML_QUANT_SIZES[self.tensor.kind]
        return torch.from_numpy(content.reshape(-1, block_bytes))


def gguf_weights(
    file: GgufFile, num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> dict[str, GgufWeight]:
    """Return a dict that maps each weight's name in transformers to a description of the weight.

    The data of the weights is not read.

    Args:
        file: the header of the file.
        num_heads: the number of attention heads.
        num_kv_heads: the number of key and value heads.
        dtype: the data type of dequantised weights.

    Raises:
        UnsupportedModelError: if the name of a tensor is unknown.
    """
    weights: dict[str, GgufWeight] = {}
    for tensor in file.tensors.values():
        if tensor.name in _CONFIG_TENSORS:
            continue  # The tensor is part of the model's config, and not a weight.
        name = _model_name(tensor.name, file)  # refuses every unknown name
        if _ANY_EXPERT in name:  # the tensor contains the weights of several experts
            weights |= _expert_weights(name, file.path, tensor, dtype)
            continue
        weights[name] = GgufWeight(
            file.path,
            tensor,
            dtype,
            num_reordered_heads=_num_reordered_heads(tensor.name, file, num_heads, num_kv_heads),
            offset=_offset(name, file),
        )
    return weights


def _num_reordered_heads(
    tensor_name: str, file: GgufFile, num_heads: int, num_kv_heads: int
) -> int | None:
    """Return the number of heads whose rows must be reordered; None if the order is right.

    Rotary embeddings rotate pairs of numbers within a head. In some architectures, llama.cpp stores
    the two rows of a pair next to each other, but transformers stores these rows half a head apart.
    In these architectures, the rows of the query and key weights must be reordered. Example:
    "blk.3.attn_q.weight" gives `num_heads`, and "blk.3.attn_v.weight" gives None.
    """
    if not ARCHITECTURES[file.architecture].has_rotated_pairs:
        return None
    layer_name, _, _ = tensor_name.rpartition(".")  # such as "blk.3.attn_q"
    if layer_name.endswith(".attn_q"):
        return num_heads
    if layer_name.endswith(".attn_k"):
        return num_kv_heads
    return None


def _offset(name: str, file: GgufFile) -> float:
    """Return the number that must be subtracted from each element of a weight.

    In architectures with sandwich norms (norms before and after attention), each norm multiplies by
    `1 + w`. llama.cpp stores `1 + w`, but transformers needs `w`. `name` is the name in
    transformers.
    """
    has_sandwich_norms = ARCHITECTURES[file.architecture].has_sandwich_norms
    return 1.0 if has_sandwich_norms and name.endswith("norm.weight") else 0.0


def _expert_weights(
    name: str, path: Path, tensor: GgufTensor, dtype: torch.dtype
) -> dict[str, GgufWeight]:
    """Return the expert weights that a tensor contains. The keys are transformers' names.

    `name` contains "*" in place of the expert's index. Example: if the tensor contains two experts,
    the name "mlp.experts.*.up_proj.weight" gives the names "mlp.experts.0.up_proj.weight" and
    "mlp.experts.1.up_proj.weight".
    """
    num_experts = tensor.shape[0]
    return {
        name.replace(_ANY_EXPERT, str(expert)): GgufWeight(path, tensor, dtype, expert=expert)
        for expert in range(num_experts)
    }


def _model_name(name: str, file: GgufFile) -> str:
    """Convert the name of a tensor in a GGUF file to the name in transformers.

    Example: "blk.3.attn_q.weight" gives "model.layers.3.self_attn.q_proj.weight". If the tensor
    contains the weights of several experts, the name contains "*" in place of the expert's index.

    Raises:
        UnsupportedModelError: if the name is unknown.
    """
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    match = _LAYER.fullmatch(name)
    if match is not None:
        layer, part, kind = match.groups()  # such as "3", "attn_q" and "weight"
        part_name = _layer_part_name(part, file)
        if part_name is not None:
            return f"model.layers.{layer}.{part_name}.{kind}"
    raise UnsupportedModelError(
        f"{file.path}: the tensor {name} of the GGUF architecture {file.architecture} is not "
        "supported. Use the model's safetensors files."
    )


def _layer_part_name(part: str, file: GgufFile) -> str | None:
    """Return transformers' name for a part of a layer; None if the GGUF name is unknown.

    Examples: "attn_q" gives "self_attn.q_proj", and "ffn_up_exps" gives "mlp.experts.*.up_proj".
    """
    # Sandwich norms are norms before and after attention.
    has_sandwich_norms = ARCHITECTURES[file.architecture].has_sandwich_norms
    names = _SANDWICH_LAYER_NAMES if has_sandwich_norms else _LAYER_NAMES
    if part in names:
        return names[part]
    match = _EXPERTS.fullmatch(part)
    if match is None:
        return None
    projection = match[1]  # "gate", "up" or "down"
    return f"mlp.experts.{_ANY_EXPERT}.{projection}_proj"


def _row_order(num_rows: int, num_heads: int) -> Tensor:
    """Return the order in which transformers needs the rows of a weight.

    Element i of the result is the index of row i in the file. Rotary embeddings rotate pairs of
    numbers. In the file, the two rows of a pair are adjacent. In transformers, the distance between
    the two rows is half a head. Example: for one head of 4 rows, the result is [0, 2, 1, 3].
    """
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


def _floats(blocks: Tensor, kind: gguf.GGMLQuantizationType) -> Tensor:
    """Convert blocks to float32 numbers."""
    if kind.name in _FLOATS:
        return blocks.flatten().view(_FLOATS[kind.name]).float()
    return torch.from_numpy(gguf.dequantize(blocks.numpy(), kind))
