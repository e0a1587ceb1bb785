# SPDX-License-Identifier: Apache-2.0
"""Sends a model to another process on this machine, without the values of large weights.

The other process compiles the model's code. The compiler needs the shapes of the weights, but not
their values. In the received model, a large tensor therefore has the right shape and uninitialised
values. The operating system provides the memory of a tensor only when a program writes to this
memory, so the received model needs almost no memory. The values of small tensors are sent, because
the compiler may write these values into the library.
"""

import io
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import init_hf_modules

from nereid_backend.paths.compiled_forward.build_library import MAX_LITERAL_ELEMENTS
from nereid_backend.paths.model_call import UnfitError


class Skeleton(NamedTuple):
    """A model, and the settings that influence its compilation.

    Attributes:
        model: the model.
        attention: the name under which the engine has registered its attention in transformers.
        is_native: whether the model's attention uses the CPU kernels; see `compile_forward`.
        num_threads: the number of CPU threads that the engine uses.
    """

    model: PreTrainedModel
    attention: str
    is_native: bool
    num_threads: int


def pack_skeleton(skeleton: Skeleton) -> bytes:
    """Convert a model and its settings to bytes, from which `unpack_skeleton` restores the model.

    The message contains the shapes of all tensors, but not the values of large tensors.

    Raises:
        UnfitError: if a part of the model cannot be sent to another process.
    """
    message = io.BytesIO()
    try:
        _SkeletonPickler(message, pickle.HIGHEST_PROTOCOL).dump(skeleton)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        # pickle raises one of these three exceptions if, for example, an object refers to a local
        # function.
        raise UnfitError(f"the model cannot be sent to another process ({error})") from error
    return message.getvalue()


def unpack_skeleton(message: bytes) -> Skeleton:
    """Restore a model from a message that `pack_skeleton` has created.

    The message must come from an engine on this machine, because a message can make this function
    execute any code.
    """
    # A checkpoint can contain Python files. transformers copies these files to a folder, and this
    # call lets pickle import them from that folder.
    init_hf_modules()
    skeleton: Skeleton = pickle.loads(message)
    return skeleton


class _SkeletonPickler(pickle.Pickler):
    """A pickler that omits the values of large tensors."""

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401 - any object of the model
        """Tell pickle how to store `value`. The values of large tensors are not stored.

        pickle calls this method for each object of the model. For a tensor, return the function
        that restores the tensor, and the arguments of this function. For any other object, return
        NotImplemented, so that pickle uses its default method.
        """
        if not isinstance(value, Tensor):
            return NotImplemented
        if type(value) not in (Tensor, nn.Parameter):
            raise pickle.PicklingError(f"it has a tensor of the class {type(value).__name__}")
        num_elements = _num_spanned_elements(value)
        data = None  # The values of large tensors are not needed for the compilation.
        if num_elements <= MAX_LITERAL_ELEMENTS:
            memory = value.detach().as_strided((num_elements,), (1,))
            data = memory.view(torch.uint8).numpy().tobytes()
        arguments = (
            tuple(value.shape),
            value.stride(),
            value.dtype,
            isinstance(value, nn.Parameter),
            num_elements,
            data,
        )
        return _restore_tensor, arguments


def _num_spanned_elements(tensor: Tensor) -> int:
    """Return the size of the memory range that contains all elements of a tensor, in elements.

    Example: an expanded tensor has the shape [4, 1000] and the stride [0, 1], so its memory has
    1000 elements.
    """
    if tensor.numel() == 0:
        return 0
    last_index = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return last_index + 1


def _restore_tensor(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    is_parameter: bool,
    num_elements: int,
    data: bytes | None,
) -> Tensor:
    """Create a tensor with the given shape, memory layout and values.

    Args:
        shape: the shape.
        stride: for each dimension, the distance between two neighbouring elements in memory.
        dtype: the data type.
        is_parameter: whether the tensor is a parameter of a module.
        num_elements: the number of elements in the tensor's memory.
        data: the bytes of the memory; None for a large tensor, whose values were not sent.
    """
    memory = torch.empty(num_elements, dtype=dtype)
    if data:
        # The bytes are copied to a bytearray first, because torch requires writable memory.
        memory.view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    tensor = memory.as_strided(shape, stride)
    return nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
