# SPDX-License-Identifier: Apache-2.0
"""Stores the weights of an encoder as integers of 4 or 8 bits."""

from collections.abc import Callable

from nereid_backend.errors import ConfigError
from nereid_backend.linear.quantise_weights import quantise_linears, slow_integers_warning
from nereid_backend.pooling.loading.load_encoder import Encoder

_BITS = {"int8": 8, "int4": 4}


def store_as_integers(
    encoder: Encoder, weight_dtype: str, architecture: str, progress: Callable[[str], None]
) -> None:
    """Store the weights of all linear layers in the data type that `weight_dtype` names.

    Args:
        encoder: the model. Mutated, unless `weight_dtype` is "auto".
        weight_dtype: the setting: "auto", "int8" or "int4".
        architecture: the name of the model's class, for error messages.
        progress: called with one line about the result.

    Raises:
        ConfigError: the model is on a GPU, or it has no standard linear layers.
    """
    if weight_dtype == "auto":
        return
    if encoder.device.type != "cpu":
        raise ConfigError(
            f"weight_dtype: the value {weight_dtype} requires device=cpu, but the device is "
            f"{encoder.device}. Set weight_dtype=auto."
        )
    num_layers = quantise_linears(encoder.model, _BITS[weight_dtype])
    if not num_layers:
        raise ConfigError(
            f"weight_dtype: the value {weight_dtype} requires a model with standard linear layers, "
            f"which {architecture} does not have. Set weight_dtype=auto."
        )
    progress(
        f"the weights of {num_layers} linear layers are stored as {weight_dtype}"
        f"{slow_integers_warning()}"
    )
