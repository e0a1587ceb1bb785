# SPDX-License-Identifier: Apache-2.0
"""Moves the tensors of a prompt's images to the device of the model."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nereid_backend.core.image_inputs import ImageInputs


def place_images(images: ImageInputs, device: torch.device, dtype: torch.dtype) -> ImageInputs:
    """Copy images to `device`. Floating-point tensors are also converted to `dtype`."""

    def place(value: Any) -> Any:  # noqa: ANN401 - a tensor, a list of tensors, or a plain value
        if isinstance(value, Tensor):
            return value.to(device, dtype if value.is_floating_point() else None)
        if isinstance(value, list | tuple):
            return type(value)(place(item) for item in value)
        return value

    return replace(images, arguments={name: place(v) for name, v in images.arguments.items()})
