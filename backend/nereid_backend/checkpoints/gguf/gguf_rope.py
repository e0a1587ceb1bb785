# SPDX-License-Identifier: Apache-2.0
"""Derives the rope parameters of a transformers config from the metadata of a GGUF file."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nereid_backend.checkpoints.gguf.gguf_file import GgufFile
from nereid_backend.errors import UnsupportedModelError

# The tensor with the factors of Llama 3, which change the frequencies of the rotary embeddings.
_ROPE_FACTORS = "rope_freqs.weight"
DEFAULT_ROPE_THETA = 10000.0


def rope_parameters(
    file: GgufFile, values: Mapping[str, Any], factors: Sequence[float] | None
) -> dict[str, Any]:
    """Return the parameters of the rotary position embeddings, as transformers names them.

    Scaling extends the context of a model. Example: a file with the rope.freq_base 10000, the
    rope.scaling.type "linear" and the rope.scaling.factor 4 gives {"rope_type": "linear",
    "rope_theta": 10000, "factor": 4}.

    Args:
        file: the GGUF file.
        values: the metadata of the file, without the name of the architecture in the keys.
        factors: the numbers in the tensor rope_freqs.weight; None if the tensor does not exist.
            Only files of Llama 3 models contain this tensor, which describes the scaling.

    Raises:
        UnsupportedModelError: if the scaling is not supported.
    """
    theta = values.get("rope.freq_base", DEFAULT_ROPE_THETA)
    if factors is not None:
        return _llama3_rope(file, theta, factors)
    # As in llama.cpp, a factor without a type means linear scaling, and the factor 0 means 1.
    factor = values.get("rope.scaling.factor") or 1.0
    scaling = values.get("rope.scaling.type", "none" if factor == 1 else "linear")
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    parameters = {"rope_type": scaling, "rope_theta": theta, "factor": factor}
    if scaling == "linear":
        return parameters
    if scaling == "yarn":
        # The context length before YaRN extended it. If the file does not contain this length, or
        # contains 0, use the context length of the model.
        original_length = values.get("rope.scaling.original_context_length")
        length = original_length or values.get("context_length")
        return {**parameters, "original_max_position_embeddings": length}
    raise UnsupportedModelError(
        f"{file.path}: rope.scaling.type {scaling!r} is not supported. Use the model's "
        "safetensors files."
    )


def _llama3_rope(file: GgufFile, theta: float, factors: Sequence[float]) -> dict[str, Any]:
    """Return the rope parameters of a Llama 3 model. `factors` has one number per frequency.

    The file contains only these factors, but not the parameters from which they were computed. This
    function assumes the parameters of the published Llama 3 models, computes the factors from these
    parameters, and compares the result with the factors in the file. `theta` is the base of the
    rotary frequencies.

    Raises:
        UnsupportedModelError: if the factors were computed from other parameters.
    """
    if not factors or not all(factor > 0 for factor in factors):
        raise _unsupported_factors(file)
    # The rope parameters of the Llama 3 models. Only `factor` differs between these models. It is
    # the largest number in `factors`, because the lowest frequency is divided by `factor`.
    common_parameters = {
        "rope_theta": theta,
        "rope_type": "llama3",
        "factor": float(max(factors)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = _llama3_divisors(common_parameters, len(factors))
    # The file contains float32 numbers, so there are small rounding errors.
    is_equal = all(
        math.isclose(computed, stored, rel_tol=1e-4)
        for computed, stored in zip(expected, factors, strict=True)
    )
    if not is_equal:
        raise _unsupported_factors(file)
    return common_parameters


def _unsupported_factors(file: GgufFile) -> UnsupportedModelError:
    """Return the error for a file whose tensor rope_freqs.weight contains unknown factors."""
    return UnsupportedModelError(
        f"{file.path}: the factors in {_ROPE_FACTORS} are not supported. Use the model's "
        "safetensors files."
    )


def _llama3_divisors(parameters: Mapping[str, Any], count: int) -> list[float]:
    """Return one divisor for each of the `count` rotary frequencies of a Llama 3 model.

    Dividing the low frequencies extends the context of the model. The divisor of a frequency
    depends on its number of rotations in the original context. If the number is at most
    `low_freq_factor`, the divisor is `factor`. If the number is at least `high_freq_factor`, the
    divisor is 1. Between these limits, the reciprocal of the divisor is interpolated linearly.

    Source: _compute_llama3_parameters in transformers 5.23, modeling_rope_utils.py.
    """
    factor = parameters["factor"]
    original_context = parameters["original_max_position_embeddings"]
    min_rotations = parameters["low_freq_factor"]
    max_rotations = parameters["high_freq_factor"]
    divisors = []
    for index in range(count):
        # The number of positions in one rotation.
        wavelength = 2 * math.pi * parameters["rope_theta"] ** (index / count)
        num_rotations = original_context / wavelength
        # The position between the limits: 0 at `min_rotations`, and 1 at `max_rotations`.
        position = (num_rotations - min_rotations) / (max_rotations - min_rotations)
        clamped = min(1.0, max(0.0, position))
        reciprocal = (1 - clamped) / factor + clamped
        divisors.append(1 / reciprocal)
    return divisors
