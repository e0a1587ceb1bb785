# SPDX-License-Identifier: Apache-2.0
"""Passes the tensors of a quantised checkpoint to transformers as unquantised weights.

    model.layers.0.mlp.up_proj.qweight, .qzeros, .scales   ->   model.layers.0.mlp.up_proj.weight
    model.norm.weight                                      ->   model.norm.weight

Each weight is read and dequantised when transformers loads the weight. As for an unquantised
checkpoint, transformers renames weights and merges the weights of experts. This module uses the
tensors of a layer, and not the config, to find out whether the layer is quantised.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nereid_backend.checkpoints.integer_weight import IntegerWeight
from nereid_backend.checkpoints.layout import Format, Layout, Settings, UnknownVariantError
from nereid_backend.checkpoints.quantised.awq import awq_format
from nereid_backend.checkpoints.quantised.bitsandbytes import bitsandbytes_format
from nereid_backend.checkpoints.quantised.compressed_tensors import compressed_tensors_format
from nereid_backend.checkpoints.quantised.fp8 import fp8_format
from nereid_backend.checkpoints.quantised.gptq import gptq_format
from nereid_backend.checkpoints.quantised.mxfp4 import mxfp4_format
from nereid_backend.checkpoints.quantised.torchao import torchao_format
from nereid_backend.checkpoints.safetensors_files import StoredTensor
from nereid_backend.errors import ModelError, UnsupportedModelError

FORMATS: dict[str, Callable[[Settings], Format]] = {
    "awq": awq_format,
    "bitsandbytes": bitsandbytes_format,
    "compressed-tensors": compressed_tensors_format,
    "fbgemm_fp8": fp8_format,
    "fp8": fp8_format,
    "gptq": gptq_format,
    "mxfp4": mxfp4_format,
    "torchao": torchao_format,
}
"""The supported values of quantization_config.quant_method."""

QUANTISED_SUFFIXES = (
    "qweight",
    "qzeros",
    "weight_scale",
    "scale_inv",
    "weight_packed",
    "zero_point",
    "g_idx",
    "absmax",
    ".SCB",
    "qdata",
    "_blocks",
    "act_pre_scale",
    # AutoAWQ divides the outputs of activation functions by these scales, for example in Starcoder2
    # and BLOOM.
    ".act.scales",
    ".gelu_impl.scales",
)
"""The suffixes that only tensors of quantised weights have. If a tensor has such a suffix and
belongs to no known layout, the checkpoint is refused, because the weight would be wrong or
missing."""

# GPTQModel and AutoRound describe rotated weights with these fields of quantization_config.
_ROTATION_FIELDS = ("rotation", "rotation_config", "spinquant_config")


@dataclass(frozen=True, slots=True)
class LazyWeight:
    """A weight of a checkpoint. It is read and dequantised when transformers needs its elements.

    Attributes:
        tensors: maps the suffix of each tensor of the weight to the tensor.
        layout: the layout of a quantised weight; None if the weight is not quantised.
        dtype: the data type of the dequantised weight.
    """

    tensors: Mapping[str, StoredTensor]
    layout: Layout | None
    dtype: torch.dtype

    def __getitem__(self, index: object) -> Tensor:
        """Return the dequantised weight.

        transformers always passes `...` as `index`, which selects the whole weight.
        """
        weight = self.decode()
        return weight.dequantise(self.dtype) if isinstance(weight, IntegerWeight) else weight

    def decode(self) -> Tensor | IntegerWeight:
        """Read the tensors of the weight, and compute the weight from them.

        The result is an IntegerWeight (integers with scales) if `has_integers` is true. Otherwise,
        the result is a tensor.

        Raises:
            ModelError: if the tensors cannot be read, or if the shapes of the tensors do not match.
        """
        # `read` raises a ModelError itself.
        if self.layout is None:
            return self.main_tensor.read()
        tensors_by_suffix = {suffix: tensor.read() for suffix, tensor in self.tensors.items()}
        try:
            return self.layout.decode(tensors_by_suffix, self.dtype)
        except (ValueError, RuntimeError, LookupError, TypeError, ZeroDivisionError) as error:
            # These errors occur if the tensors are damaged. Example: a tensor has a wrong shape.
            raise ModelError(
                f"the quantised weight {self.origin} cannot be read ({error}). Download the file "
                "again."
            ) from error

    @property
    def num_elements(self) -> int:
        """The number of elements of the weight."""
        factor = 1 if self.layout is None else self.layout.numbers_per_element
        return round(math.prod(self.main_tensor.shape) * factor)

    @property
    def main_tensor(self) -> StoredTensor:
        """The tensor that contains the numbers of the weight. The numbers may be quantised.

        An unquantised weight has only this tensor.
        """
        return next(iter(self.tensors.values()))  # The main tensor always comes first.

    @property
    def origin(self) -> str:
        """The name of the main tensor and its file, for error messages."""
        return f"{self.main_tensor.name} in {self.main_tensor.file}"

    @property
    def is_unquantised_matrix(self) -> bool:
        """Whether the weight is an unquantised matrix, which has two dimensions."""
        return self.layout is None and len(self.main_tensor.shape) == 2

    @property
    def has_integers(self) -> bool:
        """Whether `decode` returns an IntegerWeight."""
        return self.layout is not None and self.layout.has_integers

    @property
    def integer_bytes(self) -> int:
        """The approximate number of bytes that the integers and their scales need in memory.

        The result is the size of the weight's tensors in the file.
        """
        return sum(
            math.prod(tensor.shape) * tensor.number_bytes for tensor in self.tensors.values()
        )


def lazy_weights(
    stored: Mapping[str, StoredTensor], settings: Settings | None, dtype: torch.dtype
) -> dict[str, LazyWeight]:
    """Return the weights of a checkpoint by name. No weight is read.

    A quantised weight consists of several tensors. Example: the tensors "up_proj.qweight",
    "up_proj.qzeros" and "up_proj.scales" give the weight "up_proj.weight".

    Args:
        stored: maps the name of each tensor of the checkpoint to the tensor.
        settings: the quantization_config; None if the checkpoint is not quantised.
        dtype: the data type of dequantised weights.

    Raises:
        ModelError: if a tensor of a quantised weight is missing.
        UnsupportedModelError: if the method is not supported.
    """
    no_format = Format(layouts=())  # No tensors form a quantised weight.
    chosen_format = no_format if settings is None else _choose_format(settings)
    weights, used_names = _quantised_weights(stored, chosen_format, dtype)
    for name, tensor in stored.items():
        # `ignored` contains suffixes of tensors that are not needed, such as scales of activations.
        if name in used_names or name.endswith(chosen_format.ignored):
            continue
        if settings is not None:
            _check_is_unquantised(name, tensor)
        # The weight is not quantised, so it consists of one tensor without a suffix.
        weights[name] = LazyWeight({"": tensor}, layout=None, dtype=dtype)
    return weights


def _check_is_unquantised(name: str, tensor: StoredTensor) -> None:
    """Raise a ModelError if a tensor has a suffix or a data type that only quantised weights have.

    The caller calls this function for each tensor that belongs to no complete quantised weight. If
    such a tensor is a part of a quantised weight, the other tensors of the weight are missing or
    not supported.
    """
    if _is_part_of_quantised_weight(tensor):
        raise ModelError(
            f"{tensor.file} contains the tensor {name} of a quantised weight. The other tensors of "
            "this weight are missing or have an unsupported layout. Download the checkpoint again, "
            "or use another checkpoint of the model."
        )


def _quantised_weights(
    stored: Mapping[str, StoredTensor], chosen_format: Format, dtype: torch.dtype
) -> tuple[dict[str, LazyWeight], set[str]]:
    """Return the quantised weights by name, and the names of all tensors that belong to them.

    Example: for AWQ, the tensors "up_proj.qweight", "up_proj.qzeros" and "up_proj.scales" give the
    weight "up_proj.weight" and the set of these three names.

    Args:
        stored: maps the name of each tensor of the checkpoint to the tensor.
        chosen_format: the layouts of the quantisation method.
        dtype: the data type of dequantised weights.
    """
    weights: dict[str, LazyWeight] = {}
    used_names: set[str] = set()
    for name, tensor in stored.items():
        layout = _find_layout(tensor, chosen_format, stored)
        if layout is None:
            continue  # The tensor is not the main tensor of a quantised weight.
        stem = name.removesuffix(layout.main)  # such as "up_proj"
        tensors = _tensors_of_weight(stem, layout, stored)
        weights[stem + layout.target] = LazyWeight(tensors, layout, dtype)
        used_names.update(tensor.name for tensor in tensors.values())
    return weights, used_names


def quantisation_settings(config: Any) -> dict[str, Any] | None:  # noqa: ANN401 - any config class
    """Return the field quantization_config of a config; None if the checkpoint is not quantised.

    In a multimodal model, the config of the decoder may contain the field.
    """
    for owner in (config, config.get_text_config(decoder=True)):
        settings = settings_in(vars(owner))
        if settings is not None:
            # transformers stores the field as a dict or as an object with the method `to_dict`.
            return dict(settings if isinstance(settings, Mapping) else settings.to_dict())
    return None


def settings_in(fields: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any JSON value
    """Return the quantization_config in the fields of a config; None if there is none.

    Old checkpoints of MLX have the field `quantization` instead. Example: {"group_size": 64,
    "bits": 4}.
    """
    mlx_settings = fields.get("quantization")
    is_mlx = isinstance(mlx_settings, Mapping) and "bits" in mlx_settings
    return fields.get("quantization_config") or (mlx_settings if is_mlx else None)


def _choose_format(settings: Settings) -> Format:
    """Return the Format object of the quantisation method that is named in `settings`.

    `settings` is the field quantization_config of config.json.

    Raises:
        UnsupportedModelError: if the method or its variant is not supported, or if the settings
            are damaged.
    """
    try:
        create_format = _format_creator(_quantisation_method(settings))
        _check_rotation(settings)
        return create_format(settings)
    except UnknownVariantError as error:
        raise UnsupportedModelError(
            f"the weights cannot be read, because {error}. Use another checkpoint of the model."
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        # `create_format` expects values of the right types, and does not check the types itself.
        raise UnsupportedModelError(
            "the weights cannot be read, because quantization_config of config.json has a value of "
            f"a wrong type ({error}). Download config.json again."
        ) from error


def _check_rotation(settings: Settings) -> None:
    """Raise an UnknownVariantError if the weights are rotated.

    The inputs of a layer with rotated weights must be rotated, too, which the engine does not do.
    """
    for field in _ROTATION_FIELDS:
        if settings.get(field):
            raise UnknownVariantError(
                f"rotated weights ({field} in quantization_config of config.json) are not supported"
            )


def _format_creator(method: str) -> Callable[[Settings], Format]:
    """Return the function that creates the Format object of a quantisation method.

    Raises:
        UnsupportedModelError: if the method is not supported.
    """
    if method not in FORMATS:
        raise UnsupportedModelError(
            f"the weights are quantised with the method {method!r} (quantization_config of "
            "config.json), which is not supported. The supported methods are "
            f"{', '.join(FORMATS)}. Use a checkpoint that is quantised with one of these methods, "
            "or a checkpoint that is not quantised."
        )
    return FORMATS[method]


def _quantisation_method(settings: Settings) -> str:
    """Return the name of the quantisation method that defines the layout of the weights.

    `settings` is the field quantization_config of config.json. It contains the name of the method
    in quant_method. Some programs store weights in the layout of another method. The field
    packing_format then contains the name of the other method.

    Examples: {"quant_method": "awq"} returns "awq". {"quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq"} returns "gptq".

    Raises:
        UnknownVariantError: if the settings contain no name.
    """
    packing = str(settings.get("packing_format", ""))
    for other_method in ("gptq", "awq"):
        if packing.endswith(other_method):
            return other_method
    method = settings.get("quant_method")
    if method is not None:
        # The name is a text, or a member of an enum of transformers.
        return str(getattr(method, "value", method))
    # Old checkpoints of bitsandbytes do not contain the name of the method.
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    raise UnknownVariantError(  # The message is a part of a sentence; see UnknownVariantError.
        "quantization_config of config.json has no field quant_method, which names the layout of "
        "the weights. Checkpoints of MLX, which are not supported, lack this field"
    )


def _find_layout(
    tensor: StoredTensor, chosen_format: Format, stored: Mapping[str, StoredTensor]
) -> Layout | None:
    """Return the layout of the quantised weight whose main tensor is `tensor`.

    A quantised weight consists of several tensors. The main tensor contains its quantised numbers.
    Return None if `tensor` is not a main tensor. Example: the main tensor of an AWQ weight is
    qweight, so the result for qzeros is None.

    Args:
        tensor: the tensor of a checkpoint.
        chosen_format: the layouts of the quantisation method.
        stored: maps the name of each tensor of the checkpoint to the tensor.
    """
    for layout in chosen_format.layouts:
        has_name = tensor.name.endswith(layout.main)
        has_dtype = layout.main_dtypes is None or tensor.dtype in layout.main_dtypes
        if not has_name or not has_dtype:
            continue
        stem = tensor.name.removesuffix(layout.main)
        has_other_tensors = all(stem + suffix in stored for suffix in layout.others)
        if has_other_tensors:
            return layout
    return None


def _tensors_of_weight(
    stem: str, layout: Layout, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return a dict that maps suffixes to the tensors of one weight. The main tensor comes first.

    The name of each tensor consists of `stem` and a suffix. Example: for the stem
    "model.layers.0.mlp.up_proj", the key ".scales" is the tensor
    "model.layers.0.mlp.up_proj.scales". Optional tensors that do not exist are left out. The other
    tensors exist, because `_find_layout` has selected a layout whose tensors exist.
    """
    tensors: dict[str, StoredTensor] = {}
    for suffix in (layout.main, *layout.others, *layout.optional):
        tensor = stored.get(stem + suffix)
        if tensor is not None:
            tensors[suffix] = tensor
    return tensors


def _is_part_of_quantised_weight(tensor: StoredTensor) -> bool:
    """Return whether the suffix or the data type shows that a tensor belongs to a quantised weight.

    Examples: "up_proj.qweight" gives True, and so does any tensor of 8-bit floating point numbers.
    """
    return tensor.name.endswith(QUANTISED_SUFFIXES) or tensor.dtype.startswith("F8")
